"""Moves chunks with the Triton kernel on one stream: a launch per access width moves and digests a chunk.

All kernels add to one sum that is never reset. After each chunk the sum is copied to a place in
pinned memory; the digest is the difference of two successive sums.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from kvconnect.errors import LocalError
from kvconnect.pack.batches import Blocks, ChunkLayout, PackTicket, StagedChunk
from kvconnect.pack.launcher import Launcher
from kvconnect.pack.numbers import NumberBuffer
from kvconnect.pack.page_lanes import Lanes

_PLACES = 256


class TritonMover:
    """All work is on ``cuda_stream``; None for the stream that is current at construction."""

    def __init__(
        self, all_lanes: Sequence[Lanes], device: torch.device, cuda_stream: torch.cuda.Stream | None
    ) -> None:
        on_cuda = device.type == "cuda"
        if on_cuda and cuda_stream is None:
            cuda_stream = torch.cuda.current_stream(device)
        self._device, self._stream = device, cuda_stream
        with self._on_stream():
            self._launcher = Launcher(all_lanes, device)
            self.prepare = self._launcher.prepare
            places = torch.zeros(_PLACES, dtype=torch.int64, pin_memory=on_cuda)
        self._values = places.numpy()
        # Views are made once: making one costs as much as the copy.
        self._sum, self._places = self._launcher.sums[0], list(places.unbind())
        self._events = [torch.cuda.Event() if on_cuda else None for _ in range(_PLACES)]  # type: ignore[no-untyped-call]
        self._issued = 0
        self._pending: deque[KernelTicket] = deque()
        self._last_value = 0

    def stage(self, layouts: Sequence[ChunkLayout], blocks: Blocks) -> list[StagedChunk]:
        """Copy the numbers of several chunks to the device, in one copy."""
        with self._on_stream():
            lent, staged = self._launcher.stage(layouts, [blocks] * len(layouts))
            self._launcher.load(lent)
        return staged

    def move(self, slot: int, staged: StagedChunk, seed: int, pack: bool) -> KernelTicket:
        """Pack pages into the slot at address ``slot``, or unpack them, and compute the slot's digest.

        Raises ``LocalError``: 256 packs and unpacks are in flight, and no place for a digest is free.
        """
        if len(self._pending) == _PLACES:
            if not self._pending[0].done:
                raise LocalError(f"{_PLACES} packs and unpacks are under way; accepted: fewer")
            self.settle(self._pending[0])
        with self._on_stream():
            self._launcher.start(staged, slot, pack, seed)
            place = self._issued % _PLACES
            self._issued += 1
            self._places[place].copy_(self._sum, non_blocking=True)
            # The event can be reused: the ticket that had this place before is settled.
            event = self._events[place]
            if event is not None:
                event.record(self._stream)
        ticket = KernelTicket(self, place, event, staged.lent)
        self._pending.append(ticket)
        return ticket

    def settle(self, ticket: KernelTicket) -> None:
        """Read the digests of all tickets up to this one, which is done."""
        while not ticket.settled:
            oldest, before = self._pending.popleft(), self._last_value
            self._last_value = int(self._values[oldest.place])
            oldest.settle((self._last_value - before) % 2**64)

    def _on_stream(self) -> AbstractContextManager[Any]:
        if self._stream is None:
            return nullcontext()
        index = torch.cuda.current_device() if self._device.index is None else self._device.index
        # Checking the current stream is cheaper than changing it; a stream object would cost 10 us.
        is_current = torch._C._cuda_getCurrentRawStream(index) == self._stream.cuda_stream
        return nullcontext() if is_current else torch.cuda.stream(self._stream)


class KernelTicket(PackTicket):
    """A launched pack or unpack; see ``PackTicket``. ``place`` has the sum after it."""

    def __init__(self, mover: TritonMover, place: int, event: Any, reads: NumberBuffer | None) -> None:
        super().__init__()
        self.place, self.settled = place, False
        # Keeps the kernel's numbers out of the pool until the kernel is done.
        self._mover, self._event, self._reads = mover, event, reads

    def settle(self, digest: int) -> None:
        """Note that the work is done, and its digest."""
        self.settled, self._digest, self._reads = True, digest, None

    @property
    def done(self) -> bool:
        return self.settled or self._event is None or bool(self._event.query())

    @property
    def digest(self) -> int:
        if not self.done:
            raise LocalError("the digest of a pack or unpack is not known before it is done")
        self._mover.settle(self)
        return self._digest

    def wait(self) -> None:
        if not self.done:
            self._event.synchronize()
