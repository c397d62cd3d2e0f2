"""CUDA's streams and events, as far as a copier needs them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from kvconnect.offload.copies.host_memory import CudaHostMemory
from kvconnect.pack.lanes import Column


class CudaEvent:
    """A point in a stream."""

    def __init__(self, stream: torch.cuda.Stream, timed: bool) -> None:
        self.event: Any = torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]
        self.event.record(stream)

    @property
    def done(self) -> bool:
        """All work before it is done. Raises what the device says where some of it failed."""
        return bool(self.event.query())

    def wait(self) -> None:
        """Block the calling thread until it is done."""
        self.event.synchronize()

    def seconds_since(self, earlier: CudaEvent) -> float:
        """Time of the device between two timed events that are done."""
        return float(earlier.event.elapsed_time(self.event)) / 1e3


class CudaQueue:
    """A stream: work is begun in the order in which it is given, none before all before it is done.

    ``is_current`` says that the stream is the calling thread's.
    """

    def __init__(self, stream: torch.cuda.Stream, memory: CudaHostMemory, is_current: bool) -> None:
        self._stream, self._memory, self._is_current = stream, memory, is_current

    def run(self, launch: Callable[[], None]) -> None:
        """Work that ``launch`` gives to the stream that is current while it is called."""
        with nullcontext() if self._is_current else torch.cuda.stream(self._stream):
            launch()

    def copy(self, source: Column, target: Column, length: Column) -> None:
        """Copy stretches of memory by the device's copy engines, in any order."""
        self._memory.copy(source, target, length, self._stream.cuda_stream)

    def record(self, timed: bool = False) -> CudaEvent:
        """The point after what was given so far."""
        return CudaEvent(self._stream, timed)

    def wait_for(self, event: CudaEvent) -> None:
        """Begin nothing that is given from now on before an event of any stream."""
        self._stream.wait_event(event.event)


class CudaDevice:
    """A GPU and its streams."""

    def __init__(self, device: torch.device, memory: CudaHostMemory) -> None:
        self._device, self._memory = device, memory

    def compute(self) -> CudaQueue:
        """The calling thread's stream, which runs the model's steps."""
        return CudaQueue(torch.cuda.current_stream(self._device), self._memory, True)

    def make_queue(self) -> CudaQueue:
        """A stream of its own."""
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return CudaQueue(stream, self._memory, False)
