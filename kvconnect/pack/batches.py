"""A chunk of one request as moves of like lanes: what a kernel needs, as columns.

Lanes are sorted into classes once per peer. A chunk then only looks up its rows and its blocks, by
class; nothing here loops over pages or layers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvconnect.arithmetic import div_ceil
from kvconnect.errors import LayoutError
from kvconnect.pack.lanes import Access, Lane, Walk
from kvconnect.plan.chunks import Chunk, Placement
from kvconnect.runner_kit.block_table import BlockIds

Column = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class LaneClass:
    """Lanes that are walked alike and have the same rows in every chunk, in the order of their streams.

    ``scales`` are float32, two a lane, for those that are cast: see ``Lane``.
    """

    group: int
    num_blocks: int
    walk: Walk
    access: Access
    stream: Column
    address: Column
    wire_offset: Column
    key_values: int
    scales: NDArray[np.float32]


@dataclass(frozen=True)
class PageRange:
    """The kernel positions ``first .. first + count - 1`` of a group."""

    group: int
    first: int
    count: int


@dataclass(frozen=True, eq=False)
class Move:
    """What one class moves in one chunk, whichever request it is of.

    Lane ``i`` of ``lanes[which]`` has its first row at ``wire[i]`` bytes into the slot. The first of the
    pages begins ``-lead`` rows before the chunk, which has ``rows`` rows.
    """

    lanes: LaneClass
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


def make_classes(lanes: Sequence[Lane], rows_alike: Sequence[tuple[int, int]]) -> tuple[LaneClass, ...]:
    """Sort lanes into classes. ``rows_alike`` names, by stream, what decides its rows in a chunk."""
    classes: dict[tuple[object, ...], list[Lane]] = defaultdict(list)
    for lane in lanes:
        alike = (lane.group, rows_alike[lane.stream], lane.walk, lane.access, lane.key_values)
        classes[alike].append(lane)
    return tuple(
        LaneClass(
            group=members[0].group,
            num_blocks=min(lane.num_blocks for lane in members),
            walk=members[0].walk,
            access=members[0].access,
            stream=np.array([lane.stream for lane in members], dtype=np.int64),
            address=np.array([lane.address for lane in members], dtype=np.int64),
            wire_offset=np.array([lane.wire_offset for lane in members], dtype=np.int64),
            key_values=members[0].key_values,
            scales=np.array([lane.scales for lane in members], dtype=np.float32),
        )
        for members in classes.values()
    )


def make_move(lanes: LaneClass, chunk: Chunk, placement: Placement) -> Move | None:
    """What a class moves in a chunk; None where it has no rows of it.

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
