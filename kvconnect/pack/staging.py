"""Memory for the numbers that kernels read: on the host where they are written, and beside it on the device.

Kept and used again. To ask torch's allocators for both, and to copy between what they give, takes longer
than everything else that is done for a chunk.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import torch
from numpy.typing import NDArray

_LEAST_NUMBERS = 512
_MOST_FREE_BYTES = 32 << 20


class _Pair:
    """Memory of both kinds; on a CPU both are one."""

    def __init__(self, count: int, device: torch.device) -> None:
        on_cuda = device.type == "cuda"
        self.host = torch.empty(count, dtype=torch.int64, pin_memory=on_cuda)
        self.values: NDArray[np.int64] = self.host.numpy()
        self.tensor = torch.empty(count, dtype=torch.int64, device=device) if on_cuda else self.host


class Lent:
    """A pair that is in use for as long as this object lives.

    Whoever launched a kernel that reads ``tensor`` keeps it until the kernel is done: then so is the copy,
    and the host's side can be written again. What no kernel reads may be written over while it is copied.
    """

    def __init__(self, pair: _Pair, staging: Staging) -> None:
        self._pair = pair
        self._staging = staging

    @property
    def values(self) -> NDArray[np.int64]:
        """Where the numbers are written, on the host. It is at least as long as was asked for."""
        return self._pair.values

    @property
    def tensor(self) -> torch.Tensor:
        """Where kernels read them, once ``copy`` was called."""
        return self._pair.tensor

    def copy(self) -> None:
        """Copy what was written to the device, in the order of the current stream."""
        if self._pair.tensor is not self._pair.host:
            self._pair.tensor.copy_(self._pair.host, non_blocking=True)

    def __del__(self) -> None:
        self._staging.take_back(self._pair)


class Staging:
    """Pairs by their length, a power of two.

    One thread owns it, and what it lends is read on one stream, which is current when it is lent.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: defaultdict[int, list[_Pair]] = defaultdict(list)
        self._free_bytes = 0

    def lend(self, count: int) -> Lent:
        """Room for ``count`` numbers, from a multiple of 16 bytes on."""
        length = max(_LEAST_NUMBERS, 1 << (count - 1).bit_length())
        free = self._free[length]
        if not free:
            return Lent(_Pair(length, self._device), self)
        pair = free.pop()
        self._free_bytes -= pair.values.nbytes
        return Lent(pair, self)

    def take_back(self, pair: _Pair) -> None:
        """Nobody reads a pair any more. Where much is free already it is given up."""
        if self._free_bytes + pair.values.nbytes <= _MOST_FREE_BYTES:
            self._free_bytes += pair.values.nbytes
            self._free[len(pair.values)].append(pair)
