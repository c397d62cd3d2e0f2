"""Pack and unpack by the Triton kernel, on one stream: one launch for a chunk and its digest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from kvconnect.pack.batches import ChunkLayout, LaneClass, Move, PageRange, StagedChunk
from kvconnect.pack.launcher import Launcher, Prepared, Staged
from kvconnect.pack.tickets import KernelTicket, Tickets
from kvconnect.runner_kit.block_table import BlockIds


class TritonPackOps:
    """See ``PackOps``. ``cuda_stream`` is the stream of all work; None for the one that is current now."""

    def __init__(
        self, classes: Sequence[LaneClass], device: torch.device, cuda_stream: torch.cuda.Stream | None
    ) -> None:
        if device.type == "cuda" and cuda_stream is None:
            cuda_stream = torch.cuda.current_stream(device)
        self._device, self._stream = device, cuda_stream
        with self._on_stream():
            self._launcher = Launcher(classes, device)
            self._tickets = Tickets(self._launcher.sums, cuda_stream)

    def prepare(self, moves: Sequence[Move]) -> Prepared:
        """See ``PackOps``."""
        return self._launcher.prepare(moves)

    def stage(self, layouts: Sequence[ChunkLayout], blocks: Mapping[PageRange, BlockIds]) -> list[Staged]:
        """See ``PackOps``."""
        with self._on_stream():
            prepared = [layout.handle for layout in layouts]
            lent, staged = self._launcher.stage(prepared, [blocks] * len(prepared))
            self._launcher.load(lent)
        return staged

    def move(self, slot: int, staged: StagedChunk, seed: int | None, pack: bool) -> KernelTicket:
        """See ``PackOps``."""
        numbers: Staged = staged.handle
        self._tickets.check_room()
        with self._on_stream():
            self._launcher.start(numbers, slot, pack, seed)
            return self._tickets.issue(seed is not None, numbers.lent)

    def _on_stream(self) -> AbstractContextManager[Any]:
        # To change the stream and back costs more than to look: the owner's thread may be on it already.
        if self._stream is None or _current_stream(self._device) == self._stream.cuda_stream:
            return nullcontext()
        return torch.cuda.stream(self._stream)


def _current_stream(device: torch.device) -> int:
    """The handle of the stream that is current: asked for at every launch, and an object costs 10 us."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(torch._C._cuda_getCurrentRawStream(index))
