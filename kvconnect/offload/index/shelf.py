"""The rows of one cache group: which contents they hold, and in which state.

One half of the index: ``TierIndex`` says which groups share rows, a shelf what one group does with those
that it has.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np
from numpy.typing import NDArray

from kvconnect.errors import LocalError
from kvconnect.offload.index.cell_table import CellTable
from kvconnect.offload.index.columns import Cells, Column, as_cells, as_list, backwards, known, least
from kvconnect.offload.index.policies import Policy, make_policy, num_remembered

# Contents that are gone and still known by their hash: forgetting a hash costs more than letting go of its
# row, so it is done later and a few at a time.
_MOST_UNFORGOTTEN = 1 << 15


class ContentState(enum.IntEnum):
    """What is known of a content."""

    ABSENT = 0
    PENDING = 1
    READY = 2


_ABSENT, _PENDING, _READY = (int(state) for state in ContentState)
# Dropped while it was pinned: absent to everybody, but its row is still read.
_DOOMED = 3


@dataclass(eq=False)
class Totals:
    """What has happened to contents so far."""

    stored: int = 0
    evicted: int = 0
    dropped: int = 0
    refused: int = 0


@dataclass(eq=False)
class Leaving:
    """Contents that made room. Their hashes are read when they are asked for, or about to be forgotten."""

    cells: Cells
    hashes: list[bytes] | None = None


@dataclass(frozen=True)
class Wanted:
    """Contents that are absent, each once; cells of which the policy still knows; cells that are kept."""

    absent: list[bytes]
    recalled: Cells
    parked: Cells


class Shelf:
    """The contents of one cache group.

    Args:
        group: the cache group.
        limit: rows that it can have whatever other groups do.
        num_rows: rows that it can have at most.
        policy: which contents make room.
    """

    def __init__(self, group: int, limit: int, num_rows: int, policy: Policy) -> None:
        num_cells = num_rows + num_remembered(policy, limit) + _MOST_UNFORGOTTEN
        self.group = group
        self.limit = limit
        self.totals = Totals()
        self.num_pending = 0
        self.num_ready = 0
        self.num_doomed = 0
        self._table = CellTable(num_cells)
        self._policy = make_policy(policy, limit, num_cells)
        self._state = Column(num_cells, np.uint8)
        self._row = Column(num_cells, np.int32)
        self._pins = Column(num_cells, np.int32)
        # Whose hashes are asked for later, if ever.
        self._leaving: list[Leaving] = []

    @property
    def num_held(self) -> int:
        """Rows that the group has."""
        return self.num_pending + self.num_ready + self.num_doomed

    @property
    def num_pinned(self) -> int:
        """Contents that are pinned."""
        return self._policy.num_parked

    @property
    def num_spare(self) -> int:
        """Contents that are gone and whose hashes can be forgotten."""
        return self._policy.num_spare

    def lookup(self, hashes: Sequence[bytes]) -> int:
        """How many of the hashes, from the first on, are ready."""
        first, length = 0, 16
        while first < len(hashes):
            part = hashes[first : first + length]
            states = self._states(self._table.find(part))
            if isinstance(states, list):
                ready = next((place for place, state in enumerate(states) if state != _READY), len(states))
            else:
                missing = states != _READY
                ready = int(missing.argmax()) if missing.any() else len(states)
            first += ready
            if ready < len(part):
                break
            length = min(8 * length, 8192)
        return first

    def states(self, hashes: Sequence[bytes]) -> list[int]:
        """The state of each content."""
        states = self._states(self._table.find(hashes))
        found: list[int] = states if isinstance(states, list) else states.tolist()
        return [_ABSENT if state == _DOOMED else state for state in found]

    def _states(self, cells: Cells) -> list[int] | NDArray[np.uint8]:
        if isinstance(cells, list):
            each = self._state.each
            return [each[cell] if cell >= 0 else _ABSENT for cell in cells]
        states: NDArray[np.uint8] = self._state.array[cells]
        states[cells < 0] = _ABSENT
        return states

    def ready_cells(self, hashes: Sequence[bytes]) -> Cells:
        """The cells of contents that are ready.

        Raises:
            LocalError: one of them is not.
        """
        return self._cells_in(hashes, _READY)

    def _cells_in(self, hashes: Sequence[bytes], state: int) -> Cells:
        cells = self._table.find(hashes)
        states = self._states(cells)
        if isinstance(states, list):
            wrong = next((place for place, found in enumerate(states) if found != state), -1)
        else:
            is_wrong = states != state
            wrong = int(is_wrong.argmax()) if is_wrong.any() else -1
        if wrong >= 0:
            raise LocalError(
                f"content {hashes[wrong].hex()} of cache group {self.group} is not "
                f"{ContentState(state).name.lower()}"
            )
        return cells

    def ready_hashes(self) -> list[bytes]:
        """All contents that are ready."""
        return self._table.hashes_of(np.flatnonzero(self._state.array == _READY))

    def rows(self, cells: Cells) -> list[int]:
        """The rows of cells that have one."""
        rows = self._row.of(cells)
        return rows if isinstance(rows, list) else rows.tolist()

    def keep_for_now(self, hashes: Sequence[bytes]) -> Wanted:
        """What to do for contents of which all should be there. Those that are do not make room until
        ``no_longer_keep``; the policy hears that the others are wanted.
        """
        cells = self._table.find(hashes)
        states = self._states(cells)
        if isinstance(states, list):
            is_absent = [state == _ABSENT for state in states]
        else:
            is_absent = (states == _ABSENT).tolist()
        there = known(cells)
        recalled = self._state.having(there, _ABSENT)
        if len(recalled):
            self._policy.recall(recalled)
        parked = self._unpinned(self._state.having(there, _READY))
        self._policy.park(parked)
        return Wanted(list(dict.fromkeys(compress(hashes, is_absent))), recalled, parked)

    def no_longer_keep(self, wanted: Wanted) -> None:
        """What was kept for now may make room again; the first one is kept longest."""
        self._policy.unpark(backwards(wanted.parked))

    def add(self, wanted: Wanted, rows: Sequence[int]) -> list[bytes]:
        """The first contents that are wanted are pending, in these rows; the others are not wanted any more.

        Returns those that are pending now.
        """
        hashes = wanted.absent[: len(rows)]
        if len(wanted.recalled):
            found = self._table.find(hashes)
            self._state.fill(known(found), _PENDING)
            self._policy.forget(self._state.having(wanted.recalled, _ABSENT))
            cells = as_list(found)
            fresh = [content for content, cell in zip(hashes, cells, strict=True) if cell < 0]
            added = iter(self._add_cells(fresh))
            placed = as_cells([cell if cell >= 0 else next(added) for cell in cells])
        else:
            placed = as_cells(self._add_cells(hashes))
        self._state.fill(placed, _PENDING)
        self._row.put(placed, rows)
        self.num_pending += len(hashes)
        self.totals.refused += len(wanted.absent) - len(hashes)
        return hashes

    def _unpinned(self, cells: Cells) -> Cells:
        return self._pins.having(cells, 0)

    def _add_cells(self, hashes: list[bytes]) -> list[int]:
        missing = len(hashes) - self._table.num_free
        if missing > 0:
            self.tidy(missing)
        return self._table.add(hashes)

    def commit(self, hashes: Sequence[bytes]) -> list[bytes]:
        """Pending contents are ready. Returns them.

        Raises:
            LocalError: one of them is not pending; none is changed then.
        """
        hashes = list(dict.fromkeys(hashes))
        cells = self._cells_in(hashes, _PENDING)
        self._state.fill(cells, _READY)
        self.num_pending -= len(hashes)
        self.num_ready += len(hashes)
        self.totals.stored += len(hashes)
        self._policy.admit(backwards(cells))
        return hashes

    def drop(self, hashes: Sequence[bytes]) -> tuple[list[bytes], list[int]]:
        """Forget contents. Returns those that were ready, and the rows that are free now."""
        cells = known(self._table.find(list(dict.fromkeys(hashes))))
        pending, ready = self._state.having(cells, _PENDING), self._state.having(cells, _READY)
        removed = self._table.hashes_of(ready)
        self.totals.dropped += len(pending) + len(ready)
        self.num_pending -= len(pending)
        rows = self._let_go(pending)
        unpinned = self._unpinned(ready)
        self.num_ready -= len(ready)
        self.num_doomed += len(ready) - len(unpinned)
        rows += self._let_go(unpinned)
        self._state.fill(self._state.having(ready, _READY), _DOOMED)
        return removed, rows

    def drop_unused(self, hashes: Sequence[bytes]) -> tuple[list[bytes], list[int]]:
        """Forget contents that are ready and not pinned. Returns them, and their rows."""
        cells = known(self._table.find(list(dict.fromkeys(hashes))))
        unused = self._unpinned(self._state.having(cells, _READY))
        self.totals.dropped += len(unused)
        self.num_ready -= len(unused)
        return self._table.hashes_of(unused), self._let_go(unused)

    def drop_ready(self) -> list[int]:
        """Forget all that is ready. Returns the rows that are free now."""
        cells = np.flatnonzero(self._state.array == _READY)
        self.totals.dropped += len(cells)
        unpinned = self._unpinned(cells)
        self.num_ready -= len(cells)
        self.num_doomed += len(cells) - len(unpinned)
        rows = self._let_go(unpinned)
        self._state.fill(self._state.having(cells, _READY), _DOOMED)
        return rows

    def _let_go(self, cells: Cells) -> list[int]:
        """Cells hold nothing any more. Returns their rows."""
        self._state.fill(cells, _ABSENT)
        self._policy.forget(cells)
        return self.rows(cells)

    def pin(self, hashes: Sequence[bytes]) -> None:
        """Keep ready contents until they are unpinned as often.

        Raises:
            LocalError: one of them is not ready; none is pinned then.
        """
        cells = self.ready_cells(hashes)
        self._policy.park(self._unpinned(cells))
        self._add_pins(cells, 1)

    def unpin(self, hashes: Sequence[bytes]) -> list[int]:
        """Take back a pin of each. Returns the rows that are free now.

        Raises:
            LocalError: one of them is pinned less often; none is changed then.
        """
        cells = self._table.find(hashes)
        some = known(cells)
        self._add_pins(some, -1)
        if len(some) < len(cells) or least(self._pins.of(some)) < 0:
            self._add_pins(some, 1)
            raise LocalError(
                f"a content of cache group {self.group} is unpinned more often than it was pinned"
            )
        free = self._unpinned(some)
        self._policy.unpark(backwards(self._state.having(free, _READY)))
        doomed = as_cells(list(dict.fromkeys(as_list(self._state.having(free, _DOOMED)))))
        self.num_doomed -= len(doomed)
        return self._let_go(doomed)

    def _add_pins(self, cells: Cells, count: int) -> None:
        if isinstance(cells, list):
            each = self._pins.each
            for cell in cells:
                each[cell] += count
        else:
            # A number of the column's own type: any other takes twenty times as long.
            np.add.at(self._pins.array, cells, np.int32(count))

    def touch(self, hashes: Sequence[bytes]) -> None:
        """Contents were used; the first of them is kept longest."""
        cells = known(self._table.find(hashes))
        self._policy.use(backwards(self._state.having(cells, _READY)))

    def refresh(self, hashes: Sequence[bytes]) -> None:
        """Contents are the newest; the first of them is kept longest."""
        cells = known(self._table.find(hashes))
        self._policy.refresh(backwards(self._state.having(cells, _READY)))

    def evict(self, count: int) -> tuple[Leaving, list[int] | NDArray[np.int32]]:
        """Up to ``count`` contents make room. Returns who they are, and their rows."""
        cells = self._policy.evict(count)
        self._state.fill(cells, _ABSENT)
        self.num_ready -= len(cells)
        self.totals.evicted += len(cells)
        self._leaving.append(Leaving(cells))
        return self._leaving[-1], self._row.of(cells)

    def name(self, leaving: Leaving) -> list[bytes]:
        """The hashes of contents that made room."""
        if leaving.hashes is None:
            leaving.hashes = self._table.hashes_of(leaving.cells)
        return leaving.hashes

    def forget_leaving(self) -> None:
        """Nobody will ask for those that made room so far."""
        self._leaving.clear()

    def tidy(self, count: int) -> int:
        """Forget the hashes of up to ``count`` contents that are gone. Returns how many were forgotten."""
        cells = self._policy.spare(count)
        for leaving in self._leaving:
            self.name(leaving)
        self._leaving.clear()
        self._table.remove(cells)
        return len(cells)

    def check(self) -> set[int]:
        """Prove the invariants. Returns the rows that are held.

        Raises:
            LocalError: one does not hold.
        """
        self._table.check()
        state = self._state.array
        for name, value in (("pending", _PENDING), ("ready", _READY), ("doomed", _DOOMED)):
            if getattr(self, f"num_{name}") != np.count_nonzero(state == value):
                raise LocalError(f"cache group {self.group} miscounts what is {name}")
        held = np.flatnonzero(state)
        rows = set(self._row.array[held].tolist())
        if len(rows) != len(held):
            raise LocalError(f"a row of cache group {self.group} holds two contents")
        pinned = self._pins.array > 0
        if (self._pins.array < 0).any() or np.isin(state[pinned], (_ABSENT, _PENDING)).any():
            raise LocalError(f"cache group {self.group} has pins of what is neither ready nor doomed")
        if np.count_nonzero(pinned & (state == _READY)) != self._policy.num_parked - self.num_doomed:
            raise LocalError(f"cache group {self.group} has pins of what may make room, or the reverse")
        known = self.num_held + self._policy.num_remembered + self._policy.num_spare
        if len(self._table) != known or None in self._table.hashes_of(held):
            raise LocalError(
                f"cache group {self.group} knows {len(self._table)} hashes and accounts for {known} of them"
            )
        return rows
