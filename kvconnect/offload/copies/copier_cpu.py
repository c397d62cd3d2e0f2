"""Copies between pages and rows on a CPU: at once, a few strided copies for each lane."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvconnect.offload.copies.arena import RowArena
from kvconnect.offload.copies.copier import Ended, failed
from kvconnect.offload.copies.rows import GroupRows, RowLayout
from kvconnect.orders import RowCopies
from kvconnect.pack.lanes import Column

# An indexed copy goes through a buffer, which should stay in the processor's cache.
_BYTES_AT_ONCE = 256 << 10

Words = NDArray[Any]


class CpuCopier:
    """See ``Copier``. Everything is done when a call returns."""

    staging_waits = 0

    def __init__(self, layout: RowLayout, arena: RowArena) -> None:
        self._layout, self._arena = layout, arena
        self._views = {group: list(_views(layout.of(group), arena)) for group in arena.plan.groups}

    def snapshot(self, copies: Sequence[RowCopies]) -> Ended:
        """See ``Copier``."""
        try:
            for pages, rows, blocks, numbers in self._stretches(copies):
                rows[numbers] = pages[blocks]
        except Exception as error:
            return failed("snapshot", error)
        return Ended()

    def mark(self) -> None:
        """See ``Copier``. Nothing is under way here."""

    def restore(self, copies: Sequence[RowCopies], after: None = None) -> Ended:
        """See ``Copier``."""
        try:
            for pages, rows, blocks, numbers in self._stretches(copies):
                pages[blocks] = rows[numbers]
        except Exception as error:
            return failed("restore", error)
        return Ended()

    def close(self) -> None:
        """See ``Copier``."""
        self._views = {}

    def _stretches(self, copies: Sequence[RowCopies]) -> Iterator[tuple[Words, Words, Column, Column]]:
        """What is copied in one go each, once all of it was checked: a lane, and which pages and rows."""
        checked = []
        for one in copies:
            blocks, rows = self._layout.of(one.group).columns(one)
            self._arena.addresses(one.group, rows)
            checked.append((self._views[one.group], blocks, rows))
        for views, blocks, rows in checked:
            for pages, in_rows in views:
                at_once = max(1, _BYTES_AT_ONCE // pages[0].nbytes)
                for first in range(0, len(blocks), at_once):
                    yield pages, in_rows, blocks[first : first + at_once], rows[first : first + at_once]


def _views(group: GroupRows, arena: RowArena) -> Iterator[tuple[Words, Words]]:
    """Each lane in memory and in rows, shapes ``(blocks, words)`` and ``(rows, words)``."""
    rows = arena.rows_of(group.group)
    for lanes in group.lanes_of(0, 0, group.row_bytes):
        word, length, stride = (
            np.dtype(f"u{lanes.access.word}"),
            lanes.walk.run_bytes,
            lanes.walk.block_stride,
        )
        shape = (group.num_blocks, length // word.itemsize)
        for address, offset in zip(lanes.address.tolist(), lanes.wire_offset.tolist(), strict=True):
            held: Any = (ctypes.c_uint8 * ((group.num_blocks - 1) * stride + length)).from_address(address)
            pages: Words = np.ndarray(shape, word, held, 0, (stride, word.itemsize))
            yield pages, rows[:, offset : offset + length].view(word)
