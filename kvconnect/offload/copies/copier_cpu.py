"""Copies between pages and rows on a CPU: at once, a few strided copies for each lane."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvconnect.offload.copies.arena import RowArena
from kvconnect.offload.copies.copier import Ended, Ticket, columns_of, failed
from kvconnect.offload.copies.rows import GroupRows, RowLayout
from kvconnect.orders import RowCopies

# An indexed copy goes through a buffer, which should stay in the processor's cache.
_BYTES_AT_ONCE = 256 << 10


@dataclass(frozen=True, eq=False)
class _LaneViews:
    """A lane in memory and in rows, shapes ``(blocks, words)`` and ``(rows, words)``."""

    pages: NDArray[Any]
    rows: NDArray[Any]


class CpuCopier:
    """See ``Copier``. Everything is done when a call returns."""

    modes = ("cpu", "cpu")
    rates = (0.0, 0.0)
    staging_waits = 0

    def __init__(self, layout: RowLayout, arena: RowArena) -> None:
        self._layout, self._arena = layout, arena
        self._views = {group: _views(layout.of(group), arena) for group in arena.plan.groups}

    def snapshot(self, copies: Sequence[RowCopies]) -> Ticket:
        """See ``Copier``."""
        try:
            for lane, blocks, rows in self._parts(copies):
                lane.rows[rows] = lane.pages[blocks]
        except Exception as error:
            return failed("snapshot", error)
        return Ended()

    def mark(self) -> None:
        """See ``Copier``. Nothing is under way here."""

    def restore(self, copies: Sequence[RowCopies], after: None = None) -> Ticket:
        """See ``Copier``."""
        try:
            for lane, blocks, rows in self._parts(copies):
                lane.pages[blocks] = lane.rows[rows]
        except Exception as error:
            return failed("restore", error)
        return Ended()

    def close(self) -> None:
        """See ``Copier``."""
        self._views = {}

    def _parts(
        self, copies: Sequence[RowCopies]
    ) -> Iterator[tuple[_LaneViews, NDArray[np.int64], NDArray[np.int64]]]:
        """What is to be copied in one go each, once all of it was checked."""
        checked = []
        for one in copies:
            blocks, rows = columns_of(one, self._layout.of(one.group))
            self._arena.addresses(one.group, rows)
            checked.append((one.group, blocks, rows))
        for group, blocks, rows in checked:
            for lane in self._views[group]:
                at_once = max(1, _BYTES_AT_ONCE // lane.pages[0].nbytes)
                for first in range(0, len(blocks), at_once):
                    yield lane, blocks[first : first + at_once], rows[first : first + at_once]


def _views(group: GroupRows, arena: RowArena) -> tuple[_LaneViews, ...]:
    rows = arena.rows_of(group.group)
    columns = (group.address, group.stride, group.length, group.offset, group.unit)
    return tuple(
        _lane_views(rows, group.num_blocks, *numbers)
        for numbers in zip(*(column.tolist() for column in columns), strict=True)
    )


def _lane_views(
    rows: NDArray[np.uint8], num_blocks: int, address: int, stride: int, length: int, offset: int, unit: int
) -> _LaneViews:
    word = np.dtype(f"u{min(unit, 8)}")
    memory: Any = (ctypes.c_uint8 * ((num_blocks - 1) * stride + length)).from_address(address)
    shape, strides = (num_blocks, length // word.itemsize), (stride, word.itemsize)
    pages: NDArray[Any] = np.ndarray(shape, word, memory, 0, strides)
    return _LaneViews(pages, rows[:, offset : offset + length].view(word))
