"""The index of host memory: which contents are in which rows, and in which order they are evicted.

Pure bookkeeping: it touches no row's memory and no clock. A call costs time in proportion to its contents,
not to the size of the index.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import compress, islice, repeat

import numpy as np
from numpy.typing import NDArray

from kvconnect.errors import LocalError
from kvconnect.offload.index.budgets import ArenaPlan
from kvconnect.offload.tier import HOST
from kvconnect.offload.tier_events import TierEvents

Rows = NDArray[np.intp]


class ContentState(enum.IntEnum):
    ABSENT = 0
    PENDING = 1
    READY = 2


ABSENT, PENDING, READY = (int(state) for state in ContentState)
# A content that was dropped while pinned: it counts as absent, but a job still reads its row.
DOOMED = 3


class ClassRows:
    """The rows of one class, and the content of each; ``hash`` and ``group`` of a free row mean nothing.

    ``ages`` are the rows of which ``may_go`` is true, least recently used first. The last element of
    ``state`` and ``pins`` belongs to unknown contents, whose row is -1.
    """

    def __init__(self, num_rows: int, groups: Iterable[int]) -> None:
        self.num_rows = num_rows
        self.row_of: dict[int, dict[bytes, int]] = {group: {} for group in groups}
        # A stack: the rows freed last are taken first.
        self.free = list(range(num_rows - 1, -1, -1))
        self.ages: dict[int, None] = {}
        self.state: NDArray[np.uint8] = np.zeros(num_rows + 1, dtype=np.uint8)
        self.pins: NDArray[np.int32] = np.zeros(num_rows + 1, dtype=np.int32)
        self.group: NDArray[np.int32] = np.full(num_rows, min(self.row_of), dtype=np.int32)
        self.hash: list[bytes] = [b""] * num_rows

    def take(self, count: int) -> list[int]:
        """Take ``count`` free rows, or all if there are fewer; returns them in rising order."""
        first = max(0, len(self.free) - count)
        rows = sorted(self.free[first:])
        del self.free[first:]
        return rows

    def may_go(self, rows: Rows) -> NDArray[np.bool_]:
        """For each row whether its content may be evicted."""
        may_go: NDArray[np.bool_] = (self.state[rows] == READY) & (self.pins[rows] == 0)
        return may_go

    def keep(self, rows: Rows) -> None:
        """Rows are not to be evicted for now."""
        for row in rows.tolist():
            self.ages.pop(row, None)

    def use(self, rows: Rows) -> None:
        """Mark those rows that may be evicted as used, the first one most recently."""
        rows = rows[self.may_go(rows)][::-1]
        self.keep(rows)
        self.ages.update(dict.fromkeys(rows.tolist()))

    def let_go(self, rows: Rows) -> None:
        """Free rows, and forget their contents."""
        self.keep(rows)
        self.state[rows] = ABSENT
        for group, hashes in self.contents(rows).items():
            for name in hashes:
                del self.row_of[group][name]
        self.free += rows.tolist()

    def contents(self, rows: Rows) -> dict[int, list[bytes]]:
        """The hashes in rows, by group."""
        by_group: dict[int, list[bytes]] = {}
        for group, row in zip(self.group[rows].tolist(), rows.tolist(), strict=True):
            by_group.setdefault(group, []).append(self.hash[row])
        return by_group

    def find(self, group: int, hashes: Sequence[bytes]) -> Rows:
        """The row of each content, -1 for unknown ones."""
        return np.fromiter(map(self.row_of[group].get, hashes, repeat(-1)), np.intp, len(hashes))

    def put(self, group: int, hashes: list[bytes], rows: list[int]) -> None:
        """Assign rows to contents, which are pending now."""
        self.row_of[group].update(zip(hashes, rows, strict=True))
        for content, row in zip(hashes, rows, strict=True):
            self.hash[row] = content
        self.group[rows] = group
        self.state[rows] = PENDING


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
        """Called with pinned contents that are about to be dropped; the callee removes pins of sessions."""

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
        rows.keep(found)
        absent = list(dict.fromkeys(compress(hashes, (states == ABSENT).tolist())))
        if (short := len(absent) - len(rows.free)) > 0:
            evicted = np.fromiter(islice(rows.ages, short), np.intp)
            self._lost(rows, evicted)
            rows.let_go(evicted)
        taken = rows.take(len(absent))
        del absent[len(taken) :]
        rows.put(group, absent, taken)
        rows.use(found)
        return absent, taken

    def commit(self, group: int, hashes: Sequence[bytes]) -> None:
        """Make pending contents ready. Raises ``LocalError``: one is not pending; none is changed then."""
        rows, hashes = self._rows(group), list(dict.fromkeys(hashes))
        found = self._find_in(group, hashes, PENDING)
        rows.state[found] = READY
        rows.use(found)
        if self.events is not None:
            self.events.stored(HOST, group, hashes)

    def drop(self, group: int, hashes: Sequence[bytes]) -> None:
        """Forget ready and pending contents; absent ones are skipped.

        A pinned content is absent at once, but its row stays taken until the content is unpinned.
        """
        rows = self._rows(group)
        found = rows.find(group, list(dict.fromkeys(hashes)))
        self._drop(group, found[(rows.state[found] == READY) | (rows.state[found] == PENDING)])

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
        """Add a pin to each content: while it has one it stays. Raises ``LocalError``: one is absent."""
        rows = self._rows(group)
        found = self._find_in(group, hashes, READY, PENDING)
        rows.keep(found)
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
        rows.use(found)
        doomed = found[(rows.pins[found] == 0) & (rows.state[found] == DOOMED)]
        rows.let_go(np.unique(doomed))

    def touch(self, group: int, hashes: Sequence[bytes]) -> None:
        """Mark contents as used, the first one most recently; contents that are not ready are skipped."""
        rows = self._rows(group)
        rows.use(rows.find(group, hashes))

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

    def _find_in(self, group: int, hashes: Sequence[bytes], *states: int) -> Rows:
        rows = self._rows(group)
        found = rows.find(group, hashes)
        is_wrong = ~np.isin(rows.state[found], states)
        if is_wrong.any():
            raise LocalError(
                f"content {hashes[int(is_wrong.argmax())].hex()} of cache group {group} is not "
                f"{' or '.join(ContentState(state).name.lower() for state in states)}"
            )
        return found

    def _drop(self, group: int, held: Rows) -> None:
        """Forget the ready and pending contents in these rows of a group."""
        rows = self._rows(group)
        self._lost(rows, held[rows.state[held] == READY])
        if len(pinned := held[rows.pins[held] > 0]):
            self.session_pins_lost(group, [rows.hash[row] for row in pinned.tolist()])
        rows.state[held] = DOOMED
        rows.let_go(held[rows.pins[held] == 0])

    def _lost(self, rows: ClassRows, gone: Rows) -> None:
        if self.events is not None and len(gone):
            for group, hashes in rows.contents(gone).items():
                self.events.removed(HOST, group, hashes)
