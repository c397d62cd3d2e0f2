"""Snapshots: blocks are packed on the model's own queue, and go to the host while the model computes."""

from __future__ import annotations

from collections.abc import Sequence

from kvconnect.errors import KVConnectError
from kvconnect.offload.copies.copier import Ended, Ticket, error_text, failed, logger
from kvconnect.offload.copies.launching import Loading, Mover, NumberPool
from kvconnect.offload.copies.queues import Device, Event, Queue
from kvconnect.offload.copies.row_parts import RowParts
from kvconnect.offload.copies.staging import Ring, Staging
from kvconnect.offload.copies.tiles import Piece
from kvconnect.orders import RowCopies


class _Sent:
    """A piece on its way to the host. ``event`` follows its copies; None where the device took none."""

    def __init__(self, event: Event | None, error: str | None = None) -> None:
        self.event = event
        self.error = error

    @property
    def done(self) -> bool:
        """Nobody reads its staging memory or writes to its rows any more."""
        return self.event is None or self.event.done


class _SnapshotTicket:
    """See ``Ticket``. ``waits`` are pairs of timed events, before and after the model had to wait."""

    def __init__(self, sent: Sequence[_Sent], waits: Sequence[tuple[Event, Event]]) -> None:
        self._sent, self._waits = sent, waits
        self._error: str | None = None
        self._waited_s = 0.0

    @property
    def done(self) -> bool:
        """See ``Ticket``. Once the device says that it failed, nothing runs on it any more."""
        if not self._sent:
            return True
        try:
            if not all(sent.done for sent in self._sent):
                return False
            self._waited_s = sum(after.seconds_since(before) for before, after in self._waits)
        except Exception as error:
            self._error = self._error or error_text(error)
        self._error = self._error or next((sent.error for sent in self._sent if sent.error), None)
        self._sent, self._waits = (), ()
        return True

    @property
    def error(self) -> str | None:
        """See ``Ticket``."""
        return self._error

    @property
    def waited_s(self) -> float:
        """See ``Ticket``."""
        return self._waited_s

    def wait(self) -> None:
        """See ``Ticket``."""
        for sent in self._sent:
            if sent.event is not None:
                sent.event.wait()
        assert self.done


class Outward:
    """Copies blocks to rows. ``snapshot`` is called on one thread.

    ``by_kernel`` is how many programs may move what is packed to the host, 0 for copy engines.
    """

    def __init__(
        self, parts: RowParts, device: Device, staging: Staging, mover: Mover, by_kernel: int
    ) -> None:
        self._parts, self._device, self._mover = parts, device, mover
        self._programs = by_kernel
        self._queue = device.make_queue()
        self._ring: Ring[_Sent] = Ring(staging.address, staging.out_bytes)
        self._numbers = NumberPool(mover)
        self.staging_waits = 0

    def snapshot(self, copies: Sequence[RowCopies]) -> Ticket:
        """See ``Copier``."""
        try:
            compute = self._device.compute()
            parts = self._parts.of(copies)
            # One launch if it can be; else two halves in turn.
            whole = parts.total_bytes <= self._ring.length_bytes
            pieces = self._parts.cut(parts, self._ring.length_bytes // (1 if whole else 2))
        except Exception as error:
            return failed("snapshot", error)
        if not pieces:
            return Ended()
        all_sent: list[_Sent] = []
        waits: list[tuple[Event, Event]] = []
        try:
            self._send_all(pieces, compute, all_sent, waits)
        except Exception as error:
            logger.error(
                "a snapshot of blocks failed: %s", error, exc_info=not isinstance(error, KVConnectError)
            )
            all_sent.append(self._broken(error, compute))
        return _SnapshotTicket(all_sent, waits)

    def close(self) -> None:
        """Wait until nothing is under way."""
        self._queue.record().wait()

    def _send_all(
        self,
        pieces: Sequence[Piece],
        compute: Queue,
        all_sent: list[_Sent],
        waits: list[tuple[Event, Event]],
    ) -> None:
        loading = Loading(self._mover, self._numbers)
        all_launches = [loading.add(piece.kind, piece.block, piece.place) for piece in pieces]
        loading.load(compute)
        for piece, launches in zip(pieces, all_launches, strict=True):
            address, fence = self._ring.take(piece.total_bytes)
            if fence is not None and fence.event is not None and not fence.done:
                self.staging_waits += 1
                before = compute.record(timed=True)
                compute.wait_for(fence.event)
                waits.append((before, compute.record(timed=True)))
            loading.start(compute, launches, address, True)
            self._queue.wait_for(compute.record())
            if self._programs:
                self._send_by_kernel(piece, address)
            else:
                host, place, length = piece.copies
                self._queue.copy(address + place, host, length)
            sent = _Sent(self._queue.record())
            self._ring.seal(sent)
            all_sent.append(sent)
        assert sent.event is not None
        self._numbers.give_back(sent.event)

    def _send_by_kernel(self, piece: Piece, address: int) -> None:
        loading = Loading(self._mover, self._numbers)
        launches = loading.add(self._parts.plain_kind(piece.length), address + piece.place, piece.address)
        loading.load(self._queue)
        loading.start(self._queue, launches, 0, True, self._programs)

    def _broken(self, error: Exception, compute: Queue) -> _Sent:
        """What ends once nobody touches anything any more for a snapshot that failed half-way."""
        made = _Sent(None, error_text(error))
        try:
            self._queue.wait_for(compute.record())
            made.event = self._queue.record()
            self._numbers.give_back(made.event)
        except Exception as lost:
            # A device that takes no work does none either.
            logger.error("the device takes no more copies: %s", lost)
        self._ring.seal(made)
        return made
