"""Peer loss: its kinds, their consequences, and how long memory stays in quarantine afterwards.

Only D detects the loss of a peer. P needs no detection: a lease expires, and a fetch has a deadline.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class PeerLoss(enum.Enum):
    """How D lost one rank of a peer. ``LOSS_RULES`` has the consequences for leases, loads and the breaker.

    Leases that are not void are kept, and renewed after the next greeting. Granted slots stay in quarantine
    until the peer's writes are over; if that time is unknown, for the load's time and ``quarantine_s``.
    """

    PROCESS_GONE = "its port is closed: the process ended"
    OTHER_INCARNATION = "another process answers at its address"
    LINK_LOST = "the connection broke, and the process may live"
    TOLD_TO_STOP = "it reported that it does nothing on our behalf"
    SILENT = "it did not answer in time"
    UNUSABLE = "it answered, and nothing can be fetched from it"


@dataclass(frozen=True)
class LossRule:
    """The consequences of a loss for the leases and fetches of the lost rank.

    Attributes:
        is_out_of_reach: the breaker opens, and awaited handles that are to be reported fail. Both also follow
            if D never completed a greeting with the peer.
        asks_again: D repeats a fetch that the peer had not answered, some times, and then fails it; the peer
            writes nothing for it in between. False: the fetch fails, and its slots may still be written.
        writes_end_s: seconds after the loss by which the peer's writes have surely ended; None: unknown.
    """

    is_out_of_reach: bool = False
    asks_again: bool = False
    writes_end_s: float | None = None


_GRACE_S = 1.0
"""A process that is gone sends no more, but its last bytes may still be in this node's kernel."""

LOSS_RULES: dict[PeerLoss, LossRule] = {
    PeerLoss.PROCESS_GONE: LossRule(is_out_of_reach=True, writes_end_s=_GRACE_S),
    PeerLoss.OTHER_INCARNATION: LossRule(writes_end_s=_GRACE_S),
    PeerLoss.LINK_LOST: LossRule(),
    PeerLoss.TOLD_TO_STOP: LossRule(asks_again=True),
    PeerLoss.SILENT: LossRule(is_out_of_reach=True),
    PeerLoss.UNUSABLE: LossRule(is_out_of_reach=True),
}
