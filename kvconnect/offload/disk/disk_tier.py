"""The disk tier's calls: one thread writes rows, several read. ``row_files`` owns the files."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kvconnect.offload.disk.folder import DiskFolder, FolderOwner, OpenFolder
from kvconnect.offload.disk.row_files import (
    CLOSED,
    INTERNAL,
    TOO_LARGE,
    Catalog,
    RowFiles,
    reason_of,
)
from kvconnect.offload.lower_tier import LowerTier
from kvconnect.offload.tier import CompletionTracker, Content, Kind, TierRow

logger = logging.getLogger(__name__)

READ_THREADS = 8
_LEAST_BYTES_PER_THREAD = 1 << 20
_REPORTED_AT_ONCE = 256


class DiskTier(LowerTier):
    """Rows in files of one folder, ``path/<namespace>-rank<rank>``.

    It recovers rows from before its start in the background. If the folder cannot be used, or a write fails,
    it tries again when it is to write after a pause.

    Args:
        path: the parent of the folders of all ranks and namespaces.
        owner: the rank and namespace of the rows.
        limit_bytes: most bytes that the tier takes on the disk.
        max_queued_bytes: most bytes of rows that wait to be written.
        reads_footers: whether recovered rows are reported with their footers.
        pause_s: how long after a failed write nothing is written.
        open_folder: opens a folder; for tests.

    Raises ``ConfigError``: the path is no folder of this user, or another process uses it.
    """

    name = "disk"

    def __init__(
        self,
        path: Path,
        owner: FolderOwner,
        limit_bytes: int,
        *,
        max_queued_bytes: int = 1 << 30,
        reads_footers: bool = False,
        pause_s: float = 10.0,
        open_folder: OpenFolder = DiskFolder,
    ) -> None:
        self.path = path.absolute() / owner.folder_name
        self.tracker = CompletionTracker(str(self.path))
        self.tracker.is_recovering = True
        self._reads_footers = reads_footers
        self._catalog = Catalog(self.tracker)
        self._pause_s, self._retry_at = pause_s, 0.0
        self._paused_by = ""
        self._rows = RowFiles(self.path, owner, limit_bytes, self._catalog, open_folder, self._note)
        try:
            self._rows.open()
        except OSError as error:
            self._note(error)
        super().__init__(self.tracker, {"write": 1, "read": READ_THREADS}, max_queued_bytes)
        self._submit("write", self._recover)

    # ---- for the owner's thread

    def has(self, contents: Sequence[Content]) -> Sequence[bool]:
        return self._catalog.has(contents)

    def pin(self, pins: Sequence[tuple[int, bytes, bool]]) -> None:
        self._catalog.pin(pins)

    def clear(self) -> None:
        """Forget all contents; the files are removed in the background."""
        self._catalog.clear()
        self._submit("write", self._rows.remove_cleared)

    def state(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "records": len(self._catalog),
            "taken_bytes": self._catalog.taken_bytes,
            "limit_bytes": self._rows.limit_bytes,
            "queued_bytes": self.queued_bytes,
            "recovering": self.tracker.is_recovering,
            "paused_by": self._paused_by,
        }

    def close(self) -> bool:
        """Stop. Written rows stay for the next process that opens the folder."""
        self._rows.is_closing = True
        has_ended = super().close()
        if has_ended:
            self._rows.close()
        else:
            logger.error("%s: the disk does not end its last reads and writes, and is left behind", self.path)
        return has_ended

    def _parts(self, kind: Kind, rows: Sequence[TierRow]) -> Sequence[Sequence[TierRow]]:
        parts = 1
        if kind == "read":
            total_bytes = sum(len(row.memory) for row in rows)
            parts = max(1, min(READ_THREADS, total_bytes // _LEAST_BYTES_PER_THREAD))
        length = max(1, -(-len(rows) // parts))
        return [rows[first : first + length] for first in range(0, len(rows), length)]

    def _carry_out(self, kind: Kind, rows: Sequence[TierRow], epoch: int) -> Sequence[bool]:
        return self._write(rows, epoch) if kind == "write" else self._read(rows)

    # ---- on the writer's thread

    def _recover(self) -> None:
        try:
            torn = self._rows.recover()
            if torn:
                logger.info("%s: rows that were not whole are removed, as after a crash", self.path)
                self.tracker.fail("disk_torn", times=torn)
            self._rows.make_room(0)
        finally:
            self._submit("read", self._report_found)

    def _write(self, rows: Sequence[TierRow], epoch: int) -> Sequence[bool]:
        """Write rows that the folder does not have."""
        paused = 0
        contents = [row.content for row in rows]
        # Mark contents that are there as used: they must not be evicted for the rest.
        self._catalog.has(contents, is_use=True)
        self._catalog.report(contents, {})
        # The end of a sequence is written first, so that it is evicted first, also after a restart.
        for row in reversed(rows):
            if self.is_closing or epoch != self.tracker.epoch:
                break
            if self._catalog.has([row.content])[0]:
                continue
            if time.monotonic() < self._retry_at:
                paused += 1
            else:
                self._try_to_write(row, epoch)
        self.tracker.fail("disk_paused", times=paused)
        # If the tier was cleared meanwhile, none of the rows is there.
        return self.has(contents)

    def _try_to_write(self, row: TierRow, epoch: int) -> None:
        try:
            if self._rows.reopen():
                self.tracker.is_recovering = True
                self._submit("read", self._report_found)
            self._rows.write(row, epoch)
        except Exception as error:
            reason = self._note(error)
            if reason not in (TOO_LARGE, INTERNAL):
                self._retry_at, self._paused_by = time.monotonic() + self._pause_s, reason
            return
        if self._paused_by:
            logger.info("%s: rows are written to disk again", self.path)
            self._paused_by = ""
            self.tracker.logged.clear()

    # ---- on a reader's thread

    def _report_found(self) -> None:
        """Report recovered contents, a part at a time."""
        contents = self._catalog.contents()
        try:
            for first in range(0, len(contents), _REPORTED_AT_ONCE):
                if self.is_closing:
                    break
                found = contents[first : first + _REPORTED_AT_ONCE]
                footers: dict[Content, bytes] = {}
                for content in found if self._reads_footers else ():
                    # An unreadable footer is no worse than a missing one.
                    with contextlib.suppress(OSError):
                        footers[content] = self._rows.read_footer(content)
                self._catalog.report(found, footers)
        finally:
            self.tracker.recovered()

    def _read(self, rows: Sequence[TierRow]) -> Sequence[bool]:
        known = self._catalog.has([row.content for row in rows], is_use=True)
        wrong: list[Content] = []
        is_good = [is_kept and self._read_row(row, wrong) for row, is_kept in zip(rows, known, strict=True)]
        missing = [row.content for row, is_read in zip(rows, is_good, strict=True) if not is_read]
        self._catalog.forget(missing, wrong)
        if wrong:
            self._submit("write", partial(self._rows.make_room, 0))
        return is_good

    def _read_row(self, row: TierRow, wrong: list[Content]) -> bool:
        """Read a row; returns whether it is intact. Adds it to ``wrong`` if another try would fail too."""
        try:
            reason = self._rows.read(row)
        except Exception as error:
            # A file that cannot be opened now may be readable later.
            self._note(error)
            return False
        if not reason:
            return True
        # A row that was evicted meanwhile is no fault of the disk.
        if self._catalog.has([row.content])[0]:
            self.tracker.fail(reason, f"group {row.group}, hash {row.hash.hex()} cannot be read")
        wrong.append(row.content)
        return False

    def _note(self, error: Exception) -> str:
        """Count an error, and log it; returns the reason that it counts as."""
        reason = reason_of(error)
        if reason == INTERNAL:
            super()._note(error)
        # Work that closing the tier cut short is no failure: the next process goes on with it.
        elif reason != CLOSED:
            self.tracker.fail(reason, error)
        return reason
