"""Puts the records of several workers on one clock, joins them by request, and shows them. Pure.

They are shown as a trace file in Chrome's format, for Perfetto, and as a table of the slowest loads.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

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

_CHUNK_SLICES = {
    (Moment.PACKING, Moment.PACKED): "pack",
    (Moment.PACKED, Moment.SUBMITTED): "wait to be sent",
    (Moment.SUBMITTED, Moment.WRITTEN): "write",
    (Moment.LANDED, Moment.UNPACKING): "wait to be unpacked",
    (Moment.UNPACKING, Moment.UNPACKED): "unpack",
}
_OF_CHUNKS = {moment for pair in _CHUNK_SLICES for moment in pair}
Event = dict[str, Any]


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


def trace(workers: Sequence[Worker], requests: Sequence[TracedRequest]) -> dict[str, Any]:
    """The trace: one process per worker, with tracks of its thread, its requests and their chunks.

    A process has the number of its transfer thread, which viewers then take for its main thread, and no two
    tracks have one number: to viewers, 0 is the idle thread, and a thread's number is the machine's.
    """
    began_at = min((request.interval[0] for request in requests), default=0.0)
    ended_at = max((request.interval[1] for request in requests), default=0.0)
    events: list[Event] = []
    tracks = itertools.count(len(workers) + 1)
    for place, worker in enumerate(workers):
        process = place + 1
        events.append(_named("process_name", worker.name, process, process))
        events.append(_named("thread_name", "transfer thread", process, process))
        for record in worker.records:
            if record[1] in (Moment.LATE, Moment.SLOW) and began_at <= record[0] <= ended_at:
                start = max(began_at, record[0] - record[5] * 1e-6)
                events.append(_slice(record[1], start, record[0], process, process))
        for request in requests:
            if place in request.records:
                track = next(tracks)
                events.append(_named("thread_name", request.name, process, track))
                events += _request_slices(request, place, process, track)
                events += _chunk_slices(request, place, process)
    for event in events:
        if "ts" in event:
            event["ts"] = round((event["ts"] - began_at) * 1e6, 3)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _request_slices(request: TracedRequest, place: int, process: int, track: int) -> Iterator[Event]:
    """Slices between two moments of a request, named by the moment that ends each."""
    records = [record for record in request.records[place] if record[1] not in _OF_CHUNKS]
    for before, record in zip(records[:1] + records, records, strict=False):
        arguments = {"handle": request.handle, "number": record[5]}
        yield _slice(f"to {record[1]}", before[0], record[0], process, track, arguments)


def _chunk_slices(request: TracedRequest, place: int, process: int) -> Iterator[Event]:
    """The steps of each chunk as async events: a viewer puts those that overlap on tracks of their own."""
    last: dict[tuple[int, int], Record] = {}
    for record in request.records[place]:
        if record[1] not in _OF_CHUNKS:
            continue
        transfer, chunk = record[4:]
        before = last.get((transfer, chunk), record)
        last[transfer, chunk] = record
        if name := _CHUNK_SLICES.get((before[1], record[1])):
            # A local id belongs to the process. P and D, and ranks of one side, use the same numbers.
            one = {"cat": "chunk", "id2": {"local": f"{request.handle}/{transfer}/{chunk}"}}
            arguments = {"request": request.name, "handle": request.handle, "chunk": chunk}
            for phase, at in (("b", before[0]), ("e", record[0])):
                event = {"ph": phase, "name": name, "pid": process, "tid": process, "ts": at}
                yield {**event, **one, "args": arguments}


def _named(what: str, name: str, process: int, track: int) -> Event:
    return {"ph": "M", "name": what, "pid": process, "tid": track, "args": {"name": name}}


def _slice(
    name: str, start: float, end: float, process: int, track: int, arguments: dict[str, Any] | None = None
) -> Event:
    length = {"ts": start, "dur": round((end - start) * 1e6, 3)}
    return {"ph": "X", "name": name, "pid": process, "tid": track, **length, "args": arguments or {}}


def slowest(workers: Sequence[Worker], requests: Sequence[TracedRequest], most: int) -> list[str]:
    """The slowest loads as lines of a table, all times in milliseconds.

    ``late``: the time within the load in which threads of all workers were late or held up, added up.
    """
    loads = []
    for request in requests:
        if request.load is not None:
            began_at, phases = request.load
            total = sum(phases.values())
            late = late_s(workers, began_at, began_at + total)
            loads.append((total, request.name, phases, late))
    loads.sort(key=lambda load: (-load[0], load[1]))
    lines = ["".join(f"{column:>8}" for column in ("load", *PHASES, "late")) + "  request"]
    for total, name, phases, late in loads[:most]:
        times = (total, *(phases[phase] for phase in PHASES), late)
        lines.append("".join(f"{seconds * 1e3:8.2f}" for seconds in times) + f"  {name}")
    return lines
