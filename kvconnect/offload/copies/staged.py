"""The copier of a device with memory of its own.

A snapshot packs blocks into staging memory on the model's own stream; copy engines bring them to the host
while the model computes. A restore takes the same way back, on streams of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import torch

from kvconnect.errors import ConfigError, EngineError, LocalError
from kvconnect.offload.copies.copier import Copier, CopyTicket, failure, logger
from kvconnect.offload.copies.cuda_device import CudaDevice, CudaQueue
from kvconnect.offload.copies.host_arena import RowArena
from kvconnect.offload.copies.rows import Piece, RowLayout, RowParts
from kvconnect.pack.arena import spare_bytes
from kvconnect.pack.batches import StagedChunk
from kvconnect.pack.launcher import Launcher
from kvconnect.pack.numbers import NumberBuffer
from kvconnect.transfer.orders import RowCopies

_MOST_STAGING_BYTES = 512 << 20
_LEAST_STAGING_BYTES = 16 << 20
_PART_OF_MEMORY = 256
_MOST_PREPARED = 256


class Ring:
    """Staging memory: spans of ``length_bytes`` from ``address`` on, given out in turn.

    A span is taken, used, and sealed with a fence: the event after which nothing uses it, or None.
    """

    def __init__(self, address: int, length_bytes: int) -> None:
        self.length_bytes = length_bytes
        self._address = address
        self._next = 0
        self._sealed: deque[tuple[int, int, Any]] = deque()
        self._open: tuple[int, int] | None = None

    def take(self, length_bytes: int) -> tuple[int, Any]:
        """The address of a span, and the fence that must be passed before it is used; None for none.

        Fences are passed in the order in which spans were sealed.

        Raises:
            LocalError: the span is longer than the ring, or the last one was not sealed.
        """
        if length_bytes > self.length_bytes:
            raise LocalError(f"a span has {length_bytes} bytes; accepted: up to {self.length_bytes}")
        if self._open is not None:
            raise LocalError("a span was taken before the last one was sealed")
        start = self._next if self._next + length_bytes <= self.length_bytes else 0
        self._open = start, start + length_bytes
        self._next = start + length_bytes
        fence = None
        # The oldest come first, so that what lies in the way is at the front; a fence stands for those
        # before it as well.
        in_the_way = [begin < start + length_bytes and start < end for begin, end, _ in self._sealed]
        last = max((index for index, hit in enumerate(in_the_way) if hit), default=-1)
        for _ in range(last + 1):
            fence = self._sealed.popleft()[2]
        return self._address + start, fence

    def seal(self, fence: Any) -> None:
        """Nothing uses the span that was taken last once this fence is passed."""
        if self._open is not None:
            self._sealed.append((*self._open, fence))
            self._open = None


class Direction:
    """One direction of copies: its kernel, and its staging memory. One thread at a time uses it.

    The numbers of launches are kept until the launches are done.
    """

    def __init__(self, parts: RowParts, launcher: Launcher, ring: Ring) -> None:
        self.ring = ring
        self._launcher = launcher
        # A step stores few blocks, and about as many each time.
        self._prepare = lru_cache(_MOST_PREPARED)(lambda pages: launcher.prepare(0, (), parts.moves(pages)))
        self._lent: list[NumberBuffer] = []
        self._kept: deque[tuple[Any, list[NumberBuffer]]] = deque()

    def load(self, queue: CudaQueue, pieces: Sequence[Piece]) -> list[StagedChunk]:
        """Bring the numbers of pieces to the device, at once."""
        while self._kept and self._kept[0][0].query():
            self._kept.popleft()
        layouts = [self._prepare(tuple(piece.numbers)) for piece in pieces]
        # In memory of this queue: what torch frees on another stream it gives away there at once, although
        # kernels that were launched there before may still use it.
        with queue.current():
            lent, staged = self._launcher.stage(layouts, [piece.numbers for piece in pieces])
        self._lent.append(lent)
        queue.run(partial(self._launcher.load, lent))
        return staged

    def start(self, queue: CudaQueue, staged: StagedChunk, rows_at: int, pack: bool) -> None:
        """Move a piece between its blocks and its rows, whose places count from an address."""
        queue.run(partial(self._launcher.start, staged, rows_at, pack))

    def keep_until(self, end: Any) -> None:
        """All that was loaded so far is done then."""
        self._kept.append((end, self._lent))
        self._lent = []


class StagedCopier(Copier):
    """See ``Copier``. ``keep`` is what owns the staging memory."""

    def __init__(
        self, parts: RowParts, device: CudaDevice, storing: Direction, restoring: Direction, keep: object
    ) -> None:
        self.staging_waits = 0
        self._parts, self._device, self._keep = parts, device, keep
        self._storing, self._restoring = storing, restoring
        self._to_host, self._from_host, self._unpacks = (device.make_queue() for _ in range(3))

    def snapshot(self, copies: Sequence[RowCopies]) -> CopyTicket:
        """See ``Copier``."""
        try:
            compute = self._device.compute()
            # While one half of the staging memory leaves, the other is filled.
            pieces = self._parts.pieces(copies, self._storing.ring.length_bytes // 2)
        except Exception as error:
            return CopyTicket(failure("snapshot", error))
        return self._move(pieces, self._storing, compute, self._to_host, pack=True)

    def mark(self) -> Any:
        """See ``Copier``."""
        return self._device.compute().record()

    def restore(self, copies: Sequence[RowCopies], after: Any = None) -> CopyTicket:
        """See ``Copier``."""
        try:
            pieces = self._parts.pieces(copies, self._restoring.ring.length_bytes // 4)
            if after is not None:
                self._unpacks.wait_for(after)
        except Exception as error:
            return CopyTicket(failure("restore", error))
        return self._move(pieces, self._restoring, self._from_host, self._unpacks, pack=False)

    def close(self) -> None:
        """See ``Copier``."""
        try:
            for queue in (self._to_host, self._from_host, self._unpacks):
                queue.record().synchronize()
        except Exception as error:
            logger.warning("copies of blocks failed before their end: %s", error)
        self._keep = None

    def _move(
        self, pieces: Sequence[Piece], way: Direction, first: CudaQueue, last: CudaQueue, pack: bool
    ) -> CopyTicket:
        """Move piece by piece, by the kernel and by copy engines, in this order to ``pack``.

        The first of the two has one queue and the second another, so that they work on two pieces at a time.
        """
        if not pieces:
            return CopyTicket()
        end, waits = None, []
        try:
            all_staged = way.load(first if pack else last, pieces)
            for piece, staged in zip(pieces, all_staged, strict=True):
                address, fence = way.ring.take(piece.total_bytes)
                host, place, length = piece.copies
                if pack:
                    if fence is not None and not fence.query():
                        self.staging_waits += 1
                        before = first.record(timed=True)
                        first.wait_for(fence)
                        waits.append((before, first.record(timed=True)))
                    way.start(first, staged, address, pack)
                    last.wait_for(first.record())
                    last.copy(address + place, host, length)
                else:
                    if fence is not None:
                        first.wait_for(fence)
                    first.copy(host, address + place, length)
                    last.wait_for(first.record())
                    way.start(last, staged, address, pack)
                end = last.record()
                way.ring.seal(end)
            way.keep_until(end)
        except Exception as error:
            text = failure("snapshot" if pack else "restore", error)
            return CopyTicket(text, _end_of_failed(way, first, last) or end, waits)
        return CopyTicket(None, end, waits)


def _end_of_failed(way: Direction, first: CudaQueue, last: CudaQueue) -> Any:
    """What ends once nothing touches blocks or rows any more for copies that failed half-way."""
    end = None
    try:
        last.wait_for(first.record())
        end = last.record()
        way.keep_until(end)
    except Exception as lost:
        # A device that takes no work does none either.
        logger.error("the device takes no more copies: %s", lost)
    way.ring.seal(end)
    return end


def make_staged_copier(
    layout: RowLayout, arena: RowArena, device: torch.device, staging_bytes: int, reserved_bytes: int
) -> StagedCopier:
    """See ``make_copier``."""
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    staging_bytes = staging_bytes or _suited_bytes(device, reserved_bytes)
    try:
        cuda = CudaDevice(device)
        storage = torch.zeros(staging_bytes, dtype=torch.uint8, device=device)
    except (EngineError, torch.OutOfMemoryError) as error:
        raise ConfigError(
            f"{device} has no room for {staging_bytes} bytes of staging memory: {error}"
        ) from error
    ring_bytes = staging_bytes // 2 // 256 * 256
    parts = RowParts(layout, arena, ring_bytes // 4)
    all_lanes = [lanes for kind in parts.lanes_of for lanes in kind]

    def make_direction(address: int, pack: bool) -> Direction:
        # Each direction has its own thread, and a launcher stages for one thread only.
        launcher = Launcher(all_lanes, device, is_placed=True)
        launcher.compile(pack)
        return Direction(parts, launcher, Ring(address, ring_bytes))

    storing = make_direction(storage.data_ptr(), pack=True)
    restoring = make_direction(storage.data_ptr() + ring_bytes, pack=False)
    torch.cuda.synchronize(device)
    return StagedCopier(parts, cuda, storing, restoring, keep=storage)


def fitted_staging(wanted_bytes: int, spare: int | None) -> int:
    """As much staging memory as ``spare`` bytes of the device hold, and what copies cannot do without."""
    return wanted_bytes if spare is None else min(wanted_bytes, max(spare, _LEAST_STAGING_BYTES))


def _suited_bytes(device: torch.device, reserved_bytes: int) -> int:
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    wanted_bytes = min(_MOST_STAGING_BYTES, total_bytes // _PART_OF_MEMORY)
    spare = spare_bytes(device, reserved_bytes)
    fitted_bytes = fitted_staging(wanted_bytes, spare)
    if fitted_bytes < wanted_bytes:
        logger.warning(
            "%d bytes of staging memory do not fit into the %d bytes that are spare on %s, beside %d that "
            "the serving stack is still to take: %d are taken",
            wanted_bytes,
            spare,
            device,
            reserved_bytes,
            fitted_bytes,
        )
    return fitted_bytes
