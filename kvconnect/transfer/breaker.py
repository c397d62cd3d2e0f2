"""Circuit breaker of one peer: loads from a dead peer fail at once.

After a failure to reach the peer D waits, then tries once; each further failure doubles the wait, up to a
bound. Pure, with time and randomness as arguments.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from kvconnect.outcome import Reason

_FIRST_RETRY_S = 0.25


@dataclass
class Breaker:
    """``failures``: since the peer was last met; ``is_probing``: a new try is under way."""

    failures: int = 0
    retry_at: float = 0.0
    reason: Reason | None = None
    is_probing: bool = False

    def met(self) -> None:
        """The peer introduced itself: close the breaker."""
        self.failures, self.is_probing = 0, False

    def tried(self) -> None:
        """Note that a connection to the peer is being opened."""
        self.is_probing = self.failures > 0

    def failed(self, reason: Reason, retry_max_s: float, randomness: random.Random, now: float) -> None:
        """The peer was not reached: wait at random between half and all of a time that doubles."""
        self.failures, self.is_probing = self.failures + 1, False
        while_s = min(retry_max_s, _FIRST_RETRY_S * 2 ** min(self.failures - 1, 30))
        self.retry_at = now + while_s * (0.5 + randomness.random() / 2)
        self.reason = reason

    def may_try(self, now: float) -> bool:
        """Whether a connection may be opened; while the peer is in doubt, at most one."""
        return not self.failures or (not self.is_probing and now >= self.retry_at)

    def refusal(self, now: float) -> Reason | None:
        """Why the peer cannot be fetched from now, or None.

        During a new try a load waits for the result, which takes at most a handshake's time.
        """
        if self.is_probing or self.may_try(now):
            return None
        assert self.reason is not None, "it has failed"
        return self.reason.after("the prefill node is out of reach, it was tried just now: ")
