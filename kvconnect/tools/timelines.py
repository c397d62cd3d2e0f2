"""Puts the records of several workers on one clock, and joins them by request. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from kvconnect.timeline import Moment, Record

_PHASES = (
    *(("meet", Moment.FETCH_SENT), ("ask", Moment.FETCH_RECEIVED), ("wait", Moment.FETCH_BEGUN)),
    *(("pack", Moment.PACKED), ("write", Moment.WRITTEN), ("notify", Moment.LANDED)),
    *(("unpack", Moment.UNPACKED), ("report", Moment.REPORTED)),
)
PHASES = tuple(name for name, _ in _PHASES)
"""The phases of a load, in order: each ends with the last moment of its kind, on any worker.

``meet``: until every rank of P was asked. ``ask``: until P received the fetch. ``wait``: until P holds or
streams the KV. ``pack``: until the last chunk is packed; many are written by then. ``write``: until the
engine has written the last chunk. ``notify``: until D has the message of that. ``unpack``, ``report``: on D.
"""


class TraceSpan(NamedTuple):
    """An interval, ``low`` to ``high``, in which a number is known to lie."""

    low: float = -math.inf
    high: float = math.inf

    @property
    def guess(self) -> float:
        """An estimate of the number: 0 if the interval contains 0."""
        if self.low <= 0 <= self.high:
            # Workers of one machine share a clock; clocks of two machines are far apart.
            return 0.0
        return (self.low + self.high) / 2 if math.isfinite(self.high - self.low) else 0.0

    def also(self, other: TraceSpan) -> TraceSpan:
        """The intersection of both intervals; this one if they do not overlap."""
        both = TraceSpan(max(self.low, other.low), min(self.high, other.high))
        return both if both.low <= both.high else self


@dataclass
class Worker:
    """The records of one worker, until ``read_at`` of its clock, in seconds.

    ``ahead``: by how many seconds its clock is ahead of the asking process's clock.
    """

    name: str
    rank: int
    records: Sequence[Record]
    ahead: TraceSpan = field(default_factory=TraceSpan)
    read_at: float = math.inf


@dataclass
class TracedRequest:
    """A load, or a prefill that no peer fetched: records by the worker's index in the list."""

    handle: str
    records: dict[int, list[Record]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The request's ids, first those of workers that load it."""
        ids = {record[3] for record in self._all() if record[3]}
        loading = {record[3] for record in self._all() if record[1] == Moment.LOAD_TAKEN}
        return " ".join((*sorted(loading), *sorted(ids - loading))) or self.handle

    @property
    def load(self) -> tuple[float, dict[str, float]] | None:
        """When a worker took the load, and the seconds of each of ``PHASES``; None if records are missing.

        The phases add up to the load. A phase without a moment took no time: pages that are moved directly
        have no chunks.
        """
        last: dict[str, float] = {}
        taken = [record[0] for record in self._all() if record[1] == Moment.LOAD_TAKEN]
        for record in self._all():
            last[record[1]] = max(record[0], last.get(record[1], -math.inf))
        if not taken or Moment.REPORTED not in last:
            return None
        took, now = {}, min(taken)
        for name, moment in _PHASES:
            # A moment that is earlier than the one before it, as clocks differ a little, takes no time.
            end = min(max(now, last.get(moment, now)), last[Moment.REPORTED])
            took[name], now = end - now, end
        return min(taken), took

    @property
    def interval(self) -> tuple[float, float]:
        """The first and the last time in its records."""
        times = [record[0] for record in self._all()]
        return min(times), max(times)

    def _all(self) -> Iterable[Record]:
        return (record for records in self.records.values() for record in records)


def align(workers: Sequence[Worker]) -> list[Worker]:
    """The same workers on the first one's clock, as far as messages and the asking process determine it.

    Records made after the earliest read of any worker are dropped: that worker has no matching records.
    """
    if not workers:
        return []
    messages = [_Messages(worker) for worker in workers]
    offsets = {0: 0.0}
    while len(offsets) < len(workers):
        spans = {
            (known, other): _ahead(messages[known], messages[other]).also(
                _asked(workers[known].ahead, workers[other].ahead)
            )
            for known in offsets
            for other in range(len(workers))
            if other not in offsets
        }
        # The best-known clock comes next: each worker may have exchanged messages with few others.
        known, other = min(spans, key=lambda pair: (spans[pair].high - spans[pair].low, pair))
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
"""The moment P records before it sends D a message: the moment D records when it receives the message."""


class _Messages:
    """Times of a worker's messages, by moment, handle, D's number for the fetch, chunk, and D's rank.

    Each rank of D numbers its own fetches.
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
            # If several ranks have fetches of one number, the receiver of a message is not known.
            if moment in _RECEIVED_AS and len(ranks) == 1:
                self.sent[_RECEIVED_AS[moment], handle, transfer_id, number, min(ranks)] = at


def _asked(first: TraceSpan, second: TraceSpan) -> TraceSpan:
    """How far the second clock is ahead of the first, by what the asking process knows of both."""
    return TraceSpan(second.low - first.high, second.high - first.low)


def _ahead(first: _Messages, second: _Messages) -> TraceSpan:
    """How far the second clock is ahead of the first, since no message arrives before it is sent."""
    there = (second.received[key] - at for key, at in first.sent.items() if key in second.received)
    back = (at - first.received[key] for key, at in second.sent.items() if key in first.received)
    low, high = max(back, default=-math.inf), min(there, default=math.inf)
    # Drifting clocks contradict themselves a little over minutes.
    return TraceSpan(low, high) if low <= high else TraceSpan((low + high) / 2, (low + high) / 2)


def join(workers: Sequence[Worker]) -> list[TracedRequest]:
    """All requests, in the order of their ends. The workers must be aligned."""
    found: dict[str, TracedRequest] = {}
    for place, worker in enumerate(workers):
        handle_of = {record[3]: record[2] for record in worker.records if record[2] and record[3]}
        for record in worker.records:
            handle = record[2] or handle_of.get(record[3], record[3])
            if handle:
                request = found.setdefault(handle, TracedRequest(handle))
                request.records.setdefault(place, []).append(record)
    return sorted(found.values(), key=lambda request: (request.interval[1], request.handle))


def late_s(workers: Sequence[Worker], began_at: float, ended_at: float) -> float:
    """The seconds of this interval in which threads were late beyond their sleep, or held up, added up."""
    return sum(
        max(0.0, min(record[0], ended_at) - max(record[0] - record[5] * 1e-6, began_at))
        for worker in workers
        for record in worker.records
        if record[1] in (Moment.LATE, Moment.SLOW)
    )


def lanes(intervals: Iterable[tuple[float, float]]) -> list[int]:
    """A lane number for each interval: intervals of a lane do not overlap, with as few lanes as possible."""
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
