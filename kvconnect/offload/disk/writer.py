"""The thread that writes: what waits for it is bounded, and a disk that refuses is left alone for a while."""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvconnect.errors import LocalError
from kvconnect.offload.completion_tracker import CompletionTracker
from kvconnect.offload.disk.catalog import Catalog
from kvconnect.offload.disk.files import bytes_on_disk
from kvconnect.offload.disk.options import (
    DISK_PAUSED,
    DISK_QUEUE_FULL,
    DISK_REFUSED,
    DISK_TOO_LARGE,
    Complaints,
    DiskOptions,
    reason_of,
)
from kvconnect.offload.disk.segment_log import Record
from kvconnect.offload.disk.table import ENTRY_BYTES, TRAILER_BYTES
from kvconnect.offload.record import HEADER_BYTES, RecordFormat
from kvconnect.offload.tier import Content, TierRow

logger = logging.getLogger(__name__)

_OVERHEAD_BYTES = HEADER_BYTES + ENTRY_BYTES + TRAILER_BYTES
_BATCH_BYTES = 8 << 20
_BATCH_ROWS = 256


class _Waiting(NamedTuple):
    job: int
    epoch: int
    rows: Sequence[TierRow]
    length_bytes: int


class _Due(NamedTuple):
    job: int
    epoch: int
    row: TierRow


class DiskWriter:
    """Takes rows in order, and has them written in batches.

    Args:
        record_format: of the namespace.
        catalog: what is there already.
        desk: where jobs are settled.
        options: the bounds.
        append: writes records of an epoch; raises OSError where the disk refuses.
        prepare: called on the thread before the first row, and whenever ``poke`` asks for it; never raises.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        record_format: RecordFormat,
        catalog: Catalog,
        desk: CompletionTracker,
        options: DiskOptions,
        append: Callable[[Sequence[Record], int], None],
        prepare: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._format = record_format
        self._catalog = catalog
        self._desk = desk
        self._options = options
        self._append = append
        self._prepare = prepare
        self._clock = clock
        self._complaints = Complaints()
        self._changed = threading.Condition()
        self._waiting: deque[_Waiting] = deque()
        self._queued_bytes = 0
        self._is_poked = True
        self._is_closed = False
        self._pause_s = 0.0
        self._paused_until_s = 0.0
        self._paused_by = ""
        self._thread = threading.Thread(target=self._run, name="kvconnect-disk-writer", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    # ---- any thread

    @property
    def queued_bytes(self) -> int:
        """Bytes of rows that wait."""
        return self._queued_bytes

    @property
    def paused_by(self) -> str:
        """Why nothing is written now; empty if it is."""
        return self._paused_by

    def submit(self, job: int, rows: Sequence[TierRow]) -> None:
        """Have rows written, as many as there is room for; the others fail at once."""
        sizes = [len(row.memory) for row in rows]
        total_bytes = sum(sizes)
        with self._changed:
            room_bytes = self._options.max_queued_bytes - self._queued_bytes
            count = len(rows)
            if self._is_closed:
                count = 0
            elif total_bytes > room_bytes:
                count = 0
                while sizes[count] <= room_bytes:
                    room_bytes -= sizes[count]
                    count += 1
                total_bytes = sum(sizes[:count])
            if count:
                self._queued_bytes += total_bytes
                self._waiting.append(_Waiting(job, self._catalog.epoch, rows[:count], total_bytes))
                self._changed.notify()
        if count < len(rows):
            self._desk.fail(DISK_QUEUE_FULL, 0 if self._is_closed else len(rows) - count)
            self._desk.settle("written", job, len(rows) - count, [row.content for row in rows[count:]])

    def poke(self) -> None:
        """Have ``prepare`` called soon."""
        with self._changed:
            self._is_poked = True
            self._changed.notify()

    def close(self) -> None:
        """Begin no more batches."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def join(self, timeout_s: float) -> bool:
        """Wait for the last batch; whether it ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # ---- its own thread

    def _run(self) -> None:
        while self._wait():
            try:
                if self._is_poked:
                    self._is_poked = False
                    self._prepare()
                waiting = self._take()
                if waiting is not None:
                    self._serve(waiting)
            except Exception:
                logger.exception("the disk tier's writer goes on after an error")
                self._desk.fail("disk_internal")
        while (waiting := self._take()) is not None:
            batch = [_Due(waiting.job, waiting.epoch, row) for row in waiting.rows]
            self._settle(batch, [row.content for row in waiting.rows], 0)

    def _wait(self) -> bool:
        with self._changed:
            while not (self._waiting or self._is_poked or self._is_closed):
                self._changed.wait()
            return not self._is_closed

    def _take(self) -> _Waiting | None:
        with self._changed:
            return self._waiting.popleft() if self._waiting else None

    def _serve(self, waiting: _Waiting) -> None:
        batch: list[_Due] = []
        length_bytes = 0
        for index, row in enumerate(waiting.rows):
            batch.append(_Due(waiting.job, waiting.epoch, row))
            length_bytes += len(row.memory)
            is_last = index + 1 == len(waiting.rows)
            if is_last or len(batch) == _BATCH_ROWS or length_bytes >= _BATCH_BYTES:
                self._write(batch)
                batch, length_bytes = [], 0

    def _write(self, batch: Sequence[_Due]) -> None:
        """Write a batch and settle it, whatever happens."""
        failures: Counter[str] = Counter()
        records: list[Record] = []
        try:
            if not self._is_closed:
                self._try_to_write(batch, records, failures)
        except Exception:
            logger.exception("a batch of rows could not be written")
            failures["disk_internal"] += 1
        there = self._catalog.has([due.row.content for due in batch])
        epoch = self._catalog.epoch
        failed = [
            due.row.content
            for due, is_there in zip(batch, there, strict=True)
            if not is_there or due.epoch != epoch
        ]
        lost = set(failed)
        for reason, times in failures.items():
            self._desk.fail(reason, times)
        self._settle(batch, failed, sum(len(one.row) for one in records if one.content not in lost))

    def _try_to_write(self, batch: Sequence[_Due], records: list[Record], failures: Counter[str]) -> None:
        """Write what is not there yet; adds what it tried to write to ``records``."""
        if self._paused_until_s > self._clock():
            failures[DISK_PAUSED] += len(batch)
            return
        epoch = self._catalog.epoch
        seen = set()
        there = self._catalog.has([due.row.content for due in batch])
        for due, is_there in zip(batch, there, strict=True):
            row = due.row
            if is_there or due.epoch != epoch or row.content in seen:
                continue
            seen.add(row.content)
            if bytes_on_disk(len(row.memory) + _OVERHEAD_BYTES) > self._catalog.limit_bytes:
                failures[DISK_TOO_LARGE] += 1
                self._complaints.say(DISK_TOO_LARGE, f"a row of {len(row.memory)} bytes exceeds disk_bytes")
                continue
            try:
                header = self._format.header(row.content, row.memory)
            except LocalError as error:
                failures[DISK_REFUSED] += 1
                self._complaints.say(DISK_REFUSED, f"not kept on disk: {error}")
                continue
            records.append(Record(row.content, header, row.memory))
        if not records:
            return
        try:
            self._append(records, epoch)
        except OSError as error:
            reason = reason_of(error)
            failures[reason] += 1
            self._pause(reason, error)
        else:
            self._resume()

    def _pause(self, reason: str, error: OSError) -> None:
        first_s, most_s = self._options.retry_s
        self._pause_s = min(self._pause_s * 2, most_s) if self._pause_s else first_s
        self._paused_until_s = self._clock() + self._pause_s
        self._paused_by = reason
        self._complaints.say(
            reason, f"rows are not written to disk: {error}; it is tried again, now and then"
        )

    def _resume(self) -> None:
        if self._paused_by:
            self._complaints.ended(self._paused_by, "rows are written to disk again")
        self._pause_s = self._paused_until_s = 0.0
        self._paused_by = ""

    def _settle(self, batch: Sequence[_Due], failed: Sequence[Content], written_bytes: int) -> None:
        with self._changed:
            self._queued_bytes -= sum(len(due.row.memory) for due in batch)
        self._desk.settle("written", batch[0].job, len(batch), failed, written_bytes)
