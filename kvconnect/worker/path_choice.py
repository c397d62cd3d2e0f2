"""By which path P serves a fetch where both are open: the link is calibrated once, before its first fetch.

Owned by the transfer thread.
"""

from __future__ import annotations

import logging

from kvconnect.config import ExtraConfig
from kvconnect.metrics import Metrics
from kvconnect.peer.messages import Fetch
from kvconnect.plan.cost import LinkCost, fit
from kvconnect.plan.transfer import plan_size
from kvconnect.worker.inbound_peers import Way
from kvconnect.worker.leases import Claims, Lease, Sending, TransferKey
from kvconnect.worker.local import Local
from kvconnect.worker.sender import Sender

logger = logging.getLogger(__name__)

_PROBE = 0
"""The number of a calibration among the transfers of a connection: peers count their fetches from 1."""


class PathChoice:
    """Calibrates a link when its first fetch comes, and chooses for every fetch after that.

    Args:
        local: where pages are packed, and how fast that goes.
    """

    def __init__(self, config: ExtraConfig, sender: Sender, local: Local, metrics: Metrics) -> None:
        self._config = config
        self._sender = sender
        self._pack_bytes_per_s = local.pack_bytes_per_s
        # Without a GPU our one thread packs, and most engines copy in it too.
        self._overlaps = local.stream is not None
        self._metrics = metrics
        self._probed: dict[TransferKey, Way] = {}

    def is_probing(self, link: str) -> bool:
        """The link is being calibrated: its fetches wait for that."""
        return (link, _PROBE) in self._sender.sendings

    def calibrate(self, way: Way, link: str, now: float) -> None:
        """Find out how fast a link is, unless that is under way."""
        key = (link, _PROBE)
        if way.probe is not None and key not in self._sender.sendings:
            deadline = now + self._config.handshake_timeout_s
            self._probed[key] = way
            self._sender.begin(Sending(key, Claims(), ("", "", 0), way.name, deadline, now), way.probe)

    def take(self, sending: Sending) -> bool:
        """Something that was sent is over. Whether it was a calibration, which no peer waits for."""
        way = self._probed.pop(sending.key, None)
        if way is None:
            return False
        samples = way.probe.samples if way.probe is not None else []
        pack = self._pack_bytes_per_s
        way.cost = LinkCost(fit(samples) if samples else None, pack, pack, overlaps=self._overlaps)
        way.probe = None
        if sending.error:
            self._metrics.failures.labels("calibration").inc()
            logger.warning("the link to %s could not be calibrated: %s", way.name, sending.error)
        logger.info("the link to %s: %s", way.name, way.cost.describe())
        believed = way.cost.as_metrics()
        for what, gauge in self._metrics.link.items():
            gauge.set(believed[what])
        return True

    def prefers_packed(self, lease: Lease, fetch: Fetch, way: Way) -> bool:
        """Whether a request is cheaper by slots than page by page, where both are open."""
        if way.direct is None or way.packer is None:
            return way.direct is None
        cost = way.cost or LinkCost()
        direct = plan_size(way.direct, lease.order.groups, fetch.groups, fetch.num_tokens)
        packed_bytes = sum(way.packer.chunker.place(chunk).total_bytes for chunk in fetch.chunks)
        choice = cost.choose(direct.copies, direct.total_bytes, packed_bytes, len(fetch.chunks))
        return choice.path == "packed"
