"""Memory for the numbers that kernels read: on the host where they are written, and beside it on the device.

Kept and used again. To ask torch's allocators for both takes longer than everything else that is done for
a chunk.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from numpy.typing import NDArray

_LEAST_NUMBERS = 512
_MOST_FREE_BYTES = 32 << 20


class _Pair:
    """As much memory of the host, pinned where there is a GPU, as of the device."""

    def __init__(self, count: int, device: torch.device) -> None:
        self.host = torch.empty(count, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.values: NDArray[Any] = self.host.numpy()
        self.tensor = torch.empty(count, dtype=torch.int64, device=device)


class NumberBuffer:
    """A pair that is in use for as long as this object lives.

    Its owner keeps it until the kernels that read ``tensor`` are done: then so is what loaded it, and the
    host's side can be written again.

    Attributes:
        count: how many numbers were asked for.
        values: where the numbers are written, on the host; at least so many.
        tensor: where kernels read them, once they were loaded.
    """

    def __init__(self, pair: _Pair, count: int, pool: NumberPool) -> None:
        self._pair, self._pool = pair, pool
        self.count = count
        self.values, self.tensor = pair.values, pair.tensor
        self.host_address = pair.host.data_ptr()

    def __del__(self) -> None:
        self._pool.take_back(self._pair)


class NumberPool:
    """Pairs by their length, a power of two. One thread asks for them; any may give them up."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: defaultdict[int, list[_Pair]] = defaultdict(list)

    @property
    def free_bytes(self) -> int:
        """What is kept and not in use, on each side."""
        return sum(pair.values.nbytes for pairs in list(self._free.values()) for pair in list(pairs))

    def lend(self, count: int) -> NumberBuffer:
        """Room for ``count`` numbers, from a multiple of 16 bytes on."""
        length = max(_LEAST_NUMBERS, 1 << (count - 1).bit_length())
        free = self._free[length]
        return NumberBuffer(free.pop() if free else _Pair(length, self._device), count, self)

    def take_back(self, pair: _Pair) -> None:
        """No kernel reads a pair any more. Where much is free already it is given up."""
        if self.free_bytes + pair.values.nbytes <= _MOST_FREE_BYTES:
            self._free[len(pair.values)].append(pair)
