"""The index of host memory: which contents are in which rows, and in which order they are evicted.

Pure bookkeeping: it touches no row's memory and no clock. A call costs time in proportion to its contents,
not to the size of the index.
"""

from __future__ import annotations

import enum
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, repeat

from kvconnect.errors import LocalError
from kvconnect.offload.index.budgets import ArenaPlan
from kvconnect.offload.tier import HOST, Content
from kvconnect.offload.tier_events import TierEvents


class ContentState(enum.IntEnum):
    ABSENT = 0
    PENDING = 1
    READY = 2


ABSENT, PENDING, READY = (int(state) for state in ContentState)
# A content that was dropped while pinned: it counts as absent, but a job still reads its row.
DOOMED = 3
_STATES = (*ContentState, ContentState.ABSENT)


class ClassRows:
    """The rows of one class, and the content of each; that of a free row means nothing.

    ``ages`` are the ready rows without a pin, least recently used first. The last element of ``state`` and
    ``pins`` belongs to unknown contents, whose row is -1.
    """

    def __init__(self, num_rows: int, groups: Iterable[int]) -> None:
        self.num_rows = num_rows
        self.row_of: dict[int, dict[bytes, int]] = {group: {} for group in groups}
        # A stack: the rows freed last are taken first.
        self.free = list(range(num_rows - 1, -1, -1))
        # Not a plain dictionary: that is searched from its front past everything that was taken from there.
        self.ages = OrderedDict[int, None]()
        self.state = [ABSENT] * (num_rows + 1)
        self.pins = [0] * (num_rows + 1)
        self.content: list[Content] = [(0, b"")] * num_rows

    def take(self, count: int) -> list[int]:
        """Take ``count`` free rows, or all if there are fewer; returns them in rising order."""
        first = max(0, len(self.free) - count)
        rows = sorted(self.free[first:])
        del self.free[first:]
        return rows

    def use(self, rows: Iterable[int]) -> None:
        """Mark those rows that may be evicted as used, the last one most recently."""
        for row in rows:
            if self.state[row] == READY and not self.pins[row]:
                self.ages.pop(row, None)
                self.ages[row] = None

    def let_go(self, rows: Iterable[int]) -> None:
        """Free rows, and forget their contents."""
        for row in rows:
            self.ages.pop(row, None)
            self.state[row] = ABSENT
            group, name = self.content[row]
            del self.row_of[group][name]
            self.free.append(row)

    def find(self, group: int, hashes: Iterable[bytes]) -> list[int]:
        """The row of each content, -1 for unknown ones."""
        return list(map(self.row_of[group].get, hashes, repeat(-1)))

    def put(self, group: int, hashes: Sequence[bytes], rows: Sequence[int]) -> None:
        """Assign rows to contents, which are pending now."""
        self.row_of[group].update(zip(hashes, rows, strict=True))
        for name, row in zip(hashes, rows, strict=True):
            self.content[row] = group, name
            self.state[row] = PENDING


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
    from its end, because no hit can use the end without the beginning. ``events`` receives contents that
    become ready or are dropped, if events are published.
    """

    def __init__(self, plan: ArenaPlan, events: TierEvents | None = None) -> None:
        self._plan = plan
        # By class of the plan.
        self.classes = [
            ClassRows(rows.num_rows, plan.groups_of(index)) for index, rows in enumerate(plan.classes)
        ]
        self._events = events
        self.session_pins_lost: Callable[[int, Sequence[bytes]], None] = lambda group, hashes: None
        """Called with pinned contents that are about to be dropped; the callee removes pins of sessions."""

    def states(self, group: int, hashes: Iterable[bytes]) -> list[ContentState]:
        rows = self._rows(group)
        return [_STATES[rows.state[row]] for row in rows.find(group, hashes)]

    def has(self, group: int, hashes: Iterable[bytes]) -> list[bool]:
        """For each content whether it is ready or pending."""
        return [state is not ContentState.ABSENT for state in self.states(group, hashes)]

    def rows_of(self, group: int, hashes: Sequence[bytes]) -> list[int]:
        """The rows of ready contents. Raises ``LocalError``: one of them is not ready."""
        return self._find_in(group, hashes, READY)

    def reserve(self, group: int, hashes: Sequence[bytes]) -> tuple[list[bytes], list[int]]:
        """Take rows for the absent contents, which become pending, and mark the ready ones as used.

        Returns the contents that got a row, in order, and their rows. If rows are short the last contents get
        none. A content that was dropped while pinned gets none until it is unpinned. No content that is
        pinned, pending or in ``hashes`` is evicted.
        """
        rows = self._rows(group)
        found = rows.find(group, hashes)
        for row in found:
            rows.ages.pop(row, None)
        absent = list(dict.fromkeys(name for name, row in zip(hashes, found, strict=True) if row < 0))
        if (short := len(absent) - len(rows.free)) > 0:
            evicted = list(islice(rows.ages, short))
            self._lost(rows, evicted)
            rows.let_go(evicted)
        taken = rows.take(len(absent))
        del absent[len(taken) :]
        rows.put(group, absent, taken)
        rows.use(reversed(found))
        return absent, taken

    def commit(self, group: int, hashes: Sequence[bytes]) -> None:
        """Make pending contents ready. Raises ``LocalError``: one is not pending; none is changed then."""
        rows, hashes = self._rows(group), list(dict.fromkeys(hashes))
        found = self._find_in(group, hashes, PENDING)
        for row in found:
            rows.state[row] = READY
        rows.use(reversed(found))
        if self._events is not None:
            self._events.stored(HOST, group, hashes)

    def drop(self, group: int, hashes: Iterable[bytes]) -> None:
        """Forget ready and pending contents; absent ones are skipped.

        A pinned content is absent at once, but its row stays taken until the content is unpinned.
        """
        rows = self._rows(group)
        found = rows.find(group, dict.fromkeys(hashes))
        self._drop(group, [row for row in found if rows.state[row] in (READY, PENDING)])

    def drop_unused(self, group: int, hashes: Iterable[bytes]) -> None:
        """Forget contents that are ready and not pinned."""
        rows = self._rows(group)
        self._drop(group, [row for row in rows.find(group, dict.fromkeys(hashes)) if row in rows.ages])

    def clear(self) -> None:
        """Forget all ready contents; pinned rows become free when unpinned. Pending contents stay."""
        for group in self._plan.groups:
            rows = self._rows(group)
            self._drop(group, [row for row in rows.row_of[group].values() if rows.state[row] == READY])

    def pin(self, group: int, hashes: Sequence[bytes]) -> None:
        """Add a pin to each content: while it has one it stays. Raises ``LocalError``: one is absent."""
        rows = self._rows(group)
        for row in self._find_in(group, hashes, READY, PENDING):
            rows.pins[row] += 1
            rows.ages.pop(row, None)

    def unpin(self, group: int, hashes: Sequence[bytes]) -> None:
        """Remove a pin of each content, as a use. Raises ``LocalError``: one has no pin; none is changed."""
        rows = self._rows(group)
        found = rows.find(group, hashes)
        if any(rows.pins[row] < count for row, count in Counter(found).items()):
            raise LocalError(f"a content of cache group {group} is unpinned more often than it was pinned")
        for row in found:
            rows.pins[row] -= 1
        rows.use(reversed(found))
        rows.let_go([row for row in dict.fromkeys(found) if rows.state[row] == DOOMED and not rows.pins[row]])

    def touch(self, group: int, hashes: Iterable[bytes]) -> None:
        """Mark contents as used, the first one most recently; contents that are not ready are skipped."""
        rows = self._rows(group)
        rows.use(reversed(rows.find(group, hashes)))

    def counts(self) -> dict[int, GroupCounts]:
        """Rows by cache group. Costs time in proportion to the size of the index."""
        counts = {}
        for group in self._plan.groups:
            rows = self._rows(group)
            held = list(rows.row_of[group].values())
            states = Counter(rows.state[row] for row in held)
            pinned = sum(rows.pins[row] > 0 for row in held)
            counts[group] = GroupCounts(len(held), states[READY], states[PENDING], pinned)
        return counts

    def held_rows(self) -> tuple[int, ...]:
        """The number of rows that are not free, by class."""
        return tuple(rows.num_rows - len(rows.free) for rows in self.classes)

    def _rows(self, group: int) -> ClassRows:
        return self.classes[self._plan.class_index(group)]

    def _find_in(self, group: int, hashes: Sequence[bytes], *states: int) -> list[int]:
        rows = self._rows(group)
        found = rows.find(group, hashes)
        for name, row in zip(hashes, found, strict=True):
            if rows.state[row] not in states:
                wanted = " or ".join(ContentState(state).name.lower() for state in states)
                raise LocalError(f"content {name.hex()} of cache group {group} is not {wanted}")
        return found

    def _drop(self, group: int, held: Sequence[int]) -> None:
        """Forget the ready and pending contents in these rows of a group."""
        rows = self._rows(group)
        self._lost(rows, [row for row in held if rows.state[row] == READY])
        if pinned := [rows.content[row][1] for row in held if rows.pins[row]]:
            self.session_pins_lost(group, pinned)
        for row in held:
            rows.state[row] = DOOMED
        rows.let_go([row for row in held if not rows.pins[row]])

    def _lost(self, rows: ClassRows, gone: Iterable[int]) -> None:
        if self._events is not None:
            by_group: dict[int, list[bytes]] = {}
            for row in gone:
                group, name = rows.content[row]
                by_group.setdefault(group, []).append(name)
            for group, hashes in by_group.items():
                self._events.removed(HOST, group, hashes)
