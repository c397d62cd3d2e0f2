"""The records of several workers on one clock, and by request. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from kvconnect.timeline import Moment, Record

_PHASES = (
    *(("meet", Moment.FETCH_SENT), ("ask", Moment.FETCH_RECEIVED), ("wait", Moment.FETCH_BEGUN)),
    *(("pack", Moment.PACKED), ("write", Moment.WRITTEN), ("notify", Moment.LANDED)),
    *(("unpack", Moment.UNPACKED), ("report", Moment.REPORTED)),
)
PHASES = tuple(name for name, _ in _PHASES)
"""What a load consists of, one after the other: each ends with the last moment of its kind, on any worker.

``meet``: until every rank of P was asked. ``ask``: until P has the fetch. ``wait``: until P holds, or
streams, what is asked for. ``pack``: until the last chunk is packed, many being written by then. ``write``:
until the engine has written the last one. ``notify``: until D has the message of it. ``unpack`` and
``report`` are D's.
"""


@dataclass(frozen=True)
class TraceSpan:
    """An interval of numbers that one number is known to lie in, ``low`` to ``high``."""

    low: float = -math.inf
    high: float = math.inf

    @property
    def width(self) -> float:
        """How little is known of the number."""
        return self.high - self.low

    @property
    def guess(self) -> float:
        """The number, as far as it is known: 0 wherever it may be."""
        if self.low <= 0 <= self.high:
            # The clocks of one machine are one, and those of two are far apart.
            return 0.0
        return (self.low + self.high) / 2 if math.isfinite(self.width) else 0.0

    def also(self, other: TraceSpan) -> TraceSpan:
        """The intersection of both; this one, where they do not overlap."""
        both = TraceSpan(max(self.low, other.low), min(self.high, other.high))
        return both if both.low <= both.high else self

    def __neg__(self) -> TraceSpan:
        return TraceSpan(-self.high, -self.low)

    def __add__(self, other: TraceSpan) -> TraceSpan:
        return TraceSpan(self.low + other.low, self.high + other.high)


@dataclass
class Worker:
    """The records of one worker, until ``read_at`` of its clock.

    ``ahead``: how far that clock is ahead of the clock of the process that asked.
    """

    name: str
    rank: int
    records: Sequence[Record]
    ahead: TraceSpan = field(default_factory=TraceSpan)
    read_at: float = math.inf


@dataclass
class TracedRequest:
    """A load, or a prefill that no peer fetched: the records of each worker, by its place in the list."""

    handle: str
    records: dict[int, list[Record]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The request ids of it, those of a worker that loads it first."""
        ids = {record[3] for record in self._all() if record[3]}
        loading = {record[3] for record in self._all() if record[1] == Moment.LOAD_TAKEN}
        return " ".join((*sorted(loading), *sorted(ids - loading))) or self.handle

    @property
    def load(self) -> tuple[float, dict[str, float]] | None:
        """When a worker took it, and how long in seconds each of ``PHASES`` took; None if it is not all here.

        They add up to the load. A phase that has no moment, as those of chunks where pages were moved
        directly, took no time.
        """
        last: dict[str, float] = {}
        taken = [record[0] for record in self._all() if record[1] == Moment.LOAD_TAKEN]
        for record in self._all():
            last[record[1]] = max(record[0], last.get(record[1], -math.inf))
        if not taken or Moment.REPORTED not in last:
            return None
        took, now = {}, min(taken)
        for name, moment in _PHASES:
            # Where another moment came later already, as with a clock that is a little off, it took nothing.
            end = min(max(now, last.get(moment, now)), last[Moment.REPORTED])
            took[name], now = end - now, end
        return min(taken), took

    @property
    def interval(self) -> tuple[float, float]:
        """The first and the last that is known of it."""
        times = [record[0] for record in self._all()]
        return min(times), max(times)

    def _all(self) -> Iterable[Record]:
        return (record for records in self.records.values() for record in records)


def align(workers: Sequence[Worker]) -> list[Worker]:
    """The same with the clock of the first, as far as messages between them, and the asking, show it.

    Without what a worker recorded when others had been read already: they have nothing that belongs to it.
    """
    if not workers:
        return []
    messages = [_Messages(worker) for worker in workers]
    offsets = {0: 0.0}
    while len(offsets) < len(workers):
        spans = {
            (known, other): _ahead(messages[known], messages[other]).also(
                workers[other].ahead + -workers[known].ahead
            )
            for known in offsets
            for other in range(len(workers))
            if other not in offsets
        }
        # The one that is known best comes next: each may have talked to few others.
        known, other = min(spans, key=lambda pair: (spans[pair].width, pair))
        offsets[other] = offsets[known] + spans[known, other].guess
    read_at = min(worker.read_at - offsets[place] for place, worker in enumerate(workers))
    return [
        replace(
            worker,
            records=[
                (record[0] - offset, *record[1:])
                for record in worker.records
                if record[0] - offset <= read_at
            ],
            read_at=read_at,
        )
        for worker, offset in ((worker, offsets[place]) for place, worker in enumerate(workers))
    ]


_RECEIVED_AS = {Moment.WRITTEN: Moment.LANDED, Moment.ANSWER_SENT: Moment.ANSWER_RECEIVED}
"""What P records before it sends D a message, and what D records when it receives that."""


class _Messages:
    """When a worker sent and received messages: by moment, handle, D's number for the fetch, chunk, D's rank.

    Each rank of D counts its fetches for itself.
    """

    def __init__(self, worker: Worker) -> None:
        self.sent: dict[tuple[str, str, int, int, int], float] = {}
        self.received: dict[tuple[str, str, int, int, int], float] = {}
        asking: dict[tuple[str, int], set[int]] = {}
        for at, moment, handle, _, transfer_id, number in worker.records:
            if moment == Moment.FETCH_SENT:
                self.sent[Moment.FETCH_RECEIVED, handle, transfer_id, 0, worker.rank] = at
            elif moment == Moment.FETCH_RECEIVED:
                self.received[moment, handle, transfer_id, 0, number] = at
                asking.setdefault((handle, transfer_id), set()).add(number)
            elif moment in _RECEIVED_AS.values():
                self.received[moment, handle, transfer_id, number, worker.rank] = at
        for at, moment, handle, _, transfer_id, number in worker.records:
            ranks = asking.get((handle, transfer_id), set())
            # Where several ranks ask under one number it is not known which of them was sent a message.
            if moment in _RECEIVED_AS and len(ranks) == 1:
                self.sent[_RECEIVED_AS[moment], handle, transfer_id, number, min(ranks)] = at


def _ahead(first: _Messages, second: _Messages) -> TraceSpan:
    """How far the second one's clock is ahead of the first's, since no message arrives before it is sent."""
    there = (second.received[key] - at for key, at in first.sent.items() if key in second.received)
    back = (at - first.received[key] for key, at in second.sent.items() if key in first.received)
    low, high = max(back, default=-math.inf), min(there, default=math.inf)
    # Clocks that drift contradict themselves a little over minutes.
    return TraceSpan(low, high) if low <= high else TraceSpan((low + high) / 2, (low + high) / 2)


def join(workers: Sequence[Worker]) -> list[TracedRequest]:
    """All requests, in the sequence of their ends. The clocks are one."""
    found: dict[str, TracedRequest] = {}
    for place, worker in enumerate(workers):
        handle_of = {record[3]: record[2] for record in worker.records if record[2] and record[3]}
        for record in worker.records:
            handle = record[2] or handle_of.get(record[3], record[3])
            if handle:
                request = found.setdefault(handle, TracedRequest(handle))
                request.records.setdefault(place, []).append(record)
    return sorted(found.values(), key=lambda request: (request.interval[1], request.handle))


def late_s(workers: Sequence[Worker], began_at: float, ended_at: float) -> list[float]:
    """By worker, for how long within this time its thread did not run, or was held up, beyond its sleep."""
    return [
        sum(
            max(0.0, min(record[0], ended_at) - max(record[0] - record[5] * 1e-6, began_at))
            for record in worker.records
            if record[1] in (Moment.LATE, Moment.SLOW)
        )
        for worker in workers
    ]


def lanes(intervals: Iterable[tuple[float, float]]) -> list[int]:
    """For each interval the number of a lane in which it overlaps with no other, of as few as can be."""
    given = list(intervals)
    made = [0] * len(given)
    free_at: list[float] = []
    for place in sorted(range(len(given)), key=lambda one: given[one]):
        began_at, ended_at = given[place]
        lane = next((number for number, free in enumerate(free_at) if free <= began_at), len(free_at))
        if lane == len(free_at):
            free_at.append(ended_at)
        free_at[lane] = max(free_at[lane], ended_at)
        made[place] = lane
    return made
