"""Which contents host memory holds, in which rows, and which of them make room for others.

Pure bookkeeping: no memory, no clock. A call takes time for the contents that it is given, never for all that
the index holds.
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
    """Some of the rows 0 to ``num_rows - 1``, least recently used first.

    The order is a log: a row that is used again gets a new entry, and its old one is void, skipped once,
    or dropped when the log is full. A use of thousands of rows is a few operations on arrays.
    """

    def __init__(self, num_rows: int) -> None:
        self._log: Rows = np.empty(_ENTRIES_PER_ROW * max(num_rows, _FIRST_LOOK), dtype=np.intp)
        self._first = self._end = 0
        # By row the place of its valid entry in the log.
        self._place: Rows = np.full(num_rows, _NOWHERE, dtype=np.intp)

    def append(self, rows: Rows) -> None:
        """Rows were used now, the last of them last."""
        if self._end + len(rows) > len(self._log):
            self._compact(len(rows))
        end = self._end + len(rows)
        self._log[self._end : end] = rows
        # Of a row that is given twice the later entry stays.
        self._place[rows] = np.arange(self._end, end)
        self._end = end

    def remove(self, rows: Rows) -> None:
        """Rows have no age; those that have none already are skipped."""
        self._place[rows] = _NOWHERE

    def take(self, count: int) -> Rows:
        """Remove the ``count`` oldest rows, or all."""
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
        """Those that have an age, oldest first."""
        return self._log[self._valid(self._first, self._end)]

    def _valid(self, first: int, end: int) -> Rows:
        return first + np.flatnonzero(self._place[self._log[first:end]] == np.arange(first, end))

    def _compact(self, room: int) -> None:
        """Drop the void entries, and see that so many more have room."""
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


# Of what was dropped while it was pinned the state is that of absent contents.
_STATES = (*ContentState, ContentState.ABSENT)


@dataclass(eq=False)
class GroupCounts:
    """Rows of a cache group; ``held`` are those of what is ready, pending, or was dropped while pinned."""

    held: int
    ready: int
    pending: int
    pinned: int


class TierIndex:
    """The contents of host memory: absent, pending (a row is reserved and being filled), or ready.

    The least recently used makes room, from any group, among those whose rows are equally long. All
    methods take hashes of one group, in the order of the sequence where there is one: its beginning is kept
    longer than its end, which is void without it.
    """

    def __init__(self, plan: ArenaPlan) -> None:
        self._plan = plan
        # Of each class of the plan its rows.
        self.classes = [
            ClassRows(rows.num_rows, plan.groups_of(index)) for index, rows in enumerate(plan.classes)
        ]
        self.events: TierEvents | None = None
        """Where it is noted what is ready, and what is so no more, if events are published."""
        self.session_pins_lost: Callable[[int, Sequence[bytes]], None] = lambda group, hashes: None
        """Called with contents that sessions have pinned and that are about to be dropped: it unpins them."""

    def lookup(self, group: int, hashes: Sequence[bytes]) -> int:
        """How many of the hashes, from the first on, are ready."""
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
        """Of each content whether it is ready or pending."""
        rows = self._rows(group)
        state = rows.state[rows.find(group, hashes)]
        has: list[bool] = ((state == READY) | (state == PENDING)).tolist()
        return has

    def rows_of(self, group: int, hashes: Sequence[bytes]) -> list[int]:
        """The rows of contents that are ready. Raises ``LocalError``: one of them is not."""
        found: list[int] = self._find_in(group, hashes, READY).tolist()
        return found

    def reserve(self, group: int, hashes: Sequence[bytes]) -> tuple[list[bytes], list[int]]:
        """Take rows for those of the contents that are absent; they are pending from now on.

        Returns the contents that got a row, in order, and their rows. Those that are there already count as
        used. Where there is no room the last ones get nothing, and what was dropped while it was pinned gets
        nothing until it is unpinned. Nothing that is pinned, pending or among ``hashes`` makes room.
        """
        rows = self._rows(group)
        found = rows.find(group, hashes)
        states = rows.state[found]
        used = found[(states == READY) & (rows.pins[found] == 0) & ~rows.is_session_pinned[found]]
        rows.ages.remove(used)
        absent = list(dict.fromkeys(compress(hashes, (states == ABSENT).tolist())))
        if len(absent) > len(rows.free):
            evicted = rows.evict(len(absent) - len(rows.free))
            # Before the rows hold something else.
            self._lost(rows, evicted)
        taken = rows.take(len(absent))
        del absent[len(taken) :]
        rows.put(group, absent, taken)
        rows.ages.append(used[::-1])
        return absent, taken

    def commit(self, group: int, hashes: Sequence[bytes]) -> None:
        """Pending contents are ready. Raises ``LocalError``: one is not pending; none is changed then."""
        rows, hashes = self._rows(group), list(dict.fromkeys(hashes))
        found = self._find_in(group, hashes, PENDING)
        rows.state[found] = READY
        rows.ages.append(found[~rows.is_session_pinned[found]][::-1])
        if self.events is not None:
            self.events.stored(HOST, group, hashes)

    def drop(self, group: int, hashes: Sequence[bytes]) -> None:
        """Forget contents: pending ones that failed, ready ones that are useless. Absent ones are skipped.

        A pinned one is absent at once, but its row is taken until it is unpinned.
        """
        rows = self._rows(group)
        found = rows.find(group, list(dict.fromkeys(hashes)))
        self._drop(group, found[rows.state[found] == READY])
        pending = found[rows.state[found] == PENDING]
        self._lose_session_pins(group, pending)
        rows.let_go(pending)

    def drop_unused(self, group: int, hashes: Sequence[bytes]) -> None:
        """Forget those that are ready and not pinned."""
        rows = self._rows(group)
        found = rows.find(group, list(dict.fromkeys(hashes)))
        self._drop(group, found[rows.may_go(found)])

    def clear(self) -> None:
        """Forget all that is ready; pinned rows become free when they are unpinned. Pending contents stay."""
        for group in self._plan.groups:
            rows = self._rows(group)
            self._drop(group, np.flatnonzero((rows.state[:-1] == READY) & (rows.group == group)))

    def pin(self, group: int, hashes: Sequence[bytes]) -> None:
        """Keep ready contents until they are unpinned as often. Raises ``LocalError``: one is not ready."""
        rows = self._rows(group)
        found = self._find_in(group, hashes, READY)
        rows.ages.remove(found)
        # A number of the array's own type: any other takes twenty times as long.
        np.add.at(rows.pins, found, np.int32(1))

    def unpin(self, group: int, hashes: Sequence[bytes]) -> None:
        """Take back a pin of each, as a use. Raises ``LocalError``: one is not pinned; none is changed."""
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
        """Whether a session pins contents, ready or pending: then they make room for nothing.

        No count is kept. The end of it is a use, and what is dropped is pinned no more.
        """
        rows = self._rows(group)
        found = rows.find(group, hashes)
        rows.is_session_pinned[found] = is_pinned
        rows.ages.remove(found)
        rows.ages.append(found[rows.may_go(found)][::-1])

    def touch(self, group: int, hashes: Sequence[bytes]) -> None:
        """Contents were used. The first of them is kept longest; what is not ready is skipped."""
        rows = self._rows(group)
        found = rows.find(group, hashes)
        rows.ages.append(found[rows.may_go(found)][::-1])

    def counts(self) -> dict[int, GroupCounts]:
        """Rows by cache group. It takes time for all that the index holds."""
        counts = {}
        for group in self._plan.groups:
            rows = self._rows(group)
            is_ours = rows.group == group
            state, pins = rows.state[:-1][is_ours], rows.pins[:-1][is_ours]
            each = (state, state == READY, state == PENDING, pins)
            counts[group] = GroupCounts(*(int(np.count_nonzero(some)) for some in each))
        return counts

    def held_rows(self) -> tuple[int, ...]:
        """Rows that are not free, by class."""
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
        """Forget what is ready in these rows of a group."""
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
