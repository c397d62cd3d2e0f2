"""The rows of one length: what each holds, and where the contents of their groups are."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from itertools import compress, count, repeat
from operator import ne

import numpy as np
from numpy.typing import NDArray

from kvconnect.offload.index.age_order import AgeOrder, Rows


class ContentState(enum.IntEnum):
    ABSENT = 0
    PENDING = 1
    READY = 2


ABSENT, PENDING, READY = (int(state) for state in ContentState)
# Dropped while it was pinned: absent, but its row is still read.
DOOMED = 3
_FEW = 24
_SHORTEST_STRETCH, _LONGEST_STRETCH = 8, 2048
_MOST_SINGLES = 128


class ClassRows:
    """What each row holds. Only what is ready and not pinned, by jobs or by a session, has an age.

    ``hash`` of a free row is what it held before: to forget it takes longer than to free the row, and is done
    when the row is taken again. The last element of ``state``, ``pins`` and ``is_session_pinned`` stands for
    unknown contents.
    """

    def __init__(self, num_rows: int, groups: Iterable[int]) -> None:
        self.num_rows = num_rows
        self.row_of: dict[int, dict[bytes, int]] = {group: {} for group in groups}
        # The rows freed last are taken first.
        self.free = list(range(num_rows - 1, -1, -1))
        self.ages = AgeOrder(num_rows)
        self.state: NDArray[np.uint8] = np.zeros(num_rows + 1, dtype=np.uint8)
        self.pins: NDArray[np.int32] = np.zeros(num_rows + 1, dtype=np.int32)
        self.is_session_pinned: NDArray[np.bool_] = np.zeros(num_rows + 1, dtype=np.bool_)
        self.group: NDArray[np.int32] = np.full(num_rows, min(self.row_of), dtype=np.int32)
        self.hash: list[bytes] = [b""] * num_rows

    def take(self, count: int) -> list[int]:
        """So many free rows, or all there are, in rising order."""
        first = max(0, len(self.free) - count)
        rows = sorted(self.free[first:])
        del self.free[first:]
        return rows

    def evict(self, count: int) -> Rows:
        """So many of the least recently used contents, or all, lose their rows; those rows."""
        rows = self.ages.take(count)
        self.let_go(rows)
        return rows

    def may_go(self, rows: Rows) -> NDArray[np.bool_]:
        """Of each row whether what it holds may make room."""
        is_kept: NDArray[np.bool_] = (self.pins[rows] > 0) | self.is_session_pinned[rows]
        may_go: NDArray[np.bool_] = (self.state[rows] == READY) & ~is_kept
        return may_go

    def let_go(self, rows: Rows) -> None:
        self.state[rows] = ABSENT
        self.ages.remove(rows)
        self.free += rows.tolist()

    def contents(self, rows: Rows) -> dict[int, list[bytes]]:
        """What rows hold, by group."""
        if len(self.row_of) == 1:
            return {group: [self.hash[row] for row in rows.tolist()] for group in self.row_of}
        by_group: dict[int, list[bytes]] = {}
        for group, row in zip(self.group[rows].tolist(), rows.tolist(), strict=True):
            by_group.setdefault(group, []).append(self.hash[row])
        return by_group

    def find(self, group: int, hashes: Sequence[bytes]) -> Rows:
        """The row of each content, -1 for those that are not known; rows that are free are no content's."""
        row_of = self.row_of[group]
        if len(hashes) < _FEW:
            return np.fromiter(map(row_of.get, hashes, repeat(-1)), np.intp, len(hashes))
        hashes = list(hashes)
        found = _find_stretches(row_of, self.hash, hashes)
        # A row keeps the hash of what it held, and another group may hold the same hash beside ours.
        is_doubtful = (self.state[found] == ABSENT) | (self.group[found] != group)
        is_doubtful &= found >= 0
        for place in np.flatnonzero(is_doubtful).tolist():
            found[place] = row_of.get(hashes[place], -1)
        return found

    def put(self, group: int, hashes: list[bytes], taken: list[int]) -> None:
        """Contents are pending in rows that were free; what these held before is forgotten."""
        row_of = self.row_of[group]
        rows = np.array(taken, dtype=np.intp)
        for content, row, former in zip(hashes, taken, self.group[rows].tolist(), strict=True):
            known, gone = self.row_of[former], self.hash[row]
            if known.get(gone) == row:
                del known[gone]
            self.hash[row] = content
            row_of[content] = row
        self.group[rows] = group
        self.state[rows] = PENDING


def _find_stretches(row_of: dict[bytes, int], hash_of: list[bytes], hashes: list[bytes]) -> Rows:
    """The row of each content, or one that held it before; -1 where neither is known.

    What follows one another in a sequence lies in neighbouring rows, as a rule. To compare stretches of
    hashes takes a third of the time that it takes to look them up one by one.
    """
    found = np.empty(len(hashes), dtype=np.intp)
    place, singles, stretch = 0, 1, _SHORTEST_STRETCH
    while place < len(hashes):
        end = min(place + singles, len(hashes))
        found[place:end] = [row_of.get(content, -1) for content in hashes[place:end]]
        place, row = end, int(found[end - 1]) + 1
        length = 0
        while row and stretch:
            theirs, ours = hash_of[row : row + stretch], hashes[place : place + stretch]
            same = min(len(theirs), len(ours))
            if theirs != ours:
                same = next(compress(count(), map(ne, theirs, ours)), same)
            found[place : place + same] = np.arange(row, row + same)
            place, row, length = place + same, row + same, length + same
            stretch = min(2 * stretch, _LONGEST_STRETCH) if same == stretch else 0
        # Where there are no stretches, more are looked up one by one before another try.
        singles = 1 if length else min(2 * singles, _MOST_SINGLES)
        stretch = min(max(_SHORTEST_STRETCH, length), _LONGEST_STRETCH)
    return found
