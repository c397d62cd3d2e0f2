"""Pack and unpack as a Triton kernel: one launch for a chunk.

Layers are of one launch if their accesses are equally wide, which all of a model's usually are; a layer
with odd rows (the 132 bytes of an fp8 indexer) gets a launch of its own and slows no other down.

Here the kernel's work is cut and its numbers are laid out; the kernel itself is in ``move_triton.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from triton.compiler import CompiledKernel

from kvconnect.arithmetic import div_ceil
from kvconnect.errors import LocalError
from kvconnect.pack.batches import LaneClass, Move, PageRange
from kvconnect.pack.digest import MULTIPLIER, STEP
from kvconnect.pack.lanes import Access
from kvconnect.pack.move_triton import move_kernel
from kvconnect.pack.packer import ChunkLayout, StagedChunk, Ticket
from kvconnect.pack.staging import Lent, Staging
from kvconnect.pack.tickets import Tickets
from kvconnect.runner_kit.block_table import BlockIds

FIELDS = 20
CAST_FIELDS = FIELDS + 1


@dataclass(frozen=True)
class Tuning:
    """How the kernel's work is cut.

    ``tile_bytes`` are moved at a time by one program of ``num_warps`` warps. An item has at most
    ``max_turns`` such tiles, so that what is worked out once per item counts little. At most
    ``programs_per_sm`` programs are launched for each multiprocessor where no bound was asked for.
    """

    tile_bytes: int
    num_warps: int
    max_turns: int
    programs_per_sm: int


# Measured on an H200 (`python -m benchmarks pack`). Where any number of programs may run, small tiles leave
# registers for many of them; few programs must each keep more bytes under way.
UNBOUNDED = Tuning(tile_bytes=8 << 10, num_warps=8, max_turns=16, programs_per_sm=32)
BOUNDED = Tuning(tile_bytes=32 << 10, num_warps=16, max_turns=16, programs_per_sm=1)
_INTERPRETED_PROGRAMS = 8
_ITEMS_EACH = 2
_LEAST_TURNS = 4


@dataclass(frozen=True)
class _Launch:
    """One launch of a chunk: the moves of one access width. ``batches_at`` is where their rows begin."""

    access: Access
    batches_at: int
    num_batches: int
    num_items: int
    programs: int


@dataclass(frozen=True)
class _Prepared:
    """A chunk's launches and its numbers, with room for the blocks of a request from ``places`` on."""

    launches: tuple[_Launch, ...]
    numbers: NDArray[np.int64]
    places: tuple[tuple[PageRange, int], ...]


class _Numbers(NamedTuple):
    """A chunk's launches, and the tensor with their numbers, which lies in ``lent``."""

    tensor: torch.Tensor
    launches: tuple[_Launch, ...]
    lent: Lent


class TritonPackOps:
    """See ``PackOps``."""

    def __init__(
        self,
        classes: Sequence[LaneClass],
        device: torch.device,
        max_programs: int,
        cuda_stream: torch.cuda.Stream | None,
        tuning: Tuning | None = None,
    ) -> None:
        self._device = device
        if device.type == "cuda" and cuda_stream is None:
            cuda_stream = torch.cuda.current_stream(device)
        self._max_programs = max_programs or _INTERPRETED_PROGRAMS
        self._stream = cuda_stream
        self._tuning = tuning or (BOUNDED if max_programs else UNBOUNDED)
        if device.type == "cuda" and not max_programs:
            sms = torch.cuda.get_device_properties(device).multi_processor_count
            self._max_programs = sms * self._tuning.programs_per_sm
        sizes: dict[Access, list[tuple[int, int]]] = {}
        self._flat: dict[Access, bool] = {}
        for lanes in classes:
            walk = lanes.walk
            units = walk.page_bytes // lanes.access.unit
            sizes.setdefault(lanes.access, []).append((units, len(lanes.address)))
            flat = walk.tokens == walk.heads == walk.planes == 1
            self._flat[lanes.access] = flat and self._flat.get(lanes.access, True)
        self._units = {
            access: units_at_once(found, self._tile_units(access)) for access, found in sizes.items()
        }
        self._compiled: dict[tuple[Access, bool, bool], tuple[Any, tuple[Any, ...]]] = {}
        self._staging = Staging(device)
        with self._on_stream():
            self._tickets = Tickets(device, cuda_stream)

    def prepare(self, moves: Sequence[Move]) -> _Prepared:
        """See ``PackOps``."""
        columns: list[NDArray[np.int64]] = []
        at = 0

        def put(column: NDArray[np.int64]) -> int:
            nonlocal at
            columns.append(column)
            at += len(column)
            return at - len(column)

        places: dict[PageRange, int] = {}
        by_access: dict[Access, list[Move]] = {}
        for move in moves:
            by_access.setdefault(move.access, []).append(move)
            if move.pages not in places:
                places[move.pages] = put(np.zeros(move.pages.count, dtype=np.int64))
        launches = []
        for access, alike in by_access.items():
            lanes_at = [put(_lane_numbers(access, move)) for move in alike]
            blocks_at = [places[move.pages] for move in alike]
            rows, num_items = self._rows(access, alike, lanes_at, blocks_at)
            programs = min(num_items, self._max_programs)
            launches.append(_Launch(access, put(rows), len(alike), num_items, programs))
        # Chunks lie side by side, each from a multiple of 16 bytes on, as the compiled kernel expects it.
        put(np.zeros(2 - at % 2, dtype=np.int64))
        return _Prepared(tuple(launches), np.concatenate(columns), tuple(places.items()))

    def stage(
        self, layouts: Sequence[ChunkLayout], blocks: Mapping[PageRange, BlockIds]
    ) -> Sequence[_Numbers]:
        """See ``PackOps``."""
        prepared: list[_Prepared] = [layout.handle for layout in layouts]
        lengths = [len(chunk.numbers) for chunk in prepared]
        with self._on_stream():
            lent = self._staging.lend(sum(lengths))
            numbers, at = lent.values, 0
            for chunk, length in zip(prepared, lengths, strict=True):
                numbers[at : at + length] = chunk.numbers
                for pages, place in chunk.places:
                    numbers[at + place : at + place + pages.count] = blocks[pages]
                at += length
            lent.copy()
        if len(prepared) == 1:
            return (_Numbers(lent.tensor, prepared[0].launches, lent),)
        parts = torch.split(lent.tensor[:at], lengths)
        return [_Numbers(part, chunk.launches, lent) for part, chunk in zip(parts, prepared, strict=True)]

    def _tile_units(self, access: Access) -> int:
        return self._tuning.tile_bytes // access.memory_unit

    def _pages_at_once(self, access: Access) -> int:
        return max(1, self._tile_units(access) // self._units[access])

    def _rows(
        self, access: Access, moves: Sequence[Move], lanes_at: Sequence[int], blocks_at: Sequence[int]
    ) -> tuple[NDArray[np.int64], int]:
        """The moves' rows, and how many items they have together."""
        units, pages = self._units[access], self._pages_at_once(access)
        tiles = [div_ceil(move.walk.page_bytes // access.unit, units) for move in moves]
        turns = [div_ceil(move.pages.count, pages) for move in moves]
        all_turns = sum(
            count * turn * len(move.address) for count, turn, move in zip(tiles, turns, moves, strict=True)
        )
        # Long items, a few for each program, so that all programs end at about the same time; where there is
        # less to do, fewer programs rather than short items.
        at_once = div_ceil(all_turns, _ITEMS_EACH * self._max_programs)
        at_once = max(at_once, min(_LEAST_TURNS, all_turns // max(1, self._max_programs // 4)))
        at_once = min(at_once, self._tuning.max_turns)
        rows, first = [], 0
        step = access.stride_bytes
        for move, count, turn, lanes, blocks in zip(moves, tiles, turns, lanes_at, blocks_at, strict=True):
            walk = move.walk
            turn = div_ceil(turn, at_once)
            rows.append(
                (
                    first,
                    count * turn,
                    turn,
                    at_once * pages,
                    lanes,
                    blocks,
                    move.pages.count,
                    move.lead,
                    move.rows,
                    walk.tokens,
                    walk.page_bytes // access.unit,
                    walk.block_stride,
                    walk.wire_token_stride // access.unit,
                    walk.wire_run_bytes // access.unit,
                    walk.planes,
                    walk.heads,
                    walk.plane_stride // step,
                    walk.head_stride // step,
                    walk.token_stride // step,
                    walk.wire_head_stride // access.unit,
                    *(() if access.cast is None else (move.key_values,)),
                )
            )
            first += count * turn * len(move.address)
        if first >= 2**31:
            raise LocalError(f"a chunk has {first} items of work; accepted: less than 2**31")
        return np.array(rows, dtype=np.int64).reshape(-1), first

    def move(self, slot: int, staged: StagedChunk, seed: int | None, pack: bool) -> Ticket:
        """See ``PackOps``."""
        numbers: _Numbers = staged.handle
        self._tickets.check_room()
        wrapped = 0 if seed is None else (seed + 2**63) % 2**64 - 2**63
        with self._on_stream():
            for launch in numbers.launches:
                self._start(launch, numbers.tensor, slot, wrapped, pack, seed is not None)
            return self._tickets.issue(seed is not None, numbers.lent)

    def _start(
        self, launch: _Launch, numbers: torch.Tensor, slot: int, seed: int, pack: bool, digest: bool
    ) -> None:
        """Launch on the current stream."""
        varying = (
            numbers,
            launch.batches_at,
            launch.num_batches,
            launch.num_items,
            slot,
            self._tickets.sum_of_all,
            seed,
        )
        key = (launch.access, pack, digest)
        compiled, constants = self._compiled.get(key, (None, ()))
        if compiled is not None:
            # What Triton would find out anew at each launch takes longer than everything else that is done
            # for a chunk, and has been found out: the types of all arguments, and which kernel that means.
            compiled[(launch.programs, 1, 1)](*varying, *constants)
            return
        named = self._constants(launch.access, pack, digest)
        made = move_kernel[(launch.programs,)](*varying, **named, num_warps=self._tuning.num_warps)
        if isinstance(made, CompiledKernel):
            self._compiled[key] = (made, tuple(named.values()))

    def _constants(self, access: Access, pack: bool, digest: bool) -> dict[str, Any]:
        """The kernel's compile-time arguments, in its order."""
        cast = access.cast
        return {
            "PACK": pack,
            "DIGEST": digest,
            "FLAT": self._flat[access],
            "UNIT": access.unit,
            "WORD": access.word,
            "MEMORY": access.stride_bytes,
            "MEMORY_TYPE": None if cast is None else cast.memory,
            "WIRE_TYPE": None if cast is None else cast.wire,
            "PAGES": self._pages_at_once(access),
            "UNITS": self._units[access],
            "FIELDS": FIELDS if cast is None else CAST_FIELDS,
            "STEP": STEP,
            "MULTIPLIER": MULTIPLIER,
        }

    def _on_stream(self) -> AbstractContextManager[Any]:
        # To change the stream and back costs more than to look: the owner's thread may be on it already.
        if self._stream is None or _current_stream(self._device) == self._stream.cuda_stream:
            return nullcontext()
        return torch.cuda.stream(self._stream)


def _current_stream(device: torch.device) -> int:
    """The handle of the stream that is current: asked for at every launch, and an object costs 10 us."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(torch._C._cuda_getCurrentRawStream(index))


def _lane_numbers(access: Access, move: Move) -> NDArray[np.int64]:
    """For each lane its address and its place in the slot; with a cast also its scales, two to a number."""
    columns = [move.address, move.wire // access.unit]
    if access.cast is not None:
        columns.append(move.scales.view(np.int64).reshape(-1))
    return np.stack(columns, axis=1).reshape(-1)


def units_at_once(pages: Sequence[tuple[int, int]], most: int) -> int:
    """How many units of a page a tile takes: a power of two, as large as wastes little.

    ``pages`` are the units of a page and how many lanes have such pages.
    """
    most = max(1, 1 << (most.bit_length() - 1))
    sizes = [1 << bit for bit in range(most.bit_length())]
    cost = {size: sum(div_ceil(units, size) * size * lanes for units, lanes in pages) for size in sizes}
    fewest = min(cost[size] for size in sizes)
    return max(size for size in sizes if cost[size] <= fewest * 1.15)
