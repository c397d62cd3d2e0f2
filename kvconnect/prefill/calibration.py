"""The rate of the link to a peer, in bytes per second: first from a calibration, then from the chunks sent.

A calibration writes a few batches from P's scratch memory to the peer's, whose content is never read. The
peer's fetches wait until the first one ends: no longer than it takes to connect. Owned by the transfer
thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import msgspec
import numpy as np

from kvconnect.addresses import is_loopback
from kvconnect.engine.base import Completion
from kvconnect.engine.lanes import (
    LEAST_SHARE,
    MOST_BYTES_PER_S,
    MOST_TEXT,
    Seen,
    Traffic,
    Transport,
    expected_rate,
    seen_lane,
)
from kvconnect.peer.allow_list import same_host
from kvconnect.prefill.outbox import Columns, Parcel
from kvconnect.transfer.link_reports import Transports
from kvconnect.transfer.local import Local

_FIRST_BYTES, _GROWTH = 4096, 4
_LONGEST_S = 0.5
"""The probe ends after a batch that took longer, in seconds: the link is known to be slow by then."""
_LARGE_BYTES = 1 << 20
_WINDOW_BYTES = 64 << 20
_SLOW_WINDOWS = 4
"""Consecutive slow windows before P warns: a single slow window may be a disturbance."""


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
        return self._next is None

    def advance(self, stopping: bool) -> Iterator[Parcel]:
        return iter(())

    def peek(self) -> Columns | None:
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


def found_by(probe: ProbeOutbox, local: Local, host: str, own_host: str) -> Transport:
    """What a probe found of the link to ``host``."""
    seen = Seen(
        total_bytes=sum(sample.total_bytes for sample in probe.samples),
        bytes_per_s=probe.bytes_per_s,
        host=host,
        is_near=is_loopback(host) or same_host(host, own_host),
        on_gpu=local.device.type == "cuda",
        before=probe.before,
        after=local.look_at_traffic(),
    )
    reported = local.engine.capabilities.carries
    return transport_over(seen_lane(reported, seen, local.fabric), seen.bytes_per_s, local)


def transport_over(lane: Transport, bytes_per_s: float, local: Local) -> Transport:
    """A lane with its measured rate, and the rate that the hardware should give (both bytes per second).

    The rate of shared memory depends on the load of the processors, so none is expected of it.
    """
    return msgspec.structs.replace(
        lane,
        device=lane.device[:MOST_TEXT],
        bytes_per_s=min(bytes_per_s, MOST_BYTES_PER_S),
        expected_bytes_per_s=min(expected_rate(local.fabric, lane), MOST_BYTES_PER_S),
    )


class LinkMeter:
    """Measures, in windows of 64 MiB, the rate of chunks to one peer while P writes to no other peer.

    Small copies, and copies that share the link, do not show what the link can do, and are left out.

    A link is slow if its chunks take twice as long as in its calibration. The time counts in which chunks
    were seen in flight, not the time in which this thread did other work and saw no completion. What the
    hardware promises does not count: a host with a slow interpreter never reaches it.

    Args:
        calibrated_s: the seconds that a batch of so many bytes took in the calibration; None without one.
    """

    def __init__(
        self,
        peer: str,
        found: Transport,
        transports: Transports,
        calibrated_s: Callable[[int], float] | None = None,
    ) -> None:
        self.found = found
        self._peer = peer
        self._transports = transports
        self._calibrated_s_of = calibrated_s
        self._last_at = 0.0
        self._bytes = 0
        self._seconds = self._least_s = self._calibrated_s = 0.0
        self._slow_windows = 0

    def moved(self, completion: Completion, now: float, *, is_alone: bool, unfinished_at: float) -> None:
        """Take the completion of one chunk's batch, which a poll at ``unfinished_at`` saw in flight."""
        began_at, self._last_at = max(now - completion.seconds, self._last_at), now
        if not is_alone or completion.total_bytes < _LARGE_BYTES:
            return
        self._bytes += completion.total_bytes
        self._seconds += now - began_at
        self._least_s += max(0.0, unfinished_at - began_at)
        if self._calibrated_s_of is not None:
            self._calibrated_s += self._calibrated_s_of(completion.total_bytes)
        if self._bytes < _WINDOW_BYTES or self._seconds <= 0:
            return
        rate = min(self._bytes / self._seconds, MOST_BYTES_PER_S)
        found = msgspec.structs.replace(self.found, bytes_per_s=rate)
        self._transports.show(found)
        is_slow = 0.0 < self._calibrated_s < LEAST_SHARE * self._least_s
        self._slow_windows = self._slow_windows + 1 if is_slow else 0
        if self._slow_windows >= _SLOW_WINDOWS:
            self._transports.slowed(self._peer, found, self._bytes / self._calibrated_s)
        self._bytes, self._seconds, self._least_s, self._calibrated_s = 0, 0.0, 0.0, 0.0
