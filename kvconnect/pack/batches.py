"""A chunk of one request, or some rows of an offload, as moves of like lanes: what movers need."""

from __future__ import annotations

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
    """The kernel positions ``first .. first + count - 1`` of a group."""

    group: int
    first: int
    count: int


Blocks = Mapping[PageRange, BlockIds]


@dataclass(frozen=True, eq=False)
class Move:
    """What like lanes move in one chunk, of any request.

    Lane ``i`` of ``lanes[which]`` has its first row at ``wire[i]`` bytes into the slot. The first of the
    pages begins ``-lead`` rows before the chunk, which has ``rows`` rows.
    """

    lanes: Lanes
    which: slice
    wire: Column
    pages: PageRange
    lead: int
    rows: int


@dataclass(frozen=True)
class Launch:
    """The moves of one access width. ``batches_at`` is where their fields begin among the numbers."""

    access: Access
    batches_at: int
    num_batches: int
    num_items: int
    programs: int


@dataclass(frozen=True, eq=False)
class ChunkLayout:
    """What a chunk is on one side, for any request.

    For kernels it has launches and their ``numbers``, with room at ``places`` for those of each page range.
    """

    total_bytes: int
    streams: Streams
    moves: tuple[Move, ...]
    launches: tuple[Launch, ...] = ()
    numbers: Column | tuple[()] = ()
    places: tuple[tuple[PageRange, int], ...] = ()


@dataclass(frozen=True, eq=False)
class StagedChunk:
    """A chunk with the kernel blocks of a request, 0 for none, ready to be moved as often as is wanted.

    Blocks whose pages are placed are followed by their places: bytes into the slot, multiples of 16.
    A kernel reads ``tensor``, which lies in ``lent``.
    """

    layout: ChunkLayout
    blocks: Blocks
    tensor: torch.Tensor | None = None
    lent: NumberBuffer | None = None

    @property
    def total_bytes(self) -> int:
        """What it has in a slot."""
        return self.layout.total_bytes


class PackTicket:
    """A pack or unpack that was asked for. On a CPU, as here, it is ``done`` at once."""

    def __init__(self, digest: int | None) -> None:
        self._digest = digest

    @property
    def done(self) -> bool:
        return True

    @property
    def digest(self) -> int | None:
        """The 64-bit digest of the slot's bytes as they were moved; None where none was asked for.

        Raises ``LocalError``: it is not done yet.
        """
        return self._digest

    def wait(self) -> None:
        """Block the calling thread until it is done. For tests and benchmarks."""


def make_move(lanes: Lanes, chunk: Chunk, placement: Placement) -> Move | None:
    """What like lanes move in a chunk; None where they have no rows of it.

    Raises ``LayoutError``: that is more pages than the cache has, whichever peer asked for them.
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
    """What movers without a kernel of their own have in common: nothing of a chunk is worked out before."""

    def prepare(self, total_bytes: int, streams: Streams, moves: tuple[Move, ...]) -> ChunkLayout:
        """See ``Launcher``."""
        return ChunkLayout(total_bytes, streams, moves)

    def stage(self, layouts: Sequence[ChunkLayout], blocks: Blocks) -> list[StagedChunk]:
        """See ``TritonMover``."""
        return [StagedChunk(layout, blocks) for layout in layouts]


class Part(NamedTuple):
    """The pages ``first <= i < stop`` of a move, of each of which ``tokens`` rows travel after ``skipped``.

    The first of these rows lies ``at`` bytes into those of its lane in the slot.
    """

    first: int
    stop: int
    skipped: int
    tokens: int
    at: int


def parts(move: Move, count: int) -> Iterator[Part]:
    """A move's pages: the whole ones, and the first and the last, of which less may travel."""
    walk = move.lanes.walk
    head = 1 if move.lead < 0 else 0
    tail = max(head, count - 1 if move.lead + count * walk.tokens > move.rows else count)
    for first, stop in ((0, head), (head, tail), (tail, count)):
        if first < stop:
            row = move.lead + first * walk.tokens
            skipped = max(0, -row)
            tokens = min(walk.tokens, move.rows - row) - skipped
            yield Part(first, stop, skipped, tokens, (row + skipped) * walk.wire_token_stride)


def values_by_scale(
    lanes: Lanes, planes: int, run: int, scales: Sequence[float]
) -> Iterator[tuple[int, slice, float]]:
    """Of the values of a head in each plane those of K, and those of V, with their scale."""
    for plane in range(planes):
        keys = min(max(lanes.key_values - plane * run, 0), run)
        for first, stop, scale in ((0, keys, scales[0]), (keys, run, scales[1])):
            if first < stop:
                yield plane, slice(first, stop), scale
