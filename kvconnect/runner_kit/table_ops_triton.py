"""The operations of block tables as Triton kernels: one launch each, for any number of groups.

Kernels find the tables through a tensor of absolute addresses, since the tables of groups are separate
allocations of different widths.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from kvconnect.runner_kit.block_table import Numbers, TableMemory, TableOps
from kvconnect.runner_kit.kernels import PinnedStaging

_CHUNK = 128
_FIELDS = 5


# No specialisation on numbers that differ between steps: a new value must not cause a compilation.
@triton.jit(do_not_specialize=["staged_at", "num_records", "num_programs"])
def _apply_kernel(
    staged_at, tables, widths, ratios, num_records, num_programs, FIELDS: tl.constexpr, CHUNK: tl.constexpr
):
    # Staged are the records, then the first record of every program, then the ids. The kernel reads them
    # once, from pinned host memory: a copy to the device would cost the host more than it saves.
    staged = staged_at.to(tl.int64).to(tl.pointer_type(tl.int32))
    program = tl.program_id(0)
    starts = staged + num_records * FIELDS
    ids = starts + num_programs + 1
    first = tl.load(starts + program)
    last = tl.load(starts + program + 1)
    lanes = tl.arange(0, CHUNK)
    for record in range(first, last):
        here = staged + record * FIELDS
        table = tl.load(here)
        row = tl.load(here + 1)
        start = tl.load(here + 2)
        count = tl.load(here + 3)
        offset = tl.load(here + 4)
        ratio = tl.load(ratios + table)
        width = tl.load(widths + table)
        base = tl.load(tables + table).to(tl.pointer_type(tl.int32)) + row.to(tl.int64) * width + start
        entries = tl.where(count > 0, count * ratio, -count)
        written = tl.where(count > 0, entries, 0)
        for done in range(0, entries, CHUNK):
            entry = done + lanes
            inside = entry < entries
            block = tl.load(ids + offset + entry // ratio, mask=entry < written, other=0)
            value = tl.where(entry < written, block * ratio + entry % ratio, 0)
            tl.store(base + entry, value, mask=inside)
        # The next record may write the same entries from other threads of this program.
        tl.debug_barrier()


@triton.jit(do_not_specialize=["num_requests"])
def _gather_kernel(tables, batch, widths, indices, num_requests, max_requests, CHUNK: tl.constexpr):
    row = tl.program_id(0)
    group = tl.program_id(1)
    width = tl.load(widths + group)
    target = tl.load(batch + group).to(tl.pointer_type(tl.int32)) + row.to(tl.int64) * width
    lanes = tl.arange(0, CHUNK)
    present = row < num_requests
    request = tl.load(indices + row, mask=present, other=0)
    # An index out of range gives an empty row, and reads no memory outside the table.
    filled = tl.where(present & (request >= 0) & (request < max_requests), width, 0)
    source = tl.load(tables + group).to(tl.pointer_type(tl.int32)) + request * width
    for done in range(0, width, CHUNK):
        entry = done + lanes
        inside = entry < width
        value = tl.load(source + entry, mask=entry < filled, other=0)
        tl.store(target + entry, value, mask=inside)


@triton.jit(do_not_specialize=["num_requests", "num_tokens"])
def _slots_kernel(
    tables,
    slots,
    widths,
    sizes,
    indices,
    query_start,
    positions,
    num_requests,
    num_tokens,
    max_requests,
    PAD: tl.constexpr,
    CHUNK: tl.constexpr,
):
    request = tl.program_id(0)
    group = tl.program_id(1)
    size = tl.load(sizes + group)
    width = tl.load(widths + group)
    target = tl.load(slots + group).to(tl.pointer_type(tl.int64))
    lanes = tl.arange(0, CHUNK)
    # The program after the last request writes the padding.
    present = request < num_requests
    first = tl.load(query_start + request)
    last = tl.load(query_start + request + 1, mask=present, other=0)
    last = tl.minimum(tl.where(present, last, num_tokens), num_tokens)
    row = tl.load(indices + request, mask=present, other=0)
    # An index out of range gives padding, and reads no memory outside the table.
    known = tl.where(present & (row >= 0) & (row < max_requests), last, first)
    # Tokens before ``query_start[0]`` belong to no request: the first program pads them.
    begin = tl.where(request == 0, 0, first)
    table = tl.load(tables + group).to(tl.pointer_type(tl.int32)) + row * width
    for done in range(begin, last, CHUNK):
        token = done + lanes
        inside = token < last
        mine = (token >= first) & (token < known)
        position = tl.load(positions + token, mask=mine, other=-1)
        block = position // size
        held = mine & (position >= 0) & (block < width)
        kernel_block = tl.load(table + block, mask=held, other=0).to(tl.int64)
        slot = tl.where(held, kernel_block * size + position % size, PAD)
        tl.store(target + token, slot, mask=inside)


class TritonTableOps(TableOps):
    """``TableOps`` with one launch per operation."""

    def __init__(self, memory: TableMemory) -> None:
        tables = memory.tables
        self._device = tables[0].device
        # Kernels use addresses only: this reference keeps the tensors alive.
        self._kept = memory
        self._table_at, self._batch_at, self._slots_at = (
            self._numbers([tensor.data_ptr() for tensor in tensors]) for tensors in memory[:3]
        )
        self._widths = self._numbers([table.shape[1] for table in tables])
        self._max_requests = tables[0].shape[0]
        self._ratio_of = self._numbers(memory.ratios)
        self._size_of = self._numbers(memory.kernel_block_sizes)
        self._staging = PinnedStaging(self._device, np.int32)

    def apply(self, records: Numbers, ids: Numbers, keep_order: bool) -> None:
        """See ``TableOps``. One program per record, or with ``keep_order`` one per row."""
        num_records = len(records)
        starts = np.arange(num_records + 1)
        if keep_order:
            key = records[:, 0].astype(np.int64) << 32 | records[:, 1]
            order = np.argsort(key, kind="stable")
            records = records[order]
            breaks = np.flatnonzero(np.diff(key[order])) + 1
            starts = np.concatenate(([0], breaks, [num_records]))
        staged_at = self._staging.put(records.reshape(-1), starts, ids).data_ptr()
        programs = len(starts) - 1
        _apply_kernel[(programs,)](
            staged_at,
            self._table_at,
            self._widths,
            self._ratio_of,
            num_records,
            programs,
            FIELDS=_FIELDS,
            CHUNK=_CHUNK,
        )
        self._staging.in_use()

    def gather(self, request_indices: torch.Tensor, num_rows: int) -> None:
        """See ``TableOps``."""
        if num_rows:
            grid = (num_rows, len(self._widths))
            _gather_kernel[grid](
                self._table_at,
                self._batch_at,
                self._widths,
                request_indices,
                len(request_indices),
                self._max_requests,
                CHUNK=_CHUNK,
            )

    def compute_slots(
        self, indices: torch.Tensor, query_start: torch.Tensor, positions: torch.Tensor, num_tokens: int
    ) -> None:
        """See ``TableOps``."""
        grid = (len(indices) + 1, len(self._widths))
        _slots_kernel[grid](
            self._table_at,
            self._slots_at,
            self._widths,
            self._size_of,
            indices,
            query_start,
            positions,
            len(indices),
            num_tokens,
            self._max_requests,
            PAD=-1,
            CHUNK=_CHUNK,
        )

    def _numbers(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int64, device=self._device)
