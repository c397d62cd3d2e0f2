"""Whether a peer is worth trying, so that loads to a dead one fail at once.

Once a peer could not be reached it is left alone for a while, then tried once; every failure doubles the
while, up to a bound. Pure, with the time and randomness as arguments.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from kvconnect.outcome import Reason

_FIRST_RETRY_S = 0.25


@dataclass
class Breaker:
    """``failures`` are those since the peer was met; ``is_probing`` while it is being tried again."""

    failures: int = 0
    retry_at: float = 0.0
    reason: Reason | None = None
    is_probing: bool = False

    def met(self) -> None:
        """The peer introduced itself."""
        self.failures, self.is_probing = 0, False

    def tried(self) -> None:
        """A connection to the peer is opened."""
        self.is_probing = self.failures > 0

    def failed(self, reason: Reason, retry_max_s: float, randomness: random.Random, now: float) -> None:
        """The peer could not be reached: it is left alone for between half and all of a time that doubles."""
        self.failures, self.is_probing = self.failures + 1, False
        while_s = min(retry_max_s, _FIRST_RETRY_S * 2 ** min(self.failures - 1, 30))
        self.retry_at = now + while_s * (0.5 + randomness.random() / 2)
        self.reason = reason

    def may_try(self, now: float) -> bool:
        """Whether a connection may be opened. At most one is, while it is not known to work."""
        return not self.failures or (not self.is_probing and now >= self.retry_at)

    def refusal(self, now: float) -> Reason | None:
        """Why nothing can be fetched from it now, or nothing.

        While it is being tried again a load waits for what comes of that, which a handshake's time bounds.
        """
        if self.is_probing or self.may_try(now):
            return None
        assert self.reason is not None, "it has failed"
        return self.reason.after("the peer is out of reach, it was tried just now: ")
