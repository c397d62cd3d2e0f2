"""Which contents host memory holds, in which rows, and which of them make room for others.

Pure bookkeeping: no memory, no clock. A call takes time for the contents that it is given, never for all that
the index holds: see ``python -m benchmarks index``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np

from kvconnect.errors import LocalError
from kvconnect.offload.index.age_order import Rows
from kvconnect.offload.index.budgets import ArenaPlan
from kvconnect.offload.index.class_rows import ABSENT, DOOMED, PENDING, READY, ClassRows, ContentState
from kvconnect.offload.tier import HOST
from kvconnect.offload.tier_events import TierEvents

__all__ = ["ContentState", "GroupCounts", "TierIndex"]

# Of what was dropped while it was pinned the state is that of absent contents.
_STATES = (*ContentState, ContentState.ABSENT)


@dataclass(eq=False)
class GroupCounts:
    """Rows of a cache group, and what has happened to its contents so far.

    ``held`` rows are those of what is ready, pending, or was dropped while it was pinned. ``refused_total``
    are contents for which there was no room.
    """

    held: int = 0
    ready: int = 0
    pending: int = 0
    pinned: int = 0
    stored_total: int = 0
    evicted_total: int = 0
    dropped_total: int = 0
    refused_total: int = 0


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
        self._totals = {group: GroupCounts() for group in plan.groups}
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
            for evicted_group, times in enumerate(np.bincount(rows.group[evicted]).tolist()):
                if times:
                    self._totals[evicted_group].evicted_total += times
            # Before the rows hold something else.
            self._lost(rows, evicted)
        taken = rows.take(len(absent))
        self._totals[group].refused_total += len(absent) - len(taken)
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
        self._totals[group].stored_total += len(hashes)
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
        self._totals[group].dropped_total += len(pending)
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
        """Rows and totals by cache group. It takes time for all that the index holds."""
        for group, counts in self._totals.items():
            rows = self._rows(group)
            is_ours = rows.group == group
            state = rows.state[:-1][is_ours]
            counts.held = int(np.count_nonzero(state))
            counts.ready = int(np.count_nonzero(state == READY))
            counts.pending = int(np.count_nonzero(state == PENDING))
            counts.pinned = int(np.count_nonzero(rows.pins[:-1][is_ours]))
        return self._totals

    def held_rows(self) -> tuple[int, ...]:
        """Rows that are not free, by class."""
        return tuple(rows.num_rows - len(rows.free) for rows in self.classes)

    def _rows(self, group: int) -> ClassRows:
        index = self._plan.class_of.get(group)
        if index is None:
            raise LocalError(f"cache group {group} has no rows; those that have: {list(self._plan.groups)}")
        return self.classes[index]

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
        self._totals[group].dropped_total += len(ready)
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
