"""The rate of the link to a peer, in bytes per second: first from a calibration, then from the chunks sent.

Owned by the transfer thread.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from kvconnect.addresses import is_loopback
from kvconnect.engine.base import Completion
from kvconnect.engine.lanes import (
    LEAST_SHARE,
    MOST_BYTES_PER_S,
    MOST_TEXT,
    Seen,
    Transport,
    expected_rate,
    seen_lane,
)
from kvconnect.peer.allow_list import same_host
from kvconnect.prefill.calibration import ProbeOutbox
from kvconnect.transfer.link_reports import Transports
from kvconnect.transfer.local import Local

_LARGE_BYTES = 1 << 20
_WINDOW_BYTES = 64 << 20
_SLOW_WINDOWS = 4
"""Consecutive slow windows before P warns: a single slow window may be a disturbance."""


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
