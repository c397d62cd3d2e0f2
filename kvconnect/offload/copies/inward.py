"""Restores: rows come back on queues of their own, so that no step waits for them."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvconnect.errors import KVConnectError
from kvconnect.offload.copies.copier import Ended, Ticket, error_text, failed, logger
from kvconnect.offload.copies.launching import Loading, Mover, NumberPool
from kvconnect.offload.copies.queues import Device, Event
from kvconnect.offload.copies.row_parts import RowParts
from kvconnect.offload.copies.staging import Ring, Staging
from kvconnect.offload.copies.tiles import Piece
from kvconnect.orders import RowCopies

_UNBOUND = 1 << 62


class _RestoreTicket:
    """See ``Ticket``."""

    waited_s = 0.0

    def __init__(self, end: Event, error: str | None = None) -> None:
        self._end: Event | None = end
        self._error = error

    @property
    def done(self) -> bool:
        """See ``Ticket``. Once the device says that it failed, nothing runs on it any more."""
        end = self._end
        if end is None:
            return True
        try:
            if not end.done:
                return False
        except Exception as error:
            self._error = self._error or error_text(error)
        self._end = None
        return True

    @property
    def error(self) -> str | None:
        """See ``Ticket``."""
        return self._error

    def wait(self) -> None:
        """See ``Ticket``."""
        if self._end is not None:
            self._end.wait()
        assert self.done


class Inward:
    """Copies rows to blocks: by copy engines to staging memory, and from there by a kernel; or by a kernel.

    ``by_kernel`` is how many programs may do that at one time, 0 for copy engines.
    """

    def __init__(
        self, parts: RowParts, device: Device, staging: Staging, mover: Mover, by_kernel: int
    ) -> None:
        self._parts, self._mover = parts, mover
        self._programs = by_kernel
        self._most_bytes = _UNBOUND if by_kernel else staging.part_bytes
        self._copies, self._unpacks = device.make_queue(), device.make_queue()
        self._ring: Ring[Event] = Ring(staging.address + staging.out_bytes, staging.back_bytes)
        self._numbers = NumberPool(mover)
        self._lock = threading.Lock()

    def restore(self, copies: Sequence[RowCopies], after: Event | None) -> Ticket:
        """See ``Copier``."""
        try:
            pieces = self._parts.cut(self._parts.of(copies), self._most_bytes)
        except Exception as error:
            return failed("restore", error)
        if not pieces:
            return Ended()
        with self._lock:
            try:
                if after is not None:
                    self._unpacks.wait_for(after)
                end = self._read(pieces) if self._programs else self._fetch(pieces)
                self._numbers.give_back(end)
                return _RestoreTicket(end)
            except Exception as error:
                return self._broken(error)

    def close(self) -> None:
        """Wait until nothing is under way."""
        self._unpacks.wait_for(self._copies.record())
        self._unpacks.record().wait()

    def _read(self, pieces: Sequence[Piece]) -> Event:
        """The kernel reads rows where they are."""
        loading = Loading(self._mover, self._numbers)
        all_launches = [loading.add(piece.kind, piece.block, piece.address) for piece in pieces]
        loading.load(self._unpacks)
        for launches in all_launches:
            loading.start(self._unpacks, launches, 0, False, self._programs)
        return self._unpacks.record()

    def _fetch(self, pieces: Sequence[Piece]) -> Event:
        """Copy engines bring rows, piece by piece; each is unpacked while the next arrive."""
        loading = Loading(self._mover, self._numbers)
        for number, piece in enumerate(pieces):
            address, fence = self._ring.take(piece.total_bytes)
            if fence is not None:
                self._copies.wait_for(fence)
            host, place, length = piece.copies
            self._copies.copy(host, address + place, length)
            self._unpacks.wait_for(self._copies.record())
            if number == 0:
                # Worked out while the first piece is on its way.
                all_launches = [loading.add(one.kind, one.block, one.place) for one in pieces]
                loading.load(self._unpacks)
            loading.start(self._unpacks, all_launches[number], address, False)
            end = self._unpacks.record()
            self._ring.seal(end)
        return end

    def _broken(self, error: Exception) -> Ticket:
        """The ticket of copies of which some may be under way: done once nobody touches anything any more."""
        logger.error("a restore of blocks failed: %s", error, exc_info=not isinstance(error, KVConnectError))
        try:
            self._unpacks.wait_for(self._copies.record())
            end = self._unpacks.record()
            self._ring.seal(end)
            self._numbers.give_back(end)
        except Exception as lost:
            # A device that takes no work does none either.
            logger.error("the device takes no more copies: %s", lost)
            return Ended(error_text(error))
        return _RestoreTicket(end, error_text(error))
