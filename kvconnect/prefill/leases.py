"""P's requests behind a handle: while they are prefilled and streamed, and then held for others.

Each lease ends exactly once: when every rank that would fetch was served or will not, or when it was not
renewed in time; never while something reads its blocks. Time is an argument.
"""

from __future__ import annotations

import itertools
import logging
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvconnect.cache.region_table import GroupGeometry
from kvconnect.cache.specs import div_ceil
from kvconnect.config import ExtraConfig
from kvconnect.errors import PeerError
from kvconnect.metrics import Metrics
from kvconnect.outcome import Cause, Reason
from kvconnect.plan.blocks import GroupBlocks
from kvconnect.transfer.kept import Kept
from kvconnect.transfer.orders import Hold, Progress
from kvconnect.transfer.timers import Timer, Timers

Consumer = tuple[str, str, int]
"""Who fetches: engine id, incarnation, rank."""

TransferKey = tuple[str, int]
"""A fetch as P knows it: the connection it came over, and D's number for it."""


@dataclass(eq=False)
class Lease:
    """What P computes or holds for the ranks of one engine (``owner``), each of its ``consumers`` once.

    Computed: ``ready_tokens`` of ``num_tokens`` are, in ``blocks`` by group; ``marks`` are tokens that the
    device was given, each with a check whether they are computed. Until the request is held it may lose
    its blocks, and nothing that was sent of them counts. ``epoch`` is another whenever they are others.

    Held: ``hold`` is set, and ``is_computed`` returns whether all of it is. The lease ends at ``expires_at``,
    which may be moved as far as ``last_until``. ``renewers`` are the connections over which a peer
    renewed it. ``revoked`` states why it is given up before its time. What was sent counts while it
    ``is_intact``; the last ``replay`` tokens are computed again by who fetches. ``kept`` are the
    rows of one by name. ``timer`` is armed while it is held.
    """

    handle: str
    num_tokens: int
    epoch: int = 0
    owner: str | None = None
    consumers: int | None = None
    served: set[Consumer] = field(default_factory=set)
    released: set[Consumer] = field(default_factory=set)
    sending: set[TransferKey] = field(default_factory=set)
    ready_tokens: int = 0
    blocks: dict[int, list[int]] = field(default_factory=dict)
    marks: deque[tuple[Callable[[], bool], int]] = field(default_factory=deque)
    hold: Hold | None = None
    is_computed: Callable[[], bool] = lambda: False
    held_at: float = 0.0
    expires_at: float = 0.0
    last_until: float = 0.0
    renewers: set[str] = field(default_factory=set)
    revoked: Reason | None = None
    replay: int = 1
    is_intact: Callable[[], bool] = lambda: True
    kept: Kept | None = None
    timer: Timer | None = None

    def __str__(self) -> str:
        return f"request {self.hold.request_id}" if self.hold is not None else "an unfinished prefill"

    def claim(self, consumer: Consumer, consumers: int) -> None:
        """A rank fetches, and states how many ranks of its engine will.

        Raises:
            PeerError: it has no right to.
        """
        if self.owner not in (None, consumer[0]):
            raise PeerError("another engine has fetched this request", Cause.FETCHED_BEFORE)
        if consumer in self.served or consumer in self.released:
            raise PeerError("this rank has had this request", Cause.FETCHED_BEFORE)
        self.owner, self.consumers = consumer[0], consumers

    @property
    def satisfied(self) -> bool:
        """Every rank that would fetch did, or released it."""
        ranks = {rank for _, _, rank in self.served | self.released}
        return self.consumers is not None and len(ranks) >= self.consumers

    @property
    def is_whole(self) -> bool:
        """The request is held, and all of it is computed."""
        return self.hold is not None and self.is_computed()

    def add(self, order: Progress, is_computed: Callable[[], bool]) -> bool:
        """Take what is new. False: it does not follow from what is known, and nothing was taken."""
        if any(new.first_block != len(self.blocks.get(new.group, ())) for new in order.groups):
            return False
        for new in order.groups:
            self.blocks.setdefault(new.group, []).extend(new.block_ids)
        self.marks.append((is_computed, order.computed_tokens))
        return True

    def clear(self, epoch: int) -> None:
        """Its blocks are lost: what is computed from now on belongs to another epoch."""
        self.epoch = epoch
        self.ready_tokens = 0
        self.blocks.clear()
        self.marks.clear()

    def advance(self) -> None:
        """Take what the device has computed meanwhile."""
        while self.marks and self.marks[0][0]():
            self.ready_tokens = max(self.ready_tokens, self.marks.popleft()[1])

    def differs_from(self, order: Hold) -> str:
        """Why what was sent is not of what is held now, or nothing."""
        if order.num_tokens != self.num_tokens:
            return f"{self.num_tokens} tokens were to be held, {order.num_tokens} are"
        for held in order.groups:
            known = self.blocks.get(held.group, ())[held.first_block :]
            # A null block has left its window since.
            if any(a and b and a != b for a, b in zip(known, held.block_ids, strict=False)):
                return f"the blocks of cache group {held.group} are others now"
        return ""

    def blocks_of(
        self, geometry: Sequence[GroupGeometry], start_token: int, stop_token: int
    ) -> tuple[GroupBlocks, ...]:
        """The blocks that hold these tokens, by our groups; and the states, once they are held."""
        known: dict[int, tuple[int, Sequence[int]]]
        if self.hold is not None:
            known = {held.group: (held.first_block, held.block_ids) for held in self.hold.groups}
        else:
            known = {group: (0, ids) for group, ids in self.blocks.items()}
        made = []
        for group in geometry:
            first, ids = known.get(group.group, (0, ()))
            if not group.is_state:
                tokens = group.block_tokens * group.blocks_per_kv_block
                begin = max(first, start_token // tokens)
                ids = ids[begin - first : max(begin, div_ceil(stop_token, tokens)) - first]
                first = begin
                # What no later token sees may be another request's by now.
                ids = group.rule.only_kept(ids, first, self.num_tokens, tokens, replay=1)
            made.append(GroupBlocks(group.group, first, tuple(ids)))
        return tuple(made)


logger = logging.getLogger(__name__)


SERVED = Cause.FETCHED_BEFORE("every rank that wanted it was served")


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
        is_satisfied = lease.satisfied
        due_at = now if is_satisfied else lease.expires_at
        if now < due_at:
            if lease.timer is not None:
                lease.timer.at(due_at)
            return
        if is_satisfied:
            self._end(lease, SERVED, now)
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
