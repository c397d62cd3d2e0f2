"""The tier on disk: a file for each row, written by one thread and read by several."""

from __future__ import annotations

import dataclasses
import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvconnect.config import OffloadConfig
from kvconnect.errors import ConfigError, LocalError
from kvconnect.offload.completion_tracker import CompletionTracker
from kvconnect.offload.disk.catalog import Catalog, Row
from kvconnect.offload.disk.failures import (
    DISK_GONE,
    DISK_PAUSED,
    DISK_QUEUE_FULL,
    DISK_REFUSED,
    DISK_TOO_LARGE,
    DISK_TORN,
    LogOnce,
    Pause,
    reason_of,
)
from kvconnect.offload.disk.files import Files
from kvconnect.offload.disk.folder import OVERHEAD_BYTES, folder_name
from kvconnect.offload.disk.io_threads import IoThreads
from kvconnect.offload.disk.row_files import RowFiles
from kvconnect.offload.tier import Content, TierNews, TierRow

if TYPE_CHECKING:
    from kvconnect.offload.namespace import Namespace

logger = logging.getLogger(__name__)

READ_THREADS = 8
_LEAST_BYTES_PER_THREAD = 1 << 20
_CLOSE_TIMEOUT_S = 5.0


def open_disk_tier(config: OffloadConfig, namespace: Namespace, rank: int, world_size: int) -> DiskTier:
    """The disk tier of one rank, as configured. What was kept before is found in the background.

    Raises:
        ConfigError: the path cannot be a folder of ours, the bound leaves no room, or another process uses
            the folder; the text names the path, and the process.
    """
    least_bytes = 2 * OVERHEAD_BYTES
    if config.disk_bytes < least_bytes:
        raise ConfigError(
            f"disk_bytes is {config.disk_bytes}; accepted: at least {least_bytes}, where disk_path is set"
        )
    facts = json.loads(namespace.text)["facts"]
    # Who may look at a folder need not know what it takes to find something in it.
    facts.pop("salt", None)
    return DiskTier(
        Path(config.disk_path),
        namespace.digest.hex(),
        config.disk_bytes,
        max_queued_bytes=config.max_queued_bytes,
        owner=(rank, world_size),
        facts=facts,
    )


class DiskTier:
    """Rows in files of one folder, ``path/<namespace>-rank<rank>``. A ``LowerTier``.

    A folder that cannot be used now is tried again when something shall be written, ever more seldom.

    Args:
        path: under which every rank and namespace has its folder.
        namespace: the digest of what the rows depend on beside their content, in hexadecimal.
        limit_bytes: most bytes on the disk, of everything that the tier keeps there.
        max_queued_bytes: most bytes of rows that wait to be written.
        owner: the rank of this worker, and how many workers there are.
        facts: of the namespace, for people who look.
        files: how files are reached.
        clock: seconds that only grow.
        retry_s: how long it leaves a disk alone that refused to be written, the first time and at most.

    Raises:
        ConfigError: as ``open_disk_tier``.
    """

    name = "disk"
    indexed = True

    def __init__(
        self,
        path: Path,
        namespace: str,
        limit_bytes: int,
        *,
        max_queued_bytes: int = 1 << 30,
        owner: tuple[int, int] = (0, 1),
        facts: Mapping[str, Any] | None = None,
        files: Files | None = None,
        clock: Callable[[], float] = time.monotonic,
        retry_s: tuple[float, float] = (1.0, 60.0),
    ) -> None:
        self.path = path.absolute() / folder_name(namespace, owner[0])
        self._max_queued_bytes = max_queued_bytes
        self._tracker = CompletionTracker()
        self._catalog = Catalog(self._tracker.wake)
        self._pause = Pause(retry_s, clock)
        self._log = LogOnce()
        self._is_closed = False
        self._is_recovered = threading.Event()
        self._lock = threading.Lock()
        self._queued_bytes = 0
        self._rows = RowFiles(
            self.path,
            namespace,
            limit_bytes,
            self._catalog,
            files or Files(),
            self._note,
            owner=owner,
            facts=facts or {},
        )
        try:
            self._rows.open()
        except OSError as error:
            self._note(error)
            logger.warning("%s cannot be used, nothing is kept on disk until it can: %s", self.path, error)
        self._writer = IoThreads("kvconnect-disk-writer", 1, self._note)
        self._readers = IoThreads("kvconnect-disk-reader", READ_THREADS, self._note)
        self._writer.submit(self._recover)

    # ---- what its owner calls

    def on_news(self, wake: Callable[[], None]) -> None:
        """Have ``wake`` called whenever ``poll`` has something to tell."""
        self._tracker.on_news(wake)

    def write(self, job: int, rows: Sequence[TierRow]) -> None:
        """Begin to write rows, as many as there is room for in the queue; the others fail at once."""
        self._tracker.open("written", job, len(rows))
        count = length_bytes = 0
        with self._lock:
            room_bytes = 0 if self._is_closed else self._max_queued_bytes - self._queued_bytes
            while count < len(rows) and length_bytes + len(rows[count].memory) <= room_bytes:
                length_bytes += len(rows[count].memory)
                count += 1
            self._queued_bytes += length_bytes
        if count:
            self._writer.submit(partial(self._write, job, rows[:count], self._catalog.epoch))
        if count < len(rows):
            self._tracker.fail(DISK_QUEUE_FULL, 0 if self._is_closed else len(rows) - count)
            self._tracker.settle("written", job, len(rows) - count, [row.content for row in rows[count:]])

    def read(self, job: int, rows: Sequence[TierRow]) -> None:
        """Begin to read rows, several at once."""
        self._tracker.open("read", job, len(rows))
        total_bytes = sum(len(row.memory) for row in rows)
        parts = max(1, min(READ_THREADS, total_bytes // _LEAST_BYTES_PER_THREAD))
        length = -(-len(rows) // parts)
        for first in range(0, len(rows), max(1, length)):
            self._readers.submit(partial(self._read, job, rows[first : first + length]))

    def seek(self, job: int, contents: Sequence[Content]) -> None:
        """Report which contents are there."""
        self._tracker.open("found", job, len(contents))
        if contents:
            there = self._catalog.has(contents)
            found = [content for content, is_there in zip(contents, there, strict=True) if is_there]
            self._tracker.settle("found", job, len(contents), found)

    def poll(self) -> TierNews:
        """What is new."""
        news = self._tracker.take()
        added, removed = self._catalog.take_changes()
        return dataclasses.replace(news, added=added, removed=removed)

    def clear(self) -> None:
        """Forget everything; the files go in the background."""
        self._catalog.clear()
        self._writer.submit(self._rows.remove_doomed)

    def wait_recovered(self, timeout_s: float) -> bool:
        """Wait until everything that was kept before was found; whether it was."""
        return self._is_recovered.wait(timeout_s)

    def state(self) -> dict[str, Any]:
        """What there is to see."""
        return {
            "path": str(self.path),
            "records": len(self._catalog),
            "taken_bytes": self._catalog.taken_bytes,
            "limit_bytes": self._rows.limit_bytes,
            "queued_bytes": self._queued_bytes,
            "jobs": self._tracker.open_jobs(),
            "recovering": not self._is_recovered.is_set(),
            "paused_by": self._pause.reason,
        }

    def close(self) -> bool:
        """Stop; what was written stays, for the next to open the folder."""
        self._is_closed = True
        deadline_s = time.monotonic() + _CLOSE_TIMEOUT_S
        has_ended = self._writer.close(deadline_s)
        has_ended = self._readers.close(deadline_s) and has_ended
        if has_ended:
            self._rows.close()
        else:
            logger.error("%s: the disk hangs; its threads are left behind", self.path)
        return has_ended

    # ---- on the writer's thread

    def _recover(self) -> None:
        try:
            torn = self._rows.recover()
            if torn:
                logger.info("%s: rows that were not whole are removed, as after a crash", self.path)
                self._tracker.fail(DISK_TORN, torn)
        finally:
            self._is_recovered.set()

    def _write(self, job: int, rows: Sequence[TierRow], epoch: int) -> None:
        """Write rows that are not there yet, and settle them, whatever happens."""
        failures: Counter[str] = Counter()
        written: set[Content] = set()
        for index, row in enumerate(rows):
            if self._is_closed or epoch != self._catalog.epoch:
                break
            if self._catalog.has([row.content])[0]:
                continue
            if self._pause.is_on:
                failures[DISK_PAUSED] += len(rows) - index
                break
            reason = self._try_to_write(row, epoch)
            if reason:
                failures[reason] += 1
            else:
                written.add(row.content)
        there = self._catalog.has([row.content for row in rows])
        is_void = epoch != self._catalog.epoch
        failed = [row.content for row, is_there in zip(rows, there, strict=True) if not is_there or is_void]
        for reason, times in failures.items():
            self._tracker.fail(reason, times)
        written -= set(failed)
        with self._lock:
            self._queued_bytes -= sum(len(row.memory) for row in rows)
        written_bytes = sum({row.content: len(row.memory) for row in rows if row.content in written}.values())
        self._tracker.settle("written", job, len(rows), failed, written_bytes)

    def _try_to_write(self, row: TierRow, epoch: int) -> str:
        """Write a row; why it is not kept, empty if it is."""
        try:
            self._rows.reopen()
            self._rows.write(row, epoch)
        except LocalError as error:
            self._log.warn(DISK_REFUSED, f"not kept on disk: {error}")
            return DISK_REFUSED
        except OSError as error:
            reason = reason_of(error)
            if reason == DISK_TOO_LARGE:
                self._log.warn(reason, f"not kept on disk: {error}")
                return reason
            self._pause.begin(reason)
            self._log.warn(reason, f"rows are not written to disk: {error}; it is tried again, now and then")
            return reason
        except Exception:
            logger.exception("%s: a row could not be written", self.path)
            return "disk_internal"
        if self._pause.reason:
            self._log.ended(self._pause.reason, "rows are written to disk again")
            self._pause.end()
        return ""

    # ---- on a reader's thread

    def _read(self, job: int, rows: Sequence[TierRow]) -> None:
        contents = [row.content for row in rows]
        missing: list[Content] = []
        unknown: list[Content] = []
        wrong: list[tuple[Content, Row]] = []
        length_bytes = 0
        found: Sequence[Row | None] = [None] * len(rows) if self._is_closed else self._catalog.use(contents)
        for row, known in zip(rows, found, strict=True):
            if known is None:
                unknown.append(row.content)
            elif self._read_row(row, known, wrong):
                length_bytes += len(row.memory)
                continue
            missing.append(row.content)
        if unknown and not self._is_closed:
            self._catalog.deny(unknown)
        if wrong:
            self._catalog.drop(wrong)
            self._writer.submit(self._rows.remove_doomed)
        self._tracker.settle("read", job, len(rows), missing, length_bytes)

    def _read_row(self, row: TierRow, known: Row, wrong: list[tuple[Content, Row]]) -> bool:
        """Whether a row was read; adds it to ``wrong`` if it never will be."""
        try:
            reason = self._rows.read(row, known.name)
        except FileNotFoundError:
            reason = DISK_GONE
        except Exception as error:
            # One that cannot be opened now may be later.
            self._note(error)
            return False
        if not reason:
            return True
        # A row that made room meanwhile is no fault of the disk.
        if self._catalog.has([row.content])[0]:
            self._tracker.fail(reason)
            self._log.warn(reason, f"{self.path / known.name} cannot be read: {reason}")
        wrong.append((row.content, known))
        return False

    def _note(self, error: BaseException) -> None:
        """Count what went wrong, and log the first of its kind."""
        reason = reason_of(error)
        if isinstance(error, OSError):
            self._log.warn(reason, f"{self.path}: {error}")
        else:
            logger.error("%s: the disk tier goes on after an error", self.path, exc_info=error)
        self._tracker.fail(reason)
