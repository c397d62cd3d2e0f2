"""Which contents host memory holds, in which rows, and which of them make room for others.

Pure bookkeeping: no memory, no clock. A call takes time for the contents that it is given, never for all that
the index holds: see ``python -m benchmarks index``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvconnect.errors import LocalError
from kvconnect.offload.index.budgets import ArenaPlan
from kvconnect.offload.index.policies import Policy
from kvconnect.offload.index.shelf import ContentState, Leaving, Shelf

__all__ = ["ContentState", "GroupCounts", "IndexEvents", "TierIndex"]

# Hashes of what has made room are forgotten later, with reservations: twice as many as one of them takes,
# though not a few at a time, and never so many that one of them pays for a mass eviction.
_TIDIED_AT_LEAST, _TIDIED_AT_MOST = 256, 1024


@dataclass(frozen=True)
class IndexEvents:
    """Contents (cache group and hash) that are ready now and were not at the last call, and the reverse.

    Where ``cleared`` is set, nothing was left in between, and ``removed`` is empty.
    """

    stored: tuple[tuple[int, bytes], ...] = ()
    removed: tuple[tuple[int, bytes], ...] = ()
    cleared: bool = False

    def __bool__(self) -> bool:
        return bool(self.stored or self.removed or self.cleared)


@dataclass(frozen=True)
class GroupCounts:
    """Rows of a cache group, and what has happened to its contents so far.

    ``held`` rows are those of what is ready, pending, or was dropped while it was pinned. ``refused_total``
    are contents for which there was no room.
    """

    limit: int
    held: int
    ready: int
    pending: int
    pinned: int
    stored_total: int
    evicted_total: int
    dropped_total: int
    refused_total: int


class _FreeRows:
    """The free rows of one class. The ones freed last are given out first, in rising order."""

    def __init__(self, num_rows: int) -> None:
        self._rows: NDArray[np.int32] = np.arange(num_rows - 1, -1, -1, dtype=np.int32)
        self.count = num_rows

    def take(self, count: int) -> list[int]:
        """So many rows."""
        self.count -= count
        rows: list[int] = self._rows[self.count : self.count + count].tolist()
        rows.sort()
        return rows

    def give(self, rows: Sequence[int] | NDArray[np.int32]) -> None:
        """Rows that are free again."""
        self._rows[self.count : self.count + len(rows)] = rows
        self.count += len(rows)

    def all(self) -> list[int]:
        """Every free row."""
        rows: list[int] = self._rows[: self.count].tolist()
        return rows


class TierIndex:
    """The contents of host memory, for the one who alone decides what is in it.

    A content is a cache group and the hash of all tokens up to the end of a block. It is absent, pending (a
    row is reserved and being filled), or ready. Contents of a group make room for others of the same group;
    where groups share a class of rows, one may use what others leave of it, until they want what is theirs.
    All methods take hashes of one group, in the order of the sequence where there is one: its beginning is
    kept longer than its end, which is of no use without it.

    Args:
        plan: which rows there are.
        policy: which contents make room.
    """

    def __init__(self, plan: ArenaPlan, policy: Policy = "lru") -> None:
        self._plan = plan
        self._free = [_FreeRows(rows.num_rows) for rows in plan.classes]
        self._shelves = {
            group: Shelf(group, plan.limits[group], plan.row_class(group).num_rows, policy)
            for group in plan.groups
        }
        self._sharing = [
            [self._shelves[group] for group in plan.groups_of(index)] for index in range(len(plan.classes))
        ]
        # Nothing is written down for somebody who never asks.
        self._is_asked = False
        # In order: what came, what went by name, what made room.
        self._changes: list[tuple[int, bool, list[bytes] | Leaving]] = []
        self._is_cleared = False

    def lookup(self, group: int, hashes: Sequence[bytes]) -> int:
        """How many of the hashes, from the first on, are ready."""
        return self._shelf(group).lookup(hashes)

    def states(self, group: int, hashes: Sequence[bytes]) -> list[ContentState]:
        """The state of each content. What was dropped while it was pinned is absent."""
        return [_STATES[state] for state in self._shelf(group).states(hashes)]

    def rows_of(self, group: int, hashes: Sequence[bytes]) -> list[int]:
        """The rows of contents that are ready.

        Raises:
            LocalError: one of them is not.
        """
        shelf = self._shelf(group)
        return shelf.rows(shelf.ready_cells(hashes))

    def reserve(self, group: int, hashes: Sequence[bytes]) -> tuple[list[bytes], list[int]]:
        """Take rows for those of the contents that are absent; they are pending from now on.

        Returns the contents that got a row, in order, and their rows. Contents that are there already keep
        theirs and are refreshed. Where there is no room the last ones get nothing, and what was dropped while
        it was pinned gets nothing until it is unpinned. Nothing that is pinned, pending or among ``hashes``
        makes room.
        """
        shelf = self._shelf(group)
        wanted = shelf.keep_for_now(hashes)
        taken: list[bytes] = []
        rows: list[int] = []
        if wanted.absent:
            room = min(len(wanted.absent), self.make_room(group, len(wanted.absent)))
            rows = self._free[self._plan.class_of[group]].take(room)
            taken = shelf.add(wanted, rows)
            if shelf.num_spare >= _TIDIED_AT_LEAST:
                shelf.tidy(min(max(2 * room, _TIDIED_AT_LEAST), _TIDIED_AT_MOST))
        shelf.no_longer_keep(wanted)
        return taken, rows

    def make_room(self, group: int, count: int) -> int:
        """See that so many contents of a group could be reserved. Returns how many could."""
        shelf, index = self._shelf(group), self._plan.class_of[group]
        free = self._free[index]
        theirs = min(count - free.count, shelf.limit - shelf.num_held - free.count)
        if theirs > 0:
            others = [other for other in self._sharing[index] if other.num_held > other.limit]
            for other in sorted(others, key=lambda other: other.limit - other.num_held):
                theirs -= self._evict(other, min(theirs, other.num_held - other.limit))
                if theirs <= 0:
                    break
        if count > free.count:
            self._evict(shelf, count - free.count)
        return free.count

    def commit(self, group: int, hashes: Sequence[bytes]) -> None:
        """Pending contents are ready: their rows hold what they should.

        Raises:
            LocalError: one of them is not pending; none is changed then.
        """
        committed = self._shelf(group).commit(hashes)
        if self._is_asked and committed:
            self._changes.append((group, True, committed))

    def drop(self, group: int, hashes: Sequence[bytes]) -> None:
        """Forget contents: pending ones that failed, ready ones that are of no use. Absent ones are skipped.

        A pinned one is absent at once, but its row is taken until it is unpinned.
        """
        self._dropped(group, *self._shelf(group).drop(hashes))

    def drop_unused(self, group: int, hashes: Sequence[bytes]) -> None:
        """Forget contents that are ready and not pinned; the others stay as they are."""
        self._dropped(group, *self._shelf(group).drop_unused(hashes))

    def pin(self, group: int, hashes: Sequence[bytes]) -> None:
        """Keep ready contents until they are unpinned as often.

        Raises:
            LocalError: one of them is not ready; none is pinned then.
        """
        self._shelf(group).pin(hashes)

    def unpin(self, group: int, hashes: Sequence[bytes]) -> None:
        """Take back a pin of each. They are refreshed.

        Raises:
            LocalError: one of them is not pinned as often; none is changed then.
        """
        self._give(group, self._shelf(group).unpin(hashes))

    def touch(self, group: int, hashes: Sequence[bytes]) -> None:
        """Contents were used. The first of them is kept longest; what is not ready is skipped."""
        self._shelf(group).touch(hashes)

    def refresh(self, group: int, hashes: Sequence[bytes]) -> None:
        """Bring contents in the order of their sequence, as the newest, where they came in several parts.

        That is no use of them: whoever was stored, and is refreshed when its request ends, was used once.
        """
        self._shelf(group).refresh(hashes)

    def clear(self) -> None:
        """Forget all that is ready; pinned rows become free when they are unpinned. Pending contents stay."""
        for group, shelf in self._shelves.items():
            self._give(group, shelf.drop_ready())
        self._changes, self._is_cleared = [], self._is_asked

    def take_events(self) -> IndexEvents:
        """What has come and gone since the last call. The first one tells all that there is."""
        if not self._is_asked:
            self._is_asked = True
            self._changes = [(group, True, shelf.ready_hashes()) for group, shelf in self._shelves.items()]
        came: dict[tuple[int, bytes], None] = {}
        went: dict[tuple[int, bytes], None] = {}
        for group, is_stored, batch in self._changes:
            hashes = self._shelves[group].name(batch) if isinstance(batch, Leaving) else batch
            now, before = (came, went) if is_stored else (went, came)
            for content in hashes:
                key = (group, content)
                if key in before:
                    del before[key]
                else:
                    now[key] = None
        for shelf in self._shelves.values():
            shelf.forget_leaving()
        events = IndexEvents(tuple(came), tuple(went), self._is_cleared)
        self._changes, self._is_cleared = [], False
        return events

    def counts(self) -> dict[int, GroupCounts]:
        """Rows and totals by cache group."""
        return {
            group: GroupCounts(
                limit=shelf.limit,
                held=shelf.num_held,
                ready=shelf.num_ready,
                pending=shelf.num_pending,
                pinned=shelf.num_pinned,
                stored_total=shelf.totals.stored,
                evicted_total=shelf.totals.evicted,
                dropped_total=shelf.totals.dropped,
                refused_total=shelf.totals.refused,
            )
            for group, shelf in self._shelves.items()
        }

    def check(self) -> None:
        """Prove the invariants. It takes time for all that the index holds.

        Raises:
            LocalError: one does not hold; the text says which.
        """
        for index, rows in enumerate(self._plan.classes):
            seen = self._free[index].all()
            for shelf in self._sharing[index]:
                seen.extend(shelf.check())
            if sorted(seen) != list(range(rows.num_rows)):
                raise LocalError(f"the rows of class {index} are not each free or held once")

    def _shelf(self, group: int) -> Shelf:
        if group not in self._shelves:
            raise LocalError(f"cache group {group} has no rows; those that have: {sorted(self._shelves)}")
        return self._shelves[group]

    def _evict(self, shelf: Shelf, count: int) -> int:
        leaving, rows = shelf.evict(count)
        self._free[self._plan.class_of[shelf.group]].give(rows)
        if self._is_asked:
            self._changes.append((shelf.group, False, leaving))
        else:
            shelf.forget_leaving()
        return len(rows)

    def _dropped(self, group: int, removed: list[bytes], rows: list[int]) -> None:
        self._give(group, rows)
        if self._is_asked and removed:
            self._changes.append((group, False, removed))

    def _give(self, group: int, rows: list[int]) -> None:
        self._free[self._plan.class_of[group]].give(rows)


_STATES = tuple(ContentState)
