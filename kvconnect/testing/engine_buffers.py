"""Where the buffers of the engine suite lie: in the host's memory, or on a GPU.

A suite names a function that allocates, for its own process and for the peer's. It must be one that the
peer's process can import.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from kvconnect.engine.base import Span


class Buffer(Protocol):
    """Memory that a case registers, reads and writes. It lives as long as the object."""

    @property
    def address(self) -> int:
        """Where it begins."""
        ...

    @property
    def device(self) -> str:
        """As a ``Span`` names it."""
        ...

    def read(self) -> np.ndarray:
        """Its bytes. Of host memory these are the bytes themselves, else a copy."""
        ...

    def write(self, content: np.ndarray) -> None:
        """Replace all of its bytes."""
        ...


Allocate = Callable[[np.ndarray], Buffer]


def part(buffer: Buffer, offset: int, length_bytes: int) -> Span:
    """A stretch of a buffer, which may also lie beside it."""
    return Span(buffer.address + offset, length_bytes, buffer.device)


class HostBuffer:
    """A numpy array."""

    device = "cpu"

    def __init__(self, content: np.ndarray) -> None:
        self._bytes = content.copy()

    @property
    def address(self) -> int:
        """See ``Buffer``."""
        return int(self._bytes.ctypes.data)

    def read(self) -> np.ndarray:
        """See ``Buffer``."""
        return self._bytes

    def write(self, content: np.ndarray) -> None:
        """See ``Buffer``."""
        self._bytes[:] = content


class TensorBuffer:
    """A tensor, which is usually a part of a larger allocation."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    @property
    def address(self) -> int:
        """See ``Buffer``."""
        return int(self._tensor.data_ptr())

    @property
    def device(self) -> str:
        """See ``Buffer``."""
        return str(self._tensor.device)

    def read(self) -> np.ndarray:
        """See ``Buffer``."""
        content: np.ndarray = self._tensor.cpu().numpy()
        return content

    def write(self, content: np.ndarray) -> None:
        """See ``Buffer``. Engines do not follow streams, so the bytes are there when this returns."""
        import torch

        self._tensor.copy_(torch.from_numpy(content))
        torch.cuda.synchronize(self._tensor.device)


def on_host(content: np.ndarray) -> Buffer:
    """Allocate host memory with these bytes."""
    return HostBuffer(content)


@dataclass(frozen=True)
class OnGpu:
    """Allocates memory of one GPU, ``"cuda:N"``, through torch."""

    device: str

    def __call__(self, content: np.ndarray) -> Buffer:
        """Allocate GPU memory with these bytes."""
        import torch

        buffer = TensorBuffer(torch.empty(len(content), dtype=torch.uint8, device=self.device))
        buffer.write(content)
        return buffer
