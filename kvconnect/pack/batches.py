"""A chunk of one request as moves of like lanes: what a kernel needs, as columns.

Lanes are joined once per peer. A chunk then only looks up the rows and the blocks of each move; nothing here
loops over pages or layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvconnect.arithmetic import div_ceil
from kvconnect.errors import LayoutError
from kvconnect.pack.lanes import Column, Lanes
from kvconnect.plan.chunks import Chunk, Placement
from kvconnect.runner_kit.block_table import BlockIds


@dataclass(frozen=True)
class PageRange:
    """The kernel positions ``first .. first + count - 1`` of a group."""

    group: int
    first: int
    count: int


@dataclass(frozen=True, eq=False)
class Move:
    """What like lanes move in one chunk, whichever request it is of.

    Lane ``i`` of ``lanes[which]`` has its first row at ``wire[i]`` bytes into the slot. The first of the
    pages begins ``-lead`` rows before the chunk, which has ``rows`` rows.
    """

    lanes: Lanes
    which: slice
    wire: Column
    pages: PageRange
    lead: int
    rows: int

    @property
    def address(self) -> Column:
        """Where each lane has its first page."""
        return self.lanes.address[self.which]

    @property
    def scales(self) -> NDArray[np.float32]:
        """Those of each lane."""
        return self.lanes.scales[self.which]


@dataclass(frozen=True, eq=False)
class ChunkLayout:
    """What a chunk is on one side, whichever request it is of.

    ``streams`` are those that have bytes, as (offset, length, word) in bytes. ``handle`` is what the kernels'
    side made of the moves.
    """

    total_bytes: int
    streams: tuple[tuple[int, int, int], ...]
    moves: tuple[Move, ...]
    pages: tuple[PageRange, ...]
    handle: Any


@dataclass(frozen=True, eq=False)
class StagedChunk:
    """A chunk with the kernel blocks of a request, 0 for none, ready to be moved as often as is wanted."""

    layout: ChunkLayout
    blocks: Mapping[PageRange, BlockIds]
    handle: Any

    @property
    def total_bytes(self) -> int:
        """What it has in a slot."""
        return self.layout.total_bytes


def make_move(lanes: Lanes, chunk: Chunk, placement: Placement) -> Move | None:
    """What like lanes move in a chunk; None where they have no rows of it.

    Raises:
        LayoutError: that is more pages than the cache has, whichever peer asked for them.
    """
    start, stop = np.searchsorted(lanes.stream, (chunk.first_stream, chunk.stop_stream))
    if start == stop:
        return None
    stream = lanes.stream[start:stop] - chunk.first_stream
    first_row, rows = int(placement.first_row[stream[0]]), int(placement.rows[stream[0]])
    if not rows:
        return None
    tokens = lanes.walk.tokens
    first = first_row // tokens
    count = div_ceil(first_row + rows, tokens) - first
    if count > lanes.num_blocks:
        raise LayoutError(
            f"cache group {lanes.group}: a chunk has {count} kernel blocks, the cache {lanes.num_blocks}"
        )
    wire = placement.base[stream] + lanes.wire_offset[start:stop]
    pages = PageRange(lanes.group, first, count)
    return Move(lanes, slice(start, stop), wire, pages, first * tokens - first_row, rows)
