"""P's part of a worker: holds blocks under leases and serves the fetches of peers.

Owned by the transfer thread. Each fetch is answered exactly once; a lease ends exactly once, and only when no
sending reads its blocks.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from kvconnect.errors import PeerError
from kvconnect.outcome import Cause, Reason
from kvconnect.peer.messages import (
    MAX_HANDLES,
    PIN_PREFIX,
    Cancel,
    CreditGrant,
    Fetch,
    FindPrefix,
    Introduction,
    Message,
    PinPrefix,
    PrefixFound,
    Release,
    Renew,
    Renewed,
)
from kvconnect.prefill.fetch_service import FetchService, not_all
from kvconnect.prefill.leases import SERVED, Lease, LeaseBook
from kvconnect.prefill.pending_fetches import PendingFetch
from kvconnect.timeline import Moment
from kvconnect.transfer.inbound_peers import InboundPeer, InboundPeers, Service
from kvconnect.transfer.orders import Hold, Orders, Progress, Results, Withdraw
from kvconnect.transfer.parts import Finished, Pace, TransferContext, carry_out_each

logger = logging.getLogger(__name__)

STOPPING = Cause.STOPPING("the prefill node is stopping")
_NOT_RENEWED = Cause.LEASE_OVER("the decode node no longer renews the lease")
_PREEMPTED = Cause.PREFILL_ENDED("the prefill was preempted")
_NO_LONGER = Cause.FETCHED_BEFORE("the request is no longer held: every rank that wanted it was served")
ASLEEP = Cause.STOPPING("the prefill node sleeps, and keeps no KV meanwhile")
_TOO_MANY = Cause.BUSY("the prefill node was asked for more names than it looks up for one decode node")
_NOTHING_KEPT = Cause.NOT_HELD("the prefill node keeps nothing under names for peers")


class PrefillSide(Service):
    """The leases, and the fetches of peers that they serve."""

    name = "the leases"
    NOTHING: ClassVar = dict.fromkeys(("leases", "expected", "pending_fetches", "sendings"), 0)
    """The counts of ``state`` for a node without this part."""

    def __init__(self, context: TransferContext, inbound_peers: InboundPeers) -> None:
        self.book = LeaseBook(
            context, self._lease_ended, lambda lease: self._cut_short(lease, _NOT_RENEWED, again=False)
        )
        self.leases = self.book.leases
        self.inbound_peers = inbound_peers
        self.fetches = FetchService(context, self.book, inbound_peers)
        self.pending, self.sender = self.fetches.pending, self.fetches.sender
        self._config, self._local = context.config, context.local
        self._reports, self._metrics, self._misused = context.reports, context.metrics, context.misused
        self._draining: Reason | None = None
        self._drain_until = math.inf
        self._giving_up = context.timers.timer(self._give_up)
        self._drained: Callable[[], None] | None = None
        super().__init__(context.repeats)
        inbound_peers.service = self

    # Orders of the scheduler

    def carry_out(self, orders: Orders, finished: Mapping[int, Finished], now: float) -> None:
        """Carry out one step's orders; ``finished``: by step, a check whether the device has finished it."""
        before = orders.step - 1
        # In this order: a handle may be withdrawn, expected anew and held in one step. Pending fetches of a
        # withdrawn handle are answered at the next advance.
        carry_out_each(
            self._metrics,
            ("withdraw", orders.withdrawn, lambda one: self._withdraw(one, now)),
            ("expect", orders.expected, self.expect),
            ("preempt", orders.preempted, self.preempted),
            ("report progress", orders.progress, lambda one: self.progress(one, finished[before])),
            ("hold", orders.holds, lambda one: self.hold(one, finished[one.step], now)),
        )

    def expect(self, handle: str) -> None:
        """Note a prefill under way: its fetches wait."""
        if self._draining:
            self._void(handle, self._draining)
            return
        lease = self.book.expect(handle)
        if lease is None:
            self._metrics.failures.labels("max_leases").inc()
        if self._reports.has_wanted:
            # -1 for ranks that released it.
            found = self.pending.first_tokens(handle) + [-1] * bool(lease and lease.finished)
            self._reports.add(Results(wanted=tuple((handle, first_token) for first_token in found)))

    def progress(self, order: Progress, is_computed: Callable[[], bool]) -> None:
        """Take a streaming prefill's progress: chunks of its computed tokens can be sent."""
        lease = self.book.expected.get(order.handle)
        if lease is None:
            return
        if not lease.add(order, is_computed):
            logger.error(
                "internal error: a prefill's progress does not follow from what is known of it, and its "
                "decode node begins anew"
            )
            self.preempted(order.handle, Cause.INTERNAL("the prefill's blocks are not known"))
        self.fetches.went_on(lease)

    def preempted(self, handle: str, reason: Reason = _PREEMPTED) -> None:
        """A prefill lost its blocks: void all chunks that were sent of it."""
        if (lease := self.book.expected.get(handle)) is not None:
            self.book.lose_blocks(lease)
            self._cut_short(lease, reason, again=True)

    def hold(self, order: Hold, is_computed: Callable[[], bool], now: float) -> None:
        """Begin a lease; it ends at once if all ranks that would fetch have released it already."""
        streamed = self.book.expected.get(order.handle)
        # A sending under way may finish: it reads the blocks until then.
        if self._draining and not (streamed is not None and streamed.sending):
            self._void(order.handle, self._draining)
            self._reports.add(Results(sent=(order.request_id,)))
            return
        lease, difference = self.book.hold(order, is_computed, now)
        if lease is None:
            # The request that has the handle stays held; this one's blocks are free.
            self._reports.add(Results(sent=(order.request_id,)))
            return
        self._metrics.timeline.note(Moment.HELD, handle=order.handle, request_id=order.request_id)
        self._metrics.streamed_bytes.inc(sum(self.sender.sendings[key].total_bytes for key in lease.sending))
        if difference:
            self._cut_short(lease, Cause.EPOCH(difference), again=True)
        self.fetches.went_on(lease)
        for link in sorted(lease.renewers):
            self.inbound_peers.send(link, Renewed(epochs=((order.handle, lease.epoch),)))
        self.book.end_if_due(lease, now)

    def _cut_short(self, lease: Lease, reason: Reason, *, again: bool) -> None:
        """Cancel the sendings of a prefill, whose chunks are void; ``again``: the peer is to fetch anew."""
        for key in lease.sending:
            self.sender.cancel(key, reason, again=again)

    def drain(self, drained: Callable[[], None], reason: Reason, drain_s: float, now: float) -> None:
        """Begin no further lease; call ``drained`` once no lease, sending or pending fetch is left.

        Peers may fetch held requests for ``drain_s`` seconds; after that all are given up, and peers that
        renewed them are informed. With 0 s, no page is read from now on.
        """
        if not self._draining:
            self._draining = reason
            self._drain_until = now + drain_s
            self._giving_up.at(self._drain_until)
        self._drained = drained
        for handle in list(self.book.expected) if not drain_s else ():
            self.preempted(handle, reason)

    def wake(self) -> None:
        """End the drain: pages exist again. Leases that were given up stay ended."""
        self._draining, self._drain_until = None, math.inf
        self._giving_up.cancel()

    def replace_weights(self, reason: Reason, now: float) -> None:
        """New weights: end all leases and streaming prefills, whose KV is of the old weights.

        Sendings of held requests go on: the peer had the old weights, and fails the load if it has others.
        """
        for handle, lease in list(self.book.expected.items()):
            if lease.num_tokens:
                self._void(handle, reason)
        self.book.revoke_all(reason, now)

    # Messages of peers

    def links_in_use(self) -> set[str]:
        return {link for link, _ in self.sender.sendings}

    def met(self, link: str) -> None:
        self.pending.touch_link(link)

    def serve(self, link: str, inbound: InboundPeer, message: Message, now: float) -> None:
        peer = inbound.peer
        match message:
            case Fetch():
                self._metrics.timeline.note(
                    Moment.FETCH_RECEIVED, peer.rank, handle=message.handle, transfer_id=message.transfer_id
                )
                self.fetches.begin(PendingFetch(link, message, now), now)
            case CreditGrant():
                self.fetches.granted((link, message.transfer_id), message)
            case Cancel():
                self.fetches.cancelled((link, message.transfer_id), now)
            case Release():
                self._release(peer, message, now)
            case Renew(handles=handles):
                inbound.session.send(self._renewed(handles, peer.engine_id, link, now))
            case FindPrefix():
                inbound.session.send(self._found(inbound, message, link, now))
            case PinPrefix():
                try:
                    self._pin(inbound, message, now)
                except PeerError as error:
                    # Fetches of the handle are refused with this reason.
                    self._void(message.handle, error.reason)

    def advance(self, now: float) -> bool:
        """Serve fetches, and answer those that have ended. Whether any work advanced without an event."""
        if now >= self._drain_until:
            # Also what was held or asked for since.
            self._give_up(now)
        self.fetches.advance(now)
        if self._drained is not None and self._is_idle:
            drained, self._drained = self._drained, None
            drained()
        return self.sender.take_progress()

    @property
    def has_work(self) -> bool:
        """``advance`` has work in a turn without an event."""
        return bool(self.sender.active or self.pending.touched)

    @property
    def pace(self) -> Pace:
        return Pace.SENDING if self.has_work else Pace.IDLE

    def _give_up(self, now: float) -> None:
        """The time to drain is over: end all leases, sendings and pending fetches."""
        reason = self._draining or STOPPING
        for key in (*self.sender.sendings, *self.pending.fetches):
            self.fetches.cancel(key, reason)
        self.book.revoke_all(reason, now)

    def state(self) -> dict[str, int]:
        """Counts of leases, prefills, fetches and sendings. All zero when idle."""
        return {
            "leases": len(self.leases),
            "expected": len(self.book.expected),
            "pending_fetches": len(self.pending.fetches) + len(self.book.released),
            "sendings": len(self.sender.sendings),
        }

    @property
    def _is_idle(self) -> bool:
        return not (self.leases or self.sender.sendings or self.pending.fetches)

    # Helpers of the above

    def _release(self, peer: Introduction, message: Release, now: float) -> None:
        consumer = (peer.engine_id, peer.incarnation, peer.rank)
        if (lease := self.book.get(message.handle)) is not None:
            self.book.release(lease, consumer, message.consumers, now)
        elif message.handle not in self.book.over:
            self.book.release_early(message.handle, consumer, message.consumers, now)
        if self._reports.has_wanted and message.handle in self.book.expected:
            self._reports.add(Results(wanted=((message.handle, -1),)))

    def _renewed(self, handles: Sequence[str], engine_id: str, link: str, now: float) -> Renewed:
        """Renew the leases of a peer's handles. The answer has for each its epoch, its end, or unknown."""
        epochs: list[tuple[str, int]] = []
        over: list[tuple[str, Reason]] = []
        unknown: list[str] = []
        for handle in dict.fromkeys(handles[:MAX_HANDLES]):
            lease = self.book.get(handle)
            if lease is None and handle in self.book.over:
                over.append((handle, self.book.over[handle]))
            elif lease is None:
                self.book.watch(handle, link)
                unknown.append(handle)
            elif (reason := self.book.renew(lease, engine_id, link, now)) is not None:
                over.append((handle, reason))
            elif lease.order is not None:
                epochs.append((handle, lease.epoch))
        return Renewed(tuple(epochs), tuple(over), tuple(unknown))

    def _found(self, inbound: InboundPeer, asked: FindPrefix, link: str, now: float) -> PrefixFound:
        """The answer to a prefix lookup; its ``error`` is a refusal, not a lack of the names."""
        kept = self._local.kept
        refusal = self._draining or self.fetches.look_at(inbound, link, now) or inbound.disagrees
        if refusal or kept is None:
            return PrefixFound(asked.number, error=refusal or _NOTHING_KEPT)
        # Names before ``start_tokens`` are not looked up, and cost nothing.
        num_names = len(asked.prefix.names) - asked.prefix.start_tokens // asked.prefix.naming.tokens
        if not inbound.names.take(max(0, num_names), now):
            return PrefixFound(asked.number, error=_TOO_MANY, is_busy=True)
        return PrefixFound(asked.number, *kept.find(asked.prefix, asked.max_tokens))

    def _pin(self, inbound: InboundPeer, asked: PinPrefix, now: float) -> None:
        """Pin KV of these names under a lease: once per handle, for all ranks of the peer's engine.

        What has the names may still be evicted: chunks of rows and blocks that were given away meanwhile are
        void. A stack is asked to reuse pinned blocks last, which takes until its next step; a stack that does
        not step reuses none. Raises ``PeerError``: nothing can be pinned.
        """
        handle, kept, num_tokens = asked.handle, self._local.kept, asked.num_tokens
        if handle in self.leases:
            return
        if not handle.startswith(PIN_PREFIX):
            # The handle may be one that this node issued: ending it would void that request.
            text = f"a handle to pin does not begin with {PIN_PREFIX!r}"
            self._misused(inbound, text)
            return
        refusal = self._draining or inbound.disagrees
        if refusal or kept is None:
            raise PeerError.of(refusal or _NOTHING_KEPT)
        if len(self.leases) >= self._config.max_leases:
            text = f"{len(self.leases)} requests are held already, and the prefill node holds no more"
            raise PeerError(text, Cause.BUSY)
        # Only the names of the first ``num_tokens`` tokens are looked up.
        names = min(len(asked.prefix.names), num_tokens // asked.prefix.naming.tokens)
        if not inbound.names.take(names, now):
            raise PeerError.of(_TOO_MANY)
        found = kept.hold(asked.prefix, num_tokens)
        if found is None:
            raise not_all(num_tokens)
        self.book.pin(handle, inbound.peer.engine_id, num_tokens, found, now)
        self._metrics.named_leases.labels("device" if found.on_device else "host").inc()
        if found.on_device:
            self._reports.read(block for group in found.groups for block in group.block_ids if block)

    def _lease_ended(self, lease: Lease, reason: Reason) -> None:
        """A lease has ended: free its request, and inform the peers that renewed it."""
        over = _NO_LONGER if reason is SERVED else reason.after("the request is no longer held: ")
        self.book.void(lease.handle, over)
        self.pending.touch(lease.handle)
        if lease.order is not None and lease.kept is None:
            request_id = lease.order.request_id
            unsent = {} if reason is SERVED else {request_id: reason}
            self._reports.add(Results(sent=(request_id,), unsent=unsent))
            self._metrics.timeline.note(Moment.LEASE_ENDED, handle=lease.handle, request_id=request_id)
        if reason is not SERVED:
            self._report_over(lease.handle, over, lease.renewers)

    def _withdraw(self, order: Withdraw, now: float) -> None:
        """No peer will fetch under a handle, or none can: end its lease, if there is one."""
        lease = self.leases.get(order.handle)
        if lease is None:
            self._void(order.handle, order.reason)
        else:
            self.book.revoke(lease, order.reason, now)

    def revoke(self, handle: str, reason: Reason, now: float) -> None:
        """The stack uses the blocks of a handle again: void what was sent of them, and hold nothing."""
        if (lease := self.book.get(handle)) is not None:
            self._cut_short(lease, reason, again=False)
        self._withdraw(Withdraw(handle, reason), now)
        self.book.revoked.discard(handle)

    def _void(self, handle: str, reason: Reason) -> None:
        """End a handle without a lease: cancel the sendings of its prefill, inform those that renewed it."""
        lease = self.book.void(handle, reason)
        self.pending.touch(handle)
        if lease is not None:
            self._cut_short(lease, reason, again=False)
            self._report_over(handle, reason, lease.renewers)

    def _report_over(self, handle: str, reason: Reason, links: set[str]) -> None:
        # Sorted, so that two simulator runs of one seed are equal.
        for link in sorted(links):
            self.inbound_peers.send(link, Renewed(over=((handle, reason),)))
