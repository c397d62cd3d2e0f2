"""The numbers of a worker: what it moves, and everything that goes wrong without an exception.

One ``Metrics`` per worker for its transfers and one ``OffloadMetrics`` for its tiers. Only the thread of each
writes, so nothing here takes a lock. Two may read: Prometheus, through one exporter per registry that sums
the workers of a process, and a serving stack that asks after every step what has changed. That question costs
a comparison while nothing has.
"""

from __future__ import annotations

import bisect
import functools
from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

K = TypeVar("K", bound=Hashable)

PREFIX = "kvconnect"
_MAX_OBSERVATIONS = 4096


@dataclass(frozen=True)
class Family:
    """Numbers of one name that differ in their labels. Counters only grow; gauges are set."""

    name: str
    kind: Literal["counter", "gauge"]
    text: str
    labels: tuple[str, ...] = ()


TRANSFERS = Family(
    "transfers",
    "counter",
    "Requests whose KV was sent or received, by outcome; where a client left that is cancelled, and aborted",
    ("direction", "outcome"),
)
TRANSFER_BYTES = Family("transfer_bytes", "counter", "KV bytes moved", ("direction", "path"))
TRANSFER_SECONDS = Family(
    "transfer_seconds",
    "counter",
    "Seconds from the first post to the last completion, summed over requests",
    ("direction",),
)
COPIES = Family("copies", "counter", "Copies given to the engine", ("direction", "path"))
STREAMED = Family("streamed", "counter", "Requests that were sent while they were prefilled")
STREAMED_BYTES = Family("streamed_bytes", "counter", "KV bytes sent before the end of their prefill")
FAILURES = Family("failures", "counter", "What went wrong, by reason", ("reason",))
LEASES_HELD = Family("leases_held", "gauge", "Requests that wait to be fetched")
LOADS_IN_FLIGHT = Family("loads_in_flight", "gauge", "Requests that are being fetched, or wait for it")
LOADS_WAITING = Family("loads_waiting", "gauge", "Requests whose fetch waits for its turn")
QUARANTINED = Family("quarantined", "gauge", "Requests whose blocks may still be written")
INFLIGHT_BYTES = Family("inflight_bytes", "gauge", "Bytes under way to peers")
SLOTS_LANDING = Family("slots_landing", "gauge", "Landing slots that are lent, unpacked or in quarantine")
SLOTS_SEND = Family("slots_send", "gauge", "Send slots that are packed, sent or in quarantine")
LINK = {
    "direct_copy_s": Family("link_direct_copy_seconds", "gauge", "A copy on the link calibrated last"),
    "direct_bytes_per_s": Family("link_direct_bytes_per_second", "gauge", "Its bytes, page by page"),
    "packed_chunk_s": Family("link_packed_chunk_seconds", "gauge", "A chunk on the link calibrated last"),
    "packed_bytes_per_s": Family("link_packed_bytes_per_second", "gauge", "Its bytes, chunk by chunk"),
}
"""What a calibration measured, by its name in ``LinkCost.as_metrics``."""
OFFLOAD_ROWS = Family(
    "offload_rows",
    "counter",
    "Blocks stored in host memory and restored from it, kept in and fetched from lower tiers, and those that "
    "a lower tier did not take (unkept) or did not have (missed)",
    ("move", "tier"),
)
OFFLOAD_BYTES = Family("offload_bytes", "counter", "Their bytes", ("move", "tier"))
OFFLOAD_JOBS = Family("offload_jobs", "counter", "Jobs of these that ended well", ("move", "tier"))
OFFLOAD_SECONDS = Family(
    "offload_seconds", "counter", "Seconds from order to end, summed over these jobs", ("move", "tier")
)
OFFLOAD_WAIT_SECONDS = Family(
    "offload_wait_seconds",
    "counter",
    "Seconds that steps waited for staging memory (staging), and orders until they were begun (turn)",
    ("what",),
)
OFFLOAD_OPEN = {
    "store": Family("offload_stores_open", "gauge", "Jobs that copy blocks to host memory"),
    "restore": Family("offload_restores_open", "gauge", "Requests whose blocks are copied from host memory"),
    "keep": Family("offload_keeps_open", "gauge", "Jobs that write blocks to lower tiers"),
    "fetch": Family("offload_fetches_open", "gauge", "Jobs that read blocks from lower tiers"),
    "seek": Family("offload_seeks_open", "gauge", "Questions to lower tiers that are not answered yet"),
}
"""Jobs under way, by their kind."""
OFFLOAD_HELD_ROWS = Family(
    "offload_held_rows", "gauge", "Rows of host memory that a tier did not let go of in time"
)
TRANSFER_FAMILIES = (
    TRANSFERS,
    TRANSFER_BYTES,
    TRANSFER_SECONDS,
    COPIES,
    STREAMED,
    STREAMED_BYTES,
    FAILURES,
    LEASES_HELD,
    LOADS_IN_FLIGHT,
    LOADS_WAITING,
    QUARANTINED,
    INFLIGHT_BYTES,
    SLOTS_LANDING,
    SLOTS_SEND,
    *LINK.values(),
)
OFFLOAD_FAMILIES = (
    OFFLOAD_ROWS,
    OFFLOAD_BYTES,
    OFFLOAD_JOBS,
    OFFLOAD_SECONDS,
    OFFLOAD_WAIT_SECONDS,
    *OFFLOAD_OPEN.values(),
    OFFLOAD_HELD_ROWS,
)
FAMILIES = (*TRANSFER_FAMILIES, *OFFLOAD_FAMILIES)

LOAD_SECONDS = "load_seconds"
LOAD_SECONDS_TEXT = "Seconds from the order to load a request to its arrival"
LOAD_SECONDS_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25),
    *(0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)


@dataclass(frozen=True)
class Changes:
    """What changed at a worker since it was last asked.

    ``counters`` maps a family to what each label set, joined with commas, grew by; ``gauges`` are all
    gauges as they are now; ``load_seconds`` are the loads that arrived.
    """

    counters: dict[str, dict[str, float]]
    gauges: dict[str, float]
    load_seconds: list[float]


def merge_changes(first: Changes | None, second: Changes | None) -> Changes | None:
    """What changed at one of two parts of a worker that share no gauge."""
    if first is None or second is None:
        return first or second
    counters = {name: dict(numbers) for name, numbers in first.counters.items()}
    for name, numbers in second.counters.items():
        _add(counters.setdefault(name, {}), numbers)
    return Changes(counters, {**first.gauges, **second.gauges}, [*first.load_seconds, *second.load_seconds])


class Number:
    """One number. Only the owner's thread calls ``inc`` and ``set``."""

    __slots__ = ("_owner", "value")

    def __init__(self, owner: MetricSet) -> None:
        self._owner = owner
        self.value: float = 0

    def inc(self, amount: float = 1) -> None:
        """Grow."""
        self.value += amount
        self._owner.revision += 1

    def set(self, value: float) -> None:
        """Become."""
        if value != self.value:
            self.value = value
            self._owner.revision += 1


class Numbers:
    """The numbers of one family."""

    def __init__(self, owner: MetricSet, family: Family) -> None:
        self.family = family
        self._owner = owner
        self._numbers: dict[tuple[str, ...], Number] = {}

    def labels(self, *values: str) -> Number:
        """The number with these labels, made when it is first asked for."""
        found = self._numbers.get(values)
        if found is None:
            if len(values) != len(self.family.labels):
                raise ValueError(f"{self.family.name} has labels {self.family.labels}, not {values}")
            found = self._numbers[values] = Number(self._owner)
        return found

    def values(self) -> dict[tuple[str, ...], float]:
        """All numbers as they are now. For any thread: a dict is copied in one go."""
        return {labels: number.value for labels, number in self._numbers.copy().items()}


class Observations:
    """A histogram, and the observations that the reader of ``Metrics.changes`` has not seen yet."""

    def __init__(self, owner: MetricSet, buckets: Sequence[float]) -> None:
        self.buckets = buckets
        self.counts = [0] * (len(buckets) + 1)
        self.total = 0.0
        # Where no reader asks, the oldest go. They stay counted above.
        self.unseen: deque[float] = deque(maxlen=_MAX_OBSERVATIONS)
        self._owner = owner

    def observe(self, value: float) -> None:
        """Count one observation."""
        self.counts[bisect.bisect_left(self.buckets, value)] += 1
        self.total += value
        self.unseen.append(value)
        self._owner.revision += 1


class MetricSet:
    """The numbers of one part of a worker, exported through ``registry`` until ``retire``.

    ``revision`` grows with every change, after it.
    """

    def __init__(self, registry: CollectorRegistry, families: Sequence[Family]) -> None:
        self.registry = registry
        self.revision = 0
        self.families = {family.name: Numbers(self, family) for family in families}
        self.load_seconds = Observations(self, LOAD_SECONDS_BUCKETS)
        self._seen_revision = 0
        self._seen: dict[str, dict[tuple[str, ...], float]] = {}
        _exporter_on(registry).add(self)

    def changes(self) -> Changes | None:
        """What changed since the last call, or None. For one reader, on any one thread."""
        revision = self.revision
        if revision == self._seen_revision:
            return None
        # Taken before the numbers: what is written meanwhile is told now, and looked for again.
        self._seen_revision = revision
        counters: dict[str, dict[str, float]] = {}
        gauges: dict[str, float] = {}
        for name, numbers in self.families.items():
            values = numbers.values()
            if numbers.family.kind == "gauge":
                gauges[name] = values.get((), 0)
                continue
            before = self._seen.get(name, {})
            grown = {labels: value - before.get(labels, 0) for labels, value in values.items()}
            self._seen[name] = values
            if told := {",".join(labels): growth for labels, growth in grown.items() if growth}:
                counters[name] = told
        unseen = self.load_seconds.unseen
        return Changes(counters, gauges, [unseen.popleft() for _ in range(len(unseen))])

    def retire(self) -> None:
        """The worker is gone: its counts stay in the registry, its gauges do not. Idempotent."""
        _exporter_on(self.registry).retire(self)


class Metrics(MetricSet):
    """What the transfers of one worker move, and what goes wrong there."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        super().__init__(registry, TRANSFER_FAMILIES)
        self.transfers = self.families[TRANSFERS.name]
        self.transfer_bytes = self.families[TRANSFER_BYTES.name]
        self.transfer_seconds = self.families[TRANSFER_SECONDS.name]
        self.copies = self.families[COPIES.name]
        self.streamed = self.families[STREAMED.name].labels()
        self.streamed_bytes = self.families[STREAMED_BYTES.name].labels()
        self.failures = self.families[FAILURES.name]
        self.leases = self.families[LEASES_HELD.name].labels()
        self.loads = self.families[LOADS_IN_FLIGHT.name].labels()
        self.loads_waiting = self.families[LOADS_WAITING.name].labels()
        self.quarantined = self.families[QUARANTINED.name].labels()
        self.inflight_bytes = self.families[INFLIGHT_BYTES.name].labels()
        self.link = {what: self.families[family.name].labels() for what, family in LINK.items()}
        self.slots_landing = self.families[SLOTS_LANDING.name].labels()
        self.slots_send = self.families[SLOTS_SEND.name].labels()


class OffloadMetrics(MetricSet):
    """What the tiers of one worker move, and what goes wrong there."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        super().__init__(registry, (FAILURES, *OFFLOAD_FAMILIES))
        self.failures = self.families[FAILURES.name]
        self.rows = self.families[OFFLOAD_ROWS.name]
        self.row_bytes = self.families[OFFLOAD_BYTES.name]
        self.jobs = self.families[OFFLOAD_JOBS.name]
        self.seconds = self.families[OFFLOAD_SECONDS.name]
        self.wait_seconds = self.families[OFFLOAD_WAIT_SECONDS.name]
        self.open = {kind: self.families[family.name].labels() for kind, family in OFFLOAD_OPEN.items()}
        self.held_rows = self.families[OFFLOAD_HELD_ROWS.name].labels()

    def moved(self, move: str, tier: str, rows: int, length_bytes: int, seconds: float | None = None) -> None:
        """So many rows were moved; by a job that took so long, if that is told."""
        if rows:
            self.rows.labels(move, tier).inc(rows)
            self.row_bytes.labels(move, tier).inc(length_bytes)
        if seconds is not None:
            self.jobs.labels(move, tier).inc()
            self.seconds.labels(move, tier).inc(seconds)


class Exporter(Collector):
    """Shows a registry the sum of all workers of a process, those that are gone included."""

    def __init__(self) -> None:
        self._living: list[MetricSet] = []
        self._past: dict[str, dict[tuple[str, ...], float]] = {}
        self._past_counts = [0] * (len(LOAD_SECONDS_BUCKETS) + 1)
        self._past_seconds = 0.0

    def add(self, metrics: MetricSet) -> None:
        """Export a worker's numbers."""
        self._living.append(metrics)

    def retire(self, metrics: MetricSet) -> None:
        """Keep what a worker counted, and forget the worker."""
        if metrics not in self._living:
            return
        self._living.remove(metrics)
        for numbers in metrics.families.values():
            if numbers.family.kind == "counter":
                _add(self._past.setdefault(numbers.family.name, {}), numbers.values())
        self._past_counts = _sums([self._past_counts, metrics.load_seconds.counts])
        self._past_seconds += metrics.load_seconds.total

    def collect(self) -> Iterator[Metric]:
        """See ``Collector``."""
        living = list(self._living)
        for family in FAMILIES:
            total = dict(self._past.get(family.name, {} if family.labels else {(): 0.0}))
            for metrics in living:
                if family.name in metrics.families:
                    _add(total, metrics.families[family.name].values())
            make = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
            shown = make(f"{PREFIX}_{family.name}", family.text, labels=family.labels)
            for labels, value in total.items():
                shown.add_metric(labels, value)
            yield shown
        counts = _sums([self._past_counts, *(metrics.load_seconds.counts for metrics in living)])
        buckets, below = [], 0
        for edge, count in zip((*LOAD_SECONDS_BUCKETS, "+Inf"), counts, strict=True):
            below += count
            buckets.append((str(edge), below))
        seconds = self._past_seconds + sum(metrics.load_seconds.total for metrics in living)
        yield HistogramMetricFamily(f"{PREFIX}_{LOAD_SECONDS}", LOAD_SECONDS_TEXT, buckets, seconds)


@functools.cache
def _exporter_on(registry: CollectorRegistry) -> Exporter:
    exporter = Exporter()
    registry.register(exporter)
    return exporter


def _add(total: dict[K, float], more: Mapping[K, float]) -> None:
    for labels, value in more.items():
        total[labels] = total.get(labels, 0) + value


def _sums(columns: Sequence[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip(*columns, strict=True)]
