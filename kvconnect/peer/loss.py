"""Losing a peer: the ways of it, what each of them means, and how long memory is left alone after it.

Only D notices it: what P holds ends with its lease, what it writes with the deadline of the fetch.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class PeerLoss(enum.Enum):
    """How D lost one rank of a peer. ``LOSS_RULES`` has what follows for leases, loads and the breaker.

    Leases that are not void are kept, and renewed once the peer is met again. Slots that were lent stay in
    quarantine until the writes are over; where that is not known, for the load's time and ``quarantine_s``.
    """

    PROCESS_GONE = "its port is closed: the process ended"
    OTHER_INCARNATION = "another process answers at its address"
    LINK_LOST = "the connection broke, and the process may live"
    TOLD_TO_STOP = "it reported that it does nothing on our behalf"
    SILENT = "it did not answer in time"
    UNUSABLE = "it answered, and nothing can be fetched from it"


@dataclass(frozen=True)
class LossRule:
    """What a loss does to what hangs on the lost rank.

    Attributes:
        is_out_of_reach: the breaker opens, and awaited leases are void. So it is in any case where the peer
            was never met.
        asks_again: a fetch that the peer had not answered is asked for again, once, and fails after that;
            nothing of it can be written meanwhile. Otherwise it fails, and may be written.
        writes_end_s: how long after the loss the peer's writes are over for sure; None: that is not known.
    """

    is_out_of_reach: bool = False
    asks_again: bool = False
    writes_end_s: float | None = None


_GRACE_S = 1.0
"""A process that is gone writes no more, but what it sent may still be on its way through our kernel."""

LOSS_RULES: dict[PeerLoss, LossRule] = {
    PeerLoss.PROCESS_GONE: LossRule(is_out_of_reach=True, writes_end_s=_GRACE_S),
    PeerLoss.OTHER_INCARNATION: LossRule(writes_end_s=_GRACE_S),
    PeerLoss.LINK_LOST: LossRule(),
    PeerLoss.TOLD_TO_STOP: LossRule(asks_again=True),
    PeerLoss.SILENT: LossRule(is_out_of_reach=True),
    PeerLoss.UNUSABLE: LossRule(is_out_of_reach=True),
}
