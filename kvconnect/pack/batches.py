"""A chunk of one request as batches of like lanes: what a kernel needs to move it, as columns.

Lanes are sorted into classes once per peer. A chunk then only looks up its rows and its blocks, by
class; nothing here loops over pages or layers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvconnect.arithmetic import div_ceil
from kvconnect.errors import LayoutError, LocalError
from kvconnect.pack.lanes import Access, Lane, Walk
from kvconnect.plan.chunks import Chunk, Placement
from kvconnect.runner_kit.block_table import BlockIds

Column = NDArray[np.int64]


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class Batch:
    """What one class moves in one chunk.

    Lane ``i`` has its pages at ``address[i]`` and its first row at ``wire[i]`` bytes into the slot.
    ``blocks`` are the kernel blocks of the pages in question, 0 for none. The first of these pages
    begins ``-lead`` rows before the chunk, which has ``rows`` rows.
    """

    walk: Walk
    access: Access
    address: Column
    wire: Column
    blocks: BlockIds
    lead: int
    rows: int
    key_values: int
    scales: NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Move:
    """What one class moves in one chunk, whichever request it is of: a batch but for its blocks."""

    walk: Walk
    access: Access
    address: Column
    wire: Column
    pages: PageRange
    lead: int
    rows: int
    key_values: int
    scales: NDArray[np.float32]

    def of(self, blocks: BlockIds) -> Batch:
        """The batch of a request that has its pages in these blocks."""
        return Batch(
            walk=self.walk,
            access=self.access,
            address=self.address,
            wire=self.wire,
            blocks=blocks,
            lead=self.lead,
            rows=self.rows,
            key_values=self.key_values,
            scales=self.scales,
        )


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
        LayoutError: that is more pages than the cache has, whoever asked for them.
    """
    start, stop = np.searchsorted(lanes.stream, (chunk.first_stream, chunk.stop_stream))
    if start == stop:
        return None
    stream = lanes.stream[start:stop] - chunk.first_stream
    first_row, rows = int(placement.first_row[stream[0]]), int(placement.rows[stream[0]])
    if not rows:
        return None
    first = first_row // lanes.walk.tokens
    count = div_ceil(first_row + rows, lanes.walk.tokens) - first
    if count > lanes.num_blocks:
        raise LayoutError(
            f"cache group {lanes.group}: a chunk has {count} kernel blocks, the cache {lanes.num_blocks}"
        )
    return Move(
        walk=lanes.walk,
        access=lanes.access,
        address=lanes.address[start:stop],
        wire=placement.base[stream] + lanes.wire_offset[start:stop],
        pages=PageRange(lanes.group, first, count),
        lead=first * lanes.walk.tokens - first_row,
        rows=rows,
        key_values=lanes.key_values,
        scales=lanes.scales[start:stop],
    )


def check_blocks(group: int, blocks: BlockIds, num_blocks: int) -> None:
    """Refuse blocks that lie outside the cache.

    Raises:
        LocalError: there are some.
    """
    # Seen without a sign, what is below 0 is beyond every cache too.
    if len(blocks) and blocks.view(np.uint64).max() >= num_blocks:
        raise LocalError(
            f"cache group {group}: kernel blocks {blocks.min()}..{blocks.max()} are to be moved, the "
            f"cache has 0..{num_blocks - 1}"
        )
