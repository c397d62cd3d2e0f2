"""What is in which segment, and what the segments may take: the state that a disk tier's threads share.

No file is touched here. Every call takes the lock once, for as long as it takes to look at its arguments.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvconnect.errors import LocalError
from kvconnect.offload.disk.files import bytes_on_disk
from kvconnect.offload.tier import Content

_OFFSET_BITS = 40


class Place(NamedTuple):
    """Where a record begins."""

    segment: int
    offset: int


@dataclass(eq=False)
class Segment:
    """One file of records.

    ``reserved_bytes`` is what it may take on the disk at most: while it is written its whole size, then what
    it has. ``contents`` are those that were written to it, in order; each may have moved on or been dropped.
    """

    number: int
    reserved_bytes: int
    length_bytes: int = 0
    is_sealed: bool = False
    contents: list[Content] = field(default_factory=list)
    read: set[Content] = field(default_factory=set)


class Catalog:
    """Contents by where they are; segments by age.

    Args:
        limit_bytes: what all segments may take on the disk, together.
        on_change: called when there is something for ``take_changes`` to tell.
    """

    def __init__(self, limit_bytes: int, on_change: Callable[[], None] = lambda: None) -> None:
        self.limit_bytes = limit_bytes
        self._on_change = on_change
        self._changes: dict[Content, bool] = {}
        self._lock = threading.Lock()
        self._places: dict[Content, int] = {}
        self._segments: dict[int, Segment] = {}
        self._doomed: dict[int, Segment] = {}
        self._discarded: list[object] = []
        self._reserved_bytes = 0
        self._next_number = 1
        self._epoch = 0

    # ---- contents

    @property
    def epoch(self) -> int:
        """Another number after every ``clear``."""
        return self._epoch

    def __len__(self) -> int:
        return len(self._places)

    def has(self, contents: Sequence[Content]) -> list[bool]:
        """Which of these are there."""
        with self._lock:
            return [content in self._places for content in contents]

    def locate(self, contents: Sequence[Content]) -> list[Place | None]:
        """Where these are, None for those that are nowhere; they count as read."""
        with self._lock:
            found: list[Place | None] = []
            for content in contents:
                packed = self._places.get(content)
                if packed is None:
                    found.append(None)
                    continue
                place = _unpacked(packed)
                self._segments[place.segment].read.add(content)
                found.append(place)
            return found

    def commit(
        self, segment: Segment, epoch: int, entries: Sequence[tuple[Content, int]], length_bytes: int
    ) -> None:
        """These contents begin at these offsets of a segment, which is now ``length_bytes`` long.

        A content that has a place in a younger segment keeps it. Nothing happens after a ``clear``.
        """
        with self._lock:
            if epoch != self._epoch or segment.number not in self._segments:
                return
            segment.length_bytes = length_bytes
            for content, offset in entries:
                packed = segment.number << _OFFSET_BITS | offset
                before = self._places.get(content)
                if before is not None and before > packed:
                    continue
                self._places[content] = packed
                self._changes[content] = True
                segment.contents.append(content)
        self._on_change()

    def drop(self, wrong: Iterable[tuple[Content, Place]]) -> None:
        """Forget contents whose record is not right, unless they have another place by now."""
        with self._lock:
            for content, place in wrong:
                if self._places.get(content) == place.segment << _OFFSET_BITS | place.offset:
                    del self._places[content]
                    self._changes[content] = False
                    self._segments[place.segment].read.discard(content)
        self._on_change()

    def deny(self, contents: Iterable[Content]) -> None:
        """Tell again of contents that are not there: somebody believed that they are."""
        with self._lock:
            for content in contents:
                if content not in self._places:
                    self._changes[content] = False
        self._on_change()

    def take_changes(self) -> tuple[tuple[Content, ...], tuple[Content, ...]]:
        """What is there that was not, and what is not there any more, since this was asked last."""
        with self._lock:
            changes, self._changes = self._changes, {}
        added = tuple(content for content, is_there in changes.items() if is_there)
        return added, tuple(content for content, is_there in changes.items() if not is_there)

    # ---- segments

    @property
    def reserved_bytes(self) -> int:
        """What all segments that are on the disk may take."""
        return self._reserved_bytes

    @property
    def num_segments(self) -> int:
        """How many segments are in use."""
        return len(self._segments)

    def room_for(self, length_bytes: int) -> bool:
        """Whether another segment of this length may be made."""
        return self._reserved_bytes + bytes_on_disk(length_bytes) <= self.limit_bytes

    def begin(self, capacity_bytes: int) -> Segment:
        """A new, youngest segment.

        Raises:
            LocalError: there is no room for it.
        """
        with self._lock:
            segment = Segment(self._next_number, bytes_on_disk(capacity_bytes))
            if self._reserved_bytes + segment.reserved_bytes > self.limit_bytes:
                raise LocalError(f"no room for a segment of {capacity_bytes} bytes")
            self._next_number += 1
            self._reserved_bytes += segment.reserved_bytes
            self._segments[segment.number] = segment
            return segment

    def adopt(self, number: int, length_bytes: int) -> Segment:
        """A segment that was there before, older than all that are begun."""
        with self._lock:
            segment = Segment(number, bytes_on_disk(length_bytes), length_bytes, is_sealed=True)
            self._reserved_bytes += segment.reserved_bytes
            self._segments[number] = segment
            self._next_number = max(self._next_number, number + 1)
            return segment

    def seal(self, segment: Segment, file_bytes: int | None) -> None:
        """A segment grows no more. Its file has this length; None if that is not known: it keeps its room."""
        with self._lock:
            segment.is_sealed = True
            if file_bytes is not None:
                self._resize(segment, bytes_on_disk(file_bytes))

    def _resize(self, segment: Segment, reserved_bytes: int) -> None:
        if segment.number in self._segments or segment.number in self._doomed:
            self._reserved_bytes += reserved_bytes - segment.reserved_bytes
        segment.reserved_bytes = reserved_bytes

    def oldest(self) -> Segment | None:
        """The segment that makes room first: sealed, and the first that was begun."""
        with self._lock:
            return next((one for one in self._segments.values() if one.is_sealed), None)

    def survivors(self, segment: Segment) -> list[tuple[Content, int]]:
        """The contents of a segment that were read since they were written to it, and their offsets."""
        with self._lock:
            found = []
            for content in segment.read:
                packed = self._places.get(content)
                if packed is not None and packed >> _OFFSET_BITS == segment.number:
                    found.append((content, _unpacked(packed).offset))
            return sorted(found, key=lambda one: one[1])

    def doom(self, segment: Segment) -> None:
        """Forget what is in a segment; its file goes next."""
        with self._lock:
            if self._segments.pop(segment.number, None) is None:
                return
            self._doomed[segment.number] = segment
            for content in segment.contents:
                packed = self._places.get(content)
                if packed is not None and packed >> _OFFSET_BITS == segment.number:
                    del self._places[content]
                    self._changes[content] = False
            segment.contents, segment.read = [], set()
        self._on_change()

    def find(self, number: int) -> Segment | None:
        """A segment that is in use."""
        return self._segments.get(number)

    def segments(self) -> list[Segment]:
        """The segments that are in use, oldest first."""
        with self._lock:
            return list(self._segments.values())

    def doomed(self) -> list[Segment]:
        """The segments whose files are to go."""
        with self._lock:
            return list(self._doomed.values())

    def gone(self, segment: Segment) -> None:
        """A doomed segment's file takes no room any more."""
        with self._lock:
            if self._doomed.pop(segment.number, None) is not None:
                self._reserved_bytes -= segment.reserved_bytes

    def clear(self) -> None:
        """Forget everything: all segments are doomed. What they held is let go of with them, not here."""
        with self._lock:
            self._epoch += 1
            # Millions of entries take a while to let go of.
            self._discarded += (self._places, self._changes)
            self._places, self._changes = {}, {}
            self._doomed.update(self._segments)
            self._segments = {}

    def sweep(self) -> None:
        """Let go of what was cleared; may take long."""
        with self._lock:
            discarded, self._discarded = self._discarded, []
        del discarded

    def check(self) -> None:
        """For tests: that all of this agrees with itself."""
        with self._lock:
            held = {number: set(segment.contents) for number, segment in self._segments.items()}
            assert all(content in held[packed >> _OFFSET_BITS] for content, packed in self._places.items())
            assert all(segment.read <= held[number] for number, segment in self._segments.items())
            everything = [*self._segments.values(), *self._doomed.values()]
            assert self._reserved_bytes == sum(segment.reserved_bytes for segment in everything)
            assert self._reserved_bytes <= self.limit_bytes


def _unpacked(packed: int) -> Place:
    return Place(packed >> _OFFSET_BITS, packed & ((1 << _OFFSET_BITS) - 1))
