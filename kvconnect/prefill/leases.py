"""P's requests behind a handle: while they are prefilled and streamed, and then held for others.

Each lease ends exactly once: when every rank that would fetch was served or will not, or when it was not
renewed in time; never while something reads its blocks. Time is an argument.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvconnect.cache.region_table import GroupGeometry
from kvconnect.cache.specs import div_ceil
from kvconnect.errors import PeerError
from kvconnect.outcome import Cause, Reason
from kvconnect.plan.blocks import GroupBlocks
from kvconnect.transfer.kept import Kept
from kvconnect.transfer.orders import Hold, Progress
from kvconnect.transfer.parts import Timer, TransferContext

logger = logging.getLogger(__name__)

Consumer = tuple[str, str, int]
"""Who fetches: engine id, incarnation, rank."""

TransferKey = tuple[str, int]
"""A fetch as P knows it: the connection it came over, and D's number for it."""


@dataclass(eq=False)
class Streamed:
    """What of a prefill under way is computed: ``ready_tokens``, in ``blocks`` by group.

    ``marks`` are tokens that the device was given, each with a check whether they are computed.
    """

    ready_tokens: int = 0
    blocks: dict[int, list[int]] = field(default_factory=dict)
    marks: deque[tuple[Callable[[], bool], int]] = field(default_factory=deque)

    def add(self, order: Progress, is_computed: Callable[[], bool]) -> bool:
        """Take what is new. False: it does not follow from what is known, and nothing was taken."""
        if any(new.first_block != len(self.blocks.get(new.group, ())) for new in order.groups):
            return False
        for new in order.groups:
            self.blocks.setdefault(new.group, []).extend(new.block_ids)
        self.marks.append((is_computed, order.computed_tokens))
        return True

    def advance(self) -> int:
        """Take what the device has computed meanwhile. Returns how many tokens are."""
        while self.marks and self.marks[0][0]():
            self.ready_tokens = max(self.ready_tokens, self.marks.popleft()[1])
        return self.ready_tokens


@dataclass(eq=False)
class Held:
    """What is held for peers until ``expires_at``, which may be moved as far as ``last_until``.

    ``is_computed`` returns whether all of it is. ``kept`` are the rows of what a peer pinned by name, which
    may be written meanwhile; None for blocks. ``revoked`` states why it is given up before its time.
    """

    order: Hold
    is_computed: Callable[[], bool]
    held_at: float
    expires_at: float
    last_until: float
    timer: Timer
    kept: Kept | None = None
    revoked: Reason | None = None


@dataclass(eq=False)
class Lease:
    """What P computes or holds for the ranks of one engine (``owner``), each of its ``consumers`` once.

    Until the request is ``held`` it may lose its blocks, and nothing that was sent of them counts; ``epoch``
    is another whenever they are others. ``renewers`` are the connections over which a peer renewed it.
    The last ``replay`` tokens are computed again by who fetches.
    """

    handle: str
    num_tokens: int
    epoch: int = 0
    owner: str | None = None
    consumers: int | None = None
    served: set[Consumer] = field(default_factory=set)
    released: set[Consumer] = field(default_factory=set)
    sending: set[TransferKey] = field(default_factory=set)
    renewers: set[str] = field(default_factory=set)
    replay: int = 1
    streamed: Streamed = field(default_factory=Streamed)
    held: Held | None = None

    def __str__(self) -> str:
        return "an unfinished prefill" if self.held is None else f"request {self.held.order.request_id}"

    @property
    def kept(self) -> Kept | None:
        """The rows of what was pinned by name."""
        return None if self.held is None else self.held.kept

    @property
    def is_intact(self) -> bool:
        """What was sent of it counts."""
        kept = self.kept
        return kept is None or kept.is_intact()

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
        return self.held is not None and self.held.is_computed()

    def differs_from(self, order: Hold) -> str:
        """Why what was sent is not of what is held now, or nothing."""
        if order.num_tokens != self.num_tokens:
            return f"{self.num_tokens} tokens were to be held, {order.num_tokens} are"
        for held in order.groups:
            known = self.streamed.blocks.get(held.group, ())[held.first_block :]
            # A null block has left its window since.
            if any(a and b and a != b for a, b in zip(known, held.block_ids, strict=False)):
                return f"the blocks of cache group {held.group} are others now"
        return ""

    def blocks_of(
        self, geometry: Sequence[GroupGeometry], start_token: int, stop_token: int
    ) -> tuple[GroupBlocks, ...]:
        """The blocks that hold these tokens, by our groups; and the states, once they are held."""
        known: dict[int, tuple[int, Sequence[int]]]
        if self.held is not None:
            known = {of.group: (of.first_block, of.block_ids) for of in self.held.order.groups}
        else:
            known = {group: (0, ids) for group, ids in self.streamed.blocks.items()}
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


_NOT_FETCHED = Cause.LEASE_OVER("what is kept by name was not fetched in time")
SERVED = Cause.FETCHED_BEFORE("every rank that wanted it was served")


class LeaseBook:
    """All leases by handle: ``leases`` of what is held, ``streaming`` of prefills under way.

    Args:
        ended: called for every lease that is over, with the reason.
    """

    def __init__(self, context: TransferContext, ended: Callable[[Lease, Reason], None]) -> None:
        self.leases: dict[str, Lease] = {}
        self.streaming: dict[str, Lease] = {}
        self._config, self._metrics, self._timers = context.config, context.metrics, context.timers
        self._ended = ended
        # What is held back is no part of what is held; else a peer computes the last token again.
        self._replay = int(not context.local.introduction.meaning.held_back)
        # No epoch of this process is one of another process at this place.
        self._epochs = itertools.count(context.randomness.randrange(1, 1 << 61))

    def get(self, handle: str) -> Lease | None:
        """What is held or streamed under a handle."""
        return self.leases.get(handle) or self.streaming.get(handle)

    def progress(self, order: Progress, is_computed: Callable[[], bool]) -> bool:
        """A prefill went on. False: the order does not follow from what is known of it."""
        lease = self.streaming.get(order.handle)
        if lease is None:
            lease = Lease(order.handle, order.num_tokens, next(self._epochs), replay=self._replay)
            self.streaming[order.handle] = lease
        return lease.streamed.add(order, is_computed)

    def lose_blocks(self, handle: str) -> Lease | None:
        """A prefill lost its blocks. What is returned is known, and what was sent of it is void."""
        lease = self.streaming.get(handle)
        if lease is not None:
            lease.epoch, lease.streamed = next(self._epochs), Streamed()
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
        self._keep(lease, order, is_computed, now)
        return lease, difference

    def pin(self, handle: str, engine_id: str, num_tokens: int, kept: Kept, now: float) -> None:
        """Begin to hold what is kept under names, for the engine that asked for it."""
        name, lease_s = f"for {num_tokens} tokens by name", self._config.lease_s
        order = Hold(name, handle, num_tokens, kept.groups, lease_s, step=0)
        # The peer goes on after these tokens: what only the last of them sees is not kept.
        lease = Lease(handle, num_tokens, next(self._epochs), engine_id, replay=0)
        self._keep(lease, order, kept.is_ready, now, kept)

    def _keep(
        self,
        lease: Lease,
        order: Hold,
        is_computed: Callable[[], bool],
        now: float,
        kept: Kept | None = None,
    ) -> None:
        timer, until = self._timers.timer(lambda now: self.end_if_due(lease, now)), now + order.lease_s
        last_until = now + max(order.lease_s, self._config.lease_max_s)
        lease.held = Held(order, is_computed, now, until, last_until, timer, kept)
        self.leases[order.handle] = lease
        timer.at(until)
        self._metrics.leases.set(len(self.leases))

    def renew(self, lease: Lease, engine_id: str, link: str, now: float) -> Reason | None:
        """A peer will still fetch what is held. Why that is void, or None."""
        if lease.owner not in (None, engine_id):
            return Cause.FETCHED_BEFORE("another engine has fetched this request")
        lease.renewers.add(link)
        if (held := lease.held) is not None:
            held.expires_at = max(held.expires_at, min(now + held.order.lease_s, held.last_until))
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
        held = lease.held
        if held is None or lease.sending or self.leases.get(lease.handle) is not lease:
            return
        is_satisfied = lease.satisfied
        due_at = now if is_satisfied else held.expires_at
        if now < due_at:
            held.timer.at(due_at)
        elif is_satisfied:
            self._end(lease, held, SERVED, now)
        elif held.kept is not None:
            # Nothing waits for these rows.
            self._end(lease, held, held.revoked or _NOT_FETCHED, now)
        else:
            self._metrics.failures.labels("lease_expired").inc()
            reason = held.revoked or Cause.LEASE_OVER(f"its lease of {held.order.lease_s} s is over")
            if not held.revoked and lease.renewers and held.expires_at >= held.last_until:
                reason = Cause.LEASE_OVER(
                    f"it was held for {self._config.lease_max_s} s, which is lease_max_s"
                )
            logger.warning("%s was not fetched, its blocks are freed: %s", lease, reason)
            self._end(lease, held, reason, now)

    def revoke(self, reason: Reason, now: float) -> None:
        """End all that no sending reads, whichever peer wants it. What is being read ends when that does."""
        for lease in list(self.leases.values()):
            if (held := lease.held) is not None:
                held.expires_at, held.last_until, held.revoked = 0.0, 0.0, reason
                if not lease.sending:
                    self._end(lease, held, reason, now)

    def _end(self, lease: Lease, held: Held, reason: Reason, now: float) -> None:
        del self.leases[lease.handle]
        held.timer.cancel()
        self._metrics.lease_seconds.observe(now - held.held_at)
        self._metrics.leases.set(len(self.leases))
        self._ended(lease, reason)
