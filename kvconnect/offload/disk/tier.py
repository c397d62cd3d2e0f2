"""The tier on disk: its threads, and what becomes of it when its folder fails, comes back or goes away."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvconnect.config import OffloadConfig
from kvconnect.errors import ConfigError
from kvconnect.offload.completion_tracker import CompletionTracker
from kvconnect.offload.disk.abandoned import Abandoned
from kvconnect.offload.disk.catalog import Catalog, Segment
from kvconnect.offload.disk.files import Files
from kvconnect.offload.disk.folder import DiskFolder, FolderHeld, folder_name, segment_name
from kvconnect.offload.disk.io_threads import IoThreads
from kvconnect.offload.disk.options import DISK_FULL, DISK_GONE, Complaints, DiskOptions, reason_of
from kvconnect.offload.disk.reader import DiskReader
from kvconnect.offload.disk.scan import Scan, scan
from kvconnect.offload.disk.segment_log import FolderGone, Record, SegmentLog
from kvconnect.offload.disk.writer import DiskWriter
from kvconnect.offload.record import Flaw, RecordFormat
from kvconnect.offload.tier import Content, TierNews, TierRow

if TYPE_CHECKING:
    from kvconnect.offload.namespace import Namespace

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 5.0
_HELD_WAIT_S = 1.0
_HELD_PAUSE_S = 0.05


def open_disk_tier(config: OffloadConfig, namespace: Namespace, rank: int, world_size: int) -> DiskTier:
    """The disk tier of one rank, as configured. What was kept before is found in the background.

    Raises:
        ConfigError: the path cannot be a folder of ours, the bounds leave no room, or another process uses
            the folder; the text names the path, and the process.
    """
    facts = json.loads(namespace.text)["facts"]
    # Whoever may look at a folder need not know what it takes to find something in it.
    facts.pop("salt", None)
    return DiskTier(
        Path(config.disk_path),
        namespace.digest.hex(),
        DiskOptions.of(config),
        rank=rank,
        world_size=world_size,
        facts=facts,
    )


class DiskTier:
    """Rows in segments of one folder, ``path/<namespace>-rank<rank>``. A ``LowerTier``.

    A folder that cannot be used now is tried again when something shall be written, ever more seldom.

    Args:
        path: under which every rank and namespace has its folder.
        namespace: the digest of what the rows depend on beside their content, in hexadecimal.
        options: the bounds.
        rank: of this worker.
        world_size: how many workers there are.
        facts: of the namespace, for people who look.
        files: how files are reached.
        clock: seconds that only grow.

    Raises:
        ConfigError: as ``open_disk_tier``.
    """

    name = "disk"
    indexed = True

    def __init__(
        self,
        path: Path,
        namespace: str,
        options: DiskOptions,
        *,
        rank: int = 0,
        world_size: int = 1,
        facts: Mapping[str, Any] | None = None,
        files: Files | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = path.absolute() / folder_name(namespace, rank)
        self._namespace = namespace
        self._options = options
        self._rank = rank
        self._world_size = world_size
        self._facts = dict(facts or {})
        self._files = files or Files()
        self._clock = clock
        self._format = RecordFormat(namespace)
        self._desk = CompletionTracker()
        self._catalog = Catalog(options.segments_limit_bytes, self._desk.wake)
        self._complaints = Complaints()
        self._is_closed = False
        self._must_clear = False
        self._is_recovered = threading.Event()
        self._log: SegmentLog | None = None
        self._folders: list[DiskFolder] = []
        self._to_scan: list[Segment] = []
        self._sync = IoThreads("kvconnect-disk-sync", 1, self._note)
        self._readers = IoThreads("kvconnect-disk-reader", options.threads, self._note)
        try:
            self._open()
        except ConfigError:
            self._readers.close(0.0)
            self._sync.close(0.0)
            raise
        except OSError as error:
            self._note(error)
            logger.warning("%s cannot be used, nothing is kept on disk until it can: %s", self.path, error)
        self._reader = DiskReader(
            self._folder_now, self._files, self._format, self._catalog, self._desk, self._readers, self._note
        )
        self._writer = DiskWriter(
            self._format, self._catalog, self._desk, options, self._append, self._prepare, clock
        )
        self._writer.start()

    # ---- what its owner calls

    def on_news(self, wake: Callable[[], None]) -> None:
        """Have ``wake`` called whenever ``poll`` has something to tell."""
        self._desk.on_news(wake)

    def write(self, job: int, rows: Sequence[TierRow]) -> None:
        """Begin to keep rows."""
        self._desk.open("written", job, len(rows))
        if rows:
            self._writer.submit(job, rows)

    def read(self, job: int, rows: Sequence[TierRow]) -> None:
        """Begin to read rows."""
        self._desk.open("read", job, len(rows))
        self._reader.submit(job, rows)

    def seek(self, job: int, contents: Sequence[Content]) -> None:
        """Say which contents are there."""
        self._desk.open("found", job, len(contents))
        if contents:
            there = self._catalog.has(contents)
            found = [content for content, is_there in zip(contents, there, strict=True) if is_there]
            self._desk.settle("found", job, len(contents), found)

    def poll(self) -> TierNews:
        """What is new."""
        news = self._desk.take()
        added, removed = self._catalog.take_changes()
        return dataclasses.replace(news, added=added, removed=removed)

    def clear(self) -> None:
        """Forget everything; the files go in the background."""
        self._must_clear = True
        self._catalog.clear()
        self._writer.poke()

    def wait_recovered(self, timeout_s: float) -> bool:
        """Wait until everything that was kept before was found; whether it was."""
        return self._is_recovered.wait(timeout_s)

    def state(self) -> dict[str, Any]:
        """What there is to see."""
        return {
            "path": str(self.path),
            "records": len(self._catalog),
            "segments": self._catalog.num_segments,
            "reserved_bytes": self._catalog.reserved_bytes,
            "limit_bytes": self._options.limit_bytes,
            "queued_bytes": self._writer.queued_bytes,
            "jobs": self._desk.open_jobs(),
            "recovering": not self._is_recovered.is_set(),
            "paused_by": self._writer.paused_by,
        }

    def close(self) -> bool:
        """Stop; what was written stays, for the next to open the folder."""
        self._is_closed = True
        deadline_s = time.monotonic() + _CLOSE_TIMEOUT_S
        self._writer.close()
        self._reader.close()
        is_quiet = self._writer.join(_CLOSE_TIMEOUT_S)
        if is_quiet and self._log is not None:
            self._log.seal()
            # What is empty or was cleared must not be found again.
            with contextlib.suppress(OSError):
                self._log.remove_doomed()
            self._log = None
        is_quiet = self._readers.close(deadline_s) and is_quiet
        if self._sync.close(deadline_s) and is_quiet:
            while self._folders:
                self._folders.pop().close()
        elif not is_quiet:
            logger.error("%s: the disk hangs; its threads are left behind", self.path)
        return is_quiet

    # ---- the folder

    def _open(self) -> None:
        """Take the folder, and make what is in it fit the bound.

        Raises:
            ConfigError: see the class.
            OSError: it cannot be used now.
        """
        folder = self._take_folder()
        try:
            self._log = self._open_log(folder)
        except BaseException:
            folder.close()
            self._lose_folder()
            raise
        self._folders.append(folder)

    def _open_log(self, folder: DiskFolder) -> SegmentLog:
        try:
            if not folder.is_read_only:
                folder.describe(self._namespace, self._rank, self._facts)
        except OSError as error:
            # A disk may be full of what can be read.
            self._note(error)
        log = SegmentLog(
            folder,
            self._files,
            self._format,
            self._catalog,
            self._sync,
            Abandoned(self.path, self._files, self._rank, self._world_size),
            capacity_bytes=self._options.capacity_bytes,
            second_chance=self._options.second_chance,
            on_error=self._note,
        )
        self._to_scan = log.adopt()
        if self._must_clear:
            # It was cleared while nothing in it could be reached.
            self._to_scan = []
            for segment in self._catalog.segments():
                self._catalog.doom(segment)
            log.remove_doomed()
        return log

    def _take_folder(self) -> DiskFolder:
        deadline_s = time.monotonic() + _HELD_WAIT_S
        while True:
            try:
                return DiskFolder(self.path, self._files)
            except FolderHeld:
                # Whoever starts beside us looks for what was abandoned, and holds it for a moment.
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(_HELD_PAUSE_S)

    def _folder_now(self) -> int | None:
        log = self._log
        return log.folder.folder if log is not None else None

    def _lose_folder(self) -> None:
        """The folder is not there any more, and nothing that was in it."""
        self._log = None
        for segment in self._catalog.segments():
            self._catalog.doom(segment)
        for segment in self._catalog.doomed():
            self._catalog.gone(segment)

    # ---- on the writer's thread

    def _prepare(self) -> None:
        """Find what was kept before, and take away what was cleared."""
        self._must_clear = self._must_clear and self._log is None
        to_scan, self._to_scan = self._to_scan, []
        if to_scan:
            self._scan(to_scan)
        self._is_recovered.set()
        try:
            if self._log is not None:
                self._log.remove_doomed()
        except OSError as error:
            self._note(error)

    def _append(self, records: Sequence[Record], epoch: int) -> None:
        """Write records, in a folder that is there, and where it is full in place of the oldest.

        Raises:
            OSError: the disk refuses.
        """
        log = self._log or self._open_again()
        try:
            log.append(records, epoch)
        except FolderGone as error:
            self._note(error)
            self._lose_folder()
            self._open_again().append(records, epoch)
        except OSError as error:
            if reason_of(error) != DISK_FULL:
                raise
            self._note(error)
            there = self._catalog.has([record.content for record in records])
            rest = [record for record, is_there in zip(records, there, strict=True) if not is_there]
            # What is too long for a file, not for the disk, fits the next file.
            if error.errno != errno.EFBIG and not log.remove_oldest():
                raise
            log.append(rest, epoch)

    def _open_again(self) -> SegmentLog:
        try:
            self._open()
        except ConfigError as error:
            raise OSError(errno.EBUSY, str(error)) from error
        self._prepare()
        assert self._log is not None
        logger.info("%s can be used", self.path)
        return self._log

    def _scan(self, segments: Sequence[Segment]) -> None:
        left = threading.Semaphore(0)
        epoch = self._catalog.epoch
        for segment in segments:
            self._readers.submit(partial(self._scan_segment, segment, epoch, left))
        for _ in segments:
            left.acquire()

    def _scan_segment(self, segment: Segment, epoch: int, done: threading.Semaphore) -> None:
        log = self._log
        try:
            if log is not None and not self._is_closed and self._catalog.epoch == epoch:
                self._find_records(log, segment, epoch)
        except OSError as error:
            self._note(error)
        finally:
            done.release()

    def _find_records(self, log: SegmentLog, segment: Segment, epoch: int) -> None:
        flags = os.O_RDONLY if log.folder.is_read_only else os.O_RDWR
        file = self._files.open(log.folder.folder, segment_name(segment.number), flags)
        try:
            found = scan(self._files, file, self._format)
            is_torn = found.length_bytes < self._files.length(file)
            for flaw, times in found.flaws.items():
                self._desk.fail(flaw.value, times)
            self._say_flaws(segment, found)
            if is_torn and not log.folder.is_read_only:
                self._files.cut(file, found.length_bytes)
            self._catalog.commit(segment, epoch, found.entries, found.length_bytes)
            if not log.folder.is_read_only:
                self._catalog.seal(segment, found.length_bytes)
        finally:
            self._files.close(file)
        if not found.entries:
            self._catalog.doom(segment)

    def _say_flaws(self, segment: Segment, found: Scan) -> None:
        if found.flaws.keys() == {Flaw.TORN}:
            logger.info("%s: a record that was not whole is cut off, as after a crash", self.path)
        elif found.flaws:
            told = ", ".join(f"{times} times {flaw.value}" for flaw, times in found.flaws.items())
            self._complaints.say("scan", f"{self.path}: segment {segment.number} is damaged: {told}")

    def _note(self, error: BaseException) -> None:
        """Count what went wrong, and log the first of its kind."""
        if isinstance(error, OSError):
            reason = DISK_GONE if isinstance(error, FolderGone) else reason_of(error)
            self._complaints.say(reason, f"{self.path}: {error}")
        else:
            reason = "disk_internal"
            logger.error("%s: the disk tier goes on after an error", self.path, exc_info=error)
        self._desk.fail(reason)
