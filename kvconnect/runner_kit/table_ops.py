"""What block tables do to their tensors: one contract, in torch and, for CUDA, in Triton.

A *record* is five int32 numbers: table, row, first entry, count, offset. A positive count writes that
many logical ids, from ``offset`` on in the staged ids, as kernel ids; a negative one zeroes that many
entries. They are in the order they were staged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kvconnect.runner_kit.kernels import wants_triton

PAD_SLOT = -1
"""The slot of a token that is written nowhere."""

Numbers = NDArray[np.int32]


class TableMemory(NamedTuple):
    """Tensors and numbers of every table, in one order: see ``BlockTables``."""

    tables: Sequence[torch.Tensor]
    batch: Sequence[torch.Tensor]
    slots: Sequence[torch.Tensor]
    ratios: Sequence[int]
    kernel_block_sizes: Sequence[int]


class TableOps(Protocol):
    """The operations behind ``BlockTables``. Arguments were checked there."""

    def apply(self, records: Numbers, ids: Numbers, keep_order: bool) -> None:
        """Carry out records; in their order if ``keep_order``, else they name different entries."""
        ...

    def gather(self, request_indices: torch.Tensor, num_rows: int) -> None:
        """Fill the batch tables."""
        ...

    def compute_slots(
        self, indices: torch.Tensor, query_start: torch.Tensor, positions: torch.Tensor, num_tokens: int
    ) -> None:
        """Fill the slots."""
        ...


def make_table_ops(kernels: str, memory: TableMemory) -> TableOps:
    """The operations for these tensors; errors as for ``wants_triton``."""
    if not wants_triton(kernels, bool(memory.tables) and memory.tables[0].is_cuda):
        return TorchTableOps(memory)
    from kvconnect.runner_kit.table_ops_triton import TritonTableOps

    return TritonTableOps(memory)


class TorchTableOps:
    """The operations in torch, on any device; a few calls per group."""

    def __init__(self, memory: TableMemory) -> None:
        self._tables, self._batch, self._slots, self._ratios, self._sizes = memory

    def apply(self, records: Numbers, ids: Numbers, keep_order: bool) -> None:
        """See ``TableOps``. Later records win where entries repeat, which is their order."""
        for index, table in enumerate(self._tables):
            mine = records[records[:, 0] == index].astype(np.int64)
            if not len(mine):
                continue
            ratio = self._ratios[index]
            writes = mine[:, 3] > 0
            entries = np.where(writes, mine[:, 3] * ratio, -mine[:, 3])
            within = np.arange(entries.sum()) - np.repeat(np.cumsum(entries) - entries, entries)
            target = np.repeat(mine[:, 1] * table.shape[1] + mine[:, 2], entries) + within
            values = np.zeros(len(target), dtype=np.int32)
            written = np.repeat(writes, entries)
            source = (np.repeat(mine[:, 4], entries) + within // ratio)[written]
            values[written] = ids[source] * ratio + (within % ratio)[written]
            if keep_order:
                # Indexed writes leave open which of two to one entry wins: keep only the last.
                _, last = np.unique(target[::-1], return_index=True)
                keep = len(target) - 1 - last
                target, values = target[keep], values[keep]
            entry = torch.from_numpy(target).to(table.device)
            table.view(-1)[entry] = torch.from_numpy(values).to(table.device)

    def gather(self, request_indices: torch.Tensor, num_rows: int) -> None:
        """See ``TableOps``."""
        count = len(request_indices)
        for table, batch in zip(self._tables, self._batch, strict=True):
            batch[:count] = table[request_indices]
            batch[count:num_rows] = 0

    def compute_slots(
        self, indices: torch.Tensor, query_start: torch.Tensor, positions: torch.Tensor, num_tokens: int
    ) -> None:
        """See ``TableOps``."""
        for slots in self._slots:
            slots[:num_tokens] = PAD_SLOT
        if not len(indices):
            return
        tokens = torch.arange(len(positions), device=positions.device)
        request = torch.searchsorted(query_start, tokens, right=True) - 1
        known = (request >= 0) & (request < len(indices))
        rows = indices[request.clamp(0, len(indices) - 1)]
        for table, slots, size in zip(self._tables, self._slots, self._sizes, strict=True):
            block = torch.div(positions, size, rounding_mode="floor")
            held = known & (positions >= 0) & (block < table.shape[1])
            picked = table[rows, block.clamp(0, table.shape[1] - 1)].long()
            slots[: len(positions)] = torch.where(held, picked * size + positions % size, PAD_SLOT)
