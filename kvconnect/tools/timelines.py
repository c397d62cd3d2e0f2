"""Puts the records of several workers on one clock, and joins them by request. Pure."""

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
"""The phases of a load, in order: each ends with the last moment of its kind, on any worker.

``meet``: until every rank of P was asked. ``ask``: until P received the fetch. ``wait``: until P holds or
streams the KV. ``pack``: until the last chunk is packed; many are written by then. ``write``: until the
engine has written the last chunk. ``notify``: until D has the message of that. ``unpack``, ``report``: on D.
"""


@dataclass
class Worker:
    """The records of one worker, until ``read_at`` of its clock, in seconds.

    ``ahead``: between how many seconds its clock is ahead of the asking process's clock.
    """

    name: str
    rank: int
    records: Sequence[Record]
    ahead: tuple[float, float] = (0.0, 0.0)
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
    """The same workers on the first one's clock.

    Clocks that may be one are one: workers of a machine share it, and clocks of two machines are far apart.
    Records made after the earliest read of any worker are dropped: that worker has no matching records.
    """
    offsets = []
    for worker in workers:
        alike = next((other for other in workers if _overlap(other.ahead, worker.ahead)), worker)
        # The low is the better estimate: the high also contains the way of the question and a handshake.
        offsets.append(alike.ahead[0] - workers[0].ahead[0])
    placed = list(zip(workers, offsets, strict=True))
    read_at = min((worker.read_at - offset for worker, offset in placed), default=math.inf)
    aligned = []
    for worker, offset in placed:
        moved = ((record[0] - offset, *record[1:]) for record in worker.records)
        kept = [record for record in moved if record[0] <= read_at]
        aligned.append(replace(worker, records=kept, read_at=read_at))
    return aligned


def _overlap(first: tuple[float, float], second: tuple[float, float]) -> bool:
    return max(first[0], second[0]) <= min(first[1], second[1])


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
