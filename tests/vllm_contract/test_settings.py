"""What vLLM is configured with: what is ours of it, what is refused, and where our memory lies."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-vllm")

from vllm.config import CacheConfig

from kvconnect.config import parse_kv_transfer_config
from kvconnect.errors import ConfigError
from kvconnect.vllm import settings
from kvconnect.vllm.connector import KVConnect
from kvconnect.vllm.traits import still_taken_bytes


def test_every_data_parallel_engine_has_a_folder_and_ports_of_its_own():
    given = SimpleNamespace(
        kv_connector="KVConnect",
        kv_connector_module_path=None,
        kv_role="kv_both",
        engine_id="e",
        kv_load_failure_policy="fail",
        kv_connector_extra_config={
            "engine": "none",
            "port": 7000,
            "ranks": {"1-2": {"device_name": "eth1"}, "3-5": {"device_name": "eth2"}},
            "offload": {"cpu_bytes": 1 << 20, "disk_path": "/data/kv", "disk_bytes": 1 << 30},
        },
    )
    folders, ports, devices = [], [], []
    for index in range(3):
        parallel = SimpleNamespace(
            data_parallel_index=index, pipeline_parallel_size=2, tensor_parallel_size=1
        )
        extra = settings.read_config(
            SimpleNamespace(kv_transfer_config=given, parallel_config=parallel)
        ).extra
        folders.append(extra.offload.disk_path)
        ports.append(extra.port)
        devices += [extra.of_rank(rank).device_name for rank in range(2)]
    assert devices == ["", "eth1", "eth1", "eth2", "eth2", "eth2"], "numbered as ports are"
    assert ports == [7000, 7002, 7004]
    assert folders == ["/data/kv", "/data/kv/dp1", "/data/kv/dp2"]


def config_of(engine):
    return parse_kv_transfer_config(
        {
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"engine": engine, "offload": {"cpu_bytes": 1 << 20}},
        }
    )


@pytest.mark.parametrize(("engine", "policy"), [("none", "recompute"), ("nixl", "fail")])
def test_where_nothing_is_fetched_from_peers_a_failed_load_is_computed(engine, policy):
    vllm_config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_load_failure_policy="fail"))
    settings.recompute_if_alone(vllm_config, config_of(engine))
    assert vllm_config.kv_transfer_config.kv_load_failure_policy == policy


@pytest.mark.parametrize(
    ("engine", "policy", "is_alone", "said"),
    [
        ("none", "fail", True, False),
        ("none", "fail", False, True),
        ("none", "recompute", False, False),
        ("nixl", "fail", True, True),
        ("nixl", "recompute", True, False),
    ],
)
def test_it_is_said_at_the_start_where_a_failed_restore_fails_its_request(
    caplog, engine, policy, is_alone, said
):
    """vLLM reads one policy, for loads of all kinds; in a MultiConnector the outer one."""
    own = SimpleNamespace(kv_load_failure_policy=policy if is_alone else "recompute")
    connector = SimpleNamespace(_kv_transfer_config=own)
    outer = SimpleNamespace(_kv_transfer_config=SimpleNamespace(kv_load_failure_policy=policy))
    settings.warn_if_restores_fail(connector, connector if is_alone else outer, config_of(engine))
    assert any("kv_load_failure_policy is 'fail'" in line for line in caplog.messages) is said


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("prefixes", [False, True])
def test_a_vllm_that_computes_prompts_whole_is_told_by_both_settings(chunked, prefixes):
    vllm_config = SimpleNamespace(
        scheduler_config=SimpleNamespace(enable_chunked_prefill=chunked),
        cache_config=SimpleNamespace(enable_prefix_caching=prefixes),
    )
    assert settings.computes_prompts_whole(vllm_config) is not (chunked or prefixes)


# Sleep mode

SLEEPS = SimpleNamespace(enable_sleep_mode=True, sleep_mode_backend="cumem")
OFFLOAD = {"engine": "none", "offload": {"cpu_bytes": 1 << 20}}
BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"


def refuse(monkeypatch, model=SLEEPS, *, tells=True, caches_prefixes=True, **extra):
    """As a vLLM of 0.33 has it, or an older one."""
    hooks = {"unregister_kv_caches": None} if tells else {}
    base = SimpleNamespace(KVConnectorBase_V1=type("Base", (), hooks))
    monkeypatch.setitem(sys.modules, BASE, base)
    monkeypatch.setattr("kvconnect.vllm.settings.check_blocks", lambda *_: None)
    monkeypatch.setattr("kvconnect.vllm.settings.hash_block_tokens", lambda *_: None)
    vllm_config = SimpleNamespace(
        model_config=model,
        parallel_config=SimpleNamespace(),
        cache_config=SimpleNamespace(enable_prefix_caching=caches_prefixes),
        speculative_config=None,
    )
    given = {"kv_role": "kv_both", "kv_connector_extra_config": extra}
    settings.refuse_unsupported(vllm_config, None, parse_kv_transfer_config(given))


def media(cache_gb=0.0, **more):
    return SimpleNamespace(
        enable_sleep_mode=False, multimodal_config=SimpleNamespace(mm_processor_cache_gb=cache_gb, **more)
    )


@pytest.mark.parametrize(
    "given",
    [
        {},
        OFFLOAD,
        {"model": SimpleNamespace(enable_sleep_mode=False), "tells": False},
        # Images that are named by their contents, or never leave.
        {"model": media(4.0), "caches_prefixes": False},
        {"model": media()},
        {"model": media(language_model_only=True), "caches_prefixes": False},
        {"model": media(), "caches_prefixes": False, **OFFLOAD},
        {"model": SimpleNamespace(enable_sleep_mode=False, multimodal_config=None), "caches_prefixes": False},
    ],
)
def test_servers_that_may_sleep_and_images_that_have_one_name_are_accepted(monkeypatch, given):
    refuse(monkeypatch, **given)


SLEEPS_OTHERWISE = SimpleNamespace(enable_sleep_mode=True, sleep_mode_backend="criu")
ON, OFF = "enable_sleep_mode is on, but .*", ".*turn it off"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"tells": False}, rf"{ON}tells no connector when it sleeps; accepted: vLLM 0\.33 or newer{OFF}"),
        (
            {"model": SLEEPS_OTHERWISE},
            f"{ON}sleep_mode_backend 'criu' does not leave slots.*accepted: cumem{OFF}",
        ),
        (
            {"model": media(), "caches_prefixes": False},
            "mm_processor_cache_gb is 0 and enable_prefix_caching is off",
        ),
    ],
)
def test_others_are_refused_by_name(monkeypatch, given, why):
    with pytest.raises(ConfigError, match=why):
        refuse(monkeypatch, **given)


@pytest.mark.parametrize("sleeps", [True, False])
def test_what_is_ours_is_allocated_where_no_pool_of_the_caller_is_open(sleeps):
    """PyTorch's pools are of one thread."""
    config = SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=sleeps))
    thread = settings.outside_pools(config, threading.get_ident, torch.device("cpu"))
    assert (thread != threading.get_ident()) is sleeps


def test_an_error_of_what_is_made_there_is_the_caller_s():
    def make():
        raise ConfigError("no room")

    with pytest.raises(ConfigError, match="no room"):
        settings.outside_pools(SimpleNamespace(model_config=SLEEPS), make, torch.device("cpu"))


def test_vllm_s_hooks_are_the_worker_s():
    called = []
    connector = KVConnect.__new__(KVConnect)
    transfer = SimpleNamespace(sleep=lambda: called.append("sleep"), wake=lambda: called.append("wake"))
    connector._worker = SimpleNamespace(transfer=transfer)
    connector.unregister_kv_caches()
    connector.restore_kv_caches()
    assert called == ["sleep", "wake"]
    connector._worker.transfer = None
    connector.unregister_kv_caches()
    connector.restore_kv_caches()
    assert KVConnect.supports_sleep_mode(None)


# What of a GPU is vLLM's, so that slots leave it alone

GIB = 1 << 30


def test_it_is_read_where_vllm_has_it(monkeypatch):
    config = SimpleNamespace(cache_config=CacheConfig(gpu_memory_utilization=0.5))
    assert still_taken_bytes(config, torch.device("cpu")) == 0
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 30 * GIB)
    assert still_taken_bytes(config, torch.device("cuda", 1)) == 10 * GIB
    # Where the size of the cache was given in bytes, it may have passed its share.
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 50 * GIB)
    assert still_taken_bytes(config, torch.device("cuda", 1)) == 0
