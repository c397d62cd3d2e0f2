"""A pool of buffers for kernel arguments: each a host array, where numbers are written, and a device tensor.

Buffers are reused, since torch's allocators take longer than all other work for a chunk.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from numpy.typing import NDArray

_LEAST_NUMBERS = 512
_MOST_FREE_BYTES = 32 << 20

# Host array (pinned if there is a GPU), device tensor of the same length, and the host array's address.
_Pair = tuple[NDArray[Any], torch.Tensor, int]


class NumberBuffer:
    """Room for ``count`` int64 numbers: ``values`` on the host, to be written, and ``tensor`` on the device.

    The owner must keep it until the kernels that read ``tensor`` are done, and with them the copy to it.
    """

    def __init__(self, pair: _Pair, count: int, pool: NumberPool) -> None:
        self._pair, self._pool, self.count = pair, pool, count
        self.values, self.tensor, self.host_address = pair

    def __del__(self) -> None:
        self._pool.take_back(self._pair)


class NumberPool:
    """Free buffers by length, a power of two. One thread calls ``lend``; any thread may drop a buffer."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: defaultdict[int, list[_Pair]] = defaultdict(list)

    @property
    def free_bytes(self) -> int:
        return sum(pair[0].nbytes for pairs in list(self._free.values()) for pair in list(pairs))

    def lend(self, count: int) -> NumberBuffer:
        """A buffer for ``count`` numbers, whose address is a multiple of 16 bytes."""
        length = max(_LEAST_NUMBERS, 1 << (count - 1).bit_length())
        free = self._free[length]
        return NumberBuffer(free.pop() if free else self._make(length), count, self)

    def _make(self, length: int) -> _Pair:
        host = torch.empty(length, dtype=torch.int64, pin_memory=self._device.type == "cuda")
        # The array keeps the host tensor alive.
        return host.numpy(), torch.empty(length, dtype=torch.int64, device=self._device), host.data_ptr()

    def take_back(self, pair: _Pair) -> None:
        """Keep a pair for reuse, or drop it if more than 32 MiB would be free."""
        if self.free_bytes + pair[0].nbytes <= _MOST_FREE_BYTES:
            self._free[len(pair[0])].append(pair)
