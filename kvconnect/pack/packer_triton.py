"""Pack and unpack as a Triton kernel: one launch for a chunk.

Layers are of one launch if their accesses are equally wide, which all of a model's usually are; a layer
with odd rows (the 132 bytes of an fp8 indexer) gets a launch of its own and slows no other down.

Here the kernel's work is cut and its numbers are laid out; the kernel itself is in ``move_triton.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvconnect.arithmetic import div_ceil
from kvconnect.errors import LocalError
from kvconnect.pack.batches import Batch, LaneClass
from kvconnect.pack.digest import MULTIPLIER, STEP
from kvconnect.pack.lanes import Access
from kvconnect.pack.move_triton import move_kernel
from kvconnect.pack.packer import StagedChunk, Ticket
from kvconnect.pack.tickets import Tickets

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


# Measured on an H200 with `kvconnect bench pack`. Where any number of programs may run, small tiles leave
# registers for many of them; few programs must each keep more bytes under way.
UNBOUNDED = Tuning(tile_bytes=8 << 10, num_warps=8, max_turns=16, programs_per_sm=32)
BOUNDED = Tuning(tile_bytes=32 << 10, num_warps=16, max_turns=16, programs_per_sm=1)
_INTERPRETED_PROGRAMS = 8
_ITEMS_EACH = 2
_LEAST_TURNS = 4


@dataclass(frozen=True)
class _Launch:
    """One launch of a chunk: the batches of one access width."""

    access: Access
    flat: bool
    pages: int
    units: int
    batches_at: int
    num_batches: int
    num_items: int
    programs: int


@dataclass(frozen=True)
class _Numbers:
    """A chunk's launches, and the tensor with their numbers."""

    tensor: torch.Tensor
    launches: tuple[_Launch, ...]


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
        with self._on_stream():
            self._tickets = Tickets(device)

    def stage(self, chunks: Sequence[Sequence[Batch]]) -> Sequence[_Numbers]:
        """See ``PackOps``."""
        columns: list[NDArray[np.int64]] = []
        placed: dict[int, int] = {}
        at = 0

        def put(column: NDArray[np.int64]) -> int:
            nonlocal at
            columns.append(column)
            at += len(column)
            return at - len(column)

        launches: list[tuple[_Launch, ...]] = []
        for batches in chunks:
            by_access: dict[Access, list[Batch]] = {}
            for batch in batches:
                by_access.setdefault(batch.access, []).append(batch)
                if id(batch.blocks) not in placed:
                    placed[id(batch.blocks)] = put(batch.blocks)
            made = []
            for access, alike in by_access.items():
                lanes_at = [put(_lane_numbers(access, batch)) for batch in alike]
                blocks_at = [placed[id(batch.blocks)] for batch in alike]
                rows, num_items = self._rows(access, alike, lanes_at, blocks_at)
                made.append(self._launch(access, put(rows), len(alike), num_items))
            launches.append(tuple(made))
        with self._on_stream():
            numbers = self._upload(columns, at)
        return [_Numbers(numbers, made) for made in launches]

    def _tile_units(self, access: Access) -> int:
        return self._tuning.tile_bytes // access.memory_unit

    def _launch(self, access: Access, batches_at: int, num_batches: int, num_items: int) -> _Launch:
        units = self._units[access]
        programs = min(num_items, self._max_programs)
        pages = max(1, self._tile_units(access) // units)
        return _Launch(access, self._flat[access], pages, units, batches_at, num_batches, num_items, programs)

    def _rows(
        self, access: Access, batches: Sequence[Batch], lanes_at: Sequence[int], blocks_at: Sequence[int]
    ) -> tuple[NDArray[np.int64], int]:
        """The batches' rows, and how many items they have together."""
        units = self._units[access]
        pages = max(1, self._tile_units(access) // units)
        tiles = [div_ceil(batch.walk.page_bytes // access.unit, units) for batch in batches]
        turns = [div_ceil(len(batch.blocks), pages) for batch in batches]
        all_turns = sum(
            count * turn * len(batch.address)
            for count, turn, batch in zip(tiles, turns, batches, strict=True)
        )
        # Long items, a few for each program, so that all programs end at about the same time; where there is
        # less to do, fewer programs rather than short items.
        at_once = div_ceil(all_turns, _ITEMS_EACH * self._max_programs)
        at_once = max(at_once, min(_LEAST_TURNS, all_turns // max(1, self._max_programs // 4)))
        at_once = min(at_once, self._tuning.max_turns)
        rows, first = [], 0
        step = access.stride_bytes
        for batch, count, turn, lanes, blocks in zip(batches, tiles, turns, lanes_at, blocks_at, strict=True):
            walk = batch.walk
            turn = div_ceil(turn, at_once)
            rows.append(
                (
                    first,
                    count * turn,
                    turn,
                    at_once * pages,
                    lanes,
                    blocks,
                    len(batch.blocks),
                    batch.lead,
                    batch.rows,
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
                    *(() if access.cast is None else (batch.key_values,)),
                )
            )
            first += count * turn * len(batch.address)
        if first >= 2**31:
            raise LocalError(f"a chunk has {first} items of work; accepted: less than 2**31")
        return np.array(rows, dtype=np.int64).reshape(-1), first

    def _upload(self, columns: Sequence[NDArray[np.int64]], length: int) -> torch.Tensor:
        if self._device.type != "cuda":
            return torch.from_numpy(np.concatenate([*columns, np.zeros(1, dtype=np.int64)]))
        # The allocator of pinned memory keeps it from reuse until the copy is done.
        host = torch.empty(length, dtype=torch.int64, pin_memory=True)
        if length:
            np.concatenate(columns, out=host.numpy())
        return host.to(self._device, non_blocking=True)

    def move(self, slot: int, staged: StagedChunk, seed: int | None, pack: bool) -> Ticket:
        """See ``PackOps``."""
        numbers: _Numbers = staged.handle
        self._tickets.check_room()
        wrapped = 0 if seed is None else (seed + 2**63) % 2**64 - 2**63
        with self._on_stream():
            for launch in numbers.launches:
                move_kernel[(launch.programs,)](
                    numbers.tensor,
                    launch.batches_at,
                    launch.num_batches,
                    launch.num_items,
                    slot,
                    self._tickets.sum_of_all,
                    wrapped,
                    PACK=pack,
                    DIGEST=seed is not None,
                    FLAT=launch.flat,
                    UNIT=launch.access.unit,
                    WORD=launch.access.word,
                    MEMORY=launch.access.stride_bytes,
                    MEMORY_TYPE=None if launch.access.cast is None else launch.access.cast.memory,
                    WIRE_TYPE=None if launch.access.cast is None else launch.access.cast.wire,
                    PAGES=launch.pages,
                    UNITS=launch.units,
                    FIELDS=FIELDS if launch.access.cast is None else CAST_FIELDS,
                    STEP=STEP,
                    MULTIPLIER=MULTIPLIER,
                    num_warps=self._tuning.num_warps,
                )
            return self._tickets.issue(seed is not None, numbers.tensor)

    def _on_stream(self) -> AbstractContextManager[Any]:
        # To change the stream and back costs more than to look: the owner's thread may be on it already.
        if self._stream is None or torch.cuda.current_stream(self._device) == self._stream:
            return nullcontext()
        return torch.cuda.stream(self._stream)


def _lane_numbers(access: Access, batch: Batch) -> NDArray[np.int64]:
    """For each lane its address and its place in the slot; with a cast also its scales, two to a number."""
    columns = [batch.address, batch.wire // access.unit]
    if access.cast is not None:
        columns.append(batch.scales.view(np.int64).reshape(-1))
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
