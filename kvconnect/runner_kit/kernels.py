"""The choice between torch and Triton kernels, and the host memory for kernel arguments."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

from kvconnect.errors import ConfigError
from kvconnect.packages import has_triton


def wants_triton(kernels: str, on_cuda: bool) -> bool:
    """Whether to use Triton instead of torch; ``"auto"`` uses Triton on CUDA.

    Raises ``ConfigError``: ``kernels`` is unknown, or Triton is not installed.
    """
    if kernels not in ("auto", "torch", "triton"):
        raise ConfigError(f"kernels is {kernels!r}; accepted: auto, torch, triton")
    if kernels == "torch" or (kernels == "auto" and not on_cuda):
        return False
    if not has_triton():
        raise ConfigError(f"kernels is {kernels!r}, which needs Triton: pip install triton")
    return True


class PinnedStaging:
    """Host memory for the numbers of a launch, pinned if the device is a GPU.

    Two buffers alternate. ``put`` waits until the launch that reads a buffer is done before it writes again.
    """

    def __init__(self, device: torch.device, dtype: DTypeLike, capacity: int = 0) -> None:
        self._on_cuda = device.type == "cuda"
        self._dtype = np.dtype(dtype)
        self._turn = 0
        self._hosts: list[torch.Tensor] = []
        cuda: Any = torch.cuda
        self._events = [cuda.Event() for _ in range(2)] if self._on_cuda else []
        self._grow(capacity)

    def put(self, *columns: NDArray[Any]) -> torch.Tensor:
        """Write the columns, concatenated, to the next buffer; returns the written part of it."""
        size = sum(len(column) for column in columns)
        if size > len(self._hosts[0]):
            self._grow(max(1024, 2 * size))
        self._turn = 1 - self._turn
        if self._events:
            self._events[self._turn].synchronize()
        host = self._hosts[self._turn][:size]
        np.concatenate(columns, out=host.numpy(), casting="unsafe")
        return host

    def in_use(self) -> None:
        """Note that work already launched on the current stream reads the buffer of the last ``put``."""
        if self._events:
            self._events[self._turn].record()

    def _grow(self, capacity: int) -> None:
        for event in self._events:
            event.synchronize()
        dtype = torch.from_numpy(np.empty(0, self._dtype)).dtype
        self._hosts = [torch.empty(capacity, dtype=dtype, pin_memory=self._on_cuda) for _ in range(2)]
