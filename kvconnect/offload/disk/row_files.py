"""The rows of one folder: their catalog, reads and writes, eviction under the byte bound, and error reasons.

Abandoned folders are those of other namespaces that no process uses, for example after a change of the model.
They count within the bound of the rank that replaced them, and are evicted first: a disk does not hold two
caches. The module knows neither jobs nor threads.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvconnect.errors import ConfigError
from kvconnect.offload.disk.folder import (
    OVERHEAD_BYTES,
    UNFINISHED,
    DiskFolder,
    FolderHeld,
    FolderOwner,
    OpenFolder,
    RowFile,
    bytes_on_disk,
    holder_of,
    list_files,
    parse_folder_name,
    row_name,
)
from kvconnect.offload.record import HEADER_BYTES, MAX_FOOTER_BYTES, RecordFormat, opened, sealed
from kvconnect.offload.tier import CompletionTracker, Content, TierRow

logger = logging.getLogger(__name__)

CLOSED = "disk_closed"
FULL = "disk_full"
GONE = "disk_gone"
INTERNAL = "disk_internal"
TOO_LARGE = "disk_too_large"

_REASONS = {
    errno.ECANCELED: CLOSED,
    errno.ENOSPC: FULL,
    errno.EDQUOT: FULL,
    errno.EFBIG: TOO_LARGE,
    errno.EROFS: "disk_read_only",
    errno.EACCES: "disk_read_only",
    errno.EPERM: "disk_read_only",
    errno.ENOENT: GONE,
    errno.ESTALE: GONE,
    errno.ENOTDIR: GONE,
}


def reason_of(error: Exception) -> str:
    """The reason that an error counts as."""
    if isinstance(error, OSError):
        return _REASONS.get(error.errno or 0, "disk_io")
    if isinstance(error, ConfigError):
        return "disk_held"
    return INTERNAL


_ADOPTED_AT_ONCE = 1024
"""Files adopted under one hold of the lock: about a millisecond, in which lookups wait."""


class Catalog:
    """Contents and the bytes of their files in LRU order. Reports changes to a tracker. Thread-safe.

    ``taken_bytes`` is the most that all files take on disk. Recovered contents are reported by ``report``,
    once their footers are read.
    """

    def __init__(self, tracker: CompletionTracker) -> None:
        self.taken_bytes = 0
        self.tracker = tracker
        self._lock = threading.Lock()
        # The bytes that each row's file takes on disk.
        self._rows: OrderedDict[Content, int] = OrderedDict()
        self._pinned: set[Content] = set()
        # Doomed files, to be removed: they belong to no content, and still take these bytes on disk.
        self._doomed: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def has(self, contents: Sequence[Content], *, is_use: bool = False) -> list[bool]:
        """For each content whether it is there. With ``is_use`` they become the most recently used."""
        with self._lock:
            # The end of a sequence is evicted first: no hit can use it without the beginning.
            for content in reversed(contents) if is_use else ():
                if content in self._rows:
                    self._rows.move_to_end(content)
            return [content in self._rows for content in contents]

    def add(self, content: Content, length_bytes: int, epoch: int) -> None:
        """A row was written; its file is doomed if the catalog was cleared since ``epoch``."""
        name = row_name(content)
        with self._lock:
            # The file that had the name before is replaced.
            self.taken_bytes += length_bytes - self._doomed.pop(name, 0)
            if epoch != self.tracker.epoch:
                self._doomed[name] = length_bytes
                return
            self._rows[content] = length_bytes
            self.tracker.add([content])

    def adopt(self, files: Sequence[RowFile], epoch: int) -> None:
        """Add files found in the folder, least recently used first; all are doomed if ``epoch`` is over."""
        for first in range(0, len(files), _ADOPTED_AT_ONCE):
            some = files[first : first + _ADOPTED_AT_ONCE]
            rows = {file.content: file.disk_bytes for file in some if file.content is not None}
            with self._lock:
                rows = rows if epoch == self.tracker.epoch else {}
                self.taken_bytes += sum(file.disk_bytes for file in some)
                self._doomed.update((file.name, file.disk_bytes) for file in some if file.content not in rows)
                self._rows.update(rows)

    def contents(self) -> list[Content]:
        """All contents that are there, most recently used first."""
        with self._lock:
            return list(reversed(self._rows))

    def report(self, contents: Iterable[Content], footers: Mapping[Content, bytes]) -> None:
        """Report contents that are there, maybe again: the scheduler half forgets what any rank missed."""
        with self._lock:
            self.tracker.add([content for content in contents if content in self._rows], footers)

    def forget(self, missing: Sequence[Content], wrong: Collection[Content]) -> None:
        """Doom the rows of ``wrong`` contents, and report ``missing`` ones as removed that are not there."""
        with self._lock:
            for content in wrong:
                if content in self._rows:
                    self._doom(content)
            self.tracker.remove([content for content in missing if content not in self._rows])

    def pin(self, pins: Sequence[tuple[int, bytes, bool]]) -> None:
        """Pin or unpin contents, there or not; pinned ones are not evicted."""
        with self._lock:
            for group, name, is_pinned in pins:
                (self._pinned.add if is_pinned else self._pinned.discard)((group, name))

    def doom_oldest(self, length_bytes: int) -> bool:
        """Doom the least recently used rows, ``length_bytes`` in all. False: no row may be evicted."""
        doomed = []
        with self._lock:
            for _ in range(len(self._rows)):
                if length_bytes <= 0:
                    break
                oldest = next(iter(self._rows))
                if oldest in self._pinned:
                    # Consider all others before this one again.
                    self._rows.move_to_end(oldest)
                    continue
                doomed.append(oldest)
                length_bytes -= self._rows[oldest]
                self._doom(oldest)
            self.tracker.remove(doomed)
        return bool(doomed)

    def _doom(self, content: Content) -> None:
        self._doomed[row_name(content)] = self._rows.pop(content)

    def doomed(self) -> list[str]:
        """The names of the doomed files."""
        with self._lock:
            return list(self._doomed)

    def gone(self, name: str) -> None:
        """A doomed file was removed from the disk."""
        with self._lock:
            self.taken_bytes -= self._doomed.pop(name, 0)

    def clear(self) -> None:
        """Forget all contents and pins; all files are doomed."""
        with self._lock:
            self._doomed.update((row_name(content), disk_bytes) for content, disk_bytes in self._rows.items())
            self._rows = OrderedDict()
            self._pinned = set()
            self.tracker.clear()

    def lose(self) -> None:
        """All files are gone, with the folder."""
        with self._lock:
            self.tracker.remove(list(self._rows))
            self._rows.clear()
            self._doomed.clear()
            self.taken_bytes = 0


_HELD_WAIT_S = 1.0
_HELD_PAUSE_S = 0.05
_NO_EPOCH = -1
# The least bytes removed from an abandoned folder at once, since that takes its lock.
_LEAST_BYTES = 16 << 20
# If the disk is full below the bound, one in so many bytes is evicted, so that the next rows find room too.
_FULL_DISK_PART = 16


class RowFiles:
    """The files of rows. One thread opens the folder, writes and removes; others may read meanwhile.

    A killed process leaves whole rows, and at most one unfinished file that the next process removes. Evicted
    files are removed before a row is written, so ``limit_bytes`` holds at every moment for the folder and the
    abandoned folders together. ``on_error`` receives errors that were handled.
    """

    def __init__(
        self,
        path: Path,
        owner: FolderOwner,
        limit_bytes: int,
        catalog: Catalog,
        open_folder: OpenFolder,
        on_error: Callable[[Exception], object],
    ) -> None:
        self.limit_bytes = limit_bytes - OVERHEAD_BYTES
        # Set by the owner, never reset: long work is left to the next process that opens the folder.
        self.is_closing = False
        self._path, self._owner = path, owner
        self._format = RecordFormat(owner.namespace)
        self._catalog = catalog
        self._open_folder = open_folder
        self._on_error = on_error
        self._folder: DiskFolder | None = None
        # By abandoned folder its files, most recently used first.
        self._abandoned: dict[Path, list[RowFile]] = {}
        self._abandoned_bytes = 0
        # The folder has no files from before this epoch.
        self._epoch = catalog.tracker.epoch

    # ---- the folder

    def open(self) -> None:
        """Open and lock the folder. Raises ``ConfigError`` and ``OSError`` as ``DiskFolder``."""
        deadline_s = time.monotonic() + _HELD_WAIT_S
        while self._folder is None:
            try:
                self._folder = self._open_folder(self._path)
            except (FolderHeld, FileNotFoundError):
                # Another rank may lock an abandoned folder for a moment, to evict rows or to remove it.
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(_HELD_PAUSE_S)
        # A full disk cannot take the description, but its rows can be read.
        with contextlib.suppress(OSError):
            self._folder.describe(self._owner)

    def recover(self) -> int:
        """Find rows here and in abandoned folders; returns the number of torn ones. Raises ``OSError``."""
        folder = self._folder
        if folder is None:
            return 0
        try:
            files = folder.listing()
        except OSError:
            # Without a listing the taken bytes are unknown, so nothing may be written until it is reopened.
            self._folder = None
            folder.close()
            raise
        self._catalog.adopt(files, _NO_EPOCH if folder.is_cleared else self._epoch)
        self._find_abandoned()
        return sum(file.name.endswith(".unfinished") for file in files)

    def reopen(self) -> bool:
        """Open the folder again if it is not open, or not in its place any more; whether it was opened."""
        if self._folder is not None and not self._folder.is_there:
            self._on_error(FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self._path)))
            self._folder = None
            self._catalog.lose()
        if self._folder is not None:
            return False
        self.open()
        self.recover()
        logger.info("%s can be used", self._path)
        return True

    def close(self) -> None:
        """Close and unlock the folder."""
        if self._folder is not None:
            self._folder.close()
        self._folder = None

    # ---- rows

    def write(self, row: TierRow, epoch: int) -> None:
        """Write a row, for an epoch of the catalog.

        Raises:
            LocalError: the row cannot be kept at all.
            OSError: the row cannot be written now, or is longer than ``limit_bytes``.
        """
        header = self._format.header(row.content, row.memory)
        parts = (header, row.memory, sealed(header, row.footer))
        length_bytes = bytes_on_disk(sum(map(len, parts)))
        if length_bytes > self.limit_bytes:
            raise OSError(errno.EFBIG, f"a row of {len(row.memory)} bytes exceeds disk_bytes")
        self.make_room(length_bytes)
        try:
            self._write_file(row.content, parts, length_bytes, epoch)
        except OSError as error:
            if reason_of(error) != FULL or not len(self._catalog):
                raise
            self._on_error(error)
            self._catalog.doom_oldest(max(length_bytes, self._catalog.taken_bytes // _FULL_DISK_PART))
            self._remove_doomed()
            self._write_file(row.content, parts, length_bytes, epoch)

    def _write_file(self, content: Content, parts: Sequence[Any], length_bytes: int, epoch: int) -> None:
        assert self._folder is not None
        try:
            self._folder.write_row(row_name(content), parts)
        except OSError:
            # If the unfinished file cannot be removed, the next write begins with it, in the same room.
            with contextlib.suppress(OSError):
                self._folder.remove(UNFINISHED)
            raise
        self._catalog.add(content, length_bytes, epoch)

    def read_footer(self, content: Content) -> bytes:
        """The footer of a content's row; empty if it has none. Raises ``OSError``."""
        folder = self._folder
        if folder is None:
            return b""
        file = folder.open(row_name(content), os.O_RDONLY)
        try:
            header = os.pread(file, HEADER_BYTES, 0)
            row_bytes = self._format.row_bytes(header)
            footer = os.pread(file, 2 * MAX_FOOTER_BYTES, HEADER_BYTES + row_bytes) if row_bytes else b""
        finally:
            os.close(file)
        return opened(header, footer)

    def read(self, row: TierRow) -> str:
        """Read a row into its memory; returns the reason if it is bad. Raises ``OSError``: not now."""
        folder, header = self._folder, bytearray(HEADER_BYTES)
        if folder is None:
            return GONE
        try:
            file = folder.open(row_name(row.content), os.O_RDONLY)
        except FileNotFoundError:
            return GONE
        try:
            length_bytes = folder.read_row(file, (header, row.memory))
        except OSError as error:
            return reason_of(error)
        finally:
            os.close(file)
        if length_bytes < HEADER_BYTES + len(row.memory):
            return "disk_truncated"
        flaw = self._format.flaw(header, row.content, row.memory)
        return f"disk_{flaw}" if flaw else ""

    # ---- room

    def remove_cleared(self) -> None:
        """Remove the files of cleared contents; if that is cut short, the next process goes on."""
        with contextlib.suppress(OSError):
            if self._folder is not None:
                self._folder.mark_cleared(True)
        self._remove_doomed()

    def _remove_doomed(self) -> None:
        """Remove all doomed files."""
        if self._folder is None:
            return
        epoch = self._catalog.tracker.epoch
        for name in self._catalog.doomed():
            if self.is_closing:
                raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))
            self._folder.remove(name)
            self._catalog.gone(name)
        if self._folder.is_cleared:
            self._folder.mark_cleared(False)
        self._epoch = epoch

    def make_room(self, length_bytes: int) -> None:
        """Remove doomed files, and evict until ``length_bytes`` more fit in the bound. Raises ``OSError``."""
        while True:
            # In every round: rows that are cleared meanwhile take room until their files are removed.
            self._remove_doomed()
            taken_bytes = self._catalog.taken_bytes + self._abandoned_bytes
            over_bytes = taken_bytes + length_bytes - self.limit_bytes
            if over_bytes <= 0:
                return
            is_any = self._remove_abandoned(over_bytes) or self._catalog.doom_oldest(over_bytes)
            if not is_any and not self._catalog.doomed():
                raise OSError(errno.ENOSPC, "nothing is left that could make room")

    def _find_abandoned(self) -> None:
        """List the abandoned folders, without locking them: a process may begin to use one."""
        self._abandoned, self._abandoned_bytes = {}, 0
        with contextlib.suppress(OSError):
            for path in sorted(self._path.parent.iterdir()):
                parsed, ranks = parse_folder_name(path.name), self._owner.world_size
                # Folders of ranks beyond the world size are divided among the ranks.
                if parsed is None or path == self._path or (parsed[1] - self._owner.rank) % ranks:
                    continue
                with contextlib.suppress(OSError):
                    if not holder_of(path):
                        self._abandoned[path] = list_files(path)[::-1]
                        self._abandoned_bytes += _taken_bytes(self._abandoned[path])

    def _remove_abandoned(self, length_bytes: int) -> bool:
        """Remove the least recently used rows of an abandoned folder; False: there is no such folder.

        A folder that is used again, is empty or cannot be removed is not considered again.
        """
        if not self._abandoned:
            return False
        path, files = min(self._abandoned.items(), key=lambda item: item[1][-1].used_s if item[1] else 0.0)
        end_bytes = self._abandoned_bytes - max(length_bytes, _LEAST_BYTES)
        is_left = False
        with (
            contextlib.suppress(OSError, ConfigError),
            contextlib.closing(self._open_folder(path, is_made=False)) as folder,
        ):
            while files and self._abandoned_bytes > end_bytes:
                folder.remove(files[-1].name)
                self._abandoned_bytes -= files.pop().disk_bytes
            is_left = bool(files)
            if not is_left:
                folder.delete()
        if not is_left:
            self._abandoned_bytes -= _taken_bytes(self._abandoned.pop(path))
        return True


def _taken_bytes(files: list[RowFile]) -> int:
    return OVERHEAD_BYTES + sum(file.disk_bytes for file in files)
