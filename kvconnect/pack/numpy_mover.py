"""Pack and unpack on a CPU with numpy: a few strided copies per lane between pages and slot.

A page and its place in the slot have the same five axes with different strides, so that one indexed copy
moves a run of whole pages of a lane. Casts work on a few pages at a time, to stay in the processor's cache.
So do placed pages (see ``Launcher``), which need lanes without inner axes. A few threads share the lanes of a
large chunk, since numpy copies without the interpreter's lock.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
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

# A thread more takes some 0.1 ms to begin.
_LEAST_BYTES_EACH = 2 << 20
# Measured on a Xeon of 16 cores: 4 threads copy at 2.7 times the rate of one, 6 and 8 not faster. P and D may
# both be on this machine, where the serving stack computes.
_MOST_THREADS = 4
_CORES_PER_THREAD = 4


class NumpyMover(PlainMover):
    """Moves chunks in CPU memory. For ``digest_sample`` see ``Packer``, for ``is_placed`` ``Launcher``."""

    def __init__(self, all_lanes: Sequence[Lanes], digest_sample: int = 1, is_placed: bool = False) -> None:
        self._digest_sample = digest_sample
        self._pages = {
            lanes: [_memory_view(address, lanes) for address in lanes.address.tolist()] for lanes in all_lanes
        }
        placed = self._pages if is_placed else {}
        self._placed = {lanes: [one[:, 0, 0, 0] for one in pages] for lanes, pages in placed.items()}

    def move(self, slot: int, staged: StagedChunk, seed: int, pack: bool) -> PackTicket:
        """Pack pages into the slot at address ``slot``, or unpack them, and compute the slot's digest."""
        if not staged.total_bytes:
            return PackTicket(0)
        raw = _slot_bytes(slot, staged)
        mine, *others = _shares(staged.layout.moves, staged.total_bytes // _LEAST_BYTES_EACH)
        helped: list[Future[None]] = []
        try:
            for moves in others:
                helped.append(_helpers().submit(self._move, moves, staged, raw, pack))
            self._move(mine, staged, raw, pack)
        finally:
            # No thread copies any more once slot and pages may be used for something else.
            wait(helped)
            if len(helped) < len(others):
                # A share for which no thread could be started is queued nevertheless.
                _helpers().shutdown()
                _helpers.cache_clear()
        for share in helped:
            share.result()
        return PackTicket(digest_streams(raw, staged.layout.streams, seed, self._digest_sample))

    def move_pages(self, slot: int, staged: StagedChunk, pack: bool) -> None:
        """Pack or unpack more than 0 bytes without a digest, in this thread."""
        self._move(staged.layout.moves, staged, _slot_bytes(slot, staged), pack)

    def _move(self, moves: Sequence[Move], staged: StagedChunk, slot: NDArray[np.uint8], pack: bool) -> None:
        for move in moves:
            numbers = staged.blocks[move.pages]
            if move.lanes in self._placed:
                _move_placed(self._placed[move.lanes], move, numbers, slot, pack)
            else:
                _move_rows(self._pages[move.lanes][move.which], move, numbers, slot, pack)


def _slot_bytes(slot: int, staged: StagedChunk) -> NDArray[np.uint8]:
    return np.ctypeslib.as_array((ctypes.c_uint8 * staged.total_bytes).from_address(slot))


def _shares(moves: Sequence[Move], most: int) -> list[Sequence[Move]]:
    """The moves, divided by their lanes for up to ``most`` threads; at least one part, none of them empty."""
    count = min(_MOST_THREADS, len(_cores()) // _CORES_PER_THREAD, most)
    if count <= 1:
        return [moves]
    shares: list[list[Move]] = [[] for _ in range(count)]
    for move in moves:
        borders = [len(move.wire) * number // count for number in range(count + 1)]
        for share, (first, stop) in zip(shares, itertools.pairwise(borders), strict=True):
            if first < stop:
                which = slice(move.which.start + first, move.which.start + stop)
                share.append(replace(move, which=which, wire=move.wire[first:stop]))
    return [share for share in shares if share] or [moves]


@functools.cache
def _helpers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_MOST_THREADS - 1, "kvconnect-copy", _use_all_cores)


@functools.cache
def _cores() -> set[int]:
    """The cores of this thread, and those of the process that started this one if it runs the same program.

    A serving stack binds each thread that computes to one core, and threads that it starts inherit that core.
    The stack's process that answers clients, the parent of those that compute, is not bound.
    """
    cores, parent = os.sched_getaffinity(0), os.getppid()
    with suppress(OSError):
        if os.path.samefile(f"/proc/{parent}/exe", "/proc/self/exe"):
            cores |= os.sched_getaffinity(parent)
    return cores


def _use_all_cores() -> None:
    with suppress(OSError):
        os.sched_setaffinity(0, _cores())


def _memory_view(address: int, lanes: Lanes) -> Words:
    """All pages of a lane: (block, token, head, plane, word)."""
    walk, cast = lanes.walk, lanes.access.cast
    word = min(8, lanes.access.memory) if cast is None else cast.memory_bytes
    length = (lanes.num_blocks - 1) * walk.block_stride + walk.extent_bytes
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(address))
    shape = (lanes.num_blocks, walk.tokens, walk.heads, walk.planes, walk.run_bytes // word)
    strides = (walk.block_stride, walk.token_stride, walk.head_stride, walk.plane_stride, word)
    return np.ndarray(shape, f"i{word}", memory, 0, strides)


def _move_rows(
    all_pages: Sequence[Words], move: Move, of_pages: BlockIds, slot: NDArray[np.uint8], pack: bool
) -> None:
    """Move the pages of each lane."""
    walk, cast = move.lanes.walk, move.lanes.access.cast
    word = np.dtype(f"i{min(8, move.lanes.access.memory) if cast is None else cast.wire_bytes}")
    step = walk.tokens * walk.wire_token_stride
    strides = (step, walk.wire_token_stride, walk.wire_head_stride, walk.wire_run_bytes, word.itemsize)
    all_scales = move.lanes.scales[move.which].tolist()
    # Computed once for all lanes, of which there may be hundreds.
    for blocks, skipped, tokens, at in parts(move, of_pages):
        if not blocks[0] and not pack:
            continue
        shape = (len(blocks), tokens, walk.heads, walk.planes, walk.wire_run_bytes // word.itemsize)
        for pages, wire, scales in zip(all_pages, move.wire.tolist(), all_scales, strict=True):
            in_slot: Words = np.ndarray(shape, word, slot, wire + at, strides)
            if tokens != walk.tokens:
                pages = pages[:, skipped : skipped + tokens]
            if not blocks[0]:
                in_slot[:] = 0
            elif cast is not None:
                _cast_part(pages, in_slot, blocks, move.lanes, scales, pack)
            elif pack:
                _gather(pages, blocks, in_slot)
            else:
                pages[blocks] = in_slot


def _gather(pages: Words, blocks: BlockIds, rows: Words) -> None:
    """Copy pages into rows. Not with torch, whose number of threads the serving stack chooses."""
    if pages.flags.c_contiguous and rows.flags.c_contiguous:
        # Block ids were checked before; with mode "raise" numpy would copy everything twice.
        pages.take(blocks, axis=0, out=rows, mode="clip")
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
        else:
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
