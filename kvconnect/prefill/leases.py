"""P's leases: requests behind a handle, first while their prefill is streamed, then held for D.

A lease ends exactly once: when every rank of D was served or has released it, or when D did not renew it in
time; never while a sending reads its blocks. Time is an argument.
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

BY_ANOTHER = "another decode node has fetched the request"

Consumer = tuple[str, str, int]
"""One rank of D that fetches: engine id, incarnation, rank."""

TransferKey = tuple[str, int]
"""P's key of a fetch: the connection that it came over, and D's transfer number."""


@dataclass(eq=False)
class Streamed:
    """A streaming prefill's progress: ``ready_tokens`` are computed, in ``blocks`` (ids by cache group).

    ``marks``: token counts that the device was given, each with a check whether they are computed.
    """

    ready_tokens: int = 0
    blocks: dict[int, list[int]] = field(default_factory=dict)
    marks: deque[tuple[Callable[[], bool], int]] = field(default_factory=deque)

    def add(self, order: Progress, is_computed: Callable[[], bool]) -> bool:
        """Append the new blocks. False: the order does not follow the known blocks, and nothing was taken."""
        if any(new.first_block != len(self.blocks.get(new.group, ())) for new in order.groups):
            return False
        for new in order.groups:
            self.blocks.setdefault(new.group, []).extend(new.block_ids)
        self.marks.append((is_computed, order.computed_tokens))
        return True

    def advance(self) -> int:
        """Update and return ``ready_tokens``, the tokens that the device has computed by now."""
        while self.marks and self.marks[0][0]():
            self.ready_tokens = max(self.ready_tokens, self.marks.popleft()[1])
        return self.ready_tokens


@dataclass(eq=False)
class Held:
    """The held content of a lease. It expires at ``expires_at``; renewals extend that up to ``last_until``.

    ``is_computed`` returns whether the device has computed all of it. ``kept``: the rows that a peer pinned
    by name, which may be overwritten meanwhile; None for blocks. ``revoked``: why P ends it early.
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
    """A prompt that P computes or holds for the ranks of one engine (``owner``).

    Each of ``consumers`` ranks may fetch it once; those in ``finished`` were served, or have released it.
    Before it is ``held`` it may lose its blocks, which voids all chunks sent so far; each new set of blocks
    has a new ``epoch``. ``renewers``: the connections over which peers renewed the lease. D computes the last
    ``replay`` tokens (0 or 1) again.
    """

    handle: str
    num_tokens: int
    epoch: int = 0
    owner: str | None = None
    consumers: int | None = None
    finished: set[Consumer] = field(default_factory=set)
    sending: set[TransferKey] = field(default_factory=set)
    renewers: set[str] = field(default_factory=set)
    replay: int = 1
    streamed: Streamed = field(default_factory=Streamed)
    held: Held | None = None

    def __str__(self) -> str:
        return "an unfinished prefill" if self.held is None else f"request {self.held.order.request_id}"

    @property
    def kept(self) -> Kept | None:
        return None if self.held is None else self.held.kept

    @property
    def is_intact(self) -> bool:
        """Chunks sent from this lease are valid: no pinned row was overwritten."""
        kept = self.kept
        return kept is None or kept.is_intact()

    def claim(self, consumer: Consumer, consumers: int) -> None:
        """Claim the lease for one rank, which states how many ranks of its engine will fetch.

        Raises:
            PeerError: another engine owns the lease, or this rank was served or has released it.
        """
        if self.owner not in (None, consumer[0]):
            raise PeerError(BY_ANOTHER, Cause.FETCHED_BEFORE)
        if consumer in self.finished:
            raise PeerError("this decode rank has fetched or released the request", Cause.FETCHED_BEFORE)
        self.owner, self.consumers = consumer[0], consumers

    @property
    def satisfied(self) -> bool:
        """Every rank of the owner was served or has released the lease."""
        if self.consumers is None or not self.finished:
            return False
        return len({rank for _, _, rank in self.finished}) >= self.consumers

    @property
    def is_whole(self) -> bool:
        """The request is held, and the device has computed all of it."""
        return self.held is not None and self.held.is_computed()

    def differs_from(self, order: Hold) -> str:
        """Why the chunks streamed so far do not match the request to be held; empty if they match."""
        if order.num_tokens != self.num_tokens:
            return f"{self.num_tokens} tokens were to be held, {order.num_tokens} are"
        for held in order.groups:
            known = self.streamed.blocks.get(held.group, ())[held.first_block :]
            # A block that left its window since then is null now: that is no difference.
            if any(a and b and a != b for a, b in zip(known, held.block_ids, strict=False)):
                return f"the blocks of cache group {held.group} are others now"
        return ""

    def blocks_of(
        self, geometry: Sequence[GroupGeometry], start_token: int, stop_token: int
    ) -> tuple[GroupBlocks, ...]:
        """By cache group of P: the blocks of these tokens, ``stop_token`` excluded; states once held."""
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
                # A block that no later token sees may belong to another request by now.
                ids = group.rule.only_kept(ids, first, self.num_tokens, tokens, replay=1)
            made.append(GroupBlocks(group.group, first, tuple(ids)))
        return tuple(made)


_NOT_FETCHED = Cause.LEASE_OVER("rows pinned for the decode node were not fetched in time")
SERVED = Cause.FETCHED_BEFORE("every decode rank that wanted it was served")
_DECODE_NODES = "decode nodes"


class LeaseBook:
    """All leases by handle: ``leases`` of held requests, ``streaming`` of prefills under way.

    Args:
        ended: called for every lease that ends, with the reason.
        overdue: called for a lease that expires while a sending reads it: D is gone, which renews it.
    """

    def __init__(
        self,
        context: TransferContext,
        ended: Callable[[Lease, Reason], None],
        overdue: Callable[[Lease], None] = lambda lease: None,
    ) -> None:
        self.leases: dict[str, Lease] = {}
        self.streaming: dict[str, Lease] = {}
        self.revoked: set[str] = set()
        """Handles whose blocks the stack may have overwritten by now. Any thread adds to it."""
        self._config, self._metrics, self._timers = context.config, context.metrics, context.timers
        self._ended, self._overdue, self._repeats = ended, overdue, context.repeats
        # With a token held back, the lease has no KV of it; otherwise D computes the last token again.
        self._replay = int(not context.local.introduction.meaning.held_back)
        # A random start: no epoch of this process equals one of an earlier process at this address.
        self._epochs = itertools.count(context.randomness.randrange(1, 1 << 61))

    def get(self, handle: str) -> Lease | None:
        """The lease of a handle, held or streaming; None without one."""
        return self.leases.get(handle) or self.streaming.get(handle)

    def progress(self, order: Progress, is_computed: Callable[[], bool]) -> bool:
        """Take a streaming prefill's progress. False: the order does not follow from the known blocks."""
        lease = self.streaming.get(order.handle)
        if lease is None:
            lease = Lease(order.handle, order.num_tokens, next(self._epochs), replay=self._replay)
            self.streaming[order.handle] = lease
        return lease.streamed.add(order, is_computed)

    def lose_blocks(self, handle: str) -> Lease | None:
        """A streaming prefill lost its blocks. Returns its lease, if known; chunks sent so far are void."""
        lease = self.streaming.get(handle)
        if lease is not None:
            lease.epoch, lease.streamed = next(self._epochs), Streamed()
        return lease

    def hold(self, order: Hold, is_computed: Callable[[], bool], now: float) -> tuple[Lease | None, str]:
        """Begin to hold a request. Returns its lease, and why chunks streamed before are void, or nothing.

        The lease is None if the handle is in use for another request.
        """
        if order.handle in self.leases:
            self._metrics.failures.labels("handle_in_use").inc()
            logger.error(
                "internal error: request %s is not held, as another is held under its handle, and its decode "
                "node computes it",
                order.request_id,
            )
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
        """Begin a lease on rows found by name, for the engine that pins them."""
        name, lease_s = f"for {num_tokens} tokens by name", self._config.lease_s
        order = Hold(name, handle, num_tokens, kept.groups, lease_s, step=0)
        # D computes from the next token on: blocks that only the last of these tokens sees are not kept.
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
        """Extend a lease that a peer will still fetch. Why the lease is void for that peer, or None."""
        if lease.owner not in (None, engine_id):
            return Cause.FETCHED_BEFORE(BY_ANOTHER)
        lease.renewers.add(link)
        if (held := lease.held) is not None:
            held.expires_at = max(held.expires_at, min(now + held.order.lease_s, held.last_until))
        return None

    def release(self, lease: Lease, consumer: Consumer, consumers: int, now: float) -> None:
        """A rank will not fetch the request. Releases by other engines than the owner are ignored."""
        if lease.owner not in (None, consumer[0]):
            return
        lease.owner, lease.consumers = consumer[0], consumers
        lease.finished.add(consumer)
        self.end_if_due(lease, now)

    def end_if_due(self, lease: Lease, now: float) -> None:
        """End a lease that no sending reads, if it was served to all ranks or has expired."""
        held = lease.held
        if held is None or self.leases.get(lease.handle) is not lease:
            return
        if lease.sending:
            if now < held.expires_at:
                held.timer.by(held.expires_at)
            elif held.expires_at < held.last_until:
                self._overdue(lease)
            return
        is_satisfied = lease.satisfied
        due_at = now if is_satisfied else held.expires_at
        if now < due_at:
            held.timer.at(due_at)
        elif is_satisfied:
            if self._repeats.logged:
                self._repeats.succeeded(_DECODE_NODES)
            self._end(lease, held, SERVED, now)
        elif held.revoked or held.kept is not None:
            # P ended it itself, or it is a pin, which holds up no eviction: that needs no warning.
            self._end(lease, held, held.revoked or _NOT_FETCHED, now)
        else:
            self._metrics.failures.labels("lease_expired").inc()
            by_none = "" if lease.renewers else ", and no decode node asked for it"
            over = f"its lease_s of {held.order.lease_s:g} s is over{by_none}"
            if lease.renewers and held.expires_at >= held.last_until:
                over = f"it was held for {self._config.lease_max_s:g} s, which is lease_max_s"
            reason = Cause.LEASE_OVER(over)
            what = f"{lease} was not fetched, its blocks are freed:"
            self._repeats.warn_first("lease_expired, until one is fetched", _DECODE_NODES, what, reason)
            self._end(lease, held, reason, now)

    def revoke_all(self, reason: Reason, now: float) -> None:
        for lease in list(self.leases.values()):
            self.revoke(lease, reason, now)

    def revoke(self, lease: Lease, reason: Reason, now: float) -> None:
        """End a lease at once; one that a sending reads ends when the sending does."""
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
