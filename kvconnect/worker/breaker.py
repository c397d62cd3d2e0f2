"""Whether a peer is worth trying: one record per peer, so that loads to a dead one fail at once.

Pure bookkeeping, with the time and randomness as arguments. Once a peer could not be reached it is left
alone for a while, then tried once; every failure doubles the while, up to a bound.
"""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass

from kvconnect.worker.state_machine import next_state

_FIRST_RETRY_S = 0.25


class BreakerState(enum.Enum):
    """What is believed of a peer."""

    CLOSED = "in reach, as far as is known"
    OPEN = "out of reach"
    PROBING = "being tried again"


class BreakerEvent(enum.Enum):
    """What can happen to a peer."""

    MET = "it introduced itself"
    FAILED = "it could not be reached"
    TRY = "it is tried again"


BREAKER_TRANSITIONS: dict[tuple[BreakerState, BreakerEvent], BreakerState] = {
    (BreakerState.CLOSED, BreakerEvent.MET): BreakerState.CLOSED,
    (BreakerState.CLOSED, BreakerEvent.FAILED): BreakerState.OPEN,
    (BreakerState.OPEN, BreakerEvent.TRY): BreakerState.PROBING,
    (BreakerState.OPEN, BreakerEvent.MET): BreakerState.CLOSED,
    (BreakerState.OPEN, BreakerEvent.FAILED): BreakerState.OPEN,
    (BreakerState.PROBING, BreakerEvent.MET): BreakerState.CLOSED,
    (BreakerState.PROBING, BreakerEvent.FAILED): BreakerState.OPEN,
}


@dataclass
class Breaker:
    """D's record of whether a peer can be reached. ``failures`` counts those since it last was."""

    name: str
    state: BreakerState = BreakerState.CLOSED
    failures: int = 0
    retry_at: float = 0.0
    reason: str = ""

    def move(self, event: BreakerEvent) -> None:
        """Change state, or raise ``IllegalTransition``."""
        self.state = next_state(BREAKER_TRANSITIONS, self.state, event, f"peer {self.name}")

    def met(self) -> None:
        """The peer introduced itself."""
        self.move(BreakerEvent.MET)
        self.failures, self.reason = 0, ""

    def failed(self, reason: str, retry_max_s: float, randomness: random.Random, now: float) -> None:
        """The peer could not be reached: it is left alone for between half and all of a growing while."""
        self.move(BreakerEvent.FAILED)
        self.failures += 1
        while_s = min(retry_max_s, _FIRST_RETRY_S * 2 ** min(self.failures - 1, 30))
        self.retry_at = now + while_s * (0.5 + randomness.random() / 2)
        self.reason = reason

    def may_try(self, now: float) -> bool:
        """Whether a connection may be opened. At most one is, while it is not known to work."""
        return self.state is BreakerState.CLOSED or (self.state is BreakerState.OPEN and now >= self.retry_at)

    def refusal(self, now: float) -> str:
        """Why nothing can be fetched from it now, or nothing.

        While it is being tried again a load waits for what comes of that, which a handshake's time bounds.
        """
        if self.state is not BreakerState.OPEN or now >= self.retry_at:
            return ""
        return f"the peer is out of reach, it was tried just now: {self.reason}"
