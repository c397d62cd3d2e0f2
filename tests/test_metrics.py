"""A worker's numbers: what Prometheus shows, and what a reader of changes is told, agree."""

from __future__ import annotations

import re
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvconnect.metrics import FAMILIES, Metrics, MetricSet, OffloadMetrics, Series, summarize
from kvconnect.node.children import parse_metrics
from tests.call_count import calls_of

words = st.sampled_from(["a", "b", "c"])
amounts = st.integers(0, 2**40) | st.floats(0, 1e6)
seconds = st.floats(0, 2000) | st.sampled_from(Metrics().load_seconds.family.buckets)


def writes_to(part: type[MetricSet]) -> st.SearchStrategy[list[tuple]]:
    verbs = {
        "counter": st.tuples(st.just("inc"), amounts),
        "gauge": st.tuples(st.just("set"), amounts),
        "histogram": st.tuples(st.just("observe"), seconds),
    }
    written = st.sampled_from(part.declared()).flatmap(
        lambda family: st.tuples(
            st.just(family), st.tuples(*(words for _ in family.labels)), verbs[family.kind]
        )
    )
    return st.lists(written, max_size=30)


def write(metrics: MetricSet, one: tuple) -> None:
    family, labels, (verb, value) = one
    getattr(metrics.families[family.name].labels(*labels), verb)(value)


def samples(registry: CollectorRegistry) -> dict:
    """What a scrape shows, without the moments at which the client library's counters were made."""
    shown = parse_metrics(generate_latest(registry).decode())
    return {key: value for key, value in shown.items() if not key[0].endswith("_created")}


def reference(workers: list[list[tuple]]) -> dict:
    """The same of metrics that are written to at once, each worker's gauges under its rank."""
    registry = CollectorRegistry()
    metrics = {}
    for family in FAMILIES:
        make = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}[family.kind]
        more = {"buckets": family.buckets} if family.buckets else {}
        labels = ["model", *(["rank"] if family.kind == "gauge" else []), *family.labels]
        name = f"kvconnect_{family.name}"
        metrics[family] = make(name, family.text, labels, registry=registry, **more)
    for rank, ops in enumerate(workers):
        for family, labels, (verb, value) in ops:
            ranks = [str(rank)] if family.kind == "gauge" else []
            getattr(metrics[family].labels("tiny", *ranks, *labels), verb)(value)
    return samples(registry)


@given(st.lists(st.lists(writes_to(Metrics), max_size=3), min_size=1, max_size=3))
def test_series_show_what_was_written_by_all_workers(workers):
    registry = CollectorRegistry()
    kinds = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}
    series = Series("kvconnect", kinds, ["model"], ["rank"], registry=registry)
    for rank, rounds in enumerate(workers):
        metrics = Metrics()
        for ops in rounds:
            for one in ops:
                write(metrics, one)
            if changes := metrics.changes():
                series.add(changes.counters, {str(rank): changes.gauges}, changes.observed, ("tiny",))
    expected = reference([[one for ops in rounds for one in ops] for rounds in workers])
    shown = samples(registry)
    # What is 0 need not be shown.
    assert {key: shown.get(key, 0) for key in expected} == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert not any(shown[key] for key in shown.keys() - expected.keys())


def test_what_was_reported_of_a_gauge_stays_as_it_was():
    metrics = Metrics()
    metrics.leases.set(3)
    metrics.link_rate.labels("shm")
    before = metrics.changes()
    metrics.leases.set(4)
    metrics.link_rate.labels("tcp").set(5)
    assert metrics.changes().gauges["link_bytes_per_second"] == {"shm": 0, "tcp": 5}
    assert before.gauges["leases_held"] == {"": 3}
    assert before.gauges["link_bytes_per_second"] == {"shm": 0}
    before.gauges.clear()
    metrics.loads.set(1)
    assert metrics.changes().gauges["leases_held"] == {"": 4}


def test_nothing_is_lost_that_is_written_while_changes_are_taken():
    metrics, seen, observed = Metrics(), 0, []

    def write_much():
        for number in range(20_000):
            metrics.copies.labels("sent").inc()
            if number % 10 == 0:
                metrics.load_seconds.observe(number)

    thread = threading.Thread(target=write_much)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        is_over = False
        while not is_over:
            is_over = not thread.is_alive()
            changes = metrics.changes()
            seen += changes.counters.get("copies", {}).get("sent", 0) if changes else 0
            observed += changes.observed.get("load_seconds", ()) if changes else ()
    finally:
        sys.setswitchinterval(interval)
        thread.join()
    assert (seen, observed) == (20_000, [*range(0, 20_000, 10)])


def test_the_changes_of_both_parts_of_a_worker_are_told_as_one():
    transfers, tiers = Metrics(), OffloadMetrics()
    assert tiers.changes(transfers.changes()) is None
    transfers.failures.labels("load").inc(2)
    transfers.load_seconds.observe(0.5)
    alone = transfers.changes()
    assert tiers.changes(alone) is alone
    tiers.failures.labels("load").inc(3)
    tiers.failures.labels("disk_full").inc()
    tiers.moved("stored", "cpu", 4, 4096, 0.25)
    tiers.moved("missed", "disk", 0, 0)
    tiers.open["store"].set(7)
    both = tiers.changes(alone)
    assert both.counters == {
        "failures": {"load": 5, "disk_full": 1},
        "offload_rows": {"stored,cpu": 4},
        "offload_bytes": {"stored,cpu": 4096},
        "offload_jobs": {"stored,cpu": 1},
        "offload_seconds": {"stored,cpu": 0.25},
    }
    assert both.gauges["offload_stores_open"] == {"": 7}
    assert both.gauges["leases_held"] == {"": 0}
    assert both.gauges["link_bytes_per_second"] == {}
    assert both.observed == {"load_seconds": [0.5]}
    tiers.open["seek"].set(1)
    assert "leases_held" not in tiers.changes().gauges


def test_a_counter_never_shrinks():
    """A time taken before another thread's was counted as less than nothing, which ended vLLM's server."""
    metrics = OffloadMetrics()
    metrics.wait_seconds.labels("turn").inc(-0.001)
    assert metrics.changes() is None
    metrics.wait_seconds.labels("turn").inc(0.5)
    assert metrics.changes().counters["offload_wait_seconds"] == {"turn": 0.5}


def test_a_gauge_that_is_set_to_what_it_is_has_not_changed():
    metrics = Metrics()
    assert metrics.changes() is None
    metrics.leases.set(0)
    assert metrics.changes() is None
    metrics.leases.set(2)
    assert metrics.changes().gauges["leases_held"] == {"": 2}
    metrics.leases.set(2)
    assert metrics.changes() is None
    metrics.leases.set(0)
    assert metrics.changes().gauges["leases_held"] == {"": 0}


def test_observations_that_nobody_asks_for_are_bounded():
    metrics = Metrics()
    for _ in range(10_000):
        metrics.load_seconds.observe(0.1)
    assert len(metrics.changes().observed["load_seconds"]) == 4096


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_name_follows_the_conventions_of_prometheus(family):
    assert re.fullmatch(r"[a-z]+(_[a-z]+)*", family.name)
    assert not family.name.endswith(("_total", "_count", "_sum", "_bucket"))
    assert not set(family.name.split("_")) & {
        "ms",
        "us",
        "ns",
        "mb",
        "gb",
        "kb",
        "mib",
        "gib",
        "milliseconds",
    }
    in_seconds = family.text.startswith("Seconds")
    assert family.name.endswith("_seconds") == in_seconds
    assert family.kind != "histogram" or list(family.buckets) == sorted(set(family.buckets))
    assert not set(family.labels) & {"peer", "request", "handle", "engine_id", "host", "le", "quantile"}


def test_a_wrong_number_of_labels_is_an_error():
    with pytest.raises(ValueError, match="direction"):
        Metrics().transfers.labels("sent")


def test_asking_costs_next_to_nothing_while_nothing_changes():
    metrics = Metrics()
    metrics.failures.labels("load").inc()
    metrics.changes()
    assert calls_of(metrics.changes) == 1


def test_a_log_line_has_what_is_taken_and_not_what_never_changes():
    metrics = Metrics()
    metrics.slots_send.set(3)
    metrics.slots_send_limit.set(8)
    changes = metrics.changes()
    assert changes is not None
    assert summarize(changes.counters, [changes.gauges], changes.observed) == {"Slots send": 3}
