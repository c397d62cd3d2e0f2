"""Memory for the numbers that kernels read: on the host where they are written, and on the device.

It is used again: torch's allocators take longer than everything else that is done for a chunk.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from numpy.typing import NDArray

_LEAST_NUMBERS = 512
_MOST_FREE_BYTES = 32 << 20

# As much memory of the host, pinned where there is a GPU, as of the device; and where the former is.
_Pair = tuple[NDArray[Any], torch.Tensor, int]


class NumberBuffer:
    """Room for ``count`` numbers: ``values`` on the host, where they are written, and ``tensor``.

    Its owner keeps it until the kernels that read ``tensor`` are done: then so is what loaded it.
    """

    def __init__(self, pair: _Pair, count: int, pool: NumberPool) -> None:
        self._pair, self._pool, self.count = pair, pool, count
        self.values, self.tensor, self.host_address = pair

    def __del__(self) -> None:
        self._pool.take_back(self._pair)


class NumberPool:
    """Pairs by their length, a power of two. One thread asks for them; any may give them up."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: defaultdict[int, list[_Pair]] = defaultdict(list)

    @property
    def free_bytes(self) -> int:
        return sum(pair[0].nbytes for pairs in list(self._free.values()) for pair in list(pairs))

    def lend(self, count: int) -> NumberBuffer:
        """Room for ``count`` numbers, from a multiple of 16 bytes on."""
        length = max(_LEAST_NUMBERS, 1 << (count - 1).bit_length())
        free = self._free[length]
        return NumberBuffer(free.pop() if free else self._make(length), count, self)

    def _make(self, length: int) -> _Pair:
        host = torch.empty(length, dtype=torch.int64, pin_memory=self._device.type == "cuda")
        # The array keeps the host's tensor.
        return host.numpy(), torch.empty(length, dtype=torch.int64, device=self._device), host.data_ptr()

    def take_back(self, pair: _Pair) -> None:
        """Where much is free already the pair is given up."""
        if self.free_bytes + pair[0].nbytes <= _MOST_FREE_BYTES:
            self._free[len(pair[0])].append(pair)
