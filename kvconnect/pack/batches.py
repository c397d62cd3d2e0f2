"""The input of movers: a chunk of one request, or some rows of an offload, as moves of joined lanes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from kvconnect.cache.specs import div_ceil
from kvconnect.errors import LayoutError
from kvconnect.pack.digest import Streams
from kvconnect.pack.numbers import NumberBuffer
from kvconnect.pack.page_lanes import Access, Column, Lanes
from kvconnect.plan.blocks import BlockIds
from kvconnect.plan.chunks import Chunk, Placement


@dataclass(frozen=True)
class PageRange:
    """The kernel positions ``first .. first + count - 1`` of a cache group."""

    group: int
    first: int
    count: int


Blocks = Mapping[PageRange, BlockIds]


@dataclass(frozen=True, eq=False)
class Move:
    """The part of a chunk that joined lanes move, for any request.

    Lane ``i`` of ``lanes[which]`` has its first row ``wire[i]`` bytes into the slot. The first page begins
    ``-lead`` rows before the chunk's first row; the chunk has ``rows`` rows of each lane.
    """

    lanes: Lanes
    which: slice
    wire: Column
    pages: PageRange
    lead: int
    rows: int


@dataclass(frozen=True)
class Launch:
    """A kernel launch for all moves of one ``access``; their fields begin at index ``batches_at`` of the
    layout's numbers."""

    access: Access
    batches_at: int
    num_batches: int
    num_items: int
    programs: int


@dataclass(frozen=True, eq=False)
class ChunkLayout:
    """The work for a chunk on one side, for any request.

    For the Triton kernel it has launches and their ``numbers``, int64, with room for the block ids of each
    page range at the index in ``places``. ``streams`` are the parts of the slot that a digest covers.
    """

    total_bytes: int
    streams: Streams
    moves: tuple[Move, ...]
    launches: tuple[Launch, ...] = ()
    numbers: Column | tuple[()] = ()
    places: tuple[tuple[PageRange, int], ...] = ()


@dataclass(frozen=True, eq=False)
class StagedChunk:
    """A chunk with a request's kernel block ids, 0 for no block, ready to be moved any number of times.

    With placed pages (see ``Launcher``), block ids are followed by places: bytes into the slot, multiples
    of 16. The Triton kernel reads ``tensor``, which is a part of ``lent``.
    """

    layout: ChunkLayout
    blocks: Blocks
    tensor: torch.Tensor | None = None
    lent: NumberBuffer | None = None

    @property
    def total_bytes(self) -> int:
        """Bytes of the chunk in a slot."""
        return self.layout.total_bytes


class PackTicket:
    """A submitted pack or unpack. This base class is for a CPU, where it is ``done`` at once."""

    def __init__(self, digest: int = 0) -> None:
        self._digest = digest

    @property
    def done(self) -> bool:
        return True

    @property
    def digest(self) -> int:
        """The 64-bit digest of the slot's bytes as they were moved.

        Raises ``LocalError``: the pack or unpack is not done yet.
        """
        return self._digest

    @property
    def has_failed(self) -> bool:
        """The bytes could not be coded, as was asked, so that the slot's content is void."""
        return False

    def wait(self) -> None:
        """Block the calling thread until the work is done. For tests and benchmarks."""


def make_move(lanes: Lanes, chunk: Chunk, placement: Placement) -> Move | None:
    """The part of a chunk that joined lanes move; None if the chunk has no rows of them.

    Raises ``LayoutError``: a peer's chunk has more pages than the cache.
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


class PlainMover:
    """The base of movers without a kernel of their own: nothing is computed or copied ahead of ``move``."""

    def prepare(self, total_bytes: int, streams: Streams, moves: tuple[Move, ...]) -> ChunkLayout:
        """See ``Launcher.prepare``."""
        return ChunkLayout(total_bytes, streams, moves)

    def stage(self, layouts: Sequence[ChunkLayout], blocks: Blocks) -> list[StagedChunk]:
        """See ``TritonMover.stage``."""
        return [StagedChunk(layout, blocks) for layout in layouts]


class Part(NamedTuple):
    """Pages of a move that follow each other: ``blocks``, either all of them or none is a block.

    Of each page ``tokens`` rows travel, after ``skipped`` rows. The first of these rows lies ``at`` bytes
    after the lane's first row in the slot.
    """

    blocks: BlockIds
    skipped: int
    tokens: int
    at: int


def parts(move: Move, blocks: BlockIds) -> Iterator[Part]:
    """Divide a move's pages by whether they have a block, and by the rows that travel.

    These are all rows, but perhaps of the first and the last page.
    """
    walk, count = move.lanes.walk, len(blocks)
    borders = {0, count, *(np.flatnonzero(np.diff(blocks > 0)) + 1).tolist()}
    if move.lead < 0:
        borders.add(1)
    if move.lead + count * walk.tokens > move.rows:
        borders.add(count - 1)
    for first, stop in itertools.pairwise(sorted(borders)):
        row = move.lead + first * walk.tokens
        skipped = max(0, -row)
        tokens = min(walk.tokens, move.rows - row) - skipped
        yield Part(blocks[first:stop], skipped, tokens, (row + skipped) * walk.wire_token_stride)


def values_by_scale(
    lanes: Lanes, planes: int, run: int, scales: Sequence[float]
) -> Iterator[tuple[int, slice, float]]:
    """For each plane, the range of K's values in a head's run of ``run`` values, and of V's, with scales."""
    for plane in range(planes):
        keys = min(max(lanes.key_values - plane * run, 0), run)
        for first, stop, scale in ((0, keys, scales[0]), (keys, run, scales[1])):
            if first < stop:
                yield plane, slice(first, stop), scale
