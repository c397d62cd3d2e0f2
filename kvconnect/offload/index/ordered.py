"""Cells in orders of age, for the policies: who came last leaves last.

An order is a log: a cell that moves to the end gets a new entry with a new stamp, and its old entry counts
for nothing from then on. So a move of thousands of cells is a few operations on arrays. Entries that count
for nothing are swept out a few at a time with every move, and there is never a long pause for it.
"""

from __future__ import annotations

from array import array

import numpy as np
from numpy.typing import NDArray

from kvconnect.errors import LocalError
from kvconnect.offload.index.columns import FEW, Cells, Column

CHUNK_ENTRIES = 4096
# Entries that are swept for every new one: more than one, so that the log stays in proportion to what counts,
# and some more for the old end.
_SWEPT_PER_ENTRY = 4
# What it costs to look at a chunk, whatever its length, in entries.
_CLEANING_ENTRIES = 64
_FIRST_LOOK = 64
NOWHERE = 0


class _Log:
    """Entries of one order, oldest first. An entry counts while its stamp is its cell's."""

    def __init__(self, stamps: Column) -> None:
        self._stamps = stamps
        self._chunks: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
        self._tail_cells, self._tail_stamps = array("q"), array("q")
        self._next_swept = 0
        self._to_sweep = 0

    def append_one(self, cell: int, stamp: int) -> None:
        """A new entry."""
        self._tail_cells.append(cell)
        self._tail_stamps.append(stamp)
        if len(self._tail_cells) >= CHUNK_ENTRIES:
            self._seal()
            self._sweep(CHUNK_ENTRIES)

    def append(self, cells: NDArray[np.int64], stamps: NDArray[np.int64]) -> None:
        """New entries, the newest last."""
        self._tail_cells.frombytes(cells.tobytes())
        self._tail_stamps.frombytes(stamps.tobytes())
        if len(self._tail_cells) >= CHUNK_ENTRIES:
            grown = len(self._tail_cells)
            self._seal()
            self._sweep(grown)

    def take(self, count: int) -> NDArray[np.int64]:
        """The oldest ``count`` cells, or all. Their entries are gone."""
        taken: list[NDArray[np.int64]] = []
        look = max(_FIRST_LOOK, 2 * count)
        while count and (self._chunks or self._tail_cells):
            if not self._chunks:
                self._seal()
            cells, stamps = self._chunks[0]
            places = np.flatnonzero(self._stamps.array[cells[:look]] == stamps[:look])[:count]
            end = int(places[-1]) + 1 if len(places) == count else look
            if end >= len(cells):
                self._drop(0)
            else:
                self._chunks[0] = (cells[end:], stamps[end:])
            taken.append(cells[places])
            count -= len(places)
            look *= 2
        return np.concatenate(taken) if taken else np.empty(0, dtype=np.int64)

    def _seal(self) -> None:
        cells = np.frombuffer(self._tail_cells.tobytes(), dtype=np.int64)
        stamps = np.frombuffer(self._tail_stamps.tobytes(), dtype=np.int64)
        self._chunks += [
            (cells[first : first + CHUNK_ENTRIES], stamps[first : first + CHUNK_ENTRIES])
            for first in range(0, len(cells), CHUNK_ENTRIES)
        ]
        self._tail_cells, self._tail_stamps = array("q"), array("q")

    def _sweep(self, grown: int) -> None:
        """Drop entries that count for nothing: at the old end, where they delay ``take``, and all around."""
        self._to_sweep += _SWEPT_PER_ENTRY * grown - self._clean(0)
        while self._to_sweep > 0 and self._chunks:
            self._next_swept = self._next_swept + 1 if self._next_swept + 1 < len(self._chunks) else 0
            self._to_sweep -= self._clean(self._next_swept)

    def _clean(self, index: int) -> int:
        """Shorten a chunk to what counts, and join it with the one before. Returns how much was looked at."""
        cells, stamps = self._chunks[index]
        looked_at = len(cells)
        counts = self._stamps.array[cells] == stamps
        left = int(np.count_nonzero(counts))
        if left == 0:
            self._drop(index)
        elif left < len(cells):
            self._chunks[index] = (cells[counts], stamps[counts])
        if left and index and len(self._chunks[index - 1][0]) + left <= CHUNK_ENTRIES:
            (first_cells, first_stamps), (cells, stamps) = self._chunks[index - 1 : index + 1]
            self._chunks[index - 1 : index + 1] = [
                (np.concatenate((first_cells, cells)), np.concatenate((first_stamps, stamps)))
            ]
            self._next_swept -= 1
        return looked_at + _CLEANING_ENTRIES

    def _drop(self, index: int) -> None:
        del self._chunks[index]
        if index <= self._next_swept:
            self._next_swept = max(0, self._next_swept - 1)


class Orders:
    """Cells 0 to ``num_cells - 1``, each in at most one of several kinds; at first all are ``NOWHERE``.

    Args:
        num_cells: how many there are.
        num_kinds: kinds besides ``NOWHERE``, numbered from 1.
        unordered: those of the kinds whose order nobody asks for.
    """

    def __init__(self, num_cells: int, num_kinds: int, unordered: frozenset[int] = frozenset()) -> None:
        self.kinds = Column(num_cells, np.uint8)
        self._stamps = Column(num_cells, np.int64)
        self._sizes = [0] * (num_kinds + 1)
        self._logs = {kind: _Log(self._stamps) for kind in range(1, num_kinds + 1) if kind not in unordered}
        # Stamp 0 is that of cells which are in no log.
        self._next_stamp = 1

    def size(self, kind: int) -> int:
        """How many cells are of a kind."""
        return self._sizes[kind]

    def move(self, cells: Cells, kind: int) -> None:
        """The cells are of this kind now, and its newest: of equal cells the last one counts."""
        if isinstance(cells, list):
            self._move_few(cells, kind)
        else:
            self._move_many(cells, kind)

    def _move_few(self, cells: list[int], kind: int) -> None:
        kinds, stamps, sizes, log = self.kinds.each, self._stamps.each, self._sizes, self._logs.get(kind)
        for cell in cells:
            sizes[kinds[cell]] -= 1
            sizes[kind] += 1
            kinds[cell] = kind
            if log is None:
                stamps[cell] = 0
            else:
                stamps[cell] = self._next_stamp
                log.append_one(cell, self._next_stamp)
                self._next_stamp += 1

    def _move_many(self, cells: NDArray[np.int64], kind: int) -> None:
        stamps = self._new_stamps(len(cells))
        self._stamps.array[cells] = stamps
        is_last = self._stamps.array[cells] == stamps
        if not is_last.all():
            cells, stamps = cells[is_last], stamps[is_last]
        left = np.bincount(self.kinds.array[cells], minlength=len(self._sizes))
        for index, count in enumerate(left.tolist()):
            self._sizes[index] -= count
        self._arrive(cells, stamps, kind)

    def _new_stamps(self, count: int) -> NDArray[np.int64]:
        self._next_stamp += count
        return np.arange(self._next_stamp - count, self._next_stamp, dtype=np.int64)

    def _arrive(self, cells: NDArray[np.int64], stamps: NDArray[np.int64], kind: int) -> None:
        self._sizes[kind] += len(cells)
        self.kinds.array[cells] = kind
        log = self._logs.get(kind)
        if log is None:
            self._stamps.array[cells] = 0
        else:
            self._stamps.array[cells] = stamps
            log.append(cells, stamps)

    def take(self, kind: int, count: int, into: int = NOWHERE) -> Cells:
        """The oldest ``count`` cells of a kind, or all of them, oldest first. They are of another kind then.

        Raises:
            LocalError: the kind keeps no order.
        """
        if kind not in self._logs:
            raise LocalError(f"kind {kind} keeps no order")
        count = min(count, self._sizes[kind])
        if count <= 0:
            return []
        taken = self._logs[kind].take(count)
        if count <= FEW:
            few: list[int] = taken.tolist()
            self._move_few(few, into)
            return few
        # Of one kind, and none of them twice.
        self._sizes[kind] -= count
        self._arrive(taken, self._new_stamps(count), into)
        return taken
