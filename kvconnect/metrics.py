"""A worker's metrics: bytes and requests moved, and failures that raise no exception.

Only one thread writes to each set, so no lock is needed. Its one reader, a serving stack, asks often for the
changes, at the cost of a comparison while there are none, and adds them to the ``Series`` that it shows.
"""

from __future__ import annotations

import functools
import logging
import traceback
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

from kvconnect.errors import IllegalTransition
from kvconnect.timeline import Timeline

logger = logging.getLogger(__name__)

K = TypeVar("K", bound=Hashable)

_MAX_OBSERVATIONS = 4096


@dataclass(frozen=True)
class Family:
    """A metric: its numbers differ in their labels. Counters only grow; gauges are set.

    A histogram has ``buckets`` (upper edges), and no labels.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    text: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


class Number:
    """One number. Only the owner's thread calls ``inc`` and ``set``; only one reader calls ``take``."""

    __slots__ = ("_is_noted", "_labels", "_owner", "_seen", "family", "value")

    def __init__(self, owner: MetricSet, family: Family, labels: tuple[str, ...] = ()) -> None:
        self.family = family
        self._owner, self._labels = owner, ",".join(labels)
        self.value: float = 0
        self._seen: float = 0
        self._is_noted = False

    def inc(self, amount: float = 1) -> None:
        # The clocks of two threads may differ by less than 0, and a counter that shrinks ends a vLLM server.
        if amount > 0:
            self.value += amount
            self.note()

    def set(self, value: float) -> None:
        if value != self.value:
            self.value = value
            self.note()

    def note(self) -> None:
        """Queue the number for the reader; after the change, as the reader may come at any time."""
        if not self._is_noted:
            self._is_noted = True
            self._owner.changed.append(self)

    def take(self, changes: Changes) -> None:
        """Add the change since the last call to ``changes``."""
        # Before the value is read: a change made meanwhile is queued again.
        self._is_noted = False
        name, value = self.family.name, self.value
        if self.family.kind == "gauge":
            # A copy: changes reported before must not alter.
            changes.gauges[name] = {**changes.gauges[name], self._labels: value}
        elif growth := value - self._seen:
            add_to(changes.counters.setdefault(name, {}), {self._labels: growth})
            self._seen = value


class Observations(Number):
    """The observations of a histogram that the reader of ``MetricSet.changes`` has not seen yet."""

    __slots__ = ("_unseen",)

    def __init__(self, owner: MetricSet, family: Family, labels: tuple[str, ...] = ()) -> None:
        super().__init__(owner, family, labels)
        # Without a reader the oldest are dropped.
        self._unseen: deque[float] = deque(maxlen=_MAX_OBSERVATIONS)

    def observe(self, value: float) -> None:
        """Count one observation."""
        self._unseen.append(value)
        self.note()

    def take(self, changes: Changes) -> None:
        """Add the observations since the last call to ``changes``."""
        self._is_noted = False
        if values := [self._unseen.popleft() for _ in range(len(self._unseen))]:
            changes.observed[self.family.name] = values


class Numbers:
    """The numbers of one family."""

    def __init__(self, owner: MetricSet, family: Family) -> None:
        self.family = family
        self._owner = owner
        self._numbers: dict[tuple[str, ...], Number] = {}

    def labels(self, *values: str) -> Number:
        """The number with these labels, made at its first use."""
        found = self._numbers.get(values)
        if found is None:
            if len(values) != len(self.family.labels):
                raise ValueError(f"{self.family.name} has labels {self.family.labels}, not {values}")
            kind = Observations if self.family.kind == "histogram" else Number
            found = self._numbers[values] = kind(self._owner, self.family, values)
            if values and self.family.kind == "gauge":
                # Shown from now on, even if it stays 0.
                found.note()
        return found

    def values(self) -> dict[tuple[str, ...], float]:
        """All present numbers. For any thread: a dict is copied atomically."""
        return {labels: number.value for labels, number in self._numbers.copy().items()}


@dataclass(frozen=True)
class Changes:
    """The changes of a worker's metrics since the last call.

    ``counters``: by family and label set (joined with commas), the growth; ``gauges``: likewise, all present
    values; ``observed``: by histogram, the new observations.
    """

    counters: dict[str, dict[str, float]]
    gauges: dict[str, dict[str, float]]
    observed: dict[str, list[float]]


def add_to(total: dict[K, float], more: Mapping[K, float]) -> None:
    for labels, value in more.items():
        total[labels] = total.get(labels, 0) + value


PREFIX = "kvconnect"


def _counter(name: str, text: str, *labels: str) -> Any:
    """A family in a ``MetricSet`` body; an instance has its numbers, or its single number, there."""
    return Family(name, "counter", text, labels)


def _gauge(name: str, text: str, *labels: str) -> Any:
    return Family(name, "gauge", text, labels)


def _histogram(name: str, text: str, buckets: tuple[float, ...]) -> Any:
    return Family(name, "histogram", text, (), buckets)


_LOAD_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
_CHUNK_BUCKETS = (
    *(0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 5.0, 30.0),
)
_LEASE_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)


def summarize(
    counters: Mapping[str, Mapping[str, float]],
    gauges: Iterable[Mapping[str, Mapping[str, float]]],
    observed: Mapping[str, Sequence[float]],
) -> dict[str, int | float]:
    """The numbers of a log line, from changes: failures by reason, gauges of the rank with the most."""
    loads, ranks = sorted(observed.get("load_seconds", ())), list(gauges)
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
        values = [gauges.get(family.name, {}).get("", 0) for gauges in ranks]
        # Constants are left out of a line that comes every 10 s.
        if family.kind == "gauge" and any(values) and "_limit" not in family.name:
            line[family.name.replace("_", " ").capitalize()] = round(max(values))
    return line


class MetricSet:
    """The metrics of one part of a worker.

    The families are declared in the class body, singly or as a dictionary. ``changed`` queues each number
    that has changed since the reader took it.
    """

    def __init__(self) -> None:
        self.changed: deque[Number] = deque()
        self.families: dict[str, Numbers] = {}
        for name, declared in self._bodies():
            if isinstance(declared, Family):
                setattr(self, name, self._numbers(declared))
            else:
                setattr(self, name, {key: self._numbers(family) for key, family in declared.items()})
        self._gauges: dict[str, dict[str, float]] = {
            name: {} if numbers.family.labels else {"": 0}
            for name, numbers in self.families.items()
            if numbers.family.kind == "gauge"
        }

    @classmethod
    def declared(cls) -> list[Family]:
        """The families that the class declares, in their order."""
        bodies = [[it] if isinstance(it, Family) else it.values() for _, it in cls._bodies()]
        return [family for body in bodies for family in body]

    @classmethod
    def _bodies(cls) -> Iterator[tuple[str, Family | dict[str, Family]]]:
        for name, declared in vars(cls).items():
            if not name.startswith("_") and isinstance(declared, (Family, dict)):
                yield name, declared

    def _numbers(self, family: Family) -> Numbers | Number:
        numbers = self.families.setdefault(family.name, Numbers(self, family))
        return numbers if family.labels else numbers.labels()

    def changes(self, more: Changes | None = None) -> Changes | None:
        """The changes since the last call, or None. For one reader, on any one thread.

        They are added to ``more``, the changes of another part of the worker, which shares no gauge and no
        histogram with this one.
        """
        if not self.changed:
            return more
        changes = more or Changes({}, {}, {})
        changes.gauges.update(self._gauges)
        for _ in range(len(self.changed)):
            self.changed.popleft().take(changes)
        self._gauges = {name: changes.gauges[name] for name in self._gauges}
        return changes


_FAILURES = _counter("failures", "What went wrong, by reason", "reason")


class Metrics(MetricSet):
    """The metrics of one worker's transfers, and their timeline."""

    def __init__(self) -> None:
        super().__init__()
        self.timeline = Timeline()
        self.logged_errors: set[Hashable] = set()

    transfers: Numbers = _counter(
        "transfers",
        "Requests whose KV was sent or received; where the client left: cancelled, or aborted",
        "direction",
        "outcome",
    )
    transfer_bytes: Numbers = _counter("transfer_bytes", "KV bytes moved", "direction", "lane")
    transfer_seconds: Numbers = _counter(
        "transfer_seconds",
        "Seconds from a request's first batch to its last completion, summed",
        "direction",
    )
    copies: Numbers = _counter("copies", "Chunks sent or received", "direction")
    streamed: Number = _counter("streamed_requests", "Requests sent during their prefill")
    streamed_bytes: Number = _counter("streamed_bytes", "KV bytes sent before the end of their prefill")
    pulls: Numbers = _counter("pulls", "Requests whose KV peers were asked for by name", "outcome")
    pulled_tokens: Number = _counter("pulled_tokens", "Tokens whose KV was loaded by name")
    named_leases: Numbers = _counter("named_leases", "Leases on KV that a peer asked for by name", "place")
    failures: Numbers = _FAILURES
    load_seconds: Observations = _histogram(
        "load_seconds", "Seconds from the order to load a request to its arrival", _LOAD_BUCKETS
    )
    chunk_seconds: Observations = _histogram(
        "chunk_seconds", "Seconds to write a chunk to a peer", _CHUNK_BUCKETS
    )
    lease_seconds: Observations = _histogram(
        "lease_seconds", "Seconds that a request's blocks were leased", _LEASE_BUCKETS
    )
    link_rate: Numbers = _gauge(
        "link_bytes_per_second", "Rate of the link measured last, over a calibration or 64 MiB", "lane"
    )
    link_expected: Numbers = _gauge(
        "link_expected_bytes_per_second", "What its hardware should give, 0 where unknown", "lane"
    )
    side_channel: Numbers = _gauge("side_channel", "1 where the worker listens for its peers", "address")
    leases: Number = _gauge("leases_held", "Requests that wait to be fetched")
    loads: Number = _gauge("loads_in_flight", "Requests being fetched, or waiting for it")
    loads_waiting: Number = _gauge("loads_waiting", "Requests whose fetch waits its turn")
    quarantined: Number = _gauge("slots_quarantined", "Landing slots that a lost peer may still write")
    inflight_bytes: Number = _gauge("inflight_bytes", "Bytes under way to peers")
    slots_landing: Number = _gauge("slots_landing", "Landing slots lent, unpacked or in quarantine")
    slots_send: Number = _gauge("slots_send", "Send slots packed, sent or in quarantine")
    slots_landing_limit: Number = _gauge("slots_landing_limit", "All landing slots")
    slots_send_limit: Number = _gauge("slots_send_limit", "All send slots")


class OffloadMetrics(MetricSet):
    """The metrics of one worker's tiers. ``open``: jobs under way, by kind.

    ``taken``, ``limit`` and ``pinned``: bytes, by tier.
    """

    failures: Numbers = _FAILURES
    rows: Numbers = _counter(
        "offload_rows",
        "Blocks stored in and restored from host memory, kept in and fetched from lower tiers, not taken "
        "(unkept) or found (missed) there",
        "move",
        "tier",
    )
    row_bytes: Numbers = _counter("offload_bytes", "Their bytes", "move", "tier")
    jobs: Numbers = _counter("offload_jobs", "Jobs of these that ended well", "move", "tier")
    seconds: Numbers = _counter(
        "offload_seconds", "Seconds from order to end of these, summed", "move", "tier"
    )
    session_actions: Numbers = _counter(
        "session_actions", "Actions that requests asked for", "action", "outcome"
    )
    wait_seconds: Numbers = _counter(
        "offload_wait_seconds",
        "Seconds that steps waited for staging memory, and orders for their turn",
        "cause",
    )
    open: ClassVar[dict[str, Number]] = {
        "store": _gauge("offload_stores_open", "Jobs that copy blocks to host memory"),
        "restore": _gauge("offload_restores_open", "Requests being restored from host memory"),
        "keep": _gauge("offload_keeps_open", "Jobs that write blocks to lower tiers"),
        "fetch": _gauge("offload_fetches_open", "Jobs that read blocks from lower tiers"),
        "seek": _gauge("offload_seeks_open", "Lookups in lower tiers under way"),
        "park": _gauge("offload_parks_open", "Jobs that fetch KV of waiting requests into host memory"),
    }
    taken: ClassVar[dict[str, Number]] = {
        "host": _gauge("offload_host_bytes", "Bytes of host memory in use"),
        "disk": _gauge("offload_disk_bytes", "Bytes on disk in use"),
    }
    limit: ClassVar[dict[str, Number]] = {
        "host": _gauge("offload_host_limit_bytes", "Bytes of host memory for blocks"),
        "disk": _gauge("offload_disk_limit_bytes", "Most bytes on disk"),
    }
    pinned: ClassVar[dict[str, Number]] = {
        "host": _gauge("offload_host_pinned_bytes", "Bytes of host memory that sessions pin"),
        "disk": _gauge("offload_disk_pinned_bytes", "Bytes that sessions pin on disk or on the way there"),
    }

    def moved(self, move: str, tier: str, rows: int, length_bytes: int, seconds: float | None = None) -> None:
        """Count moved rows and their bytes; with ``seconds``, also the job that moved them."""
        if rows:
            self.rows.labels(move, tier).inc(rows)
            self.row_bytes.labels(move, tier).inc(length_bytes)
        if seconds is not None:
            self.jobs.labels(move, tier).inc()
            self.seconds.labels(move, tier).inc(seconds)


FAMILIES = tuple(dict.fromkeys((*Metrics.declared(), *OffloadMetrics.declared())))


class Series:
    """What ``/metrics`` shows of workers: of each family a metric that ``kinds`` makes.

    They are the classes of ``prometheus_client``, or others with the same arguments, ``more`` among them.
    A metric has the labels ``labels`` first, a gauge then ``ranks``, then the family's own.
    """

    def __init__(
        self,
        prefix: str,
        kinds: Mapping[str, Callable[..., Any]],
        labels: Sequence[str] = (),
        ranks: Sequence[str] = (),
        **more: Any,
    ) -> None:
        # A metric's own look-up of a child takes a lock.
        self._child = functools.cache(self._find_child)
        self._metrics = {}
        # Each of several processes that show a gauge may get some changes only: the latest value is right.
        of_kind: dict[str, dict[str, Any]] = {"gauge": {"multiprocess_mode": "mostrecent"}}
        for family in FAMILIES:
            of_kind["histogram"] = {"buckets": list(family.buckets)}
            self._metrics[family.name] = kinds[family.kind](
                name=f"{prefix}_{family.name}",
                documentation=f"{family.text}.",
                labelnames=[*labels, *(ranks if family.kind == "gauge" else ()), *family.labels],
                **of_kind.get(family.kind, {}),
                **more,
            )

    def add(
        self,
        counters: Mapping[str, Mapping[str, float]],
        gauges: Mapping[str, Mapping[str, Mapping[str, float]]],
        observed: Mapping[str, Iterable[float]],
        labels: tuple[object, ...] = (),
    ) -> None:
        """Add ``Changes``, the gauges by rank (or '' without ``ranks``), under values for ``labels``."""
        for name, numbers in counters.items():
            for own, growth in numbers.items():
                self._child(name, labels, "", own).inc(growth)
        for rank, of_rank in gauges.items():
            for name, numbers in of_rank.items():
                for own, value in numbers.items():
                    self._child(name, labels, rank, own).set(value)
        for name, values in observed.items():
            child = self._child(name, labels, "", "")
            for value in values:
                child.observe(value)

    def _find_child(self, name: str, labels: tuple[object, ...], rank: str, own: str) -> Any:
        values = [*labels, *([rank] if rank else ()), *(own.split(",") if own else ())]
        return self._metrics[name].labels(*values) if values else self._metrics[name]


def count_error(metrics: Metrics, error: Exception, what: str) -> None:
    """Count an internal error over ``what`` as a failure, and log the first of each place in the code."""
    reason = "illegal_move" if isinstance(error, IllegalTransition) else "internal"
    metrics.failures.labels(reason).inc()
    frames = [*traceback.walk_tb(error.__traceback__)]
    place = type(error), frames[-1][1] if frames else 0, frames[-1][0].f_code if frames else None
    if place not in metrics.logged_errors:
        metrics.logged_errors.add(place)
        logger.error(
            "internal error in the transfer thread, over %s (further ones like it are only counted, as %s)",
            what,
            reason,
            exc_info=error,
        )
