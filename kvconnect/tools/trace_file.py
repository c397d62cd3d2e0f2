"""Joined timelines for people: a trace file in Chrome's format, for Perfetto, and a table. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from kvconnect.timeline import Moment, Record
from kvconnect.tools.timelines import PHASES, TracedRequest, Worker, late_s

_CHUNK_SLICES = {
    (Moment.PACKING, Moment.PACKED): "pack",
    (Moment.PACKED, Moment.SUBMITTED): "wait to be sent",
    (Moment.SUBMITTED, Moment.WRITTEN): "write",
    (Moment.LANDED, Moment.UNPACKING): "wait to be unpacked",
    (Moment.UNPACKING, Moment.UNPACKED): "unpack",
}
_OF_CHUNKS = {moment for pair in _CHUNK_SLICES for moment in pair}
Event = dict[str, Any]


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
