"""Pack and unpack on a CPU with numpy: a few strided copies per lane between pages and slot.

A page and its place in the slot have the same five axes with different strides, so that one indexed copy
moves all whole pages of a lane. Casts work on a few pages at a time, to stay in the processor's cache. So do
placed pages (see ``Launcher``), which need lanes without inner axes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvconnect.pack.batches import Move, PackTicket, PlainMover, StagedChunk, parts, values_by_scale
from kvconnect.pack.casts import cast_table
from kvconnect.pack.digest import digest_streams
from kvconnect.pack.page_lanes import PLACE_BYTES, Column, Lanes
from kvconnect.plan.blocks import BlockIds

Words = NDArray[Any]
_VALUES_AT_ONCE = 1 << 15
_BYTES_AT_ONCE = 256 << 10
_FEW_PAGES = 8


class NumpyMover(PlainMover):
    """Moves chunks in CPU memory. For ``digest_sample`` see ``Packer``, for ``is_placed`` ``Launcher``."""

    def __init__(self, all_lanes: Sequence[Lanes], digest_sample: int = 1, is_placed: bool = False) -> None:
        self._digest_sample = digest_sample
        self._pages = {
            lanes: [_memory_view(address, lanes) for address in lanes.address.tolist()] for lanes in all_lanes
        }
        self._whole = {lanes: _whole_pages(pages, lanes) for lanes, pages in self._pages.items()}
        placed = self._pages if is_placed else {}
        self._placed = {lanes: [one[:, 0, 0, 0] for one in pages] for lanes, pages in placed.items()}

    def move(self, slot: int, staged: StagedChunk, seed: int, pack: bool) -> PackTicket:
        """Pack pages into the slot at address ``slot``, or unpack them, and compute the slot's digest."""
        if not staged.total_bytes:
            return PackTicket(0)
        raw = self.move_pages(slot, staged, pack)
        return PackTicket(digest_streams(raw, staged.layout.streams, seed, self._digest_sample))

    def move_pages(self, slot: int, staged: StagedChunk, pack: bool) -> NDArray[np.uint8]:
        """Pack or unpack without a digest. Returns the bytes of the slot, which are more than 0."""
        raw = np.ctypeslib.as_array((ctypes.c_uint8 * staged.total_bytes).from_address(slot))
        for move in staged.layout.moves:
            numbers = staged.blocks[move.pages]
            if move.lanes in self._placed:
                _move_placed(self._placed[move.lanes], move, numbers, raw, pack)
            else:
                whole = self._whole[move.lanes][move.which]
                _move_rows(self._pages[move.lanes][move.which], whole, move, numbers, raw, pack)
        return raw


def _memory_view(address: int, lanes: Lanes) -> Words:
    """All pages of a lane: (block, token, head, plane, word)."""
    walk, cast = lanes.walk, lanes.access.cast
    word = min(8, lanes.access.memory) if cast is None else cast.memory_bytes
    length = (lanes.num_blocks - 1) * walk.block_stride + walk.extent_bytes
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(address))
    shape = (lanes.num_blocks, walk.tokens, walk.heads, walk.planes, walk.run_bytes // word)
    strides = (walk.block_stride, walk.token_stride, walk.head_stride, walk.plane_stride, word)
    return np.ndarray(shape, f"i{word}", memory, 0, strides)


def _whole_pages(all_pages: Sequence[Words], lanes: Lanes) -> list[NDArray[np.uint8]]:
    """The pages of each lane as rows of bytes, if pages are contiguous in memory and slot; else empty."""
    walk = lanes.walk
    if lanes.access.cast is not None or not all_pages[0][0].flags.c_contiguous:
        return []
    # In a slot, rows of other lanes may lie between the rows of this lane, even for pages of one row.
    if walk.page_bytes != walk.tokens * walk.wire_token_stride:
        return []
    shape_of_all = (lanes.num_blocks, walk.page_bytes)
    return [np.ndarray(shape_of_all, np.uint8, one.base, 0, (walk.block_stride, 1)) for one in all_pages]


def _copy_whole(
    all_rows: Sequence[NDArray[np.uint8]],
    blocks: list[int],
    slot: NDArray[np.uint8],
    firsts: list[int],
    pack: bool,
) -> None:
    """Copy the pages of each lane one by one; those of lane i follow each other from ``firsts[i]`` on."""
    size = all_rows[0].shape[1]
    for rows, first in zip(all_rows, firsts, strict=True):
        for number, block in enumerate(blocks):
            in_slot = slot[first + number * size : first + (number + 1) * size]
            if not pack and block:
                rows[block] = in_slot
            elif pack:
                in_slot[:] = rows[block] if block else 0


def _move_rows(
    all_pages: Sequence[Words],
    whole_pages: Sequence[NDArray[np.uint8]],
    move: Move,
    of_pages: BlockIds,
    slot: NDArray[np.uint8],
    pack: bool,
) -> None:
    """Move the pages of each lane."""
    walk, cast = move.lanes.walk, move.lanes.access.cast
    word = min(8, move.lanes.access.memory) if cast is None else cast.wire_bytes
    step = walk.tokens * walk.wire_token_stride
    strides = (step, walk.wire_token_stride, walk.wire_head_stride, walk.wire_run_bytes, word)
    all_scales = move.lanes.scales[move.which].tolist()
    for first, stop, skipped, tokens, at in parts(move, len(of_pages)):
        # Computed once for all lanes, of which there may be hundreds.
        blocks = of_pages[first:stop]
        if whole_pages and tokens == walk.tokens and len(blocks) <= _FEW_PAGES:
            # For few pages, setting up one indexed copy takes longer in numpy than copying each page.
            _copy_whole(whole_pages, blocks.tolist(), slot, [wire + at for wire in move.wire.tolist()], pack)
            continue
        (missing,) = np.nonzero(blocks == 0)
        (kept,) = np.nonzero(blocks) if len(missing) else (slice(None),)
        # The null block may have no memory: another block is read in its place, and its rows are zeroed.
        sources = np.where(blocks, blocks, blocks.max()) if len(missing) else blocks
        shape = (len(blocks), tokens, walk.heads, walk.planes, walk.wire_run_bytes // word)
        for pages, wire, scales in zip(all_pages, move.wire.tolist(), all_scales, strict=True):
            if tokens != walk.tokens:
                pages = pages[:, skipped : skipped + tokens]
            in_slot: Words = np.ndarray(shape, f"i{word}", slot, wire + at, strides)
            if pack and len(missing) < len(blocks):
                if cast is None:
                    _gather(pages, sources, in_slot)
                else:
                    _cast_part(pages, in_slot, sources, move.lanes, scales, pack)
            if pack:
                in_slot[missing] = 0
            elif cast is None:
                pages[blocks[kept]] = in_slot[kept]
            else:
                _cast_part(pages, in_slot, blocks, move.lanes, scales, pack)


def _gather(pages: Words, blocks: BlockIds, rows: Words) -> None:
    """Copy pages into rows. Not with torch, whose number of threads the serving stack chooses."""
    if pages.flags.c_contiguous and rows.flags.c_contiguous:
        # Block ids were checked before; with mode "raise" numpy would copy everything twice.
        np.take(pages, blocks, axis=0, out=rows, mode="clip")
        return
    at_once = max(1, _BYTES_AT_ONCE // rows[0].nbytes)
    for first in range(0, len(blocks), at_once):
        rows[first : first + at_once] = pages[blocks[first : first + at_once]]


def _move_placed(
    all_pages: Sequence[Words], move: Move, numbers: Column, slot: NDArray[np.uint8], pack: bool
) -> None:
    """Move the placed pages of each lane; ``numbers`` are block ids, followed by as many places in bytes."""
    blocks, places = numbers.reshape(2, -1)
    at_rows, page_bytes = places // PLACE_BYTES, move.lanes.walk.run_bytes
    at_once = max(1, _BYTES_AT_ONCE // page_bytes)
    parts = [slice(first, first + at_once) for first in range(0, len(blocks), at_once)]
    # A view with a row at every possible place; its rows overlap.
    word, wires = all_pages[0].dtype, move.wire.tolist()
    row_bytes = max(wires) + page_bytes
    shape = ((len(slot) - row_bytes) // PLACE_BYTES + 1, row_bytes // word.itemsize)
    rows: Words = np.ndarray(shape, word, slot, 0, (PLACE_BYTES, word.itemsize))
    for pages, wire in zip(all_pages, wires, strict=True):
        in_rows = rows[:, wire // word.itemsize : (wire + page_bytes) // word.itemsize]
        for part in parts:
            if pack:
                in_rows[at_rows[part]] = pages[blocks[part]]
            else:
                pages[blocks[part]] = in_rows[at_rows[part]]


def _cast_part(
    pages: Words, wire: Words, ids: BlockIds, lanes: Lanes, scales: list[float], pack: bool
) -> None:
    at_once = max(1, _VALUES_AT_ONCE // wire[0].size)
    for first in range(0, len(ids), at_once):
        some, rows = ids[first : first + at_once], wire[first : first + at_once]
        if pack:
            _cast_values(pages[some], rows, lanes, scales, pack)
            continue
        (kept,) = np.nonzero(some)
        if len(kept) < len(some):
            some, rows = some[kept], rows[kept]
        cast: Words = np.empty((len(some), *pages.shape[1:]), pages.dtype)
        _cast_values(rows, cast, lanes, scales, pack)
        pages[some] = cast


def _cast_values(source: Words, target: Words, lanes: Lanes, scales: list[float], pack: bool) -> None:
    """Cast (page, token, head, plane, value) from one array into another."""
    cast, (planes, run) = lanes.access.cast, source.shape[3:]
    assert cast is not None
    types = (cast.memory, cast.wire) if pack else (cast.wire, cast.memory)
    for plane, values, scale in values_by_scale(lanes, planes, run, scales):
        codes = source[..., plane, values]
        made = cast_table(*types, scale).take(codes.view(f"u{codes.itemsize}"), mode="wrap")
        target[..., plane, values] = made.view(target.dtype)
