"""Zeroes newly allocated blocks in one launch, for any number of layers, groups and allocations.

A newly allocated block still has the bytes of its last owner. Attention kernels read whole pages and mask
tokens beyond the sequence, but a masked weight of 0 times a NaN is NaN: in an fp8 cache, or in a page that
was a recurrent state before, stale bytes would reach the output. So blocks are zeroed after they were added
to the block tables, and before the forward pass reads them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from kvconnect.cache.borrowed_memory import memory_at
from kvconnect.cache.region_table import RegionTable
from kvconnect.errors import ConfigError, LayoutError, LocalError, listed
from kvconnect.runner_kit.kernels import wants_triton

PageTable = NDArray[np.int64]
"""Rows of address, stride and size in bytes: one per stretch of logical pages to zero."""


class KVBlockZeroer:
    """Zeroes logical blocks in every layer that keeps tokens.

    Made once, after the caches. Where pages of several groups share memory, the widest page is zeroed once.
    State groups are skipped, since the layer itself writes the first state. No byte outside the pages of
    the given blocks is written.

    Args:
        table: the region table. Its tensors must outlive the zeroer.
        device: the device of the tensors.
        runner_only_layers: layers that are not zeroed.
        kernels: ``"torch"``, ``"triton"``, or ``"auto"`` for Triton on CUDA and torch elsewhere.

    Raises:
        LayoutError: ``runner_only_layers`` names a layer that the table does not have.
        ConfigError: as ``wants_triton``; or ``kernels`` is ``"torch"`` on CUDA.
    """

    def __init__(
        self,
        table: RegionTable,
        *,
        device: torch.device | str,
        runner_only_layers: frozenset[str] = frozenset(),
        kernels: str = "auto",
    ) -> None:
        on_cuda = torch.device(device).type == "cuda"
        use_triton = wants_triton(kernels, on_cuda)
        if unknown := runner_only_layers - set(table.layers):
            raise LayoutError(f"runner_only_layers {listed(unknown)} are not layers of the table")
        self.pages = logical_pages(table, runner_only_layers)
        ratios = {group.group: group.blocks_per_kv_block for group in table.groups}
        counts = {region.num_blocks // ratios[region.group] for region in table.regions}
        if len(counts) != 1:
            raise LayoutError(f"the layers of one cache have different block counts: {listed(counts)}")
        (self.num_blocks,) = counts
        self._ops: CpuZeroOps
        if use_triton:
            from kvconnect.runner_kit.zeroing_triton import TritonZeroOps

            self._ops = TritonZeroOps(self.pages, self.num_blocks, torch.device(device))
        elif on_cuda:
            raise ConfigError("kernels is 'torch', which zeroes CPU memory only; accepted: auto, triton")
        else:
            self._ops = CpuZeroOps(self.pages, self.num_blocks)

    def zero_block_ids(self, ids: Sequence[int]) -> None:
        """Zero the pages of logical blocks, on the current stream. Ids may repeat.

        Raises ``LocalError``: an id is not a block of this cache. Nothing is zeroed then.
        """
        if not len(ids):
            return
        blocks = np.asarray(ids, dtype=np.int64)
        if blocks.min() < 0 or blocks.max() >= self.num_blocks:
            given = f"{blocks.min()}..{blocks.max()}"
            raise LocalError(f"block ids {given} are to be zeroed, the cache has 0..{self.num_blocks - 1}")
        if len(self.pages):
            self._ops.zero(blocks)


def logical_pages(table: RegionTable, runner_only_layers: frozenset[str]) -> PageTable:
    """The stretches of logical pages to zero: int64 ``(n, 3)`` of address, stride and size in bytes.

    The region table has checked that there are no gaps between the kernel pages of a logical page. Of
    stretches with the same address and stride, only the widest is listed.
    """
    widest: dict[tuple[int, int], int] = {}
    geometry = table.geometry()
    for region in table.regions:
        group = geometry[region.group]
        if not group.is_state and region.layer not in runner_only_layers:
            address, stride, size = region.logical_pages(group.blocks_per_kv_block)
            widest[address, stride] = max(widest.get((address, stride), 0), size)
    rows = [(address, stride, size) for (address, stride), size in sorted(widest.items())]
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


def word_bytes(pages: PageTable) -> int:
    """The largest power of two up to 8 that divides every address, stride and size."""
    return math.gcd(8, *(int(value) for value in pages.reshape(-1)))


class CpuZeroOps:
    """Zeroes blocks on a CPU: one indexed store per stretch of pages, without Python per page."""

    def __init__(self, pages: PageTable, num_blocks: int) -> None:
        word = word_bytes(pages) if len(pages) else 8
        dtype = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[word]
        self._views = []
        for address, stride, size in pages.tolist():
            raw = memory_at(address, stride * (num_blocks - 1) + size).view(dtype)
            self._views.append(raw.as_strided((num_blocks, size // word), (stride // word, 1)))

    def zero(self, blocks: NDArray[np.int64]) -> None:
        """Zero the logical blocks with these ids in every stretch."""
        index = torch.from_numpy(blocks)
        for view in self._views:
            view.index_fill_(0, index, 0)
