"""The rate of the link to a peer, in bytes per second: first from a calibration, then from the chunks sent.

Owned by the transfer thread.
"""

from __future__ import annotations

import msgspec

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
    lane_of,
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


def found_by(probe: ProbeOutbox, local: Local, before: Traffic, host: str, own_host: str) -> Transport:
    """What a probe found of the link to ``host``; ``before`` is this machine's traffic when it began."""
    seen = Seen(
        total_bytes=sum(sample.total_bytes for sample in probe.samples),
        bytes_per_s=probe.bytes_per_s,
        host=host,
        is_near=is_loopback(host) or same_host(host, own_host),
        on_gpu=local.device.type == "cuda",
        before=before,
        after=local.look_at_traffic(),
    )
    reported = lane_of(local.engine.capabilities.lane)
    return transport_over(seen_lane(reported, seen, local.fabric), seen.bytes_per_s, local)


def transport_over(lane: Transport, bytes_per_s: float, local: Local) -> Transport:
    """A lane with its measured rate, and the rate that the hardware should give (both bytes per second).

    The rate of shared memory depends on the load of the processors, so none is expected of it.
    """
    expected, _ = expected_rate(local.fabric, lane)
    return msgspec.structs.replace(
        lane,
        device=lane.device[:MOST_TEXT],
        bytes_per_s=min(bytes_per_s, MOST_BYTES_PER_S),
        expected_bytes_per_s=min(expected, MOST_BYTES_PER_S),
    )


class LinkMeter:
    """Measures, in windows of 64 MiB, the rate of chunks to one peer while P writes to no other peer.

    Small copies, and copies that share the link, do not show what the link can do, and are left out.
    """

    def __init__(self, peer: str, found: Transport, transports: Transports) -> None:
        self.found = found
        self._peer = peer
        self._transports = transports
        self._last_at = 0.0
        self._bytes = 0
        self._seconds = 0.0
        self._slow_windows = 0

    def moved(self, completion: Completion, now: float, *, is_alone: bool) -> None:
        """Take the completion of one chunk's batch."""
        began_at, self._last_at = max(now - completion.seconds, self._last_at), now
        if not is_alone or completion.total_bytes < _LARGE_BYTES:
            return
        self._bytes += completion.total_bytes
        self._seconds += now - began_at
        if self._bytes < _WINDOW_BYTES or self._seconds <= 0:
            return
        rate = min(self._bytes / self._seconds, MOST_BYTES_PER_S)
        self._bytes, self._seconds = 0, 0.0
        found = msgspec.structs.replace(self.found, bytes_per_s=rate)
        self._slow_windows = self._slow_windows + 1 if found.share < LEAST_SHARE else 0
        if self._slow_windows < _SLOW_WINDOWS:
            # A slow window is shown at once, but P does not warn of it yet.
            self._transports.show(found)
        else:
            self._transports.measured(self._peer, found)
