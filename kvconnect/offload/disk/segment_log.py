"""The segments of a folder: appended to at the end, made room for at the beginning. One thread writes.

Before a segment is made there is room for the whole of it within the bound; what makes room leaves the disk
first. So the bound holds at every moment, whenever the process ends.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from kvconnect.offload.disk.abandoned import Abandoned
from kvconnect.offload.disk.catalog import Catalog, Segment
from kvconnect.offload.disk.files import Files, bytes_on_disk
from kvconnect.offload.disk.folder import DiskFolder, segment_name
from kvconnect.offload.disk.io_threads import IoThreads
from kvconnect.offload.disk.table import ENTRY_BYTES, TRAILER_BYTES, pack_table
from kvconnect.offload.record import HEADER_BYTES, Header, RecordFormat
from kvconnect.offload.tier import Content

_MAX_SURVIVOR_BYTES = 64 << 20
_TRIES = 100


class Record(NamedTuple):
    """A header and a row, as they go to the disk."""

    content: Content
    header: bytes
    row: memoryview

    @property
    def length_bytes(self) -> int:
        """Of both."""
        return HEADER_BYTES + len(self.row)

    @property
    def segment_bytes(self) -> int:
        """What it takes of a segment: itself, and its entry in the table."""
        return self.length_bytes + ENTRY_BYTES


class FolderGone(OSError):
    """The folder, or its lock, is not in its place any more."""

    def __init__(self, path: object) -> None:
        super().__init__(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


@dataclass(eq=False)
class _Active:
    """The segment that is written."""

    segment: Segment
    file: int
    capacity_bytes: int
    headers: list[bytes] = field(default_factory=list)

    def room_bytes(self) -> int:
        """What records and their entries in the table may take still."""
        table_bytes = len(self.headers) * ENTRY_BYTES + TRAILER_BYTES
        return self.capacity_bytes - self.segment.length_bytes - table_bytes


class SegmentLog:
    """Appends records to segments of one folder.

    Args:
        folder: open and locked.
        files: how files are reached.
        record_format: of the namespace.
        catalog: what is where, and the bound.
        sync: threads that wait until a segment is on the disk.
        abandoned: what former processes left beside the folder, within the same bound.
        capacity_bytes: of a segment.
        second_chance: the part of a segment that is written again if it was read.
        on_error: told what failed that nobody waits for.
    """

    def __init__(
        self,
        folder: DiskFolder,
        files: Files,
        record_format: RecordFormat,
        catalog: Catalog,
        sync: IoThreads,
        abandoned: Abandoned,
        *,
        capacity_bytes: int,
        second_chance: float,
        on_error: Callable[[BaseException], None],
    ) -> None:
        self.folder = folder
        self._files = files
        self._format = record_format
        self._catalog = catalog
        self._sync = sync
        self._abandoned = abandoned
        self._capacity_bytes = capacity_bytes
        self._survivor_bytes = min(int(capacity_bytes * second_chance), _MAX_SURVIVOR_BYTES)
        self._on_error = on_error
        self._active: _Active | None = None

    # ---- what was there before

    def adopt(self) -> list[Segment]:
        """Take over the segments that are in the folder, the youngest of them that fit the bound.

        Raises:
            OSError: the folder cannot be read, or what is too much cannot be removed.
        """
        found = [self._catalog.adopt(number, facts.length_bytes) for number, facts in self.folder.segments()]
        try:
            self.make_room(0)
        except OSError as error:
            if not self.folder.is_read_only:
                raise
            self._on_error(error)
        return [segment for segment in found if self._catalog.find(segment.number) is segment]

    # ---- room

    def make_room(self, length_bytes: int) -> list[Record]:
        """Remove the oldest until a segment of this length fits; records of them that shall stay.

        Raises:
            OSError: something cannot be removed.
        """
        self.remove_doomed()
        survivors: list[Record] = []
        while not self._has_room(length_bytes) and (
            self._abandoned.remove_oldest() or self.remove_oldest(survivors)
        ):
            pass
        return survivors

    def _has_room(self, length_bytes: int) -> bool:
        taken_bytes = self._catalog.reserved_bytes + self._abandoned.length_bytes
        wanted_bytes = bytes_on_disk(length_bytes) if length_bytes else 0
        return taken_bytes + wanted_bytes <= self._catalog.limit_bytes

    def remove_oldest(self, survivors: list[Record] | None = None) -> bool:
        """Remove the oldest segment; what was read of it is added to ``survivors``. False if there is none.

        Raises:
            OSError: it cannot be removed; it holds nothing any more, and still takes its room.
        """
        oldest = self._catalog.oldest()
        if oldest is None:
            return False
        if survivors is not None:
            survivors += self._read_survivors(oldest, self._survivor_bytes - _length(survivors))
        self._catalog.doom(oldest)
        self.remove_doomed()
        return True

    def remove_doomed(self) -> None:
        """Take the files from the disk that hold nothing any more.

        Raises:
            OSError: one cannot be removed.
        """
        for segment in self._catalog.doomed():
            if self._active is not None and self._active.segment is segment:
                self._let_go()
            with contextlib.suppress(FileNotFoundError):
                self._files.remove(self.folder.folder, segment_name(segment.number))
            self._catalog.gone(segment)
        self._catalog.sweep()

    def _read_survivors(self, segment: Segment, room_bytes: int) -> list[Record]:
        wanted = self._catalog.survivors(segment)
        if not wanted or room_bytes <= 0:
            return []
        kept: list[Record] = []
        try:
            file = self._files.open(self.folder.folder, segment_name(segment.number), os.O_RDONLY)
            try:
                for content, offset in wanted:
                    record = self._read_record(file, content, offset, room_bytes)
                    if record is not None:
                        kept.append(record)
                        room_bytes -= record.segment_bytes
            finally:
                self._files.close(file)
        except OSError as error:
            self._on_error(error)
        return kept

    def _read_record(self, file: int, content: Content, offset: int, room_bytes: int) -> Record | None:
        raw = bytearray(HEADER_BYTES)
        got = self._files.read(file, [raw], offset)
        header = self._format.parse(memoryview(raw)[:got])
        if not isinstance(header, Header) or header.content != content or header.record_bytes > room_bytes:
            return None
        row = memoryview(bytearray(header.length_bytes))
        if self._files.read(file, [row], offset + HEADER_BYTES) < header.length_bytes:
            return None
        return None if self._format.flaw(raw, content, row) else Record(content, bytes(raw), row)

    # ---- writing

    def append(self, records: Sequence[Record], epoch: int) -> None:
        """Write records. What is written, also where this raises, is in the catalog.

        Raises:
            OSError: the disk refused.
        """
        first = 0
        while first < len(records):
            active = self._active_for(records[first].segment_bytes)
            room_bytes, end = active.room_bytes(), first
            while end < len(records) and (room_bytes := room_bytes - records[end].segment_bytes) >= 0:
                end += 1
            self._write(active, records[first:end], epoch)
            first = end

    def _active_for(self, length_bytes: int) -> _Active:
        active = self._active
        if active is not None and (
            self._catalog.find(active.segment.number) is not active.segment
            or not self._files.is_linked(active.file)
        ):
            self._catalog.doom(active.segment)
            self._let_go()
            active = None
        if active is not None and length_bytes <= active.room_bytes():
            return active
        self.seal()
        if not self.folder.is_there:
            raise FolderGone(self.folder.path)
        epoch = self._catalog.epoch
        capacity_bytes = max(self._capacity_bytes, length_bytes + TRAILER_BYTES)
        survivors = self.make_room(capacity_bytes)
        active = self._active = self._begin(capacity_bytes)
        # Not so many that the record that this is for has no room.
        while survivors and _length(survivors) + length_bytes > active.room_bytes():
            survivors.pop()
        if survivors:
            self._write(active, survivors, epoch)
        return active

    def _begin(self, capacity_bytes: int) -> _Active:
        for _ in range(_TRIES):
            segment = self._catalog.begin(capacity_bytes)
            try:
                file = self._files.open(
                    self.folder.folder, segment_name(segment.number), os.O_RDWR | os.O_CREAT | os.O_EXCL
                )
            except OSError as error:
                self._catalog.doom(segment)
                self._catalog.gone(segment)
                if error.errno != errno.EEXIST:
                    raise
                continue
            return _Active(segment, file, capacity_bytes)
        raise OSError(errno.EEXIST, os.strerror(errno.EEXIST), str(self.folder.path))

    def _write(self, active: _Active, records: Sequence[Record], epoch: int) -> None:
        offset = start = active.segment.length_bytes
        entries = []
        buffers: list[memoryview] = []
        for record in records:
            entries.append((record.content, offset))
            buffers += (memoryview(record.header), record.row)
            offset += record.length_bytes
        try:
            self._write_all(active.file, buffers, start)
        except OSError:
            self.seal(is_torn=True)
            raise
        active.headers += (record.header for record in records)
        self._catalog.commit(active.segment, epoch, entries, offset)

    def _write_all(self, file: int, buffers: list[memoryview], offset: int) -> None:
        while buffers:
            taken = self._files.write(file, buffers, offset)
            if taken <= 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            offset += taken
            first = 0
            while first < len(buffers) and taken >= len(buffers[first]):
                taken -= len(buffers[first])
                first += 1
            buffers = buffers[first:]
            if taken:
                buffers[0] = buffers[0][taken:]

    # ---- the end of a segment

    def seal(self, *, is_torn: bool = False) -> None:
        """Write no more to the segment that is written now; have it synced, and if torn, cut back first."""
        active = self._active
        if active is None:
            return
        file_bytes = None if is_torn else self._write_table(active)
        self._catalog.seal(active.segment, self._cut(active) if file_bytes is None else file_bytes)
        if not active.segment.length_bytes:
            self._catalog.doom(active.segment)
        self._active = None
        self._sync.submit(partial(self._sync_and_close, active.file))

    def _write_table(self, active: _Active) -> int | None:
        """Returns the length of the file with it; None if it cannot be written."""
        if not active.headers:
            return active.segment.length_bytes
        table = pack_table(active.headers, active.segment.length_bytes)
        try:
            self._write_all(active.file, [memoryview(table)], active.segment.length_bytes)
        except OSError as error:
            self._on_error(error)
            return None
        return active.segment.length_bytes + len(table)

    def _cut(self, active: _Active) -> int | None:
        """Cut off what is behind the last record. Returns the length of the file; None if it is not known."""
        try:
            self._files.cut(active.file, active.segment.length_bytes)
        except OSError as error:
            self._on_error(error)
            return None
        return active.segment.length_bytes

    def _sync_and_close(self, file: int) -> None:
        try:
            self._files.sync(file)
        finally:
            self._files.close(file)

    def _let_go(self) -> None:
        active, self._active = self._active, None
        if active is not None:
            self._files.close(active.file)


def _length(records: Sequence[Record]) -> int:
    return sum(record.segment_bytes for record in records)
