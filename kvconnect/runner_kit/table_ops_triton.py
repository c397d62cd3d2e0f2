"""The operations of block tables as Triton kernels: one launch each, for any number of groups.

Kernels find the tables through one tensor of facts with their absolute addresses, since the tables of groups
are separate allocations of different widths.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from kvconnect.runner_kit.block_table import PAD_SLOT, Numbers, TableMemory, TableOps
from kvconnect.runner_kit.kernels import PinnedStaging

_CHUNK = tl.constexpr(128)
_FIELDS = tl.constexpr(5)
# Columns of the facts of each group, int64 ``(groups, 6)``: addresses of its tensors, and numbers.
_TABLE, _BATCH, _SLOTS, _WIDTH, _RATIO, _SIZE = map(tl.constexpr, range(6))
_COLUMNS = tl.constexpr(6)
_PAD = tl.constexpr(PAD_SLOT)


# No specialisation on numbers that differ between steps: a new value must not cause a compilation.
@triton.jit(do_not_specialize=["staged_at", "num_records", "num_programs"])
def _apply_kernel(staged_at, facts, num_records, num_programs):
    # Staged are the records, then the first record of every program, then the ids. The kernel reads them
    # once, from pinned host memory: a copy to the device would cost the host more than it saves.
    staged = staged_at.to(tl.int64).to(tl.pointer_type(tl.int32))
    program = tl.program_id(0)
    starts = staged + num_records * _FIELDS
    ids = starts + num_programs + 1
    first = tl.load(starts + program)
    last = tl.load(starts + program + 1)
    lanes = tl.arange(0, _CHUNK)
    for record in range(first, last):
        here = staged + record * _FIELDS
        group = facts + tl.load(here) * _COLUMNS
        row = tl.load(here + 1)
        start = tl.load(here + 2)
        count = tl.load(here + 3)
        offset = tl.load(here + 4)
        ratio = tl.load(group + _RATIO)
        width = tl.load(group + _WIDTH)
        base = tl.load(group + _TABLE).to(tl.pointer_type(tl.int32)) + row.to(tl.int64) * width + start
        entries = tl.where(count > 0, count * ratio, -count)
        written = tl.where(count > 0, entries, 0)
        for done in range(0, entries, _CHUNK):
            entry = done + lanes
            inside = entry < entries
            block = tl.load(ids + offset + entry // ratio, mask=entry < written, other=0)
            value = tl.where(entry < written, block * ratio + entry % ratio, 0)
            tl.store(base + entry, value, mask=inside)
        # The next record may write the same entries from other threads of this program.
        tl.debug_barrier()


@triton.jit(do_not_specialize=["num_requests"])
def _gather_kernel(facts, indices, num_requests, max_requests):
    row = tl.program_id(0)
    group = facts + tl.program_id(1) * _COLUMNS
    width = tl.load(group + _WIDTH)
    target = tl.load(group + _BATCH).to(tl.pointer_type(tl.int32)) + row.to(tl.int64) * width
    lanes = tl.arange(0, _CHUNK)
    present = row < num_requests
    request = tl.load(indices + row, mask=present, other=0)
    # An index out of range gives an empty row, and reads no memory outside the table.
    filled = tl.where(present & (request >= 0) & (request < max_requests), width, 0)
    source = tl.load(group + _TABLE).to(tl.pointer_type(tl.int32)) + request * width
    for done in range(0, width, _CHUNK):
        entry = done + lanes
        inside = entry < width
        value = tl.load(source + entry, mask=entry < filled, other=0)
        tl.store(target + entry, value, mask=inside)


@triton.jit(do_not_specialize=["num_requests", "num_tokens"])
def _slots_kernel(facts, indices, query_start, positions, num_requests, num_tokens, max_requests):
    request = tl.program_id(0)
    group = facts + tl.program_id(1) * _COLUMNS
    size = tl.load(group + _SIZE)
    width = tl.load(group + _WIDTH)
    target = tl.load(group + _SLOTS).to(tl.pointer_type(tl.int64))
    lanes = tl.arange(0, _CHUNK)
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
    table = tl.load(group + _TABLE).to(tl.pointer_type(tl.int32)) + row * width
    for done in range(begin, last, _CHUNK):
        token = done + lanes
        inside = token < last
        mine = (token >= first) & (token < known)
        position = tl.load(positions + token, mask=mine, other=-1)
        block = position // size
        held = mine & (position >= 0) & (block < width)
        kernel_block = tl.load(table + block, mask=held, other=0).to(tl.int64)
        slot = tl.where(held, kernel_block * size + position % size, _PAD)
        tl.store(target + token, slot, mask=inside)


class TritonTableOps(TableOps):
    """``TableOps`` with one launch per operation."""

    def __init__(self, memory: TableMemory) -> None:
        tables = memory.tables
        # Kernels use addresses only: this reference keeps the tensors alive.
        self._kept = memory
        addresses = ([tensor.data_ptr() for tensor in tensors] for tensors in memory[:3])
        columns = (*addresses, [table.shape[1] for table in tables], memory.ratios, memory.kernel_block_sizes)
        facts = np.array(columns, dtype=np.int64).T.copy()
        self._facts = torch.from_numpy(facts).to(tables[0].device)
        self._num_groups, self._max_requests = len(tables), tables[0].shape[0]
        self._staging = PinnedStaging(tables[0].device, np.int32)

    def apply(self, records: Numbers, ids: Numbers, keep_order: bool) -> None:
        """One program per record, or with ``keep_order`` one per row."""
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
        _apply_kernel[(programs,)](staged_at, self._facts, num_records, programs)
        self._staging.in_use()

    def gather(self, request_indices: torch.Tensor, num_rows: int) -> None:
        if num_rows:
            grid, count = (num_rows, self._num_groups), len(request_indices)
            _gather_kernel[grid](self._facts, request_indices, count, self._max_requests)

    def compute_slots(
        self, indices: torch.Tensor, query_start: torch.Tensor, positions: torch.Tensor, num_tokens: int
    ) -> None:
        grid, given = (len(indices) + 1, self._num_groups), (indices, query_start, positions)
        _slots_kernel[grid](self._facts, *given, len(indices), num_tokens, self._max_requests)
