"""The Triton kernel that zeroes blocks in one launch.

The grid is (blocks, stretches of pages, chunks of a page). The kernel reads absolute addresses from one
table, so that one launch reaches every allocation.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from kvconnect.pack.move_triton import word_pointer
from kvconnect.runner_kit.kernels import PinnedStaging
from kvconnect.runner_kit.zeroing import CpuZeroOps, PageTable, word_bytes

_CHUNK_BYTES = 16 << 10


@triton.jit
def _zero_kernel(pages, blocks, WORD: tl.constexpr, CHUNK: tl.constexpr):
    block = tl.load(blocks + tl.program_id(0))
    row = pages + tl.program_id(1) * 3
    address = tl.load(row)
    stride = tl.load(row + 1)
    words = tl.load(row + 2) // WORD
    target = word_pointer(address + block * stride, WORD)
    lanes = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    tl.store(target + lanes, tl.zeros((CHUNK,), target.dtype.element_ty), mask=lanes < words)


class TritonZeroOps(CpuZeroOps):
    """Zeroes blocks in one launch on the current stream."""

    def __init__(self, pages: PageTable, num_blocks: int, device: torch.device) -> None:
        self._pages = torch.from_numpy(pages.copy()).to(device)
        self._word_bytes = word_bytes(pages) if len(pages) else 8
        self._chunk = _CHUNK_BYTES // self._word_bytes
        words = int(pages[:, 2].max()) // self._word_bytes if len(pages) else 0
        self._chunks = triton.cdiv(words, self._chunk)
        self._staging = PinnedStaging(device, np.int64, num_blocks)
        self._blocks = torch.empty(num_blocks, dtype=torch.int64, device=device)

    def zero(self, blocks: NDArray[np.int64]) -> None:
        if len(blocks) > len(self._blocks):
            blocks = np.unique(blocks)
        # ``put`` writes this staging buffer again only after the copy is done: see ``in_use``.
        self._blocks[: len(blocks)].copy_(self._staging.put(blocks), non_blocking=True)
        grid = (len(blocks), len(self._pages), self._chunks)
        _zero_kernel[grid](self._pages, self._blocks, WORD=self._word_bytes, CHUNK=self._chunk)
        self._staging.in_use()
