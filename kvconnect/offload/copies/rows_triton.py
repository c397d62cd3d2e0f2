"""The kernel that moves blocks to rows and back, all layers and groups in one launch.

It knows memory by absolute addresses: rows may be in the device's memory or in pinned memory of the host.
Programs take tiles in turn, so that any number of programs can do all the work. Tiles of one row follow each
other, and what they are is looked up in a table that is made once; a launch only brings blocks and rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from triton.compiler import CompiledKernel

from kvconnect.arithmetic import div_ceil
from kvconnect.offload.copies.rows import Column
from kvconnect.offload.copies.tiles import BATCH_FIELDS, TILE_FIELDS, Launch, TileTable
from kvconnect.runner_kit.words_triton import word_pointer

_INTERPRETED_PROGRAMS = 3
_PROGRAMS_PER_SM = 8
_NUM_WARPS = 8
_LOADED_AT_ONCE = 1024


# Numbers that differ from launch to launch are not specialised on: a new value must not mean a new compile.
@triton.jit(do_not_specialize=["numbers_at", "batches_at", "num_batches", "num_items", "rows_at"])
def rows_kernel(
    all_numbers,
    tiles,
    numbers_at,
    batches_at,
    num_batches,
    num_items,
    rows_at: tl.int64,
    TO_ROWS: tl.constexpr,
    UNIT: tl.constexpr,
    TILE: tl.constexpr,
    BATCH_FIELDS: tl.constexpr,
    TILE_FIELDS: tl.constexpr,
):
    """Move ``num_items`` tiles: see ``tiles.Launch``. All lengths are multiples of ``UNIT``."""
    WORD: tl.constexpr = 8 if UNIT > 8 else UNIT
    WORDS: tl.constexpr = UNIT // WORD
    numbers = all_numbers + numbers_at
    unit = tl.arange(0, TILE // UNIT)[:, None]
    word = tl.arange(0, WORDS)[None, :]
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        batch = 0
        for other in range(1, num_batches):
            batch += (item >= tl.load(numbers + batches_at + other * BATCH_FIELDS)).to(tl.int32)
        fields = numbers + batches_at + batch * BATCH_FIELDS
        place = item - tl.load(fields).to(tl.int32)
        tiles_each = tl.load(fields + 1).to(tl.int32)
        tile = tiles + (tl.load(fields + 2) + place % tiles_each) * TILE_FIELDS
        pair = numbers + tl.load(fields + 3) + (place // tiles_each) * 2
        page = tl.load(tile) + tl.load(pair) * tl.load(tile + 1)
        row = rows_at + tl.load(pair + 1) + tl.load(tile + 2)
        live = unit * UNIT < tl.load(tile + 3).to(tl.int32)
        in_page = tl.multiple_of(word_pointer(page, WORD), UNIT) + (unit * WORDS + word)
        in_row = tl.multiple_of(word_pointer(row, WORD), UNIT) + (unit * WORDS + word)
        if TO_ROWS:
            tl.store(in_row, tl.load(in_page, mask=live, eviction_policy="evict_first"), mask=live)
        else:
            tl.store(in_page, tl.load(in_row, mask=live, eviction_policy="evict_first"), mask=live)


@triton.jit(do_not_specialize=["host", "length"])
def load_kernel(device, host: tl.int64, length, COUNT: tl.constexpr):
    """Copy ``length`` numbers from the host's memory."""
    at = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    live = at < length
    tl.store(device + at, tl.load(word_pointer(host, 8) + at, mask=live), mask=live)


class DeviceNumbers:
    """See ``Numbers``: pinned memory of the host, and as much of the device's."""

    def __init__(self, length: int, device: torch.device) -> None:
        on_cuda = device.type == "cuda"
        self.host = torch.empty(length, dtype=torch.int64, pin_memory=on_cuda)
        self.column: Column = self.host.numpy()
        self.address = self.host.data_ptr()
        self.device = torch.empty(length, dtype=torch.int64, device=device)


class RowKernel:
    """Launches of the kernel for one table of tiles, on the stream that is current.

    Any thread may launch, several at a time.
    """

    def __init__(self, table: TileTable, device: torch.device) -> None:
        self.table = table
        self._device = device
        self._tiles = torch.from_numpy(table.numbers).to(device)
        self._most = _INTERPRETED_PROGRAMS
        self._compiled: dict[tuple[int, bool], tuple[Any, tuple[Any, ...]]] = {}
        self._compiled_load: Any = None
        if device.type == "cuda":
            self._most = torch.cuda.get_device_properties(device).multi_processor_count * _PROGRAMS_PER_SM
            nothing = torch.zeros(BATCH_FIELDS, dtype=torch.int64, device=device)
            self.load(self.make_numbers(1), 1)
            for unit in table.units:
                for to_rows in (True, False):
                    # Compiled now, rather than while a step waits for it.
                    self._start(nothing, Launch(unit, 0, 0, 1, 0), 0, 1, to_rows)

    def make_numbers(self, length: int) -> DeviceNumbers:
        """Room for the numbers of launches."""
        return DeviceNumbers(length, self._device)

    def load(self, numbers: DeviceNumbers, length: int) -> None:
        """Bring the first so many numbers to the device: see ``TileTable.launches``.

        A kernel fetches them: a copy engine may have long copies to do before.
        """
        programs = div_ceil(length, _LOADED_AT_ONCE)
        varying = (numbers.device, numbers.address, length)
        if self._compiled_load is not None:
            self._compiled_load[(programs, 1, 1)](*varying, _LOADED_AT_ONCE)
            return
        made = load_kernel[(programs,)](*varying, COUNT=_LOADED_AT_ONCE, num_warps=4)
        if isinstance(made, CompiledKernel):
            self._compiled_load = made

    def start(
        self,
        numbers: DeviceNumbers,
        launches: Sequence[Launch],
        rows_at: int,
        to_rows: bool,
        programs: int = 0,
    ) -> None:
        """Begin to move parts to rows, or back; places of parts count from ``rows_at``.

        At most ``programs`` programs run at a time, 0 for as many as are useful.
        """
        for launch in launches:
            self._start(
                numbers.device, launch, rows_at, min(launch.num_items, programs or self._most), to_rows
            )

    def _start(
        self, numbers: torch.Tensor, launch: Launch, rows_at: int, programs: int, to_rows: bool
    ) -> None:
        varying = (
            numbers,
            self._tiles,
            launch.numbers_at,
            launch.batches_at,
            launch.num_batches,
            launch.num_items,
            rows_at,
        )
        compiled, constants = self._compiled.get((launch.unit, to_rows), (None, ()))
        if compiled is not None:
            # What Triton would find out anew at each launch takes longer than the launch.
            compiled[(programs, 1, 1)](*varying, *constants)
            return
        named = {
            "TO_ROWS": to_rows,
            "UNIT": launch.unit,
            "TILE": self.table.tile_bytes[launch.unit],
            "BATCH_FIELDS": BATCH_FIELDS,
            "TILE_FIELDS": TILE_FIELDS,
        }
        made = rows_kernel[(programs,)](*varying, **named, num_warps=_NUM_WARPS)
        if isinstance(made, CompiledKernel):
            self._compiled[(launch.unit, to_rows)] = (made, tuple(named.values()))
