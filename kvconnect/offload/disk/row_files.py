"""The rows of one folder: how they are written and read, what makes room, and how a folder is lost."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvconnect.errors import ConfigError
from kvconnect.offload.disk.abandoned import Abandoned
from kvconnect.offload.disk.catalog import Catalog, Row
from kvconnect.offload.disk.failures import DISK_FULL, DISK_TRUNCATED, reason_of
from kvconnect.offload.disk.files import Files, bytes_on_disk, read_all, write_all
from kvconnect.offload.disk.folder import (
    OVERHEAD_BYTES,
    DiskFolder,
    FolderHeld,
    is_former,
    parse_row_name,
    row_name,
    unfinished_name,
)
from kvconnect.offload.record import HEADER_BYTES, RecordFormat
from kvconnect.offload.tier import TierRow

logger = logging.getLogger(__name__)

_HELD_WAIT_S = 1.0
_HELD_PAUSE_S = 0.05
# What is freed on a disk that is full before the bound is reached, as a part of what is there: room for the
# rows that come next, which would find it full too.
_FULL_DISK_PART = 16


class RowFiles:
    """Files of rows. One thread opens the folder, writes and removes; others may read meanwhile.

    A row is written under another name, and gets its own once it is whole: a process that is killed leaves
    whole rows, and at most one file that the next one removes. Before a row is written there is room for it,
    and what makes room leaves the disk first: so the bound holds at every moment.

    Args:
        path: of the folder.
        namespace: the digest of what the rows depend on beside their content, in hexadecimal.
        limit_bytes: most bytes on the disk, of all that is in the folder, and of what others left beside it.
        catalog: which rows there are.
        files: how files are reached.
        on_error: told what went wrong and is over, to be counted and logged.
        owner: the rank of this worker, and how many workers there are.
        facts: of the namespace, for people who look.
    """

    def __init__(
        self,
        path: Path,
        namespace: str,
        limit_bytes: int,
        catalog: Catalog,
        files: Files,
        on_error: Callable[[BaseException], None],
        *,
        owner: tuple[int, int],
        facts: Mapping[str, Any],
    ) -> None:
        self.path = path
        self.limit_bytes = limit_bytes - OVERHEAD_BYTES
        self._namespace = namespace
        self._format = RecordFormat(namespace)
        self._catalog = catalog
        self._files = files
        self._on_error = on_error
        self._owner = owner
        self._facts = facts
        self._folder: DiskFolder | None = None
        # Folders that are not in their place any more, while they may still be read.
        self._lost: list[DiskFolder] = []
        self._abandoned: Abandoned | None = None
        # What was written before this epoch is not in the folder any more.
        self._epoch = catalog.epoch

    # ---- the folder

    def open(self) -> None:
        """Take the folder.

        Raises:
            ConfigError: it cannot be a folder of ours, or another process uses it.
            OSError: it cannot be used now.
        """
        deadline_s = time.monotonic() + _HELD_WAIT_S
        while True:
            try:
                folder = DiskFolder(self.path, self._files)
                break
            except FolderHeld:
                # Another rank that starts looks for what was abandoned, and holds it for a moment.
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(_HELD_PAUSE_S)
        try:
            if not folder.is_read_only:
                folder.describe(self._namespace, self._owner[0], self._facts)
        except OSError as error:
            # A disk may be full of what can be read.
            self._on_error(error)
        self._folder = folder

    def recover(self) -> int:
        """Find what is in the folder, and make it fit the bound; how many rows were not whole.

        Raises:
            OSError: it cannot be read, or what is too much cannot be removed.
        """
        folder = self._folder
        if folder is None:
            return 0
        rows, torn, former = [], 0, 0
        try:
            listing = list(folder.listing())
        except OSError:
            # What is in it is not known, so that nothing may be written: it is opened anew.
            self._folder = None
            folder.close()
            raise
        for facts in listing:
            content, length_bytes = parse_row_name(facts.name), bytes_on_disk(facts.length_bytes)
            if content is not None:
                rows.append((content, Row(facts.name, length_bytes)))
                continue
            self._catalog.begin(facts.name, length_bytes)
            former += is_former(facts.name)
            torn += not is_former(facts.name)
        if former:
            logger.info("%s: %d files of an earlier version are removed", self.path, former)
        self._catalog.adopt(rows, self._epoch)
        self._abandoned = Abandoned(self.path, self._files, *self._owner)
        try:
            self._make_room(0)
        except OSError:
            if not folder.is_read_only:
                raise
        return torn

    def reopen(self) -> None:
        """See that the folder is in its place; if not, or if it could not be opened before, open it.

        Raises:
            OSError: it cannot be used now.
        """
        if self._folder is not None and not self._folder.is_there:
            self._on_error(FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.path)))
            self._lost.append(self._folder)
            self._folder = None
            self._catalog.lose()
        if self._folder is None:
            try:
                self.open()
            except ConfigError as error:
                raise OSError(errno.EBUSY, str(error)) from error
            self.recover()
            logger.info("%s can be used", self.path)

    def close(self) -> None:
        """Let another process have it. What was cleared or dropped must not be found again."""
        with contextlib.suppress(OSError):
            self.remove_doomed()
        for folder in (*self._lost, *([self._folder] if self._folder else ())):
            folder.close()
        self._lost, self._folder = [], None

    # ---- rows

    def write(self, row: TierRow, epoch: int) -> None:
        """Write a row of an epoch of the catalog.

        Raises:
            LocalError: it can never be kept.
            OSError: the disk refuses.
        """
        header = self._format.header(row.content, row.memory)
        length_bytes = bytes_on_disk(HEADER_BYTES + len(row.memory))
        if length_bytes > self.limit_bytes:
            raise OSError(errno.EFBIG, f"a row of {len(row.memory)} bytes exceeds disk_bytes")
        self._make_room(length_bytes)
        try:
            self._write_file(row, header, length_bytes, epoch)
        except OSError as error:
            if reason_of(error) != DISK_FULL or not len(self._catalog):
                raise
            self._on_error(error)
            self._free(max(length_bytes, self._catalog.taken_bytes // _FULL_DISK_PART))
            self._write_file(row, header, length_bytes, epoch)

    def _write_file(self, row: TierRow, header: bytes, length_bytes: int, epoch: int) -> None:
        assert self._folder is not None
        folder, name = self._folder.folder, row_name(row.content)
        unfinished = unfinished_name(name)
        self._catalog.begin(unfinished, length_bytes)
        try:
            file = self._files.open(folder, unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            try:
                if write_all(self._files, file, (header, row.memory)) < HEADER_BYTES + len(row.memory):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            finally:
                self._files.close(file)
            self._files.rename(folder, unfinished, name)
        except OSError:
            # If not now, it is removed before anything else is written.
            with contextlib.suppress(OSError):
                self.remove_doomed()
            raise
        self._catalog.add(row.content, Row(name, length_bytes), epoch, unfinished)

    def read(self, row: TierRow, name: str) -> str:
        """Read a row's file into its memory; what is wrong with it, empty if nothing is.

        Raises:
            OSError: it cannot be read now.
        """
        folder = self._folder
        if folder is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.path))
        file = self._files.open(folder.folder, name, os.O_RDONLY)
        try:
            header = bytearray(HEADER_BYTES)
            self._files.expect_whole_read(file)
            try:
                length_bytes = read_all(self._files, file, (header, row.memory))
            except OSError as error:
                return reason_of(error)
        finally:
            self._files.close(file)
        if length_bytes < HEADER_BYTES + len(row.memory):
            return DISK_TRUNCATED
        flaw = self._format.flaw(header, row.content, row.memory)
        return flaw.value if flaw else ""

    # ---- room

    def remove_doomed(self) -> None:
        """Take the files from the disk that are of no content any more.

        Raises:
            OSError: one cannot be removed.
        """
        if self._folder is None:
            return
        epoch = self._catalog.epoch
        for name in self._catalog.doomed():
            self._files.remove(self._folder.folder, name)
            self._catalog.gone(name)
        self._epoch = epoch

    def _make_room(self, length_bytes: int) -> None:
        assert self._abandoned is not None
        while True:
            # In every round: rows may be cleared meanwhile, and take room until their files are gone.
            self.remove_doomed()
            taken_bytes = self._catalog.taken_bytes + self._abandoned.length_bytes
            over_bytes = taken_bytes + length_bytes - self.limit_bytes
            if over_bytes <= 0:
                return
            if self._abandoned.remove_oldest(over_bytes) or self._free(over_bytes):
                continue
            if not self._catalog.doomed():
                raise OSError(errno.ENOSPC, "nothing is left that could make room")

    def _free(self, length_bytes: int) -> bool:
        """Remove what was used least recently. False: nothing is there.

        Raises:
            OSError: something cannot be removed.
        """
        is_any = False
        end_bytes = self._catalog.taken_bytes - length_bytes
        while self._catalog.taken_bytes > end_bytes and self._catalog.doom_oldest():
            is_any = True
            self.remove_doomed()
        return is_any
