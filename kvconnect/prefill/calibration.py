"""The short calibration when peers meet: how fast the engine moves bytes on this link.

P writes a few batches from its scratch memory to the peer's, which is never read. Until they are done the
peer's fetches wait; that is no longer than a connection takes to be made.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kvconnect.engine.base import Completion
from kvconnect.prefill.outbox import Columns, Parcel

_FIRST_BYTES, _GROWTH = 4096, 4
_LONGEST_S = 0.5
"""Nothing follows a batch that took longer: a link as slow as that has shown it."""


class Sample(NamedTuple):
    """One batch of a probe: a copy of so many bytes."""

    total_bytes: int
    seconds: float


class ProbeOutbox:
    """Copies of growing length, each alone on its way. ``samples`` are what they took.

    It has the face of ``SlotOutbox``, and no parcels: batches are ready as they are.

    Args:
        source: our scratch memory.
        target: the peer's.
        scratch_bytes: of the smaller of the two.
    """

    copies = 0
    is_packing = False
    goes_on = True

    def __init__(self, source: int, target: int, scratch_bytes: int) -> None:
        self.samples: list[Sample] = []
        # The first batch makes the connection, and measures nothing.
        length = min(_FIRST_BYTES, scratch_bytes)
        lengths = [length, length]
        while (length := length * _GROWTH) < scratch_bytes:
            lengths.append(length)
        # The largest three times: one that was disturbed does not measure the link.
        self._batches = iter([(source, target, length) for length in (*lengths, *[scratch_bytes] * 3)])
        self._next = next(self._batches, None)
        self._scratch_bytes = scratch_bytes
        self._is_connected = False

    @property
    def bytes_per_s(self) -> float:
        """The most that a copy of the largest length reached: what disturbed the others is not the link's."""
        timed = [one for one in self.samples if one.seconds > 0]
        largest = max((one.total_bytes for one in timed), default=0)
        return max((largest / one.seconds for one in timed if one.total_bytes == largest), default=0.0)

    @property
    def is_whole(self) -> bool:
        """The largest copy was made: no error and no slow batch came before it."""
        return any(one.total_bytes == self._scratch_bytes for one in self.samples)

    @property
    def exhausted(self) -> bool:
        """No batch follows the one that was submitted last."""
        return self._next is None

    def advance(self, stopping: bool) -> Iterator[Parcel]:
        """Nothing is packed."""
        return iter(())

    def peek(self) -> Columns | None:
        """The batch that can be submitted next, None if none can now."""
        return self._next

    def submitted(self, batch_id: int) -> None:
        """What follows that batch depends on what it takes."""
        self._next = None

    def ended(self, completion: Completion) -> Parcel | None:
        """The engine is done with the batch, which was no parcel."""
        if completion.ok and self._is_connected:
            self.samples.append(Sample(completion.total_bytes, completion.seconds))
        if not self._is_connected or completion.seconds <= _LONGEST_S:
            self._next = next(self._batches, None)
        self._is_connected = True
        return None
