"""Reads records into rows: sorted by where they lie, several runs at once, and verified before they count."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from kvconnect.offload.completion_tracker import CompletionTracker
from kvconnect.offload.disk.catalog import Catalog, Place
from kvconnect.offload.disk.files import Files
from kvconnect.offload.disk.folder import segment_name
from kvconnect.offload.disk.io_threads import IoThreads
from kvconnect.offload.disk.options import DISK_GONE
from kvconnect.offload.record import HEADER_BYTES, RecordFormat
from kvconnect.offload.tier import TierRow

_LEAST_BYTES_PER_THREAD = 4 << 20
_MAX_RUN_BYTES = 8 << 20
_MAX_RUN_RECORDS = 256


class Wanted(NamedTuple):
    """A row, and where its record is."""

    place: Place
    row: TierRow

    @property
    def end(self) -> tuple[int, int]:
        """Where the next record begins if it follows at once."""
        return (self.place.segment, self.place.offset + HEADER_BYTES + len(self.row.memory))


@dataclass
class _Outcome:
    """What a part of a job came to: records that are wrong, records that could not be read now, and why."""

    wrong: list[Wanted] = field(default_factory=list)
    unread: list[Wanted] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)


class DiskReader:
    """Carries out read jobs on several threads.

    Args:
        folder: gives the folder in which the segments are now, None while there is none.
        files: how files are reached.
        record_format: of the namespace.
        catalog: what is where.
        desk: where jobs are settled.
        threads: who reads.
        on_error: told what went wrong, to be counted and logged.
    """

    def __init__(
        self,
        folder: Callable[[], int | None],
        files: Files,
        record_format: RecordFormat,
        catalog: Catalog,
        desk: CompletionTracker,
        threads: IoThreads,
        on_error: Callable[[BaseException], None],
    ) -> None:
        self._folder = folder
        self._files = files
        self._format = record_format
        self._catalog = catalog
        self._desk = desk
        self._threads = threads
        self._on_error = on_error
        self._is_closed = False

    def submit(self, job: int, rows: Sequence[TierRow]) -> None:
        """Begin a job that the desk knows."""
        if rows and self._is_closed:
            self._desk.settle("read", job, len(rows), [row.content for row in rows])
        elif rows:
            self._threads.submit(partial(self._guarded, job, rows, partial(self._plan, job, rows)))

    def close(self) -> None:
        """What has not begun is not read any more."""
        self._is_closed = True

    def _guarded(self, job: int, rows: Sequence[TierRow], work: Callable[[], None]) -> None:
        """Work that settles these rows of a job by itself, unless it raises."""
        try:
            if not self._is_closed:
                return work()
        except Exception as error:
            self._on_error(error)
        self._desk.settle("read", job, len(rows), [row.content for row in rows])

    def _plan(self, job: int, rows: Sequence[TierRow]) -> None:
        places = self._catalog.locate([row.content for row in rows])
        missing = [row.content for row, place in zip(rows, places, strict=True) if place is None]
        wanted = sorted(
            (Wanted(place, row) for row, place in zip(rows, places, strict=True) if place is not None),
            key=lambda one: one.place,
        )
        parts = _parts(wanted, len(self._threads))
        for part in parts[1:]:
            rest = [one.row for one in part]
            self._threads.submit(partial(self._guarded, job, rest, partial(self._read, job, part)))
        if missing:
            # Whoever ordered this believed otherwise.
            self._catalog.deny(missing)
            self._desk.settle("read", job, len(missing), missing)
        if parts:
            first = [one.row for one in parts[0]]
            self._guarded(job, first, partial(self._read, job, parts[0]))

    def _read(self, job: int, wanted: Sequence[Wanted]) -> None:
        outcome = _Outcome()
        by_segment: dict[int, list[Wanted]] = defaultdict(list)
        for one in wanted:
            by_segment[one.place.segment].append(one)
        for number, some in by_segment.items():
            self._read_segment(number, some, outcome)
        if outcome.wrong:
            self._catalog.drop((one.row.content, one.place) for one in outcome.wrong)
        for reason, times in outcome.reasons.items():
            self._desk.fail(reason, times)
        missing = outcome.wrong + outcome.unread
        total_bytes = sum(len(one.row.memory) for one in wanted) - sum(len(one.row.memory) for one in missing)
        self._desk.settle("read", job, len(wanted), [one.row.content for one in missing], total_bytes)

    def _read_segment(self, number: int, wanted: Sequence[Wanted], outcome: _Outcome) -> None:
        folder = self._folder()
        try:
            if folder is None:
                raise FileNotFoundError
            file = self._files.open(folder, segment_name(number), os.O_RDONLY)
        except FileNotFoundError:
            outcome.unread += wanted
            segment = self._catalog.find(number)
            if segment is not None:
                # Not made room for: somebody took it away, and all that is in it.
                self._catalog.doom(segment)
                outcome.reasons[DISK_GONE] += 1
            return
        except OSError as error:
            outcome.unread += wanted
            self._on_error(error)
            return
        try:
            for run in _runs(wanted):
                self._read_run(file, run, outcome)
        finally:
            self._files.close(file)

    def _read_run(self, file: int, run: Sequence[Wanted], outcome: _Outcome) -> None:
        headers = [bytearray(HEADER_BYTES) for _ in run]
        buffers: list[bytearray | memoryview] = []
        for header, one in zip(headers, run, strict=True):
            buffers += (header, one.row.memory)
        try:
            got = self._read_all(file, buffers, run[0].place.offset)
        except OSError as error:
            if len(run) > 1:
                # One bad sector is no reason to lose what lies beside it.
                for one in run:
                    self._read_run(file, [one], outcome)
                return
            self._on_error(error)
            outcome.wrong += run
            return
        for header, one in zip(headers, run, strict=True):
            got -= HEADER_BYTES + len(one.row.memory)
            flaw = self._format.flaw(header, one.row.content, one.row.memory) if got >= 0 else None
            if got >= 0 and flaw is None:
                continue
            outcome.wrong.append(one)
            # A segment that made room meanwhile is no fault of the disk.
            if self._catalog.find(one.place.segment) is not None:
                outcome.reasons[flaw.value if flaw else "disk_truncated"] += 1

    def _read_all(self, file: int, buffers: list[bytearray | memoryview], offset: int) -> int:
        """Fill buffers as far as the file goes; how many bytes that were."""
        views = [memoryview(buffer) for buffer in buffers]
        total = 0
        while views:
            got = self._files.read(file, views, offset + total)
            if got <= 0:
                break
            total += got
            first = 0
            while first < len(views) and got >= len(views[first]):
                got -= len(views[first])
                first += 1
            views = views[first:]
            if got:
                views[0] = views[0][got:]
        return total


def _parts(wanted: Sequence[Wanted], num_threads: int) -> list[Sequence[Wanted]]:
    """Cut what is sorted into as many parts as are worth a thread."""
    total_bytes = sum(len(one.row.memory) for one in wanted)
    count = max(1, min(num_threads, total_bytes // _LEAST_BYTES_PER_THREAD, len(wanted)))
    size = -(-len(wanted) // count)
    return [wanted[start : start + size] for start in range(0, len(wanted), size)] if wanted else []


def _runs(wanted: Sequence[Wanted]) -> Iterator[list[Wanted]]:
    """Records that follow one another, as many as are read at once."""
    run: list[Wanted] = []
    length_bytes = 0
    for one in wanted:
        if run and (
            run[-1].end != one.place
            or len(run) == _MAX_RUN_RECORDS
            or length_bytes + len(one.row.memory) > _MAX_RUN_BYTES
        ):
            yield run
            run, length_bytes = [], 0
        run.append(one)
        length_bytes += len(one.row.memory)
    if run:
        yield run
