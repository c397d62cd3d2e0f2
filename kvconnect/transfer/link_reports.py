"""The lane between two nodes: whether the settings refuse it, and one report of each link.

Owned by the transfer thread. P determines lane and rate, since P writes, and reports both to D.
"""

from __future__ import annotations

import logging

from kvconnect.config import ExtraConfig
from kvconnect.engine.lanes import LEAST_SHARE, Transport
from kvconnect.metrics import Metrics
from kvconnect.outcome import Cause, Reason
from kvconnect.transfer.duplicate_filter import DuplicateFilter

logger = logging.getLogger(__name__)

_NETWORKS = ("tcp", "rdma")


def refusal(config: ExtraConfig, found: Transport | None, side: str) -> Reason | None:
    """Why the settings of this node, a ``side``, refuse this lane and rate, or None.

    ``found`` None: P reported none.
    """
    lane, bytes_per_s = ("unknown", 0.0) if found is None else (found.lane, found.bytes_per_s)
    shown = f"the link is refused: its lane is {found or 'not reported by this release of the prefill node'}"
    shown += f", and the {side} node's kv_connector_extra_config"
    if not config.allows_lane(lane):
        return Cause.LANE_REFUSED(f"{shown}.require_lane is {config.require_lane!r}")
    if bytes_per_s < config.min_gb_per_s * 1e9:
        return Cause.LANE_REFUSED(f"{shown}.min_gb_per_s is {config.min_gb_per_s:g}")
    return None


class Transports:
    """Logs the lane and rate of each peer once, and warns once where the link is slow."""

    def __init__(self, metrics: Metrics, repeats: DuplicateFilter) -> None:
        self._metrics, self._repeats = metrics, repeats

    def met(self, peer: str, found: Transport) -> None:
        """Log the result of a calibration, made here or reported by the peer."""
        logger.info("the link with %s: %s", peer, found)
        self.measured(peer, found)

    def show(self, found: Transport) -> None:
        """Set the gauges of the lane's rate, in bytes per second."""
        if found.bytes_per_s:
            self._metrics.link_rate.labels(found.lane).set(found.bytes_per_s)
            self._metrics.link_expected.labels(found.lane).set(found.expected_bytes_per_s)

    def measured(self, peer: str, found: Transport) -> None:
        """Take the rate of a calibration, and warn if it is slow for the network interfaces that carry it.

        Between GPUs of one host the interpreter may be slower than the link: there the hardware's rate is no
        measure.
        """
        self.show(found)
        if found.lane in _NETWORKS and found.share < LEAST_SHARE:
            self._warn(peer, str(found))

    def slowed(self, peer: str, found: Transport, calibrated: float) -> None:
        """Warn that chunks travel more slowly than in the calibration, which reached so many bytes per s."""
        self._warn(peer, f"{found}; its calibration reached {calibrated / 1e9:.3g} with as much in flight")

    def _warn(self, peer: str, found: str) -> None:
        # Apart from the failures of this peer, which its next success forgets.
        if not self._repeats.is_first(("slow link", peer), Cause.LANE_REFUSED):
            return
        self._metrics.failures.labels("slow_link").inc()
        logger.warning(
            "the link with %s is slow: %s. Look at `kvconnect doctor --peer HOST:PORT --measure`, other "
            "traffic, and NUMA (logged once for a peer)",
            peer,
            found,
        )
