"""Batches of copies on streams of one GPU. Owns the streams, and where the numbers of a launch lie.

A batch is one launch of the copy kernel. One of long copies only goes to the GPU's copy engines instead,
which are faster then (390 against 360 GB/s for 256 MiB between two H200) and leave the multiprocessors alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from kvconnect.engine import nvlink_copy
from kvconnect.engine.base import Addresses
from kvconnect.engine.ipc import CudaMemory
from kvconnect.errors import EngineError

_LEAST_PIECES = 1 << 12
_LEAST_NUMBERS = 8
_LONG_BYTES = 8 << 20


class Copier(Protocol):
    """Carries out batches of copies, in any order."""

    def copy(self, source: Addresses, target: Addresses, length: Addresses) -> Callable[[], bool]:
        """Begin a batch; returns what says whether it is done, and all of it can be seen by others.

        The columns may change once this returns.
        """
        ...


@dataclass(frozen=True)
class Tuning:
    """How a launch looks: programs for each multiprocessor, their warps, and the bytes of one move."""

    programs_per_sm: int
    num_warps: int
    tile_bytes: int


# Few programs must each keep more bytes under way.
UNBOUNDED = Tuning(programs_per_sm=8, num_warps=8, tile_bytes=16 << 10)
BOUNDED = Tuning(programs_per_sm=1, num_warps=16, tile_bytes=32 << 10)


class _Numbers:
    """Room for the pieces of one launch, on the host and on the GPU, and the event of its end.

    Kept for later launches: making any of the three takes longer than a launch.
    """

    def __init__(self, pieces: int, device: torch.device) -> None:
        self.pieces = pieces
        self._host = torch.empty(3 * pieces, dtype=torch.int64, pin_memory=True)
        self._on_gpu = torch.empty(3 * pieces, dtype=torch.int64, device=device)
        self.rows = self._host.numpy()
        self.ended = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def upload(self, pieces: int) -> torch.Tensor:
        """Send the first so many pieces on the current stream."""
        on_gpu = self._on_gpu[: 3 * pieces]
        on_gpu.copy_(self._host[: 3 * pieces], non_blocking=True)
        return on_gpu


class CopyStream:
    """``Copier`` over streams of its own.

    Args:
        device: number of the GPU.
        memory: the CUDA driver.
        max_programs: most programs at one time, each of which occupies a multiprocessor in part; 0 for as
            many as are useful.
    """

    def __init__(
        self, device: int, memory: CudaMemory, max_programs: int = 0, tuning: Tuning | None = None
    ) -> None:
        self._memory = memory
        self._tuning = tuning or (BOUNDED if max_programs else UNBOUNDED)
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        self._programs = max_programs or sms * self._tuning.programs_per_sm
        # Two kernels in turn: one begins as the other's last programs end. A bound holds for them together.
        count = 1 if max_programs else 2
        self._streams = [torch.cuda.Stream(device) for _ in range(count)]  # type: ignore[no-untyped-call]
        self._device = self._streams[0].device
        # Made now, since making them may wait for all that the GPU is doing.
        self._free = [_Numbers(_LEAST_PIECES, self._device) for _ in range(_LEAST_NUMBERS)]
        # The kernel is compiled now rather than when the first request waits for it.
        with torch.cuda.stream(self._streams[0]):
            self._launch(torch.zeros(3, dtype=torch.int64, device=self._device), 1)
        self._streams[0].synchronize()

    def copy(self, source: Addresses, target: Addresses, length: Addresses) -> Callable[[], bool]:
        """See ``Copier``."""
        self._streams.append(self._streams.pop(0))
        if int(length.min()) >= _LONG_BYTES:
            return self._copy_long(source, target, length)
        most_bytes = nvlink_copy.piece_bytes(int(length.sum()), self._programs)
        count = nvlink_copy.num_pieces(length, most_bytes)
        numbers = self._take(count)
        nvlink_copy.cut(source, target, length, most_bytes, numbers.rows[: 3 * count].reshape(3, count))
        with torch.cuda.stream(self._streams[0]):
            self._launch(numbers.upload(count), count)
            numbers.ended.record()

        def done() -> bool:
            if not numbers.ended.query():  # type: ignore[no-untyped-call]
                return False
            self._free.append(numbers)
            return True

        return done

    def _copy_long(self, source: Addresses, target: Addresses, length: Addresses) -> Callable[[], bool]:
        columns = (column.tolist() for column in (source, target, length))
        stream = self._streams[0]
        try:
            for here, there, size in zip(*columns, strict=True):
                self._memory.start_copy(here, there, size, stream.cuda_stream, self._device.index)
        except EngineError:
            # Those before it are on their way, and a batch that was not begun passes for quiet.
            stream.synchronize()
            raise
        ended = stream.record_event()
        query: Callable[[], bool] = ended.query
        return query

    def _take(self, pieces: int) -> _Numbers:
        for index, numbers in enumerate(self._free):
            if numbers.pieces >= pieces:
                return self._free.pop(index)
        # One that is too small makes place: batches of one kind come again and again.
        if self._free:
            self._free.pop()
        return _Numbers(max(1 << (pieces - 1).bit_length(), _LEAST_PIECES), self._device)

    def _launch(self, pieces: torch.Tensor, count: int) -> None:
        tuning = self._tuning
        programs = min(count, self._programs)
        nvlink_copy.launch(pieces, count, programs, tuning.tile_bytes, tuning.num_warps)
