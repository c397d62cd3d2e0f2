"""Pack and unpack on a CPU: a few strided copies per lane, from page to slot and back, by torch.

A page and its place in the slot are the same five axes with different strides, so that one indexed
copy moves all whole pages of a lane. The first and the last page of a chunk may be partial and go
alone. Values that are cast go a few pages at a time, through what stays in the processor's cache, and so do
pages that are placed: those of lanes without axes, each at a place of its own.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvconnect.pack.batches import ChunkLayout, Move, PackTicket, PageRange, StagedChunk
from kvconnect.pack.casts import cast_table
from kvconnect.pack.digest import digest_streams
from kvconnect.pack.lanes import PLACE_BYTES, Column, Lanes
from kvconnect.runner_kit.block_table import BlockIds

_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_UINTS = {1: np.uint8, 2: np.uint16}
_VALUES_AT_ONCE = 1 << 15
_BYTES_AT_ONCE = 256 << 10


def use_one_thread() -> None:
    """Let torch work with this thread alone whenever it is called from it; other threads are not touched.

    A model may keep all cores busy: threads of ours that wait for each other between its own are many times
    slower than one.
    """
    of_all_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    # What counts is each thread's own, but threads that begin later take what any has set last.
    other = threading.Thread(target=torch.set_num_threads, args=(of_all_threads,))
    other.start()
    other.join()


class TorchMover:
    """Moves chunks in the memory of a CPU; for ``is_placed`` see ``Launcher``."""

    def __init__(
        self, all_lanes: Sequence[Lanes], digest_sample: int = 1, *, is_placed: bool = False
    ) -> None:
        self._digest_sample = digest_sample
        self._pages = {
            lanes: [_memory_view(address, lanes) for address in lanes.address.tolist()] for lanes in all_lanes
        }
        self._placed = {
            lanes: [one[:, 0, 0, 0].numpy() for one in pages]
            for lanes, pages in self._pages.items()
            if is_placed
        }

    def prepare(self, moves: Sequence[Move]) -> Any:
        """See ``TritonMover``. Nothing is worth it."""

    def stage(self, layouts: Sequence[ChunkLayout], blocks: Mapping[PageRange, BlockIds]) -> Sequence[Any]:
        """See ``TritonMover``. There is nothing to bring anywhere."""
        return [None] * len(layouts)

    def move(self, slot: int, staged: StagedChunk, seed: int | None, pack: bool) -> PackTicket:
        """Move the pages into the slot at this address, or out of it."""
        if not staged.total_bytes:
            return PackTicket(None if seed is None else 0)
        raw = np.ctypeslib.as_array((ctypes.c_uint8 * staged.total_bytes).from_address(slot))
        for move in staged.layout.moves:
            numbers = staged.blocks[move.pages]
            if move.lanes in self._placed:
                _move_placed(self._placed[move.lanes], move, numbers, raw, pack)
                continue
            rows, lanes = _SlotRows(raw, move.lanes), self._pages[move.lanes][move.which]
            all_scales = move.lanes.scales[move.which]
            # What all lanes of a move have in common is worked out before, since there may be hundreds.
            for part in _parts(move, numbers):
                for pages, wire, scales in zip(lanes, move.wire.tolist(), all_scales, strict=True):
                    if part.tokens != move.lanes.walk.tokens:
                        pages = pages.narrow(1, part.first_token, part.tokens)
                    if move.lanes.access.cast is None:
                        _move_part(pages, rows.view(wire, part), part, pack)
                    else:
                        in_slot = rows.view(wire, part)
                        _cast_part(pages, in_slot, part.blocks, move.lanes, scales.tolist(), pack)
        if seed is None:
            return PackTicket(None)
        return PackTicket(digest_streams(raw, staged.layout.streams, seed, self._digest_sample))


@dataclass(frozen=True)
class _Part:
    """Pages of which the same tokens travel: their blocks, and where the first of their rows lies.

    ``missing`` and ``kept`` are the pages without and with a block, None where all have one.
    """

    blocks: torch.Tensor
    first_row: int
    first_token: int
    tokens: int
    missing: torch.Tensor | None
    kept: torch.Tensor | None


def _parts(move: Move, of_pages: BlockIds) -> Iterator[_Part]:
    """The first page, the whole pages and the last page: at most three parts."""
    tokens, count = move.lanes.walk.tokens, len(of_pages)
    head = 1 if move.lead < 0 else 0
    tail = max(head, count - 1 if move.lead + count * tokens > move.rows else count)
    for first, stop in ((0, head), (head, tail), (tail, count)):
        if first == stop:
            continue
        row = move.lead + first * tokens
        skipped = max(0, -row)
        blocks = torch.from_numpy(of_pages[first:stop])
        missing = (blocks == 0).nonzero().reshape(-1)
        kept = blocks.nonzero().reshape(-1) if len(missing) else None
        yield _Part(
            blocks,
            row + skipped,
            skipped,
            min(tokens, move.rows - row) - skipped,
            missing if len(missing) else None,
            kept,
        )


def _memory_view(address: int, lanes: Lanes) -> torch.Tensor:
    """All pages of a lane: (block, token, head, plane, word)."""
    walk, cast = lanes.walk, lanes.access.cast
    word = min(8, lanes.access.memory) if cast is None else cast.memory_bytes
    length = (lanes.num_blocks - 1) * walk.block_stride + walk.extent_bytes
    memory = (ctypes.c_uint8 * length).from_address(address)
    raw = torch.frombuffer(memory, dtype=_DTYPES[word])
    strides = (walk.block_stride, walk.token_stride, walk.head_stride, walk.plane_stride)
    return raw.as_strided(
        (lanes.num_blocks, walk.tokens, walk.heads, walk.planes, walk.run_bytes // word),
        (*(stride // word for stride in strides), 1),
    )


class _SlotRows:
    """The rows of like lanes in a slot."""

    def __init__(self, slot: NDArray[np.uint8], lanes: Lanes) -> None:
        walk, cast = lanes.walk, lanes.access.cast
        self._walk = walk
        self._word = min(8, lanes.access.memory) if cast is None else cast.wire_bytes
        self._words = torch.from_numpy(slot[: len(slot) // self._word * self._word]).view(_DTYPES[self._word])
        page_stride = walk.tokens * walk.wire_token_stride
        strides = (page_stride, walk.wire_token_stride, walk.wire_head_stride, walk.wire_plane_stride)
        self._strides = (*(stride // self._word for stride in strides), 1)

    def view(self, wire: int, part: _Part) -> torch.Tensor:
        """Those of one lane, which begin ``wire`` bytes into the slot: (page, token, head, plane, word)."""
        walk = self._walk
        return self._words.as_strided(
            (len(part.blocks), part.tokens, walk.heads, walk.planes, walk.wire_run_bytes // self._word),
            self._strides,
            (wire + part.first_row * walk.wire_token_stride) // self._word,
        )


def _move_part(pages: torch.Tensor, wire: torch.Tensor, part: _Part, pack: bool) -> None:
    if pack:
        torch.index_select(pages, 0, part.blocks, out=wire)
        if part.missing is not None:
            wire.index_fill_(0, part.missing, 0)
    elif part.kept is not None:
        pages.numpy()[part.blocks[part.kept].numpy()] = wire[part.kept].numpy()
    else:
        # numpy takes a quarter of the time of torch's index_copy_ for that.
        pages.numpy()[part.blocks.numpy()] = wire.numpy()


def _move_placed(
    all_pages: Sequence[NDArray[Any]], move: Move, numbers: Column, slot: NDArray[np.uint8], pack: bool
) -> None:
    """Move the pages of each lane, as rows of words; ``numbers`` are blocks, and then places."""
    blocks, places = numbers.reshape(2, -1)
    at_rows, page_bytes = places // PLACE_BYTES, move.lanes.walk.run_bytes
    at_once = max(1, _BYTES_AT_ONCE // page_bytes)
    parts = [slice(first, first + at_once) for first in range(0, len(blocks), at_once)]
    # A row begins at every possible place: rows overlap.
    word, wires = all_pages[0].dtype, move.wire.tolist()
    row_bytes = max(wires) + page_bytes
    shape = ((len(slot) - row_bytes) // PLACE_BYTES + 1, row_bytes // word.itemsize)
    rows: NDArray[Any] = np.ndarray(shape, word, slot, 0, (PLACE_BYTES, word.itemsize))
    for pages, wire in zip(all_pages, wires, strict=True):
        in_rows = rows[:, wire // word.itemsize : (wire + page_bytes) // word.itemsize]
        for part in parts:
            if pack:
                in_rows[at_rows[part]] = pages[blocks[part]]
            else:
                pages[blocks[part]] = in_rows[at_rows[part]]


def _cast_part(
    pages: torch.Tensor,
    wire: torch.Tensor,
    all_blocks: torch.Tensor,
    lanes: Lanes,
    scales: Sequence[float],
    pack: bool,
) -> None:
    at_once = max(1, _VALUES_AT_ONCE // wire[0].numel())
    for first in range(0, len(all_blocks), at_once):
        blocks, rows = all_blocks[first : first + at_once], wire[first : first + at_once]
        if pack:
            _cast_values(pages.index_select(0, blocks), rows, lanes, scales, pack)
            rows.index_fill_(0, (blocks == 0).nonzero().reshape(-1), 0)
            continue
        kept = blocks.nonzero().reshape(-1)
        if len(kept) < len(blocks):
            blocks, rows = blocks[kept], rows[kept]
        cast = torch.empty((len(blocks), *pages.shape[1:]), dtype=pages.dtype)
        _cast_values(rows, cast, lanes, scales, pack)
        pages.index_copy_(0, blocks, cast)


def _cast_values(
    source: torch.Tensor, target: torch.Tensor, lanes: Lanes, scales: Sequence[float], pack: bool
) -> None:
    """Cast (page, token, head, plane, value) from one tensor into another."""
    cast, (planes, run) = lanes.access.cast, source.shape[3:]
    assert cast is not None
    types = (cast.memory, cast.wire) if pack else (cast.wire, cast.memory)
    for plane in range(planes):
        keys = min(max(lanes.key_values - plane * run, 0), run)
        for first, stop, scale in ((0, keys, scales[0]), (keys, run, scales[1])):
            if first < stop:
                codes = source[..., plane, first:stop].numpy()
                made = cast_table(*types, scale).take(codes.view(_UINTS[codes.itemsize]), mode="wrap")
                target[..., plane, first:stop] = torch.from_numpy(made.view(f"i{made.itemsize}"))
