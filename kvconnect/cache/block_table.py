"""Which kernel blocks hold a request's tokens, as tensors that kernels index.

Rows are requests, one table per cache group. Callers speak in logical block ids; the tables hold
kernel block ids. The tensors are allocated once and keep their addresses. A write past the end of a
row is an error, never a write.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from kvconnect.arithmetic import div_exact
from kvconnect.errors import LocalError

BlockIds = NDArray[np.int64]


def expand_block_ids(block_ids: Sequence[int] | BlockIds, blocks_per_kv_block: int) -> BlockIds:
    """Kernel block ids of logical block ids, in order.

    Shape ``(n,)`` to shape ``(n * blocks_per_kv_block,)``, int64.
    """
    ids = np.asarray(block_ids, dtype=np.int64)
    if blocks_per_kv_block == 1:
        return ids
    return (ids[:, None] * blocks_per_kv_block + np.arange(blocks_per_kv_block)).reshape(-1)


class BlockTables:
    """One block table per cache group, in kernel blocks.

    Args:
        max_requests: rows of every table.
        max_blocks: most *logical* blocks of one request, per group index.
        block_sizes: tokens of a logical block, per group index.
        kernel_block_sizes: tokens of a kernel block, per group index; divides the logical size.
        device: where the tensors that kernels read live.
    """

    def __init__(
        self,
        *,
        max_requests: int,
        max_blocks: Mapping[int, int],
        block_sizes: Mapping[int, int],
        kernel_block_sizes: Mapping[int, int],
        device: torch.device | str = "cpu",
    ) -> None:
        self.max_requests = max_requests
        self.blocks_per_kv_block = {
            group: div_exact(block_sizes[group], kernel) for group, kernel in kernel_block_sizes.items()
        }
        self._host: dict[int, torch.Tensor] = {}
        self._device: dict[int, torch.Tensor] = {}
        self._num_blocks: dict[int, NDArray[np.int64]] = {}
        self._dirty: set[int] = set()
        on_host = torch.device(device).type == "cpu"
        for group, ratio in self.blocks_per_kv_block.items():
            shape = (max_requests, max_blocks[group] * ratio)
            self._host[group] = torch.zeros(shape, dtype=torch.int32, pin_memory=not on_host)
            self._device[group] = self._host[group] if on_host else self._host[group].to(device)
            self._num_blocks[group] = np.zeros(max_requests, dtype=np.int64)

    def capacity(self, group: int) -> int:
        """Kernel blocks that a row of the group's table can hold."""
        return self._host[group].shape[1]

    def num_blocks(self, group: int, request_index: int) -> int:
        """Kernel blocks in a row."""
        return int(self._num_blocks[group][request_index])

    def append_block_ids(
        self, request_index: int, block_ids: Sequence[Sequence[int]], *, overwrite: bool = False
    ) -> None:
        """Add logical block ids to a request's rows, one list per group index.

        ``overwrite`` starts the rows anew. Groups without a cache take an empty list.

        Raises:
            LocalError: a row would overflow, or the request index is out of range. Nothing is
                written then, in any group.
        """
        if not 0 <= request_index < self.max_requests:
            raise LocalError(f"request index {request_index} is not in 0..{self.max_requests - 1}")
        staged: list[tuple[int, int, BlockIds]] = []
        for group, ids in enumerate(block_ids):
            if group not in self._host:
                if len(ids):
                    raise LocalError(f"cache group {group} has no block table, but got {len(ids)} block ids")
                continue
            start = 0 if overwrite else self.num_blocks(group, request_index)
            kernel_ids = expand_block_ids(ids, self.blocks_per_kv_block[group])
            if start + len(kernel_ids) > self.capacity(group):
                raise LocalError(
                    f"request index {request_index} would hold {start + len(kernel_ids)} kernel blocks "
                    f"in cache group {group}, whose rows hold {self.capacity(group)}"
                )
            staged.append((group, start, kernel_ids))
        for group, start, kernel_ids in staged:
            end = start + len(kernel_ids)
            self._host[group].numpy()[request_index, start:end] = kernel_ids
            self._num_blocks[group][request_index] = end
            self._dirty.add(group)

    def clear_row(self, request_index: int) -> None:
        """Empty a request's rows. The entries become the null block."""
        for group, table in self._host.items():
            table.numpy()[request_index, : self.num_blocks(group, request_index)] = 0
            self._num_blocks[group][request_index] = 0
            self._dirty.add(group)

    def apply(self) -> None:
        """Make what was written visible to kernels. On a CPU there is nothing to do."""
        for group in self._dirty:
            if self._device[group] is not self._host[group]:
                self._device[group].copy_(self._host[group], non_blocking=True)
        self._dirty.clear()

    def table(self, group: int) -> torch.Tensor:
        """The table that kernels read: int32 of shape ``(max_requests, capacity)``. Never moves."""
        return self._device[group]

    def row(self, group: int, request_index: int) -> torch.Tensor:
        """The kernel block ids of one request: a view of ``table``, as long as the row is."""
        return self._device[group][request_index, : self.num_blocks(group, request_index)]
