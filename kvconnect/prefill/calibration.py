"""Calibration of a link: a probe that measures how fast the engine writes to a peer (bytes per second).

P writes a few batches from its scratch memory to the peer's scratch memory, whose content is never read. The
peer's fetches wait until the calibration ends, which takes no longer than to make a connection.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

from kvconnect.engine.base import Completion
from kvconnect.engine.lanes import Traffic
from kvconnect.prefill.outbox import Columns, Parcel

_FIRST_BYTES, _GROWTH = 4096, 4
_LONGEST_S = 0.5
"""The probe ends after a batch that took longer, in seconds: the link is known to be slow by then."""


class ProbeOutbox:
    """Batches of growing length, one in flight at a time; ``samples`` are those that count.

    Has the interface of ``SlotOutbox``; a batch of a probe carries no parcel, and needs no packing.

    Args:
        source: address of P's scratch memory.
        target: address of the peer's scratch memory.
        scratch_bytes: size of the smaller of the two.
        before: this machine's traffic when the probe begins.
    """

    copies = 0
    is_packing = False
    goes_on = True

    def __init__(self, source: int, target: int, scratch_bytes: int, before: Traffic) -> None:
        self.before = before
        self.samples: list[Completion] = []
        # The first batch establishes the connection; its time is not a sample.
        length = min(_FIRST_BYTES, scratch_bytes)
        lengths = [length, length]
        while (length := length * _GROWTH) < scratch_bytes:
            lengths.append(length)
        # The largest is sent three times, in case other traffic slows one of them.
        self._batches = iter([(source, target, length) for length in (*lengths, *[scratch_bytes] * 3)])
        self._next = next(self._batches, None)
        self._scratch_bytes = scratch_bytes
        self._is_connected = False

    @property
    def bytes_per_s(self) -> float:
        """The best rate among copies of the largest length: slower ones were disturbed by other traffic."""
        timed = [one for one in self.samples if one.seconds > 0]
        largest = max((one.total_bytes for one in timed), default=0)
        return max((largest / one.seconds for one in timed if one.total_bytes == largest), default=0.0)

    @property
    def seconds_of(self) -> Callable[[int], float]:
        """Returns the seconds of a batch of so many bytes, by the fastest samples so far; 0 without any."""
        best: dict[int, float] = {}
        for sample in self.samples:
            best[sample.total_bytes] = min(sample.seconds, best.get(sample.total_bytes, math.inf))
        if not best:
            return lambda total_bytes: 0.0
        largest = max(best)
        sizes, times = np.array(sorted(best.items())).T
        return lambda n: float(np.interp(n, sizes, times)) * max(1.0, n / largest)

    @property
    def is_whole(self) -> bool:
        """The copy of the largest length was made: no error and no slow batch ended the probe before."""
        return any(one.total_bytes == self._scratch_bytes for one in self.samples)

    @property
    def exhausted(self) -> bool:
        """No batch follows the last one that was submitted."""
        return self._next is None

    def advance(self, stopping: bool) -> Iterator[Parcel]:
        """Yield nothing: a probe packs no chunk."""
        return iter(())

    def peek(self) -> Columns | None:
        """The batch that can be submitted next; None while there is none."""
        return self._next

    def submitted(self, batch_id: int) -> None:
        """Offer no further batch until this one has ended: its duration decides whether one follows."""
        self._next = None

    def ended(self, completion: Completion) -> Parcel | None:
        """Take a batch's completion as a sample, and offer the next batch. Returns no parcel."""
        if completion.ok and self._is_connected:
            self.samples.append(completion)
        if not self._is_connected or completion.seconds <= _LONGEST_S:
            self._next = next(self._batches, None)
        self._is_connected = True
        return None
