"""With the vLLM that is installed: it finds our classes, refuses what we refuse, and carries our stats.

No server is started: vLLM's own aggregators, loggers and metric classes are called as a server would.
"""

from __future__ import annotations

import pickle
import re
import socket
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-vllm")

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1 import metrics as vllm_metrics
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector, MultiKVConnectorStats
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.plugins import load_general_plugins
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from kvconnect.errors import ConfigError
from kvconnect.metrics import FAMILIES, Metrics, OffloadMetrics
from kvconnect.transfer.orders import OffloadReport, Results, TierChange
from kvconnect.vllm.connector import KVConnect
from kvconnect.vllm.metadata import PEER_SOURCE, AddressMetadata, ReportMetadata, hit_sources
from kvconnect.vllm.stats import TransferStats
from tests.vllm.tiny_models import write_model

# Being found

CHILD = {"kv_connector": "KVConnect", "kv_role": "kv_both"}


def test_it_is_found_by_its_name():
    """In a process of its own: this one has imported the class, which registers too."""
    code = (
        "from vllm.plugins import load_general_plugins; load_general_plugins(); load_general_plugins()\n"
        "import sys; assert 'kvconnect.vllm.connector' not in sys.modules\n"
        "from vllm.config import KVTransferConfig\n"
        "from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory\n"
        "config = KVTransferConfig(kv_connector='KVConnect', kv_role='kv_both')\n"
        "print('found', KVConnectorFactory.get_connector_class(config).__module__)\n"
        "print('loaded', *(name for name in sys.modules if name.startswith('kvconnect.offload.')))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "found kvconnect.vllm.connector" in done.stdout, done.stderr[-2000:]
    # Of tiers only what a pair without any reads: names of KV, and of tiers.
    loaded = done.stdout.partition("loaded ")[2].split()
    assert set(loaded) == {"kvconnect.offload.namespace", "kvconnect.offload.tier"}


def created(tmp_path, transfer):
    """The configuration of a server, as far as vLLM makes it before it starts anything or loads a model."""
    load_general_plugins()
    model = str(write_model("gqa", tmp_path).folder)
    return AsyncEngineArgs(model, kv_transfer_config=KVTransferConfig(**transfer)).create_engine_config()


WRONG = {"kv_connector_extra_config": {"slot_byte": 4096}}
OTHER = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}


def beside_nixl(*connectors):
    extra = {"connectors": [*connectors, OTHER]}
    return {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


@pytest.mark.parametrize("wrong", [{**CHILD, **WRONG}, beside_nixl({**CHILD, **WRONG, "kv_port": 1})])
def test_a_wrong_configuration_is_refused_before_a_model_is_loaded(tmp_path, wrong):
    with pytest.raises(ConfigError, match=r"no key 'slot_byte'.*did you mean 'slot_bytes'"):
        created(tmp_path, wrong)


@pytest.mark.parametrize("right", [{**OTHER, **WRONG}, beside_nixl({**CHILD, "kv_port": 1}), beside_nixl()])
def test_what_is_another_connector_s_is_left_alone(tmp_path, right):
    assert created(tmp_path, right).kv_transfer_config


def test_what_cannot_start_is_refused_before_a_model_is_loaded(tmp_path):
    """Keys and ports, all of them at once."""
    key = tmp_path / "key"
    key.write_text("x" * 40)
    key.chmod(0o644)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        extra = {"port": taken.getsockname()[1], "key_file": str(key)}
        with pytest.raises(ConfigError) as caught:
            created(tmp_path, {**CHILD, "kv_connector_extra_config": extra})
    text = str(caught.value)
    assert "there are 2 mistakes" in text
    assert "whose mode is 0644" in text
    assert re.search(r"\.port: rank 0 would listen at 127.0.0.1:\d+, where another process does", text)


def test_an_address_of_another_machine_is_refused_before_a_model_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setenv("KVCONNECT_KEY", "x" * 40)
    elsewhere = {**CHILD, "kv_connector_extra_config": {"host": "192.0.2.1"}}
    with pytest.raises(ConfigError, match=r"\.host: rank 0 cannot listen at 192\.0\.2\.1:0: .*assign"):
        created(tmp_path, elsewhere)
    for right in ({"host": "192.0.2.1", "bind": "0.0.0.0"}, {"host": "127.0.0.1"}):
        assert created(tmp_path, {**CHILD, "kv_connector_extra_config": right}).kv_transfer_config


def test_a_later_process_of_a_server_finds_ports_of_its_workers_taken(tmp_path):
    """API servers beside the first read the options once more."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        transfer = {**CHILD, "kv_connector_extra_config": {"port": taken.getsockname()[1]}}
        with ProcessPoolExecutor(1, get_context("fork")) as pool:
            assert pool.submit(created, tmp_path, transfer).result()


def test_module_path_and_name_are_one_class():
    load_general_plugins()
    by_path = KVTransferConfig(**CHILD, kv_connector_module_path="kvconnect.vllm")
    assert KVConnectorFactory.get_connector_class(by_path) is KVConnect
    assert KVConnectorFactory.get_connector_class(KVTransferConfig(**CHILD)) is KVConnect
    assert KVConnectorFactory.get_connector_class_by_name("KVConnect") is KVConnect
    assert KVConnectorFactory.supports_hma_config(by_path)


# Stats


def worker_stats(metrics: Metrics, rank: int = 0) -> TransferStats | None:
    changes = metrics.changes()
    return None if changes is None else TransferStats.of_worker(rank, changes)


def busy(scale: int = 1) -> Metrics:
    metrics = Metrics()
    metrics.transfers.labels("received", "ok").inc(2 * scale)
    metrics.transfers.labels("received", "failed").inc()
    metrics.transfer_bytes.labels("received", "tcp").inc(2**20 * 4 * scale)
    metrics.transfer_seconds.labels("received").inc(0.5)
    metrics.copies.labels("received").inc(7)
    metrics.failures.labels("load").inc()
    metrics.loads.set(3 * scale)
    metrics.load_seconds.observe(0.25)
    metrics.chunk_seconds.observe(0.002)
    metrics.link_rate.labels("tcp").set(1e9 * scale)
    return metrics


counters = st.dictionaries(
    st.sampled_from(["transfers", "failures"]),
    st.dictionaries(st.sampled_from(["a", "b,c"]), st.integers(1, 100), min_size=1),
)
gauges = st.dictionaries(st.sampled_from(["0", "1"]), st.just({"leases_held": {"": 1}}))
observed = st.dictionaries(
    st.sampled_from(["load_seconds", "chunk_seconds"]), st.lists(st.floats(0, 10), min_size=1, max_size=4)
)
data = st.fixed_dictionaries({"counters": counters, "gauges": gauges, "observed": observed})


@given(st.lists(data, max_size=4))
def test_stats_add_up_and_leave_what_was_added_alone(parts):
    before = pickle.dumps(parts)
    total = TransferStats()
    for part in parts:
        assert total.aggregate(KVConnect.build_kv_connector_stats(part)) is total
    assert pickle.dumps(parts) == before
    for name in ("transfers", "failures"):
        for labels in ("a", "b,c"):
            expected = sum(part["counters"].get(name, {}).get(labels, 0) for part in parts)
            assert total.data["counters"].get(name, {}).get(labels, 0) == expected
    for name in ("load_seconds", "chunk_seconds"):
        expected = [value for part in parts for value in part["observed"].get(name, ())]
        assert total.data["observed"].get(name, []) == expected
    assert total.is_empty() == (not any(any(part.values()) for part in parts))
    assert pickle.loads(pickle.dumps(total)) == total
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(total.to_dict())) == total.data
    total.reset()
    assert total.is_empty()
    assert total == TransferStats()


def aggregated(*stats: TransferStats | None) -> TransferStats | None:
    """What vLLM's scheduler sees of its ranks."""
    outputs = [
        ModelRunnerOutput([], {}, kv_connector_output=KVConnectorOutput(kv_connector_stats=each))
        for each in stats
    ]
    return KVOutputAggregator(len(outputs)).aggregate(outputs).kv_connector_output.kv_connector_stats


def over_the_wire(stats) -> dict:
    """What the API server gets: through vLLM's own encoding of its messages."""
    message = EngineCoreOutputs(scheduler_stats=SchedulerStats(kv_connector_stats=stats.to_dict()))
    decoded = MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(message))
    return decoded.scheduler_stats.kv_connector_stats


def test_a_worker_s_output_is_empty_while_nothing_changed():
    metrics = busy()
    assert not KVConnectorOutput(kv_connector_stats=worker_stats(metrics)).is_empty()
    assert KVConnectorOutput(kv_connector_stats=worker_stats(metrics)).is_empty()
    assert aggregated(None, None) is None


LABELS = ["model_name", "engine"]


@pytest.fixture
def clean_registry():
    """vLLM's metrics go to the one registry of the process; it takes them out again by their name."""

    def clean():
        for collector in list(REGISTRY._collector_to_names):
            if "vllm" in getattr(collector, "_name", ""):
                REGISTRY.unregister(collector)

    clean()
    yield
    clean()


def shown(name: str, engine: str = "0", **labels: str) -> float | None:
    labels = {"model_name": "tiny", "engine": engine, **labels}
    return REGISTRY.get_sample_value(f"vllm:kvconnect_{name}", labels)


def prom(**config) -> vllm_metrics.KVConnectorProm:
    transfer = KVTransferConfig(**{**CHILD, **config})
    per_engine = {0: ["tiny", "0"], 1: ["tiny", "1"]}
    return vllm_metrics.KVConnectorProm(SimpleNamespace(kv_transfer_config=transfer), LABELS, per_engine)


def test_prometheus_shows_what_the_workers_told(clean_registry):
    exported = prom()
    metrics = [busy(1), busy(2)]
    exported.observe(over_the_wire(aggregated(*map(worker_stats, metrics, (0, 1)))))
    metrics[1].loads.set(0)
    metrics[1].transfers.labels("received", "ok").inc()
    exported.observe(over_the_wire(aggregated(*map(worker_stats, metrics, (0, 1)))))
    assert shown("transfers_total", direction="received", outcome="ok") == 7
    assert shown("transfers_total", direction="received", outcome="failed") == 2
    assert shown("transfer_bytes_total", direction="received", lane="tcp") == 3 * 2**22
    assert shown("transfer_seconds_total", direction="received") == 1.0
    assert shown("copies_total", direction="received") == 14
    assert shown("failures_total", reason="load") == 2
    assert shown("loads_in_flight", rank="0") == 3
    assert shown("loads_in_flight", rank="1") == 0
    assert shown("link_bytes_per_second", rank="1", lane="tcp") == 2e9
    assert shown("chunk_seconds_count") == 2
    assert shown("load_seconds_count") == 2
    assert shown("load_seconds_sum") == 0.5
    assert shown("load_seconds_bucket", le="0.25") == 2
    assert shown("load_seconds_bucket", le="0.1") == 0
    assert shown("transfers_total", engine="1", direction="received", outcome="ok") is None
    exported.observe(over_the_wire(aggregated(worker_stats(busy(2)), None)), 1)
    assert shown("transfers_total", engine="1", direction="received", outcome="ok") == 4
    assert shown("transfers_total", direction="received", outcome="ok") == 7
    assert shown("loads_in_flight", engine="1", rank="0") == 6
    assert shown("loads_in_flight", engine="1", rank="1") is None


def test_every_number_of_a_worker_has_a_series(clean_registry):
    exported = prom()
    halves = [Metrics(), OffloadMetrics()]
    write = {"counter": "inc", "gauge": "set", "histogram": "observe"}
    for metrics in halves:
        for numbers in metrics.families.values():
            if metrics is halves[0] or numbers.family.name not in halves[0].families:
                getattr(numbers.labels(*numbers.family.labels), write[numbers.family.kind])(5)
    both = halves[1].changes(halves[0].changes())
    exported.observe(over_the_wire(TransferStats.of_worker(0, both)))
    for family in FAMILIES:
        if family.kind == "counter":
            assert shown(f"{family.name}_total", **{label: label for label in family.labels}) == 5
        elif family.kind == "gauge":
            assert shown(family.name, rank="0", **{label: label for label in family.labels}) == 5
        else:
            assert shown(f"{family.name}_sum") == 5


def test_the_classes_that_vllm_gives_are_used(clean_registry):
    """Under Ray they are not Prometheus' own."""

    class OurGauge(Gauge):
        pass

    class OurCounter(Counter):
        pass

    class OurHistogram(Histogram):
        pass

    types = {Gauge: OurGauge, Counter: OurCounter, Histogram: OurHistogram}
    config = SimpleNamespace(kv_transfer_config=KVTransferConfig(**CHILD))
    made = KVConnect.build_prom_metrics(config, types, LABELS, {0: ["tiny", "0"]})
    assert {type(metric) for metric in made._series._metrics.values()} == {OurGauge, OurCounter, OurHistogram}


def test_the_log_line():
    logging = vllm_metrics.KVConnectorLogging(KVTransferConfig(**CHILD))
    lines = []
    for scale in (1, 2):
        logging.observe(over_the_wire(worker_stats(busy(scale))))
    logging.log(lambda *args: lines.append(args[0] % args[1:]))
    assert lines == [
        "KV Transfer metrics: Transfers received=8, MB received=12.0, MB/s received=12.0, "
        "Avg load time (ms)=250.0, P90 load time (ms)=250.0, Failures (load)=2, Loads in flight=6"
    ]
    logging.log(lambda *args: lines.append(args))
    assert len(lines) == 1


# What the tiers tell


def test_reports_of_all_ranks_arrive_together():
    def output(rank: int) -> ModelRunnerOutput:
        report = OffloadReport(rank, done={7: ()}, changes=(TierChange("disk", 0, (b"h",)),))
        # Rank 0 reports for all ranks what peers have settled.
        results = Results(offload=(report,), settled=() if rank else ("a handle",))
        meta = ReportMetadata(results) if rank != 1 else None
        made = ModelRunnerOutput(req_ids=[], req_id_to_index={})
        made.kv_connector_output = KVConnectorOutput(kv_connector_worker_meta=meta)
        # Workers are processes of their own.
        return pickle.loads(pickle.dumps(made))

    assert not output(0).kv_connector_output.is_empty()
    assert output(1).kv_connector_output.is_empty()
    merged = KVOutputAggregator(3).aggregate([output(rank) for rank in range(3)])
    told = merged.kv_connector_output.kv_connector_worker_meta.results
    assert [report.rank for report in told.offload] == [0, 2]
    assert told.offload[0].done == {7: ()}
    assert told.settled == ("a handle",)


def test_somebody_else_s_worker_metadata_is_left_alone():
    ours = ReportMetadata(Results(offload=(OffloadReport(0),)))
    assert ours.aggregate(SimpleNamespace()) is ours


def test_hits_are_told_by_where_they_came_from():
    if PEER_SOURCE is None:
        assert hit_sources({"host": 3}) == {}
        return
    told = hit_sources({"host": 3, "disk": 4, "store": 5, "peer": 6})
    assert {source.value: count for source, count in told.items()} == {
        "host": 3,
        "disk": 4,
        "external_unspecified": 5,
        "p2p": 6,
    }


def test_a_multi_connector_carries_our_stats(clean_registry):
    children = [SimpleNamespace(get_kv_connector_stats=lambda: None), object.__new__(KVConnect)]
    children[1]._worker = SimpleNamespace(changes=busy().changes)
    children[1]._own = AddressMetadata(0, None)
    multi = object.__new__(MultiConnector)
    multi._connectors = children
    stats = multi.get_kv_connector_stats()
    assert isinstance(stats, MultiKVConnectorStats)
    assert multi.get_kv_connector_stats() is None
    data = over_the_wire(aggregated(stats, MultiKVConnectorStats({"KVConnect": worker_stats(busy(2), 1)})))
    rebuilt = MultiConnector.build_kv_connector_stats(data)
    assert isinstance(rebuilt["KVConnect"], TransferStats)
    assert not rebuilt.is_empty()
    assert rebuilt.reduce()["KVConnect"]["Transfers received"] == 8

    exported = prom(**beside_nixl(CHILD))
    exported.observe(data)
    assert shown("transfers_total", direction="received", outcome="ok") == 6
    assert shown("loads_in_flight", rank="1") == 6
