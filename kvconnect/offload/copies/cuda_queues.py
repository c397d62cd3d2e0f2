"""CUDA's streams as queues: see ``queues``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from kvconnect.offload.copies.host_memory import CudaHostMemory
from kvconnect.offload.copies.queues import Event
from kvconnect.offload.copies.rows import Column


class CudaEvent:
    """See ``Event``."""

    def __init__(self, stream: torch.cuda.Stream, timed: bool) -> None:
        self.event: Any = torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]
        self.event.record(stream)

    @property
    def done(self) -> bool:
        """See ``Event``."""
        return bool(self.event.query())

    def wait(self) -> None:
        """See ``Event``."""
        self.event.synchronize()

    def seconds_since(self, earlier: Event) -> float:
        """See ``Event``."""
        assert isinstance(earlier, CudaEvent)
        return float(earlier.event.elapsed_time(self.event)) / 1e3


class CudaQueue:
    """See ``Queue``. ``current`` says that the stream is the calling thread's."""

    def __init__(self, stream: torch.cuda.Stream, memory: CudaHostMemory, current: bool) -> None:
        self.stream = stream
        self._memory, self._current = memory, current

    def run(self, launch: Callable[[], None]) -> None:
        """See ``Queue``."""
        with nullcontext() if self._current else torch.cuda.stream(self.stream):
            launch()

    def copy(self, source: Column, target: Column, length: Column) -> None:
        """See ``Queue``."""
        self._memory.copy(source, target, length, self.stream.cuda_stream)

    def record(self, timed: bool = False) -> CudaEvent:
        """See ``Queue``."""
        return CudaEvent(self.stream, timed)

    def wait_for(self, event: Event) -> None:
        """See ``Queue``."""
        assert isinstance(event, CudaEvent)
        self.stream.wait_event(event.event)


class CudaDevice:
    """See ``Device``."""

    def __init__(self, device: torch.device, memory: CudaHostMemory) -> None:
        self._device, self._memory = device, memory

    def compute(self) -> CudaQueue:
        """See ``Device``."""
        return CudaQueue(torch.cuda.current_stream(self._device), self._memory, True)

    def make_queue(self) -> CudaQueue:
        """See ``Device``."""
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return CudaQueue(stream, self._memory, False)
