"""Launches of the kernel in ``move_triton.py``: divides its work into items, and writes its arguments.

One launch has the lanes with equal ``Access``, so that odd rows (the 132 bytes of an fp8 indexer) slow no
other lanes down.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from triton.compiler import CompiledKernel

from kvconnect.cache.specs import div_ceil
from kvconnect.errors import LocalError
from kvconnect.pack.batches import Blocks, ChunkLayout, Launch, Move, PageRange, StagedChunk
from kvconnect.pack.digest import Streams
from kvconnect.pack.move_triton import load_kernel, move_kernel
from kvconnect.pack.numbers import NumberBuffer, NumberPool
from kvconnect.pack.page_lanes import Access, Column, Lanes

FIELDS = 20
CAST_FIELDS = FIELDS + 1

# Measured on an H200 (`python -m benchmarks pack`). A program moves one tile at a time: small tiles leave
# registers for many programs. An item has many tiles, so that the set-up of an item costs little.
_TILE_BYTES = 8 << 10
_NUM_WARPS = 8
_MOST_TURNS = 16
_PROGRAMS_PER_SM = 32
_INTERPRETED_PROGRAMS = 8
_ITEMS_EACH = 2
_LEAST_TURNS = 4
_LOADED_AT_ONCE = 1024


class Launcher:
    """Launches the kernel on the current stream. ``all_lanes`` are all lanes that will ever be moved.

    One thread prepares and stages; any number of threads may load and start. With ``is_placed`` each page
    has a place of its own in the slot; without it, the pages of a lane follow each other.
    """

    def __init__(self, all_lanes: Sequence[Lanes], device: torch.device, *, is_placed: bool = False) -> None:
        self._is_placed = is_placed
        self._programs = _INTERPRETED_PROGRAMS
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            self._programs = properties.multi_processor_count * _PROGRAMS_PER_SM
        sizes: dict[Access, list[tuple[int, int]]] = {}
        self._flat: dict[Access, bool] = {}
        for lanes in all_lanes:
            walk, access = lanes.walk, lanes.access
            sizes.setdefault(access, []).append((walk.page_bytes // access.unit, len(lanes.address)))
            flat = walk.tokens == walk.heads == walk.planes == 1
            self._flat[access] = flat and self._flat.get(access, True)
        self._units = {
            access: units_at_once(found, _TILE_BYTES // access.memory_unit) for access, found in sizes.items()
        }
        self._compiled: dict[tuple[Access, bool, bool], tuple[Any, tuple[Any, ...]]] = {}
        self._compiled_load: Any = None
        self._pool = NumberPool(device)
        self.sums = torch.zeros(1, dtype=torch.int64, device=device)

    def compile(self, pack: bool) -> None:
        """Compile the kernels of one direction without digest, so that no model step waits for that later."""
        lent = self._pool.lend(FIELDS)
        lent.values[:FIELDS] = 0
        self.load(lent)
        layout = ChunkLayout(0, (), (), tuple(Launch(access, 0, 1, 0, 1) for access in self._units))
        self.start(StagedChunk(layout, {}, lent.tensor, lent), 0, pack)

    def prepare(self, total_bytes: int, streams: Streams, moves: tuple[Move, ...]) -> ChunkLayout:
        """Compute the layout of a chunk, which does not depend on block ids."""
        columns: list[Column] = []

        def put(column: Column) -> int:
            columns.append(column)
            return sum(map(len, columns[:-1]))

        places: dict[PageRange, int] = {}
        by_access: dict[Access, list[Move]] = {}
        for move in moves:
            by_access.setdefault(move.lanes.access, []).append(move)
            if move.pages not in places:
                width = 2 if self._is_placed else 1
                places[move.pages] = put(np.zeros(width * move.pages.count, dtype=np.int64))
        launches = []
        for access, alike in by_access.items():
            lanes_at = [put(_lane_numbers(move)) for move in alike]
            blocks_at = [places[move.pages] for move in alike]
            fields, num_items = self._fields(access, alike, lanes_at, blocks_at)
            programs = min(num_items, self._programs)
            launches.append(Launch(access, put(fields), len(alike), num_items, programs))
        # Padding: layouts that are staged together follow each other, and the compiled kernel expects each
        # at a multiple of 16 bytes.
        put(np.zeros(2 - sum(map(len, columns)) % 2, dtype=np.int64))
        numbers = np.concatenate(columns)
        return ChunkLayout(total_bytes, streams, moves, tuple(launches), numbers, tuple(places.items()))

    def stage(
        self, layouts: Sequence[ChunkLayout], of_pages: Sequence[Blocks]
    ) -> tuple[NumberBuffer, list[StagedChunk]]:
        """Write the numbers of layouts, with block ids from ``of_pages``, to a host buffer for ``load``."""
        lent = self._pool.lend(sum(len(layout.numbers) for layout in layouts))
        staged, at = [], 0
        for layout, columns in zip(layouts, of_pages, strict=True):
            end = at + len(layout.numbers)
            lent.values[at:end] = layout.numbers
            for pages, place in layout.places:
                column = columns[pages]
                lent.values[at + place : at + place + len(column)] = column
            tensor = lent.tensor if len(layouts) == 1 else lent.tensor[at:end]
            staged.append(StagedChunk(layout, columns, tensor, lent))
            at = end
        return lent, staged

    def load(self, lent: NumberBuffer) -> None:
        """Copy a buffer's numbers to the device, by a kernel, since copy engines may be busy for long."""
        varying = (lent.tensor, lent.host_address, lent.count)
        grid = div_ceil(lent.count, _LOADED_AT_ONCE)
        if self._compiled_load is not None:
            self._compiled_load[(grid, 1, 1)](*varying, _LOADED_AT_ONCE)
            return
        made = load_kernel[(grid,)](*varying, COUNT=_LOADED_AT_ONCE, num_warps=4)
        if isinstance(made, CompiledKernel):
            self._compiled_load = made

    def start(self, staged: StagedChunk, slot: int, pack: bool, seed: int | None = None) -> None:
        """Launch the kernels of a loaded chunk. With a ``seed`` they add the slot's digest to ``sums``."""
        signed = 0 if seed is None else (seed + 2**63) % 2**64 - 2**63
        for launch in staged.layout.launches:
            counts = launch.batches_at, launch.num_batches, launch.num_items
            varying = (staged.tensor, *counts, slot, self.sums, signed)
            key = (launch.access, pack, seed is not None)
            compiled, constants = self._compiled.get(key, (None, ()))
            if compiled is not None:
                # Called directly: Triton would look up the argument types and the kernel at each launch,
                # which takes longer than all other work for a chunk.
                compiled[(launch.programs, 1, 1)](*varying, *constants)
                continue
            named = self._constants(*key)
            made = move_kernel[(launch.programs,)](*varying, **named, num_warps=_NUM_WARPS)
            if isinstance(made, CompiledKernel):
                self._compiled[key] = (made, tuple(named.values()))

    def _constants(self, access: Access, pack: bool, digest: bool) -> dict[str, Any]:
        """The kernel's compile-time arguments, in its order."""
        cast = access.cast
        return {
            "PACK": pack,
            "DIGEST": digest,
            "PLACED": self._is_placed,
            "FLAT": self._flat[access],
            "UNIT": access.unit,
            "WORD": access.word,
            "MEMORY": access.stride_bytes,
            "MEMORY_TYPE": None if cast is None else cast.memory,
            "WIRE_TYPE": None if cast is None else cast.wire,
            "PAGES": self._pages_at_once(access),
            "UNITS": self._units[access],
            "FIELDS": FIELDS if cast is None else CAST_FIELDS,
        }

    def _pages_at_once(self, access: Access) -> int:
        return max(1, _TILE_BYTES // access.memory_unit // self._units[access])

    def _fields(
        self, access: Access, moves: Sequence[Move], lanes_at: Sequence[int], blocks_at: Sequence[int]
    ) -> tuple[Column, int]:
        """The fields of the moves, int64, and the total number of their items."""
        pages = self._pages_at_once(access)
        tiles = [div_ceil(move.lanes.walk.page_bytes // access.unit, self._units[access]) for move in moves]
        turns = [div_ceil(move.pages.count, pages) for move in moves]
        lanes = [len(move.wire) for move in moves]
        all_turns = sum(map(math.prod, zip(tiles, turns, lanes, strict=True)))
        # A few long items per program, so that all programs end at about the same time. A small launch has
        # fewer programs rather than shorter items.
        at_once = div_ceil(all_turns, _ITEMS_EACH * self._programs)
        at_once = max(at_once, min(_LEAST_TURNS, all_turns // max(1, self._programs // 4)))
        at_once = min(at_once, _MOST_TURNS)
        num_fields = FIELDS if access.cast is None else CAST_FIELDS
        rows, first = [], 0
        unit, step = access.unit, access.stride_bytes
        for move, count, turn, *at in zip(moves, tiles, turns, lanes_at, blocks_at, strict=True):
            walk = move.lanes.walk
            turn = div_ceil(turn, at_once)
            # With placed pages the page is the outermost index, before lanes, so that concurrent programs
            # access memory of the slot near each other.
            order = (count * len(move.wire), count) if self._is_placed else (count * turn, turn)
            sizes = move.pages.count, move.lead, move.rows, walk.tokens, walk.page_bytes // unit
            axes = walk.wire_token_stride // unit, walk.wire_run_bytes // unit, walk.planes, walk.heads
            strides = walk.plane_stride // step, walk.head_stride // step, walk.token_stride // step
            row = (first, *order, at_once * pages, *at, *sizes, walk.block_stride, *axes, *strides)
            rows.append((*row, walk.wire_head_stride // unit, move.lanes.key_values)[:num_fields])
            first += count * turn * len(move.wire)
        if first >= 2**31:
            raise LocalError(f"a launch has {first} items of work; accepted: less than 2**31")
        return np.array(rows, dtype=np.int64).reshape(-1), first


def _lane_numbers(move: Move) -> Column:
    """Per lane its address, and its place in the slot in units; with a cast also both scales as a number."""
    access = move.lanes.access
    columns = [move.lanes.address[move.which], move.wire // access.unit]
    if access.cast is not None:
        columns.append(move.lanes.scales[move.which].view(np.int64).reshape(-1))
    return np.stack(columns, axis=1).reshape(-1)


def units_at_once(pages: Sequence[tuple[int, int]], most: int) -> int:
    """The units of a page in one tile: a power of two up to ``most``, the largest one whose tiles cover at
    most 15 % more units than the best size.

    ``pages`` has pairs: the units of a page, and the number of lanes with such pages.
    """
    most = max(1, 1 << (most.bit_length() - 1))
    sizes = [1 << bit for bit in range(most.bit_length())]
    cost = {size: sum(div_ceil(units, size) * size * lanes for units, lanes in pages) for size in sizes}
    fewest = min(cost[size] for size in sizes)
    return max(size for size in sizes if cost[size] <= fewest * 1.15)
