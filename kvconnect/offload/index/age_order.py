"""Rows in the order of their last use, so that the least recently used makes room."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

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
