"""The rows of one folder: which there are, how they are written and read, what makes room, what goes wrong.

Folders of other namespaces that no process uses, as they are left after a change of the model, count within
the bound of the rank that took their place, and make room before anything else does: a disk does not hold two
caches.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvconnect.errors import ConfigError, LocalError
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
REFUSED = "disk_refused"
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
    """What an error is counted as."""
    if isinstance(error, OSError):
        return _REASONS.get(error.errno or 0, "disk_io")
    if isinstance(error, ConfigError):
        return "disk_held"
    return REFUSED if isinstance(error, LocalError) else INTERNAL


_ADOPTED_AT_ONCE = 1024
"""About a millisecond on the lock, for which questions wait."""


@dataclass(eq=False)
class KeptFile:
    """A row that was written: another one if it is written again."""

    disk_bytes: int


class Catalog:
    """Contents and what their files take, least recently used first. Changes are reported to a tracker.

    ``taken_bytes`` is what all files take at most; ``epoch`` is another number after every ``clear``. If it
    ``waits``, what was there before is reported when its footers are read.
    """

    def __init__(self, tracker: CompletionTracker, *, waits: bool = False) -> None:
        self.taken_bytes = self.epoch = 0
        self._waits = waits
        self._unreported: list[Content] = []
        self._tracker = tracker
        self._lock = threading.Lock()
        self._rows: OrderedDict[Content, KeptFile] = OrderedDict()
        self._pinned: set[Content] = set()
        # Files that are of no content any more, and still take room: by name how many bytes.
        self._doomed: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def has(self, contents: Sequence[Content], *, is_use: bool = False) -> list[KeptFile | None]:
        """Those of these that are there; if they are used, these make room last."""
        with self._lock:
            # The end of a sequence makes room before the beginning, without which it is useless.
            for content in reversed(contents) if is_use else ():
                if content in self._rows:
                    self._rows.move_to_end(content)
            return [self._rows.get(content) for content in contents]

    def begin(self, length_bytes: int) -> None:
        """A row is about to be written: from now on its file takes room, and belongs to no content."""
        with self._lock:
            self.taken_bytes += length_bytes - self._doomed.get(UNFINISHED, 0)
            self._doomed[UNFINISHED] = length_bytes

    def add(self, content: Content, epoch: int) -> None:
        """The row that was begun is whole; its file is to go if all was cleared since ``epoch``."""
        name = row_name(content)
        with self._lock:
            length_bytes = self._doomed.pop(UNFINISHED)
            # The file that had the name before is replaced.
            self.taken_bytes -= self._doomed.pop(name, 0)
            if epoch != self.epoch:
                self._doomed[name] = length_bytes
                return
            self._rows[content] = KeptFile(length_bytes)
            self._tracker.add([content])

    def adopt(self, files: Sequence[RowFile], epoch: int) -> None:
        """Files that were there before, least recently used first; all are to go if all was cleared since."""
        for first in range(0, len(files), _ADOPTED_AT_ONCE):
            some = files[first : first + _ADOPTED_AT_ONCE]
            rows = {file.content: KeptFile(file.disk_bytes) for file in some if file.content is not None}
            with self._lock:
                rows = rows if epoch == self.epoch else {}
                self.taken_bytes += sum(file.disk_bytes for file in some)
                self._doomed.update((file.name, file.disk_bytes) for file in some if file.content not in rows)
                self._rows.update(rows)
                if self._waits:
                    self._unreported += rows
                else:
                    self._tracker.add(list(rows))

    def unreported(self, most: int) -> list[Content]:
        """The next of what was there before and was not reported: once, and most recently used first."""
        with self._lock:
            taken = self._unreported[-most:]
            del self._unreported[-most:]
        return taken[::-1]

    def report(self, footers: Mapping[Content, bytes]) -> None:
        """Report contents that were there before, with what they stand for, unless they are gone."""
        with self._lock:
            self._tracker.add([content for content in footers if content in self._rows], footers)

    def confirm(self, contents: Sequence[Content]) -> None:
        """Report those that are there anew: where another rank missed one, it is dropped for all of them."""
        with self._lock:
            self._tracker.add([content for content in contents if content in self._rows])

    def forget(self, missing: Sequence[Content], wrong: Mapping[Content, KeptFile]) -> None:
        """Report contents that are not there, or whose rows are wrong, unless they were written again."""
        with self._lock:
            for content, kept in wrong.items():
                if self._rows.get(content) is kept:
                    self._doom(content)
            self._tracker.remove([content for content in missing if content not in self._rows])

    def pin(self, pins: Sequence[tuple[int, bytes, bool]]) -> None:
        """Contents that are pinned make no room from now on, there or not; the others may again."""
        with self._lock:
            self._pinned.update((group, hash_) for group, hash_, is_pinned in pins if is_pinned)
            self._pinned.difference_update(
                (group, hash_) for group, hash_, is_pinned in pins if not is_pinned
            )

    def doom_oldest(self, length_bytes: int) -> bool:
        """Forget what was used least recently, so many bytes; its files go next. False: nothing may go."""
        doomed = []
        with self._lock:
            for _ in range(len(self._rows)):
                if length_bytes <= 0:
                    break
                oldest = next(iter(self._rows))
                if oldest in self._pinned:
                    # Not looked at again before the others were.
                    self._rows.move_to_end(oldest)
                    continue
                doomed.append(oldest)
                length_bytes -= self._rows[oldest].disk_bytes
                self._doom(oldest)
            self._tracker.remove(doomed)
        return bool(doomed)

    def _doom(self, content: Content) -> None:
        self._doomed[row_name(content)] = self._rows.pop(content).disk_bytes

    def doomed(self) -> list[str]:
        """The files that are to go."""
        with self._lock:
            return list(self._doomed)

    def gone(self, name: str) -> None:
        """A doomed file takes no room any more."""
        with self._lock:
            self.taken_bytes -= self._doomed.pop(name, 0)

    def clear(self) -> None:
        """Forget everything: all files are to go."""
        with self._lock:
            self.epoch += 1
            self._doomed.update((row_name(content), kept.disk_bytes) for content, kept in self._rows.items())
            self._rows = OrderedDict()
            self._pinned = set()
            self._unreported = []
            self._tracker.forget_changes()

    def lose(self) -> None:
        """All files are gone."""
        with self._lock:
            self._tracker.remove(list(self._rows))
            self._rows.clear()
            self._doomed.clear()
            self.taken_bytes = 0


_HELD_WAIT_S = 1.0
_HELD_PAUSE_S = 0.05
_NO_EPOCH = -1
# What is removed of another folder at once: its lock is taken for it.
_LEAST_BYTES = 16 << 20
# What is freed on a disk that is full before the bound is reached, as a part of what is there: room for the
# rows that come next, which would find it full too.
_FULL_DISK_PART = 16


class RowFiles:
    """Files of rows. One thread opens the folder, writes and removes; others may read meanwhile.

    A process that is killed leaves whole rows, and at most one file that the next one removes. Before a row
    is written there is room for it, and what makes room leaves the disk first: so ``limit_bytes`` holds at
    every moment for all that is in the folder, and for what others left beside it. ``on_error`` is called
    with what went wrong and is over.
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
        # Set from outside, for ever: what takes long is left to the next to open the folder.
        self.is_closing = False
        self._path, self._owner = path, owner
        self._format = RecordFormat(owner.namespace)
        self._catalog = catalog
        self._open_folder = open_folder
        self._on_error = on_error
        self._folder: DiskFolder | None = None
        # By folder that was left by others its files, most recently used first.
        self._abandoned: dict[Path, list[RowFile]] = {}
        self._abandoned_bytes = 0
        # What was written before this epoch is not in the folder any more.
        self._epoch = catalog.epoch

    # ---- the folder

    def open(self) -> None:
        """Take the folder. Raises ``ConfigError`` and ``OSError`` as ``DiskFolder``."""
        deadline_s = time.monotonic() + _HELD_WAIT_S
        while self._folder is None:
            try:
                self._folder = self._open_folder(self._path)
            except (FolderHeld, FileNotFoundError):
                # Another rank that makes room holds what was abandoned for a moment, or has removed it.
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(_HELD_PAUSE_S)
        # A disk may be full of what can be read.
        with contextlib.suppress(OSError):
            self._folder.describe(self._owner)

    def recover(self) -> int:
        """Find what is in the folder and beside it; how many rows were not whole. Raises ``OSError``."""
        folder = self._folder
        if folder is None:
            return 0
        try:
            files = folder.listing()
        except OSError:
            # What is in it is not known, so that nothing may be written: it is opened anew.
            self._folder = None
            folder.close()
            raise
        self._catalog.adopt(files, _NO_EPOCH if folder.is_cleared else self._epoch)
        self._find_abandoned()
        return sum(file.name.endswith(".unfinished") for file in files)

    def reopen(self) -> bool:
        """See that the folder is in its place; if not, or if it could not be opened before, open it anew."""
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
        """Let another process have it."""
        if self._folder is not None:
            self._folder.close()
        self._folder = None

    # ---- rows

    def write(self, row: TierRow, epoch: int) -> None:
        """Write a row of an epoch of the catalog. Raises ``LocalError``: never; ``OSError``: not now."""
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
        self._catalog.begin(length_bytes)
        try:
            self._folder.write_row(row_name(content), parts)
        except OSError:
            # If not now, what was written of it is removed before anything else is written.
            with contextlib.suppress(OSError):
                self._remove_doomed()
            raise
        self._catalog.add(content, epoch)

    def read_footer(self, content: Content) -> bytes:
        """What the content of a row stands for; empty if it was not kept with it. Raises ``OSError``."""
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
        """Read a row into its memory; what is wrong with it, if anything. Raises ``OSError``: not now."""
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
        return flaw.value if flaw else ""

    # ---- room

    def remove_cleared(self) -> None:
        """Take what was cleared from the disk; where that is cut short, the next process goes on."""
        with contextlib.suppress(OSError):
            if self._folder is not None:
                self._folder.mark_cleared(True)
        self._remove_doomed()

    def _remove_doomed(self) -> None:
        """Take the files from the disk that are of no content any more."""
        if self._folder is None:
            return
        epoch = self._catalog.epoch
        for name in self._catalog.doomed():
            if self.is_closing:
                raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))
            self._folder.remove(name)
            self._catalog.gone(name)
        if self._folder.is_cleared:
            self._folder.mark_cleared(False)
        self._epoch = epoch

    def make_room(self, length_bytes: int) -> None:
        """See that so many bytes can be written within the bound, and that no doomed file is left."""
        while True:
            # In every round: rows may be cleared meanwhile, and take room until their files are gone.
            self._remove_doomed()
            taken_bytes = self._catalog.taken_bytes + self._abandoned_bytes
            over_bytes = taken_bytes + length_bytes - self.limit_bytes
            if over_bytes <= 0:
                return
            is_any = self._remove_abandoned(over_bytes) or self._catalog.doom_oldest(over_bytes)
            if not is_any and not self._catalog.doomed():
                raise OSError(errno.ENOSPC, "nothing is left that could make room")

    def _find_abandoned(self) -> None:
        """Look for folders that others left. None is locked meanwhile: a process may begin to use it."""
        self._abandoned, self._abandoned_bytes = {}, 0
        with contextlib.suppress(OSError):
            for path in sorted(self._path.parent.iterdir()):
                parsed, ranks = parse_folder_name(path.name), self._owner.world_size
                # Those of a rank that is not there any more are taken over too.
                if parsed is None or path == self._path or (parsed[1] - self._owner.rank) % ranks:
                    continue
                with contextlib.suppress(OSError):
                    if not holder_of(path):
                        self._abandoned[path] = list_files(path)[::-1]
                        self._abandoned_bytes += _taken_bytes(self._abandoned[path])

    def _remove_abandoned(self, length_bytes: int) -> bool:
        """Remove what was used least recently of a folder that others left; False: none is there.

        A folder that is used again, is empty or cannot be removed is not looked at again.
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
