"""The copier of a device with memory of its own: both directions, through staging memory or by a kernel."""

from __future__ import annotations

from collections.abc import Sequence

from kvconnect.offload.copies.copier import Ticket, logger
from kvconnect.offload.copies.inward import Inward
from kvconnect.offload.copies.launching import Mover
from kvconnect.offload.copies.outward import Outward
from kvconnect.offload.copies.queues import Device, Event
from kvconnect.offload.copies.row_parts import RowParts
from kvconnect.offload.copies.staging import Staging
from kvconnect.offload.copies.trial import Way
from kvconnect.orders import RowCopies


class StagedCopier:
    """See ``Copier``.

    Args:
        parts: what rows are made of.
        device: its queues.
        staging: device memory for copies under way.
        mover: the kernel.
        ways: how blocks travel, out and back.
        keep: what owns the staging memory.
    """

    def __init__(
        self,
        parts: RowParts,
        device: Device,
        staging: Staging,
        mover: Mover,
        ways: tuple[Way, Way],
        keep: object = None,
    ) -> None:
        out, back = ways
        self.modes = (out.mode, back.mode)
        self.rates = (out.bytes_per_s, back.bytes_per_s)
        self._device, self._keep = device, keep
        self._outward = Outward(parts, device, staging, mover, out.programs)
        self._inward = Inward(parts, device, staging, mover, back.programs)

    @property
    def staging_waits(self) -> int:
        """See ``Copier``."""
        return self._outward.staging_waits

    def snapshot(self, copies: Sequence[RowCopies]) -> Ticket:
        """See ``Copier``."""
        return self._outward.snapshot(copies)

    def mark(self) -> Event:
        """See ``Copier``."""
        return self._device.compute().record()

    def restore(self, copies: Sequence[RowCopies], after: Event | None = None) -> Ticket:
        """See ``Copier``."""
        return self._inward.restore(copies, after)

    def close(self) -> None:
        """See ``Copier``."""
        for direction in (self._outward, self._inward):
            try:
                direction.close()
            except Exception as error:
                logger.warning("copies of blocks failed before their end: %s", error)
        self._keep = None
