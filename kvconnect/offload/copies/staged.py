"""The copier of a device with memory of its own.

A snapshot packs blocks into staging memory on the model's own stream; copy engines bring them to the host
while the model computes. A restore takes the same way back, on streams of its own.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from functools import lru_cache, partial

from kvconnect.errors import KVConnectError
from kvconnect.offload.copies.copier import CopyTicket, Ended, error_text, failed, logger
from kvconnect.offload.copies.pieces import Piece, RowParts, page_numbers
from kvconnect.offload.copies.ring import Ring
from kvconnect.offload.copies.streams import CudaDevice, CudaEvent, CudaQueue
from kvconnect.orders import RowCopies
from kvconnect.pack.launcher import Launcher, Staged
from kvconnect.pack.numbers import NumberBuffer

_MOST_PREPARED = 256


class _DeviceTicket:
    """See ``CopyTicket``: done once ``ends`` are. ``waits`` are events around each wait of the model."""

    def __init__(
        self,
        ends: Sequence[CudaEvent],
        waits: Sequence[tuple[CudaEvent, CudaEvent]] = (),
        error: str | None = None,
    ) -> None:
        self._ends, self._waits = ends, waits
        self.error = error
        self.waited_s = 0.0

    @property
    def done(self) -> bool:
        """See ``CopyTicket``. Once the device says that it failed, nothing runs on it any more."""
        if not self._ends:
            return True
        try:
            if not all(end.done for end in self._ends):
                return False
            self.waited_s = sum(after.seconds_since(before) for before, after in self._waits)
        except Exception as error:
            self.error = self.error or error_text(error)
        self._ends = self._waits = ()
        return True

    def wait(self) -> None:
        """See ``CopyTicket``."""
        for end in self._ends:
            end.wait()
        assert self.done


class RowKernel:
    """The kernel of one direction, which moves parts of rows. One thread at a time calls it.

    The numbers of launches are kept until the launches are done.
    """

    def __init__(self, parts: RowParts, launcher: Launcher) -> None:
        self._launcher = launcher
        # A step stores few blocks, and about as many each time.
        self._prepare = lru_cache(_MOST_PREPARED)(lambda pages: launcher.prepare(parts.moves(pages)))
        self._lent: list[NumberBuffer] = []
        self._kept: deque[tuple[CudaEvent, list[NumberBuffer]]] = deque()

    def load(self, queue: CudaQueue, pieces: Sequence[Piece]) -> list[Staged]:
        """Bring the numbers of pieces to the device, at once."""
        while self._kept and self._kept[0][0].done:
            self._kept.popleft()
        numbers = [page_numbers(piece) for piece in pieces]
        lent, staged = self._launcher.stage([self._prepare(tuple(one)) for one in numbers], numbers)
        self._lent.append(lent)
        queue.run(partial(self._launcher.load, lent))
        return staged

    def start(self, queue: CudaQueue, staged: Staged, rows_at: int, pack: bool) -> None:
        """Move a piece between its blocks and its rows, whose places count from an address."""
        queue.run(partial(self._launcher.start, staged, rows_at, pack))

    def keep_until(self, end: CudaEvent) -> None:
        """All that was loaded so far is done then."""
        self._kept.append((end, self._lent))
        self._lent = []


class StagedCopier:
    """See ``Copier``.

    Args:
        parts: what rows are made of.
        device: its streams.
        packing: the kernel that moves blocks to rows.
        unpacking: the kernel that moves rows to blocks.
        storing: staging memory for snapshots.
        restoring: staging memory for restores.
        keep: what owns the staging memory.
    """

    def __init__(
        self,
        parts: RowParts,
        device: CudaDevice,
        packing: RowKernel,
        unpacking: RowKernel,
        storing: Ring,
        restoring: Ring,
        keep: object = None,
    ) -> None:
        self.staging_waits = 0
        self._parts, self._device, self._keep = parts, device, keep
        self._packing, self._unpacking = packing, unpacking
        self._storing, self._restoring = storing, restoring
        self._to_host, self._from_host, self._unpacks = (device.make_queue() for _ in range(3))
        self._restore_lock = threading.Lock()

    def snapshot(self, copies: Sequence[RowCopies]) -> CopyTicket:
        """See ``Copier``."""
        ring = self._storing
        try:
            compute = self._device.compute()
            # While one half of the staging memory leaves, the other is filled.
            pieces = self._parts.pieces(copies, ring.length_bytes // 2)
        except Exception as error:
            return failed("snapshot", error)
        if not pieces:
            return Ended()
        ends: list[CudaEvent] = []
        waits: list[tuple[CudaEvent, CudaEvent]] = []
        try:
            self._store(pieces, compute, ends, waits)
        except Exception as error:
            text = _log_failure("snapshot", error)
            ends += _end_of_failed(compute, self._to_host, ring, self._packing)
            return _DeviceTicket(ends, waits, text)
        return _DeviceTicket(ends, waits)

    def mark(self) -> CudaEvent:
        """See ``Copier``."""
        return self._device.compute().record()

    def restore(self, copies: Sequence[RowCopies], after: CudaEvent | None = None) -> CopyTicket:
        """See ``Copier``."""
        ring = self._restoring
        try:
            pieces = self._parts.pieces(copies, ring.length_bytes // 4)
        except Exception as error:
            return failed("restore", error)
        if not pieces:
            return Ended()
        with self._restore_lock:
            try:
                if after is not None:
                    self._unpacks.wait_for(after)
                end = self._fetch(pieces)
                self._unpacking.keep_until(end)
                return _DeviceTicket([end])
            except Exception as error:
                text = _log_failure("restore", error)
                ends = _end_of_failed(self._from_host, self._unpacks, ring, self._unpacking)
                return _DeviceTicket(ends, error=text)

    def close(self) -> None:
        """See ``Copier``."""
        try:
            for queue in (self._to_host, self._from_host, self._unpacks):
                queue.record().wait()
        except Exception as error:
            logger.warning("copies of blocks failed before their end: %s", error)
        self._keep = None

    def _store(
        self,
        pieces: Sequence[Piece],
        compute: CudaQueue,
        ends: list[CudaEvent],
        waits: list[tuple[CudaEvent, CudaEvent]],
    ) -> None:
        all_staged = self._packing.load(compute, pieces)
        for piece, staged in zip(pieces, all_staged, strict=True):
            address, fence = self._storing.take(piece.total_bytes)
            if fence is not None and not fence.done:
                self.staging_waits += 1
                before = compute.record(timed=True)
                compute.wait_for(fence)
                waits.append((before, compute.record(timed=True)))
            self._packing.start(compute, staged, address, pack=True)
            self._to_host.wait_for(compute.record())
            host, place, length = piece.copies
            self._to_host.copy(address + place, host, length)
            ends.append(self._to_host.record())
            self._storing.seal(ends[-1])
        self._packing.keep_until(ends[-1])

    def _fetch(self, pieces: Sequence[Piece]) -> CudaEvent:
        """Copy engines bring rows, piece by piece; each is unpacked while the next arrive."""
        all_staged = self._unpacking.load(self._unpacks, pieces)
        for piece, staged in zip(pieces, all_staged, strict=True):
            address, fence = self._restoring.take(piece.total_bytes)
            if fence is not None:
                self._from_host.wait_for(fence)
            host, place, length = piece.copies
            self._from_host.copy(host, address + place, length)
            self._unpacks.wait_for(self._from_host.record())
            self._unpacking.start(self._unpacks, staged, address, pack=False)
            end = self._unpacks.record()
            self._restoring.seal(end)
        return end


def _log_failure(what: str, error: Exception) -> str:
    logger.error("a %s of blocks failed: %s", what, error, exc_info=not isinstance(error, KVConnectError))
    return error_text(error)


def _end_of_failed(first: CudaQueue, last: CudaQueue, ring: Ring, kernel: RowKernel) -> list[CudaEvent]:
    """What ends once nothing touches blocks or rows any more for copies that failed half-way."""
    end: CudaEvent | None = None
    try:
        last.wait_for(first.record())
        end = last.record()
        kernel.keep_until(end)
    except Exception as lost:
        # A device that takes no work does none either.
        logger.error("the device takes no more copies: %s", lost)
    ring.seal(end)
    return [] if end is None else [end]
