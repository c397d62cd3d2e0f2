"""One number per cell, for few cells at a time and for thousands.

A cell is the place that an index keeps for one content, numbered from 0. A request that decodes changes one
cell, one that returns changes thousands: a loop is faster for the former, arithmetic on arrays for the
latter, and both are hidden here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Cells = list[int] | NDArray[np.int64]
"""Cells in an order that means something: a list of few, an array of many."""

# Up to so many cells a loop is faster than the fixed cost of arithmetic on arrays.
FEW = 24


class Column:
    """A number for each of ``length`` cells, 0 at first."""

    def __init__(self, length: int, dtype: type[np.generic]) -> None:
        self.array: NDArray[Any] = np.zeros(length, dtype=dtype)
        # A memory view gives and takes Python's own numbers, several times as fast as an array.
        self.each = memoryview(self.array)  # type: ignore[arg-type]

    def of(self, cells: Cells) -> list[int] | NDArray[Any]:
        """The numbers of cells."""
        if isinstance(cells, list):
            each = self.each
            return [each[cell] for cell in cells]
        return self.array[cells]

    def fill(self, cells: Cells, value: int) -> None:
        """Give all of the cells one number."""
        if isinstance(cells, list):
            each = self.each
            for cell in cells:
                each[cell] = value
        else:
            self.array[cells] = value

    def put(self, cells: Cells, values: Sequence[int] | NDArray[Any]) -> None:
        """Give each of the cells a number of its own."""
        if isinstance(cells, list):
            each = self.each
            for cell, value in zip(cells, values, strict=True):
                each[cell] = int(value)
        else:
            self.array[cells] = values

    def having(self, cells: Cells, value: int) -> Cells:
        """Those of the cells that have a number."""
        if isinstance(cells, list):
            each = self.each
            return [cell for cell in cells if each[cell] == value]
        has_it: NDArray[np.bool_] = self.array[cells] == value
        return cells[has_it]


def backwards(cells: Cells) -> Cells:
    """The same cells, last one first."""
    return cells[::-1]


def joined(first: Cells, second: Cells) -> Cells:
    """The cells of both, in order."""
    if not len(first) or not len(second):
        return first if len(first) else second
    if isinstance(first, list) and isinstance(second, list) and len(first) + len(second) <= FEW:
        return first + second
    return np.concatenate((np.asarray(first, dtype=np.int64), np.asarray(second, dtype=np.int64)))


def least(numbers: list[int] | NDArray[Any]) -> int:
    """The smallest of numbers, 0 where there are none."""
    if isinstance(numbers, list):
        return min(numbers, default=0)
    return int(numbers.min()) if len(numbers) else 0


def known(cells: Cells) -> Cells:
    """Those of the cells that are one: -1 stands for none."""
    if isinstance(cells, list):
        return [cell for cell in cells if cell >= 0]
    return cells[cells >= 0]


def as_list(cells: Cells) -> list[int]:
    """The cells as Python's own numbers."""
    return cells if isinstance(cells, list) else cells.tolist()


def as_cells(cells: Sequence[int]) -> Cells:
    """The cells in the form for their number."""
    return list(cells) if len(cells) <= FEW else np.asarray(cells, dtype=np.int64)
