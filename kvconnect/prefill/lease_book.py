"""The requests that P streams while it computes them, and those that it holds: each lease ends exactly once.

Owned by the transfer thread. A lease ends when every rank that would fetch was served or will not, or when
it was not renewed in time; never while something reads its blocks.
"""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Callable

from kvconnect.config import ExtraConfig
from kvconnect.metrics import Metrics
from kvconnect.orders import Hold, Progress
from kvconnect.outcome import Cause, Reason
from kvconnect.prefill.leases import Consumer, Lease
from kvconnect.transfer.timers import Timers

logger = logging.getLogger(__name__)


class LeaseBook:
    """All leases by handle: ``leases`` of what is held, ``streaming`` of prefills under way.

    Args:
        ended: called for every lease that is over, with the reason.
        replay: how many of its last tokens a peer computes again.
        randomness: no epoch of this process is one of another process at this place.
    """

    def __init__(
        self,
        config: ExtraConfig,
        ended: Callable[[Lease, Reason], None],
        metrics: Metrics,
        randomness: random.Random,
        replay: int,
        timers: Timers,
    ) -> None:
        self.leases: dict[str, Lease] = {}
        self.streaming: dict[str, Lease] = {}
        self._config, self._replay = config, replay
        self._epochs = itertools.count(randomness.randrange(1, 1 << 61))
        self._ended = ended
        self._metrics = metrics
        self._timers = timers

    def next_epoch(self) -> int:
        """Of what is in no book, too, no epoch is another's."""
        return next(self._epochs)

    def get(self, handle: str) -> Lease | None:
        """What is held or streamed under a handle."""
        return self.leases.get(handle) or self.streaming.get(handle)

    def progress(self, order: Progress, is_computed: Callable[[], bool]) -> bool:
        """A prefill went on. False: the order does not follow from what is known of it."""
        lease = self.streaming.get(order.handle)
        if lease is None:
            lease = Lease(order.handle, order.num_tokens, next(self._epochs), replay=self._replay)
            self.streaming[order.handle] = lease
        return lease.add(order, is_computed)

    def lose_blocks(self, handle: str) -> Lease | None:
        """A prefill lost its blocks. What is returned is known, and what was sent of it is void."""
        lease = self.streaming.get(handle)
        if lease is not None:
            lease.clear(next(self._epochs))
        return lease

    def hold(self, order: Hold, is_computed: Callable[[], bool], now: float) -> tuple[Lease | None, str]:
        """Begin to hold a request, and why what was sent of its prefill is void, if it is.

        None: its handle is in use, and stands for another request.
        """
        if order.handle in self.leases:
            self._metrics.failures.labels("handle_in_use").inc()
            logger.error("request %s is not held: its handle is in use", order.request_id)
            return None, ""
        lease = self.streaming.pop(order.handle, None)
        difference = lease.differs_from(order) if lease is not None else ""
        if lease is None:
            lease = Lease(order.handle, order.num_tokens, next(self._epochs), replay=self._replay)
        elif difference:
            lease.num_tokens, lease.epoch = order.num_tokens, next(self._epochs)
        lease.hold, lease.is_computed = order, is_computed
        lease.expires_at = now + order.lease_s
        lease.held_at = now
        lease.last_until = now + max(order.lease_s, self._config.lease_max_s)
        self.leases[order.handle] = lease
        lease.timer = self._timers.timer(lambda now: self.end_if_due(lease, now))
        lease.timer.at(lease.expires_at)
        self._metrics.leases.set(len(self.leases))
        return lease, difference

    def renew(self, lease: Lease, engine_id: str, link: str, now: float) -> Reason | None:
        """A peer will still fetch what is held. Why that is void, or nothing."""
        if lease.owner not in (None, engine_id):
            return Cause.FETCHED_BEFORE("another engine has fetched this request")
        lease.renewers.add(link)
        if lease.hold is not None:
            lease.expires_at = max(lease.expires_at, min(now + lease.hold.lease_s, lease.last_until))
        return None

    def release(self, lease: Lease, consumer: Consumer, consumers: int, now: float) -> None:
        """A rank will not fetch what is held. Others than those of the engine that fetches do not count."""
        if lease.owner not in (None, consumer[0]):
            return
        lease.owner, lease.consumers = consumer[0], consumers
        lease.released.add(consumer)
        self.end_if_due(lease, now)

    def end_if_due(self, lease: Lease, now: float) -> None:
        """End a lease that no sending reads and that was served to all, or that is over."""
        order = lease.hold
        if order is None or lease.sending or self.leases.get(lease.handle) is not lease:
            return
        due_at = now if lease.satisfied else lease.expires_at
        if now < due_at:
            if lease.timer is not None:
                lease.timer.at(due_at)
            return
        if lease.satisfied:
            self._end(lease, Cause.FETCHED_BEFORE("every rank that wanted it was served"), now)
        else:
            self._metrics.failures.labels("lease_expired").inc()
            reason = lease.revoked or Cause.LEASE_OVER(f"its lease of {order.lease_s} s is over")
            if not lease.revoked and lease.renewers and lease.expires_at >= lease.last_until:
                reason = Cause.LEASE_OVER(
                    f"it was held for {self._config.lease_max_s} s, which is lease_max_s"
                )
            logger.warning("%s was not fetched, its blocks are freed: %s", lease, reason)
            self._end(lease, reason, now)

    def revoke(self, reason: Reason, now: float) -> None:
        """End all that no sending reads, whichever peer wants it. What is being read ends when that does."""
        for lease in list(self.leases.values()):
            lease.expires_at, lease.last_until, lease.revoked = 0.0, 0.0, reason
            if not lease.sending:
                self._end(lease, reason, now)

    def _end(self, lease: Lease, reason: Reason, now: float) -> None:
        del self.leases[lease.handle]
        if lease.timer is not None:
            lease.timer.cancel()
        self._metrics.lease_seconds.observe(now - lease.held_at)
        self._metrics.leases.set(len(self.leases))
        self._ended(lease, reason)
