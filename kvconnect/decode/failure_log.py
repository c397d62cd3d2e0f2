"""D's log of failed loads and lost peers: one line for one cause, with the requests that it failed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from kvconnect.outcome import Cause, Outcome, Reason, duration, prefill_name
from kvconnect.transfer.orders import PeerKey
from kvconnect.transfer.parts import TransferContext

logger = logging.getLogger(__name__)

_MOST_NAMED = 3
SERVER_LOST_S = 1.0
"""Seconds after which the connections to all ranks of a dead server are lost."""
_REACH = (Cause.OUT_OF_REACH, Cause.LOST)
_OF_SERVERS = {
    *(Cause.OTHER_WEIGHTS, Cause.OTHER_IDENTITY, Cause.OTHER_RELEASE, Cause.OTHER_PROMPT),
    *(Cause.NOT_TRUSTED, Cause.WRONG_ROLE, Cause.PARAMETERS, Cause.NOT_HELD, Cause.FETCHED_BEFORE),
    *(Cause.BLOCKS, Cause.STOPPING, Cause.PREFILL_ENDED, Cause.REPLACED),
}
"""Causes that all ranks of D meet alike."""


@dataclass
class _Failure:
    """The first reason of a cause, and the loads that it failed since the last ``write``.

    ``was_whole``: a peer was lost of which no connection had been lost before.
    """

    reason: Reason
    outcomes: list[Outcome] = field(default_factory=list)
    was_whole: bool = False


class FailureLog:
    """Collects failures, and logs the first of each peer and cause: see ``DuplicateFilter``.

    Rank 0 of D logs for all ranks, and counts lost peers. Another rank does so for what only it may have met:
    it first waits whether it loses its connection to the peer's rank 0 too. ``is_met`` returns whether that
    connection stands.
    """

    def __init__(self, context: TransferContext, is_met: Callable[[PeerKey], bool]) -> None:
        self._repeats, self._metrics, self._is_met = context.repeats, context.metrics, is_met
        self._is_first_rank = context.local.introduction.rank == 0
        self._timer = context.timers.timer(lambda now: self._write())
        self.new: dict[tuple[PeerKey, bool | Cause], _Failure] = {}

    def ended(self, peer: PeerKey, outcome: Outcome) -> None:
        """A load has ended."""
        reason = outcome.reason
        if reason is None:
            self._repeats.succeeded(peer)
        elif reason.cause is not Cause.ABORTED:
            self.lost(peer, reason).outcomes.append(outcome)

    def lost(self, peer: PeerKey, reason: Reason, *, was_whole: bool = False) -> _Failure:
        """A connection to a peer has ended, or a load from it has failed."""
        key = peer, reason.cause in _REACH or reason.cause
        failure = self.new.setdefault(key, _Failure(reason))
        failure.was_whole |= was_whole
        return failure

    def write(self, now: float) -> None:
        """Log what is new since the last call, on ranks other than the first later."""
        if self.new and self._is_first_rank:
            self._write()
        elif self.new:
            self._timer.by(now + SERVER_LOST_S)

    def _write(self) -> None:
        new, self.new = self.new, {}
        for (peer, _), failure in new.items():
            name, cause, is_met = prefill_name(*peer), failure.reason.cause, self._is_met(peer)
            if failure.was_whole and (self._is_first_rank or is_met):
                self._metrics.failures.labels("peer_lost").inc()
            is_shared = not is_met if cause in _REACH else cause in _OF_SERVERS
            if (self._is_first_rank or not is_shared) and self._repeats.is_first(peer, cause):
                logger.warning("%s", _line(name, failure))


def _line(peer: str, failure: _Failure) -> str:
    outcomes, reason = failure.outcomes, failure.reason
    if not outcomes:
        return f"{peer}: {reason.text} {reason.label}; no request waits for it"
    rest = f"what fails like this is only counted from now on, as {reason.cause.value}"
    fate = "computed here, or {} with an error, by kv_load_failure_policy"
    if len(outcomes) == 1:
        return f"{outcomes[0]}; it is {fate.format('ends')} ({rest})"
    named = ", ".join(outcome.request_id for outcome in outcomes[:_MOST_NAMED])
    more = f" and {len(outcomes) - _MOST_NAMED} more" if len(outcomes) > _MOST_NAMED else ""
    longest_s = max(outcome.seconds for outcome in outcomes)
    return (
        f"{len(outcomes)} requests were not loaded from {peer} after {duration(longest_s)} at most: "
        f"{reason.text} {reason.label}; {named}{more} are {fate.format('end')} ({rest})"
    )
