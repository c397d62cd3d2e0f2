"""P's leases: what is known of a handle, before and while its prefill runs, then held for D.

A lease ends exactly once: when every rank of D was served or has released it, or when D did not renew it in
time; never while a sending reads its blocks. Time is an argument.
"""

from __future__ import annotations

import itertools
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvconnect.cache.region_table import GroupGeometry
from kvconnect.cache.specs import div_ceil
from kvconnect.errors import PeerError
from kvconnect.outcome import Cause, Reason
from kvconnect.plan.blocks import GroupBlocks
from kvconnect.transfer.kept import Kept
from kvconnect.transfer.orders import Hold, Progress
from kvconnect.transfer.parts import Timer, TransferContext, always

logger = logging.getLogger(__name__)

BY_ANOTHER = "another decode node has fetched the request"

Consumer = tuple[str, str, int]
"""One rank of D that fetches: engine id, incarnation, rank."""

TransferKey = tuple[str, int]
"""P's key of a fetch: the connection that it came over, and D's transfer number."""


@dataclass(eq=False)
class Lease:
    """What P knows of a handle: a prompt that it computes or holds for the ranks of one engine (``owner``).

    Each of ``consumers`` ranks may fetch it once; those in ``finished`` were served, or have released it.
    ``num_tokens`` is 0 until the prefill's first progress. Of a streaming prefill ``ready_tokens`` are
    computed, in ``blocks`` (ids by cache group); ``marks``: token counts that the device was given, each with
    a check whether they are computed. Before it is held it may lose its blocks, which voids all chunks sent
    so far; each new set of blocks has a new ``epoch``. ``renewers``: the connections over which peers renewed
    the lease. D computes the last ``replay`` tokens (0 or 1) again.

    Once it is held it has the ``order``, and ``is_computed`` returns whether the device has computed all of
    it. It expires at ``expires_at``; renewals extend that up to ``last_until``. ``kept``: the rows that a
    peer pinned by name, which may be overwritten meanwhile; None for blocks. ``revoked``: why P ended it.
    """

    handle: str
    timer: Timer
    num_tokens: int = 0
    epoch: int = 0
    owner: str | None = None
    consumers: int | None = None
    finished: set[Consumer] = field(default_factory=set)
    sending: set[TransferKey] = field(default_factory=set)
    renewers: set[str] = field(default_factory=set)
    replay: int = 1
    blocks: dict[int, list[int]] = field(default_factory=dict)
    marks: deque[tuple[Callable[[], bool], int]] = field(default_factory=deque)
    ready_tokens: int = 0
    order: Hold | None = None
    is_computed: Callable[[], bool] = always
    held_at: float = 0.0
    expires_at: float = 0.0
    last_until: float = 0.0
    kept: Kept | None = None
    revoked: Reason | None = None

    def __str__(self) -> str:
        return "an unfinished prefill" if self.order is None else f"request {self.order.request_id}"

    def add(self, order: Progress, is_computed: Callable[[], bool]) -> bool:
        """Append the new blocks. False: the order does not follow the known blocks, and nothing was taken."""
        self.num_tokens = order.num_tokens
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

    @property
    def is_intact(self) -> bool:
        """Chunks sent from this lease are valid: no pinned row was overwritten."""
        return self.kept is None or self.kept.is_intact()

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
        return self.order is not None and self.is_computed()

    def differs_from(self, order: Hold) -> str:
        """Why the chunks streamed so far do not match the request to be held; empty if they match."""
        if self.num_tokens not in (0, order.num_tokens):
            return f"{self.num_tokens} tokens were to be held, {order.num_tokens} are"
        for held in order.groups:
            known = self.blocks.get(held.group, ())[held.first_block :]
            # A block that left its window since then is null now: that is no difference.
            if any(a and b and a != b for a, b in zip(known, held.block_ids, strict=False)):
                return f"the blocks of cache group {held.group} are others now"
        return ""

    def blocks_of(
        self, geometry: Sequence[GroupGeometry], start_token: int, stop_token: int
    ) -> tuple[GroupBlocks, ...]:
        """By cache group of P: the blocks of these tokens, ``stop_token`` excluded; states once held."""
        known: dict[int, tuple[int, Sequence[int]]]
        if self.order is not None:
            known = {of.group: (of.first_block, of.block_ids) for of in self.order.groups}
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
                # A block that no later token sees may belong to another request by now.
                ids = group.rule.only_kept(ids, first, self.num_tokens, tokens, replay=1)
            made.append(GroupBlocks(group.group, first, tuple(ids)))
        return tuple(made)


_NOT_FETCHED = Cause.LEASE_OVER("rows pinned for the decode node were not fetched in time")
SERVED = Cause.FETCHED_BEFORE("every decode rank that wanted it was served")
_DECODE_NODES = "decode nodes"


class LeaseBook:
    """All leases by handle: ``leases`` of held requests, ``expected`` of prefills under way.

    D's messages and the scheduler's orders overtake each other. Before this worker knows of a handle,
    ``released`` has those that a peer released, for ``early_fetch_s`` seconds from the first release, and at
    most ``max_leases``; ``watched`` those that peers renew only. ``over``: why P holds nothing under a handle
    that has ended. Of these two the oldest are dropped beyond ``max_leases``.

    Args:
        ended: called for every lease that ends, with the reason.
        overdue: called for a lease that expires while a sending reads it: D is gone, which renews it.
    """

    def __init__(
        self,
        context: TransferContext,
        ended: Callable[[Lease, Reason], None],
        overdue: Callable[[Lease], None],
    ) -> None:
        self.leases: dict[str, Lease] = {}
        self.expected: dict[str, Lease] = {}
        self.released: dict[str, Lease] = {}
        self.watched: OrderedDict[str, Lease] = OrderedDict()
        self.over: OrderedDict[str, Reason] = OrderedDict()
        self.revoked: set[str] = set()
        """Handles whose blocks the stack may have overwritten by now. Any thread adds to it."""
        self._config, self._metrics, self._timers = context.config, context.metrics, context.timers
        self._ended, self._overdue, self._repeats = ended, overdue, context.repeats
        # With a token held back, the lease has no KV of it; otherwise D computes the last token again.
        self._replay = int(not context.local.introduction.meaning.held_back)
        # A random start: no epoch of this process equals one of an earlier process at this address.
        self._epochs = itertools.count(context.randomness.randrange(1, 1 << 61))

    def get(self, handle: str) -> Lease | None:
        """The lease of a handle whose request is held or being prefilled; None without one."""
        return self.leases.get(handle) or self.expected.get(handle)

    def watch(self, handle: str, link: str) -> None:
        """A peer renews a handle that this worker does not know: inform it once it is held, or void."""
        lease = self.released.get(handle)
        if lease is None:
            lease = self.watched[handle] = self._known(handle) or self._new(handle)
            if len(self.watched) > self._config.max_leases:
                self.watched.popitem(last=False)
        lease.renewers.add(link)

    def release_early(self, handle: str, consumer: Consumer, consumers: int, now: float) -> None:
        """A rank will not fetch what this worker does not know: the lease that comes soon is released."""
        lease = self.released.get(handle)
        if lease is None:
            if len(self.released) >= self._config.max_leases:
                return
            lease = self.released[handle] = self._known(handle) or self._new(handle)
            lease.timer.at(now + self._config.early_fetch_s)
        self.release(lease, consumer, consumers, now)

    def _known(self, handle: str) -> Lease | None:
        """Take the record of releases and renewals that came before this worker knew the handle."""
        known = self.released if handle in self.released else self.watched
        return known.pop(handle) if handle in known else None

    def _new(self, handle: str) -> Lease:
        timer = self._timers.timer(lambda now: self._is_due(lease, now))
        lease = Lease(handle, timer, epoch=next(self._epochs), replay=self._replay)
        return lease

    def _is_due(self, lease: Lease, now: float) -> None:
        if self.released.get(lease.handle) is lease:
            del self.released[lease.handle]
        else:
            self.end_if_due(lease, now)

    def expect(self, handle: str) -> Lease | None:
        """Note a prefill under way. None: too many are, and its fetches wait as for an unknown handle."""
        self.over.pop(handle, None)
        if len(self.expected) >= self._config.max_leases:
            return None
        if handle not in self.expected:
            self.expected[handle] = self._known(handle) or self._new(handle)
        return self.expected[handle]

    def void(self, handle: str, reason: Reason) -> Lease | None:
        """P holds nothing under a handle from now on. Returns what was known of it, if anything."""
        lease = self.expected.pop(handle, None) or self._known(handle)
        if lease is not None:
            lease.timer.cancel()
        self.over[handle] = reason
        if len(self.over) > self._config.max_leases:
            self.over.popitem(last=False)
        return lease

    def lose_blocks(self, lease: Lease) -> None:
        """A streaming prefill lost its blocks: chunks sent so far are void."""
        lease.epoch, lease.blocks, lease.ready_tokens = next(self._epochs), {}, 0
        lease.marks.clear()

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
        self.over.pop(order.handle, None)
        lease = self.expected.pop(order.handle, None) or self._known(order.handle) or self._new(order.handle)
        difference = lease.differs_from(order)
        if difference:
            lease.epoch = next(self._epochs)
        self._keep(lease, order, is_computed, now)
        return lease, difference

    def pin(self, handle: str, engine_id: str, num_tokens: int, kept: Kept, now: float) -> None:
        """Begin a lease on rows found by name, for the engine that pins them."""
        lease = self._new(handle)
        # D computes from the next token on: blocks that only the last of these tokens sees are not kept.
        lease.owner, lease.kept, lease.replay = engine_id, kept, 0
        order = Hold(f"for {num_tokens} tokens by name", handle, num_tokens, kept.groups, step=0)
        self._keep(lease, order, kept.is_ready, now)

    def _keep(self, lease: Lease, order: Hold, is_computed: Callable[[], bool], now: float) -> None:
        lease.order, lease.num_tokens, lease.is_computed = order, order.num_tokens, is_computed
        lease.held_at, lease.expires_at = now, now + self._config.lease_s
        lease.last_until = now + self._config.lease_max_s
        self.leases[order.handle] = lease
        lease.timer.at(lease.expires_at)
        self._metrics.leases.set(len(self.leases))

    def renew(self, lease: Lease, engine_id: str, link: str, now: float) -> Reason | None:
        """Extend a lease that a peer will still fetch. Why the lease is void for that peer, or None."""
        if lease.owner not in (None, engine_id):
            return Cause.FETCHED_BEFORE(BY_ANOTHER)
        lease.renewers.add(link)
        if lease.order is not None:
            lease.expires_at = max(lease.expires_at, min(now + self._config.lease_s, lease.last_until))
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
        if self.leases.get(lease.handle) is not lease:
            return
        if lease.sending:
            if now < lease.expires_at:
                lease.timer.by(lease.expires_at)
            elif lease.expires_at < lease.last_until:
                self._overdue(lease)
            return
        is_satisfied = lease.satisfied
        due_at = now if is_satisfied else lease.expires_at
        if now < due_at:
            lease.timer.at(due_at)
        elif is_satisfied:
            if self._repeats.logged:
                self._repeats.succeeded(_DECODE_NODES)
            self._end(lease, SERVED, now)
        elif lease.revoked or lease.kept is not None:
            # P ended it itself, or it is a pin, which holds up no eviction: that needs no warning.
            self._end(lease, lease.revoked or _NOT_FETCHED, now)
        else:
            self._metrics.failures.labels("lease_expired").inc()
            by_none = "" if lease.renewers else ", and no decode node asked for it"
            over = f"its lease_s of {self._config.lease_s:g} s is over{by_none}"
            if lease.renewers and lease.expires_at >= lease.last_until:
                over = f"it was held for {self._config.lease_max_s:g} s, which is lease_max_s"
            reason = Cause.LEASE_OVER(over)
            what = f"{lease} was not fetched, its blocks are freed:"
            self._repeats.warn_first("lease_expired, until one is fetched", _DECODE_NODES, what, reason)
            self._end(lease, reason, now)

    def revoke_all(self, reason: Reason, now: float) -> None:
        for lease in list(self.leases.values()):
            self.revoke(lease, reason, now)

    def revoke(self, lease: Lease, reason: Reason, now: float) -> None:
        """End a held lease at once; one that a sending reads ends when the sending does."""
        lease.expires_at, lease.last_until, lease.revoked = 0.0, 0.0, reason
        if not lease.sending:
            self._end(lease, reason, now)

    def _end(self, lease: Lease, reason: Reason, now: float) -> None:
        del self.leases[lease.handle]
        lease.timer.cancel()
        self._metrics.lease_seconds.observe(now - lease.held_at)
        self._metrics.leases.set(len(self.leases))
        self._ended(lease, reason)
