"""The numbers of a worker: what it moves, and everything that goes wrong without an exception.

Only one thread writes to each set, so nothing here takes a lock. Two may read: Prometheus, through one
exporter per registry that sums the workers of a process, and a serving stack that asks after every step what
has changed. That question costs a comparison while nothing has.
"""

from __future__ import annotations

import bisect
import functools
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvconnect.timeline import Timeline

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


def _counter(name: str, text: str, *labels: str) -> Any:
    """A family in the body of a ``MetricSet``; an instance has its numbers there, or its one number."""
    return Family(name, "counter", text, labels)


def _gauge(name: str, text: str) -> Any:
    return Family(name, "gauge", text)


LOAD_SECONDS = "load_seconds"
LOAD_SECONDS_TEXT = "Seconds from the order to load a request to its arrival"
LOAD_SECONDS_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
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


def summarize(
    counters: Mapping[str, Mapping[str, float]],
    gauges: Iterable[Mapping[str, float]],
    load_seconds: Sequence[float],
) -> dict[str, int | float]:
    """The numbers of a log line, of what changed. Failures by reason; gauges as the busiest rank has them."""
    loads, ranks = sorted(load_seconds), list(gauges)
    line: dict[str, int | float] = {}
    for direction in ("sent", "received"):
        count, mib, seconds = (
            sum(n for labels, n in counters.get(name, {}).items() if labels.split(",")[0] == direction)
            for name in ("transfers", "transfer_bytes", "transfer_seconds")
        )
        mib /= 2**20
        if count:
            line[f"Transfers {direction}"] = round(count)
            line[f"MB {direction}"] = round(mib, 3)
        if mib and seconds:
            line[f"MB/s {direction}"] = round(mib / seconds, 1)
    if loads:
        line["Avg load time (ms)"] = round(sum(loads) / len(loads) * 1e3, 3)
        line["P90 load time (ms)"] = round(loads[(len(loads) * 9 - 1) // 10] * 1e3, 3)
    for labels, growth in counters.get("offload_rows", {}).items():
        name = f"Blocks {labels.split(',')[0]}"
        line[name] = round(line.get(name, 0) + growth)
    for reason, growth in counters.get("failures", {}).items():
        line[f"Failures ({reason})"] = round(growth)
    for family in FAMILIES:
        values = [gauges.get(family.name, 0) for gauges in ranks]
        if family.kind == "gauge" and any(values):
            line[family.name.replace("_", " ").capitalize()] = round(max(values))
    return line


class Number:
    """One number. Only the owner's thread calls ``inc`` and ``set``."""

    __slots__ = ("_owner", "value")

    def __init__(self, owner: MetricSet) -> None:
        self._owner = owner
        self.value: float = 0

    def inc(self, amount: float = 1) -> None:
        self.value += amount
        self._owner.revision += 1

    def set(self, value: float) -> None:
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

    The families are those in the body of the class, alone or by a key. ``revision`` grows with every change,
    after it.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self.registry = registry
        self.revision = 0
        self.families = {family.name: Numbers(self, family) for family in self.declared()}
        self.load_seconds = Observations(self, LOAD_SECONDS_BUCKETS)
        self._seen_revision = 0
        self._seen: dict[str, dict[tuple[str, ...], float]] = {}
        for name, declared in self._bodies():
            if isinstance(declared, Family):
                setattr(self, name, self._numbers(declared))
            else:
                setattr(self, name, {key: self._numbers(family) for key, family in declared.items()})
        _exporter_on(registry).add(self)

    @classmethod
    def declared(cls) -> list[Family]:
        """The families of the class, in their order."""
        bodies = [[it] if isinstance(it, Family) else it.values() for _, it in cls._bodies()]
        return [family for body in bodies for family in body]

    @classmethod
    def _bodies(cls) -> Iterator[tuple[str, Family | dict[str, Family]]]:
        for name, declared in vars(cls).items():
            if not name.startswith("_") and isinstance(declared, (Family, dict)):
                yield name, declared

    def _numbers(self, family: Family) -> Numbers | Number:
        numbers = self.families[family.name]
        return numbers if family.labels else numbers.labels()

    def changes(self) -> Changes | None:
        """What changed since the last call, or None. For one reader, on any one thread."""
        revision = self.revision
        if revision == self._seen_revision:
            return None
        # Taken before the numbers: what is written meanwhile is reported now, and looked for again.
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


_FAILURES = _counter("failures", "What went wrong, by reason", "reason")


class Metrics(MetricSet):
    """What the transfers of one worker move, and what goes wrong there; ``timeline`` has what they do when.

    ``link`` is what a calibration measured, by its name in ``LinkCost.as_metrics``.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        super().__init__(registry)
        self.timeline = Timeline()

    transfers: Numbers = _counter(
        "transfers",
        "Requests whose KV was sent or received, by outcome; where a client left that is cancelled, and "
        "aborted",
        "direction",
        "outcome",
    )
    transfer_bytes: Numbers = _counter("transfer_bytes", "KV bytes moved", "direction", "path")
    transfer_seconds: Numbers = _counter(
        "transfer_seconds",
        "Seconds from the first post to the last completion, summed over requests",
        "direction",
    )
    copies: Numbers = _counter("copies", "Copies given to the engine", "direction", "path")
    streamed: Number = _counter("streamed", "Requests that were sent while they were prefilled")
    streamed_bytes: Number = _counter("streamed_bytes", "KV bytes sent before the end of their prefill")
    failures: Numbers = _FAILURES
    leases: Number = _gauge("leases_held", "Requests that wait to be fetched")
    loads: Number = _gauge("loads_in_flight", "Requests that are being fetched, or wait for it")
    loads_waiting: Number = _gauge("loads_waiting", "Requests whose fetch waits for its turn")
    quarantined: Number = _gauge("quarantined", "Requests whose blocks may still be written")
    inflight_bytes: Number = _gauge("inflight_bytes", "Bytes under way to peers")
    slots_landing: Number = _gauge("slots_landing", "Landing slots that are lent, unpacked or in quarantine")
    slots_send: Number = _gauge("slots_send", "Send slots that are packed, sent or in quarantine")
    slots_landing_limit: Number = _gauge("slots_landing_limit", "Landing slots that there are")
    slots_send_limit: Number = _gauge("slots_send_limit", "Send slots that there are")
    link: ClassVar[dict[str, Number]] = {
        "direct_copy_s": _gauge("link_direct_copy_seconds", "A copy on the link calibrated last"),
        "direct_bytes_per_s": _gauge("link_direct_bytes_per_second", "Its bytes, page by page"),
        "packed_chunk_s": _gauge("link_packed_chunk_seconds", "A chunk on the link calibrated last"),
        "packed_bytes_per_s": _gauge("link_packed_bytes_per_second", "Its bytes, chunk by chunk"),
    }


class OffloadMetrics(MetricSet):
    """What the tiers of one worker move, and what goes wrong there. ``open`` are jobs under way, by kind.

    ``taken`` and ``limit`` are bytes, by tier.
    """

    failures: Numbers = _FAILURES
    rows: Numbers = _counter(
        "offload_rows",
        "Blocks stored in host memory and restored from it, kept in and fetched from lower tiers, and those "
        "that a lower tier did not take (unkept) or did not have (missed)",
        "move",
        "tier",
    )
    row_bytes: Numbers = _counter("offload_bytes", "Their bytes", "move", "tier")
    jobs: Numbers = _counter("offload_jobs", "Jobs of these that ended well", "move", "tier")
    seconds: Numbers = _counter(
        "offload_seconds", "Seconds from order to end, summed over these jobs", "move", "tier"
    )
    wait_seconds: Numbers = _counter(
        "offload_wait_seconds",
        "Seconds that steps waited for staging memory (staging), and orders until they were begun (turn)",
        "what",
    )
    open: ClassVar[dict[str, Number]] = {
        "store": _gauge("offload_stores_open", "Jobs that copy blocks to host memory"),
        "restore": _gauge("offload_restores_open", "Requests whose blocks are copied from host memory"),
        "keep": _gauge("offload_keeps_open", "Jobs that write blocks to lower tiers"),
        "fetch": _gauge("offload_fetches_open", "Jobs that read blocks from lower tiers"),
        "seek": _gauge("offload_seeks_open", "Questions to lower tiers that are not answered yet"),
    }
    taken: ClassVar[dict[str, Number]] = {
        "host": _gauge("offload_host_bytes", "Bytes of host memory that hold blocks"),
        "disk": _gauge("offload_disk_bytes", "Bytes that blocks take on disk"),
    }
    limit: ClassVar[dict[str, Number]] = {
        "host": _gauge("offload_host_limit_bytes", "Bytes of host memory that are for blocks"),
        "disk": _gauge("offload_disk_limit_bytes", "Most bytes that blocks may take on disk"),
    }
    held_rows: Number = _gauge(
        "offload_held_rows", "Rows of host memory that a tier did not let go of in time"
    )

    def moved(self, move: str, tier: str, rows: int, length_bytes: int, seconds: float | None = None) -> None:
        """So many rows were moved; by a job that took so long, if that is known."""
        if rows:
            self.rows.labels(move, tier).inc(rows)
            self.row_bytes.labels(move, tier).inc(length_bytes)
        if seconds is not None:
            self.jobs.labels(move, tier).inc()
            self.seconds.labels(move, tier).inc(seconds)


FAMILIES = tuple(dict.fromkeys((*Metrics.declared(), *OffloadMetrics.declared())))


class Exporter(Collector):
    """Shows a registry the sum of all workers of a process, those that are gone included."""

    def __init__(self) -> None:
        self._living: list[MetricSet] = []
        self._past: dict[str, dict[tuple[str, ...], float]] = {}
        self._past_counts = [0] * (len(LOAD_SECONDS_BUCKETS) + 1)
        self._past_seconds = 0.0

    def add(self, metrics: MetricSet) -> None:
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
