"""The requests that P holds for others: each under a lease that ends exactly once.

Owned by the transfer thread. A lease ends when everybody who would fetch was served or will not, or when
it was not renewed in time; never while something reads its blocks.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence

from kvconnect.config import ExtraConfig
from kvconnect.metrics import Metrics
from kvconnect.orders import Hold
from kvconnect.peer.messages import MAX_HANDLES, Renewed
from kvconnect.worker.error_counting import ErrorsCounted
from kvconnect.worker.leases import Consumer, Lease, LeaseEvent, LeaseState
from kvconnect.worker.pending_fetches import PendingFetches

logger = logging.getLogger(__name__)


class LeaseBook:
    """All leases, by handle.

    Args:
        epochs: numbers that no other lease has, nor one of another process at this place.
        ended: told of every lease that is over, with the reason.
    """

    def __init__(
        self,
        config: ExtraConfig,
        epochs: Iterator[int],
        ended: Callable[[Lease, str], None],
        metrics: Metrics,
    ) -> None:
        self.leases: dict[str, Lease] = {}
        self._config = config
        self._epochs = epochs
        self._ended = ended
        self._metrics = metrics
        self._look_at = math.inf

    def hold(self, order: Hold, ready: Callable[[], bool], now: float) -> Lease | None:
        """Begin a lease. None: its handle is in use, and stands for another request."""
        if order.handle in self.leases:
            self._metrics.failures.labels("handle_in_use").inc()
            logger.error("request %s is not held: its handle is in use", order.request_id)
            return None
        lease = self.leases[order.handle] = Lease(
            order,
            now + order.lease_s,
            now + max(order.lease_s, self._config.lease_max_s),
            ready,
            epoch=next(self._epochs),
        )
        self._look_at = min(self._look_at, lease.expires_at)
        self._metrics.leases.set(len(self.leases))
        return lease

    def renew(self, lease: Lease, engine_id: str, link: str, now: float) -> str:
        """A peer will still fetch what is held. Why that is void, or nothing."""
        if lease.owner not in (None, engine_id):
            return "another engine has fetched this request"
        lease.renewers.add(link)
        lease.expires_at = max(lease.expires_at, min(now + lease.order.lease_s, lease.last_until))
        return ""

    def let_go(self, lease: Lease, consumer: Consumer, consumers: int, now: float) -> None:
        """A rank will not fetch what is held. Others than those of the engine that fetches do not count."""
        if lease.owner not in (None, consumer[0]):
            return
        lease.owner, lease.consumers = consumer[0], consumers
        lease.let_go.add(consumer)
        self.end_if_due(lease, now)

    def advance(self, now: float) -> None:
        """Let time pass."""
        if now < self._look_at:
            return
        self._look_at = math.inf
        for lease in list(self.leases.values()):
            with ErrorsCounted(self._metrics, f"the lease of request {lease.order.request_id}"):
                self.end_if_due(lease, now)

    def next_deadline(self) -> float | None:
        """The time by which ``advance`` has something to do."""
        return self._look_at if self._look_at < math.inf else None

    def end_if_due(self, lease: Lease, now: float) -> None:
        """End a lease that no sending reads and that was served to all, or that is over."""
        if lease.state is not LeaseState.HELD:
            return
        due_at = max(lease.busy_until, now if lease.satisfied else lease.expires_at)
        if now < due_at:
            self._look_at = min(self._look_at, due_at)
        elif lease.satisfied:
            lease.move(LeaseEvent.SATISFIED)
            self._end(lease, "every rank that wanted it was served")
        else:
            lease.move(LeaseEvent.EXPIRED)
            self._metrics.failures.labels("lease_expired").inc()
            reason = lease.revoked or f"its lease of {lease.order.lease_s} s is over"
            if not lease.revoked and lease.renewers and lease.expires_at >= lease.last_until:
                reason = f"it was held for {self._config.lease_max_s} s, which is lease_max_s"
            logger.warning(
                "request %s was not fetched, its blocks are freed: %s", lease.order.request_id, reason
            )
            self._end(lease, reason)

    def revoke(self, reason: str) -> None:
        """End all that no sending reads, whichever peer wants it. What is being read ends when that does."""
        self._look_at = 0.0
        for lease in list(self.leases.values()):
            lease.expires_at, lease.last_until, lease.revoked = 0.0, 0.0, reason
            if lease.state is LeaseState.HELD and not lease.busy_until:
                lease.move(LeaseEvent.EXPIRED)
                self._end(lease, reason)

    def _end(self, lease: Lease, reason: str) -> None:
        del self.leases[lease.order.handle]
        self._metrics.leases.set(len(self.leases))
        self._ended(lease, reason)


def answer_renewal(
    book: LeaseBook, waiting: PendingFetches, handles: Sequence[str], engine_id: str, link: str, now: float
) -> Renewed:
    """A peer will still fetch these, as soon as it is their turn: what is so of each."""
    epochs: list[tuple[str, int]] = []
    over: list[tuple[str, str]] = []
    unknown: list[str] = []
    for handle in dict.fromkeys(handles[:MAX_HANDLES]):
        lease = book.leases.get(handle)
        reason = waiting.reason(handle) if lease is None else None
        if lease is not None:
            reason = book.renew(lease, engine_id, link, now) or None
        if reason is not None:
            over.append((handle, reason))
        elif lease is not None:
            epochs.append((handle, lease.epoch))
        else:
            waiting.watch(handle, link)
            if handle not in waiting.expected:
                unknown.append(handle)
    return Renewed(tuple(epochs), tuple(over), tuple(unknown))
