"""The index of host memory: which contents are in which rows, and in which order they are evicted.

Pure bookkeeping: it touches no row's memory and no clock. A call costs time in proportion to its contents,
not to the size of the index.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import compress, count, repeat
from operator import ne

import numpy as np
from numpy.typing import NDArray

from kvconnect.errors import LocalError
from kvconnect.offload.index.budgets import ArenaPlan
from kvconnect.offload.tier import HOST
from kvconnect.offload.tier_events import TierEvents

Rows = NDArray[np.intp]

_ENTRIES_PER_ROW = 4
_FIRST_LOOK = 64
_NOWHERE = -1


class AgeOrder:
    """An LRU order of some of the rows 0 to ``num_rows - 1``, least recently used first.

    The order is a log: a row that is used again gets a new entry, which makes its old one void. Void entries
    are skipped, and dropped when the log is full. Using thousands of rows is a few operations on arrays.
    """

    def __init__(self, num_rows: int) -> None:
        self._log: Rows = np.empty(_ENTRIES_PER_ROW * max(num_rows, _FIRST_LOOK), dtype=np.intp)
        self._first = self._end = 0
        # By row the place of its valid entry in the log.
        self._place: Rows = np.full(num_rows, _NOWHERE, dtype=np.intp)

    def append(self, rows: Rows) -> None:
        """Mark rows as used now, the last one most recently."""
        if self._end + len(rows) > len(self._log):
            self._compact(len(rows))
        end = self._end + len(rows)
        self._log[self._end : end] = rows
        # For a row given twice the later entry is valid.
        self._place[rows] = np.arange(self._end, end)
        self._end = end

    def remove(self, rows: Rows) -> None:
        """Remove rows from the order; rows that are not in it are skipped."""
        self._place[rows] = _NOWHERE

    def take(self, count: int) -> Rows:
        """Remove and return the ``count`` oldest rows, or all if there are fewer."""
        taken = [np.empty(0, dtype=np.intp)]
        look = max(_FIRST_LOOK, 2 * count)
        while count and self._first < self._end:
            end = min(self._first + look, self._end)
            valid = self._valid(self._first, end)[:count]
            count -= len(valid)
            taken.append(self._log[valid])
            self._first = end if count else int(valid[-1]) + 1
            look *= 2
        rows = np.concatenate(taken)
        self._place[rows] = _NOWHERE
        return rows

    def rows(self) -> Rows:
        """All rows in the order, oldest first."""
        return self._log[self._valid(self._first, self._end)]

    def _valid(self, first: int, end: int) -> Rows:
        return first + np.flatnonzero(self._place[self._log[first:end]] == np.arange(first, end))

    def _compact(self, room: int) -> None:
        """Drop void entries, and make the log hold ``room`` more entries."""
        rows = self.rows()
        if len(rows) + room > len(self._log):
            self._log = np.empty(2 * (len(rows) + room), dtype=np.intp)
        self._first, self._end = 0, len(rows)
        self._log[: len(rows)] = rows
        self._place[rows] = np.arange(len(rows))


class ContentState(enum.IntEnum):
    ABSENT = 0
    PENDING = 1
    READY = 2


ABSENT, PENDING, READY = (int(state) for state in ContentState)
# A content that was dropped while pinned: it counts as absent, but a job still reads its row.
DOOMED = 3
_FEW = 24
_SHORTEST_STRETCH, _LONGEST_STRETCH = 8, 2048
_MOST_SINGLES = 128


class ClassRows:
    """The rows of one class, and the content of each. ``ages`` has only ready rows without any pin.

    The ``hash`` of a free row is that of its former content, and is forgotten when the row is taken again:
    freeing must be fast. The last element of ``state``, ``pins`` and ``is_session_pinned`` belongs to unknown
    contents, whose row is -1.
    """

    def __init__(self, num_rows: int, groups: Iterable[int]) -> None:
        self.num_rows = num_rows
        self.row_of: dict[int, dict[bytes, int]] = {group: {} for group in groups}
        # A stack: the rows freed last are taken first.
        self.free = list(range(num_rows - 1, -1, -1))
        self.ages = AgeOrder(num_rows)
        self.state: NDArray[np.uint8] = np.zeros(num_rows + 1, dtype=np.uint8)
        self.pins: NDArray[np.int32] = np.zeros(num_rows + 1, dtype=np.int32)
        self.is_session_pinned: NDArray[np.bool_] = np.zeros(num_rows + 1, dtype=np.bool_)
        self.group: NDArray[np.int32] = np.full(num_rows, min(self.row_of), dtype=np.int32)
        self.hash: list[bytes] = [b""] * num_rows

    def take(self, count: int) -> list[int]:
        """Take ``count`` free rows, or all if there are fewer; returns them in rising order."""
        first = max(0, len(self.free) - count)
        rows = sorted(self.free[first:])
        del self.free[first:]
        return rows

    def evict(self, count: int) -> Rows:
        """Evict the ``count`` least recently used contents, or all; returns their rows."""
        rows = self.ages.take(count)
        self.let_go(rows)
        return rows

    def may_go(self, rows: Rows) -> NDArray[np.bool_]:
        """For each row whether its content may be evicted."""
        is_kept: NDArray[np.bool_] = (self.pins[rows] > 0) | self.is_session_pinned[rows]
        may_go: NDArray[np.bool_] = (self.state[rows] == READY) & ~is_kept
        return may_go

    def let_go(self, rows: Rows) -> None:
        self.state[rows] = ABSENT
        self.ages.remove(rows)
        self.free += rows.tolist()

    def contents(self, rows: Rows) -> dict[int, list[bytes]]:
        """The hashes in rows, by group."""
        if len(self.row_of) == 1:
            return {group: [self.hash[row] for row in rows.tolist()] for group in self.row_of}
        by_group: dict[int, list[bytes]] = {}
        for group, row in zip(self.group[rows].tolist(), rows.tolist(), strict=True):
            by_group.setdefault(group, []).append(self.hash[row])
        return by_group

    def find(self, group: int, hashes: Sequence[bytes]) -> Rows:
        """The row of each content, -1 for unknown ones. A returned row is free if its state is ABSENT."""
        row_of = self.row_of[group]
        if len(hashes) < _FEW:
            return np.fromiter(map(row_of.get, hashes, repeat(-1)), np.intp, len(hashes))
        hashes = list(hashes)
        found = _find_stretches(row_of, self.hash, hashes)
        # A free row keeps its former hash, and another group may hold the same hash in this class.
        is_doubtful = (self.state[found] == ABSENT) | (self.group[found] != group)
        is_doubtful &= found >= 0
        for place in np.flatnonzero(is_doubtful).tolist():
            found[place] = row_of.get(hashes[place], -1)
        return found

    def put(self, group: int, hashes: list[bytes], taken: list[int]) -> None:
        """Assign free rows to contents, which are pending now, and forget the rows' former contents."""
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
    """The row of each content, or a row that held it before; -1 if there is neither.

    Consecutive blocks of a sequence mostly lie in neighbouring rows. Comparing stretches of hashes takes a
    third of the time of single lookups.
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
        # Without a stretch, try the next one only after more single lookups.
        singles = 1 if length else min(2 * singles, _MOST_SINGLES)
        stretch = min(max(_SHORTEST_STRETCH, length), _LONGEST_STRETCH)
    return found


# DOOMED contents count as absent.
_STATES = (*ContentState, ContentState.ABSENT)


@dataclass(eq=False)
class GroupCounts:
    """Numbers of rows of a cache group; ``held`` counts ready, pending and doomed (dropped while pinned)."""

    held: int
    ready: int
    pending: int
    pinned: int


class TierIndex:
    """The contents of host memory: absent, pending (a row is reserved and being filled), or ready.

    When no row is free, the least recently used content of the class is evicted, whichever its group. All
    methods take hashes of one group, in the order of the sequence where there is one: a sequence is evicted
    from its end, because no hit can use the end without the beginning.
    """

    def __init__(self, plan: ArenaPlan) -> None:
        self._plan = plan
        # By class of the plan.
        self.classes = [
            ClassRows(rows.num_rows, plan.groups_of(index)) for index, rows in enumerate(plan.classes)
        ]
        self.events: TierEvents | None = None
        """Receives contents that become ready or are dropped; None if no events are published."""
        self.session_pins_lost: Callable[[int, Sequence[bytes]], None] = lambda group, hashes: None
        """Called with session-pinned contents that are about to be dropped; the callee unpins them."""

    def lookup(self, group: int, hashes: Sequence[bytes]) -> int:
        """The number of ready contents from the first hash on, up to the first one that is not ready."""
        rows = self._rows(group)
        first, length = 0, 16
        while first < len(hashes):
            part = hashes[first : first + length]
            is_missing = rows.state[rows.find(group, part)] != READY
            if is_missing.any():
                return first + int(is_missing.argmax())
            first += len(part)
            length = min(8 * length, 8192)
        return first

    def states(self, group: int, hashes: Sequence[bytes]) -> list[ContentState]:
        rows = self._rows(group)
        return [_STATES[state] for state in rows.state[rows.find(group, hashes)].tolist()]

    def has(self, group: int, hashes: Sequence[bytes]) -> list[bool]:
        """For each content whether it is ready or pending."""
        rows = self._rows(group)
        state = rows.state[rows.find(group, hashes)]
        has: list[bool] = ((state == READY) | (state == PENDING)).tolist()
        return has

    def rows_of(self, group: int, hashes: Sequence[bytes]) -> list[int]:
        """The rows of ready contents. Raises ``LocalError``: one of them is not ready."""
        found: list[int] = self._find_in(group, hashes, READY).tolist()
        return found

    def reserve(self, group: int, hashes: Sequence[bytes]) -> tuple[list[bytes], list[int]]:
        """Take rows for the absent contents, which become pending, and mark the ready ones as used.

        Returns the contents that got a row, in order, and their rows. If rows are short the last contents get
        none. A content that was dropped while pinned gets none until it is unpinned. No content that is
        pinned, pending or in ``hashes`` is evicted.
        """
        rows = self._rows(group)
        found = rows.find(group, hashes)
        states = rows.state[found]
        used = found[(states == READY) & (rows.pins[found] == 0) & ~rows.is_session_pinned[found]]
        rows.ages.remove(used)
        absent = list(dict.fromkeys(compress(hashes, (states == ABSENT).tolist())))
        if len(absent) > len(rows.free):
            evicted = rows.evict(len(absent) - len(rows.free))
            # Before the rows get other contents.
            self._lost(rows, evicted)
        taken = rows.take(len(absent))
        del absent[len(taken) :]
        rows.put(group, absent, taken)
        rows.ages.append(used[::-1])
        return absent, taken

    def commit(self, group: int, hashes: Sequence[bytes]) -> None:
        """Make pending contents ready. Raises ``LocalError``: one is not pending; none is changed then."""
        rows, hashes = self._rows(group), list(dict.fromkeys(hashes))
        found = self._find_in(group, hashes, PENDING)
        rows.state[found] = READY
        rows.ages.append(found[~rows.is_session_pinned[found]][::-1])
        if self.events is not None:
            self.events.stored(HOST, group, hashes)

    def drop(self, group: int, hashes: Sequence[bytes]) -> None:
        """Forget ready and pending contents; absent ones are skipped.

        A pinned content is absent at once, but its row stays taken until the content is unpinned.
        """
        rows = self._rows(group)
        found = rows.find(group, list(dict.fromkeys(hashes)))
        self._drop(group, found[rows.state[found] == READY])
        pending = found[rows.state[found] == PENDING]
        self._lose_session_pins(group, pending)
        rows.let_go(pending)

    def drop_unused(self, group: int, hashes: Sequence[bytes]) -> None:
        """Forget contents that are ready and not pinned."""
        rows = self._rows(group)
        found = rows.find(group, list(dict.fromkeys(hashes)))
        self._drop(group, found[rows.may_go(found)])

    def clear(self) -> None:
        """Forget all ready contents; pinned rows become free when unpinned. Pending contents stay."""
        for group in self._plan.groups:
            rows = self._rows(group)
            self._drop(group, np.flatnonzero((rows.state[:-1] == READY) & (rows.group == group)))

    def pin(self, group: int, hashes: Sequence[bytes]) -> None:
        """Add a pin to each content: while it has one it stays. Raises ``LocalError``: one is not ready."""
        rows = self._rows(group)
        found = self._find_in(group, hashes, READY)
        rows.ages.remove(found)
        # A scalar of the array's type is twenty times faster than any other.
        np.add.at(rows.pins, found, np.int32(1))

    def unpin(self, group: int, hashes: Sequence[bytes]) -> None:
        """Remove a pin of each content, as a use. Raises ``LocalError``: one has no pin; none is changed."""
        rows = self._rows(group)
        found = rows.find(group, hashes)
        np.subtract.at(rows.pins, found, np.int32(1))
        if len(found) and rows.pins[found].min() < 0:
            np.add.at(rows.pins, found, np.int32(1))
            raise LocalError(f"a content of cache group {group} is unpinned more often than it was pinned")
        free = found[rows.pins[found] == 0]
        rows.ages.append(free[rows.may_go(free)][::-1])
        doomed = free[rows.state[free] == DOOMED]
        if len(doomed):
            rows.let_go(np.unique(doomed))

    def set_session_pins(self, group: int, hashes: Sequence[bytes], is_pinned: bool) -> None:
        """Set or remove the session pin of contents, ready or pending: pinned ones are not evicted.

        The pin is a flag, not a count. Removing it is a use of the content.
        """
        rows = self._rows(group)
        found = rows.find(group, hashes)
        rows.is_session_pinned[found] = is_pinned
        rows.ages.remove(found)
        rows.ages.append(found[rows.may_go(found)][::-1])

    def touch(self, group: int, hashes: Sequence[bytes]) -> None:
        """Mark contents as used, the first one most recently; contents that are not ready are skipped."""
        rows = self._rows(group)
        found = rows.find(group, hashes)
        rows.ages.append(found[rows.may_go(found)][::-1])

    def counts(self) -> dict[int, GroupCounts]:
        """Rows by cache group. Costs time in proportion to the size of the index."""
        counts = {}
        for group in self._plan.groups:
            rows = self._rows(group)
            is_ours = rows.group == group
            state, pins = rows.state[:-1][is_ours], rows.pins[:-1][is_ours]
            each = (state, state == READY, state == PENDING, pins)
            counts[group] = GroupCounts(*(int(np.count_nonzero(some)) for some in each))
        return counts

    def held_rows(self) -> tuple[int, ...]:
        """The number of rows that are not free, by class."""
        return tuple(rows.num_rows - len(rows.free) for rows in self.classes)

    def _rows(self, group: int) -> ClassRows:
        return self.classes[self._plan.class_index(group)]

    def _find_in(self, group: int, hashes: Sequence[bytes], state: int) -> Rows:
        rows = self._rows(group)
        found = rows.find(group, hashes)
        is_wrong = rows.state[found] != state
        if is_wrong.any():
            raise LocalError(
                f"content {hashes[int(is_wrong.argmax())].hex()} of cache group {group} is not "
                f"{ContentState(state).name.lower()}"
            )
        return found

    def _drop(self, group: int, ready: Rows) -> None:
        """Forget the ready contents in these rows of a group."""
        rows = self._rows(group)
        self._lost(rows, ready)
        self._lose_session_pins(group, ready)
        pinned = rows.pins[ready] > 0
        rows.state[ready[pinned]] = DOOMED
        rows.let_go(ready[~pinned])

    def _lose_session_pins(self, group: int, gone: Rows) -> None:
        lost = gone[self._rows(group).is_session_pinned[gone]]
        if len(lost):
            self.session_pins_lost(group, [self._rows(group).hash[row] for row in lost.tolist()])

    def _lost(self, rows: ClassRows, gone: Rows) -> None:
        if self.events is not None and len(gone):
            for group, hashes in rows.contents(gone).items():
                self.events.removed(HOST, group, hashes)
