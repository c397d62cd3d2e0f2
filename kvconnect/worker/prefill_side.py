"""P's half of a worker: holds blocks under leases and sends them to those who ask.

Owned by the mover thread. Every fetch is answered exactly once; a lease ends exactly once, and only
when nothing reads its blocks any more.
"""

from __future__ import annotations

import itertools
import logging
import math
import random
from collections.abc import Callable, Sequence

from kvconnect.config import ExtraConfig
from kvconnect.engine.base import Completion, Engine
from kvconnect.errors import LayoutError, PeerError
from kvconnect.metrics import Metrics
from kvconnect.orders import Expect, Hold, Preempted, Progress, Withdraw
from kvconnect.peer.messages import (
    Accepted,
    Alive,
    Cancel,
    CreditGrant,
    Declined,
    Fetch,
    Grant,
    Introduction,
    Release,
    Renew,
    Renewed,
    StillAlive,
    Written,
    other_weights,
)
from kvconnect.peer.session import Ended, Event, Misused, Ready, Received, State
from kvconnect.plan.align import TableAlignment
from kvconnect.plan.transfer import make_plan
from kvconnect.worker.error_counting import ErrorsCounted
from kvconnect.worker.inbound_peers import InboundPeer, InboundPeers, Way
from kvconnect.worker.lease_book import LeaseBook, answer_renewal
from kvconnect.worker.leases import Consumer, Lease, LeaseEvent, Sending, TransferKey
from kvconnect.worker.local import Local
from kvconnect.worker.outbox import Arrived
from kvconnect.worker.path_choice import PathChoice
from kvconnect.worker.pending_fetches import PendingFetch, PendingFetches, check_chunks, check_fetch
from kvconnect.worker.sender import Sender
from kvconnect.worker.slot_talk import SlotTalk
from kvconnect.worker.streaming_prefill import StreamingPrefill, StreamingPrefills
from kvconnect.worker.supply import StagedChunks, StreamedChunks
from kvconnect.worker.tally import count_sent

logger = logging.getLogger(__name__)


class PrefillSide:
    """Leases, inbound peers and the writes under way.

    Args:
        introduce: our introduction, made anew for every peer since the engine's card may change.
        local: our pages, and the slots that they are packed into.
        send: sends a frame over a connection.
        report_sent: told once per request whose lease ended.
        randomness: what makes the epochs of this process others than those of the one before it.
    """

    def __init__(
        self,
        config: ExtraConfig,
        engine: Engine,
        introduce: Callable[[], Introduction],
        local: Local,
        send: Callable[[str, bytes], bool],
        report_sent: Callable[[str], None],
        metrics: Metrics,
        randomness: random.Random,
    ) -> None:
        epochs = itertools.count(randomness.randrange(1, 1 << 61))
        self.book = LeaseBook(config, epochs, self._lease_ended, metrics)
        self.streaming = StreamingPrefills(epochs)
        self.inbound_peers = InboundPeers(config, engine, introduce, local, send, self._give_up, metrics)
        self.pending = PendingFetches(config)
        self.sender = Sender(config, engine, local.send, metrics, self._arrived)
        self._slots = SlotTalk(self.sender, self.pending, self.inbound_peers)
        self._config = config
        self._report_sent = report_sent
        self._metrics = metrics
        self._not_quiescent: dict[TransferKey, float] = {}
        self._choice = PathChoice(config, self.sender, local, metrics)
        self._geometry = local.table.groups
        self._draining = ""
        self._drained_at = math.inf

    @property
    def leases(self) -> dict[str, Lease]:
        """All requests that are held, by handle."""
        return self.book.leases

    # Orders of the scheduler

    def expect(self, order: Expect) -> None:
        """A prefill is under way: whoever asks for it waits."""
        if self._draining:
            self._void(order.handle, self._draining)
            return
        if not self.pending.expect(order.handle):
            self._metrics.failures.labels("max_leases").inc()

    def withdraw(self, order: Withdraw) -> None:
        """Nothing comes of a prefill: whoever waits for it is told when time next passes."""
        self._void(order.handle, order.reason)
        self._cut_short(self.streaming.pop(order.handle), order.reason, again=False)

    def progress(self, order: Progress, is_computed: Callable[[], bool]) -> None:
        """A prefill went on: what is computed of it can be sent."""
        if order.handle in self.pending.expected:
            broken = self.streaming.progress(order, is_computed)
            self._cut_short(broken, "the prefill's blocks are not known", again=True)

    def preempted(self, order: Preempted) -> None:
        """A prefill lost its blocks: nothing that was sent of it counts."""
        self._cut_short(self.streaming.preempted(order), "the prefill was preempted", again=True)

    def hold(self, order: Hold, ready: Callable[[], bool], now: float) -> None:
        """Begin a lease, unless everybody who would fetch has said already that they will not."""
        if self._draining:
            self._void(order.handle, self._draining)
            self._report_sent(order.request_id)
            return
        lease = self.book.hold(order, ready, now)
        if lease is None:
            # The other one goes on, and this one's blocks are free.
            self._report_sent(order.request_id)
            return
        said, prefill = self.pending.hold(order.handle), self.streaming.pop(order.handle)
        if prefill is not None:
            self._take_over(lease, prefill)
        if said is not None and lease.owner in (None, said.owner):
            lease.owner, lease.consumers = said.owner, said.consumers
            lease.let_go |= said.ranks
        for link in sorted(self.pending.watchers(order.handle)):
            lease.renewers.add(link)
            self.inbound_peers.tell((link, -1), Renewed(epochs=((order.handle, lease.epoch),)))
        self.book.end_if_due(lease, now)

    def _take_over(self, lease: Lease, prefill: StreamingPrefill) -> None:
        """What is being sent of a prefill is sent of a lease from now on."""
        lease.owner, lease.consumers = prefill.owner, prefill.consumers
        for key in prefill.sending:
            sending = self.sender.sendings[key]
            sending.claims = lease
            lease.sending.add(key)
            lease.move(LeaseEvent.FETCH)
            self._metrics.streamed_bytes.inc(sending.total_bytes)
        reason = prefill.differs_from(lease.order)
        if reason:
            self._cut_short(prefill, reason, again=True)
        else:
            lease.epoch = prefill.epoch
        prefill.hold, prefill.is_computed = lease.order, lease.ready

    def _cut_short(self, prefill: StreamingPrefill | None, reason: str, *, again: bool) -> None:
        """What is being sent of a prefill is of no use any more; ``again``: until it is computed anew."""
        for key in prefill.sending if prefill is not None else ():
            self.sender.cancel(key, reason, again=again)

    def drain(self, now: float) -> None:
        """Begin no lease any more. What is held may be fetched for ``drain_s``, then all are told."""
        if not self._draining:
            self._draining = "the prefill node is stopping"
            self._drained_at = now + self._config.drain_s

    def replace_weights(self, reason: str) -> None:
        """What is held, and what is being computed, is of other weights than those that we have now.

        What is being sent goes on: it goes to a peer that had the same, and fails it if it has others now.
        """
        for handle in list(self.streaming.handles):
            self.pending.end(handle, reason)
            self._cut_short(self.streaming.pop(handle), reason, again=False)
        self.book.revoke(reason)
        self.inbound_peers.introduce_anew()

    @property
    def drained(self) -> bool:
        """It was drained, and nothing is held, sent, or waited for."""
        return bool(self._draining) and not (self.leases or self.sender.sendings or self.pending.fetches)

    def _end_drain(self, now: float) -> None:
        """The time to fetch is over: whoever still counts on something is told."""
        for key in list(self.sender.sendings):
            self._cancel(key, self._draining)
        for early in list(self.pending.fetches):
            self._cancel(early.key, self._draining)
        self.book.revoke(self._draining)

    # Frames and completions

    def receive(self, link: str, data: bytes, now: float, host: str = "") -> None:
        """Take a frame of a peer, whose connection comes from ``host``."""
        inbound = self.inbound_peers.hear(link, host)
        for event in inbound.session.receive(data, now):
            self._handle(link, inbound, event, now)
        self.inbound_peers.flush(link, inbound)
        if inbound.session.state is State.ENDED:
            self.inbound_peers.forget(link)

    def _handle(self, link: str, inbound: InboundPeer, event: Event, now: float) -> None:
        match event:
            case Ready():
                self.inbound_peers.met(link, inbound, lambda: {link for link, _ in self.sender.sendings})
            case Received(message=Fetch() as fetch):
                self._fetch(PendingFetch(link, fetch, now), now)
            case Received(message=CreditGrant() as granted):
                self._slots.granted((link, granted.transfer_id), granted.grants)
            case Received(message=Cancel() as cancel):
                self._cancelled(link, inbound, cancel.transfer_id, now)
            case Received(message=Release() as release):
                self._release(inbound, release, now)
            case Received(message=Renew(handles=handles)):
                if (peer := inbound.session.peer) is not None:
                    answer = answer_renewal(self.book, self.pending, handles, peer.engine_id, link, now)
                    inbound.session.send(answer)
            case Received(message=Alive()):
                inbound.session.send(StillAlive())
            case Misused(reason=reason):
                self._metrics.failures.labels("peer_message").inc()
                if not inbound.has_misspoken:
                    inbound.has_misspoken = True
                    logger.warning("dropped a message from %s, and counts further ones: %s", link, reason)
            case Ended(reason=reason):
                self._metrics.failures.labels("peer_refused").inc()
                logger.warning("connection %s ended: %s", link, reason)

    def completed(self, completion: Completion, now: float) -> None:
        """Take the engine's answer to one of our batches."""
        self.sender.completed(completion, now)

    def advance(self, now: float) -> None:
        """Let time pass: retry early fetches, end leases, feed the engine, answer what is over."""
        if self.pending:
            for early in self.pending.take_due(self.leases, self._is_ready, now):
                with ErrorsCounted(self._metrics, "a fetch that waited"):
                    self._fetch(early, now)
        if now >= self._drained_at:
            self._end_drain(now)
        for sending in self.sender.sendings.values():
            if now >= sending.deadline and not sending.error:
                self._cancel(sending.key, "the time that the peer gave is over")
        for sending in self.sender.advance(now):
            with ErrorsCounted(self._metrics, f"the end of transfer {sending.key[1]}"):
                self._finish(sending, now)
        self._slots.want_more()
        self.book.advance(now)

    def next_deadline(self, now: float) -> float | None:
        """The time by which ``advance`` has something to do even if nothing arrives."""
        times = [sending.deadline for sending in self.sender.sendings.values()]
        if self._draining and not self.drained:
            times.append(self._drained_at)
        waited = {early.fetch.handle for early in self.pending.fetches}
        others = (
            self.book.next_deadline(),
            self.pending.next_deadline(self.leases),
            self.sender.next_deadline(),
            self.streaming.next_poll(waited, now),
        )
        return min((*times, *(time for time in others if time is not None)), default=None)

    @property
    def busy(self) -> bool:
        """Something is under way that nobody will wake us for, or a fetch waits for the device."""
        return self.sender.busy or any(early.fetch.handle in self.leases for early in self.pending.fetches)

    # What the above is made of

    def _is_ready(self, early: PendingFetch) -> bool:
        if self._choice.is_probing(early.link):
            return False
        return self._source(early) is not None

    def _source(self, early: PendingFetch) -> Lease | StreamingPrefill | None:
        """What a fetch can be served from now: what is held, or a prefill that has its first chunk."""
        lease = self.leases.get(early.fetch.handle)
        if lease is not None:
            return lease if lease.ready() else None
        prefill, inbound = self.streaming.get(early.fetch.handle), self.inbound_peers.get(early.link)
        if prefill is None or inbound is None or (inbound.way is not None and inbound.way.packer is None):
            return None
        prefill.advance()
        return prefill if early.first_tokens <= prefill.ready_tokens else None

    def _fetch(self, pending: PendingFetch, now: float) -> None:
        """Begin a fetch, leave it pending, or answer that it cannot be done."""
        inbound = self.inbound_peers.get(pending.link)
        if inbound is None or inbound.session.peer is None:
            return
        fetch, peer = pending.fetch, inbound.session.peer
        if refusal := other_weights(inbound.session.ours.meaning, peer.meaning):
            # It greeted us before we replaced ours.
            self._answer_failure(inbound, pending, refusal)
            return
        if (held := self.leases.get(fetch.handle)) is not None:
            # What we stood still for too long to end in time serves nobody any more.
            self.book.end_if_due(held, now)
        source = self._source(pending) if now < pending.deadline else None
        if source is None:
            self._wait(inbound, pending, now)
            return
        consumer = (peer.engine_id, peer.incarnation, peer.rank)
        in_use = {sending.peer for sending in self.sender.sendings.values()}
        try:
            check_fetch(fetch)
            way = self.inbound_peers.way_to(inbound, in_use)
            if way.probe is not None and fetch.groups and fetch.chunks:
                if self._wait(inbound, pending, now, is_served=True):
                    self._choice.calibrate(way, pending.link, now)
                return
            if isinstance(source, StreamingPrefill) and way.packer is None:
                self._fetch(pending, now)
                return
            self._claim(source, fetch, consumer, pending.key)
            sending = Sending(pending.key, source, consumer, way.name, pending.deadline, started_at=now)
            self._begin(sending, source, pending, way)
        except (PeerError, LayoutError) as error:
            self._answer_failure(inbound, pending, str(error))
            return
        except Exception as error:
            # What a peer asks for must not end what others asked for.
            logger.exception("a fetch of %s could not be planned", pending.link)
            self._answer_failure(inbound, pending, f"it could not be planned: {type(error).__name__}")
            return
        if isinstance(source, Lease):
            source.move(LeaseEvent.FETCH)
        source.sending.add(sending.key)

    def _wait(
        self, inbound: InboundPeer, pending: PendingFetch, now: float, *, is_served: bool = False
    ) -> bool:
        """Leave a fetch pending, and give back the slots that it holds meanwhile. False: it may not wait."""
        refusal = self.pending.admit(pending, self.leases, now, is_served=is_served)
        if refusal:
            self._answer_failure(inbound, pending, refusal)
            return False
        self._slots.waits(pending)
        return True

    def _begin(
        self, sending: Sending, source: Lease | StreamingPrefill, pending: PendingFetch, way: Way
    ) -> None:
        """Choose a path among those that are open on both sides, and begin to send.

        Raises:
            LayoutError: none is, or the peer wants what is not held.
        """
        fetch, key = pending.fetch, pending.key
        spared: Sequence[Grant] = ()
        # Whoever wants nothing needs no path.
        link = way.direct if fetch.groups else TableAlignment({}) if not fetch.chunks else None
        packer = way.packer if fetch.chunks else None
        if packer is not None:
            check_chunks(fetch, packer.chunker, way.slot_bytes)
        if isinstance(source, StreamingPrefill) and packer is not None:
            chunks = StreamedChunks(source, packer, self._geometry, fetch.chunks)
            sending.streamed, sending.told_due = True, 0
            spared = self.sender.begin_packed(sending, packer, chunks, fetch.grants)
        elif isinstance(source, StreamingPrefill):
            raise LayoutError("a prefill under way is sent over the packed path only")
        elif packer is not None and (link is None or self._choice.prefers_packed(source, fetch, way)):
            staged = packer.stage(source.order.groups, fetch.chunks, fetch.num_tokens)
            spared = self.sender.begin_packed(sending, packer, StagedChunks(staged), fetch.grants)
            sending.told_due = 0 if pending.has_waited else None
        elif link is None:
            closed = "; ".join(f"{path}: {why}" for path, why in way.refusals.items())
            raise LayoutError(f"the peer opens no path that can be used here ({closed})")
        else:
            plan = make_plan(link, source.order.groups, fetch.groups, fetch.num_tokens)
            self.sender.begin_direct(sending, plan)
        if sending.path == "direct" or sending.told_due is not None:
            self.inbound_peers.tell(key, Accepted(fetch.transfer_id, source.epoch))
        if sending.path == "direct" and fetch.chunks:
            self.inbound_peers.tell(key, Declined(fetch.transfer_id))
        elif sending.told_due is not None:
            self._slots.want(sending, spared)

    def _arrived(self, key: TransferKey, arrived: Arrived) -> None:
        self._slots.arrived(key, arrived)

    def _claim(
        self, source: Lease | StreamingPrefill, fetch: Fetch, consumer: Consumer, key: TransferKey
    ) -> None:
        """A fetch asks for all of what is held, or will be, and no rank has a right to it twice.

        Raises:
            PeerError: this one has none.
        """
        if key in self.sender.sendings:
            raise PeerError(f"transfer {fetch.transfer_id} is under way already")
        if fetch.num_tokens != source.num_tokens:
            # Of another prompt, or of a node that counts differently: part of it is worse than none.
            raise PeerError(f"{fetch.num_tokens} tokens are wanted, {source.num_tokens} are held")
        if any(self.sender.sendings[other].consumer == consumer for other in source.sending):
            raise PeerError("this rank is being sent this request")
        source.claim(consumer, fetch.consumers)

    def _give_up(self, peer: str) -> None:
        for sending in self.sender.sendings.values():
            if sending.peer == peer:
                self.sender.cancel(sending.key, "the peer's memory was registered anew")

    def _cancel(self, key: TransferKey, reason: str) -> None:
        early = self.pending.take(key)
        inbound = self.inbound_peers.get(key[0])
        if early is not None and inbound is not None:
            self._answer_failure(inbound, early, reason)
        self.sender.cancel(key, reason)

    def _cancelled(self, link: str, inbound: InboundPeer, transfer_id: int, now: float) -> None:
        """A peer wants a fetch to end. It hears so even if the fetch itself never arrived."""
        key = (link, transfer_id)
        sending = self.sender.sendings.get(key)
        known = sending is not None or self.pending.has(key)
        if sending is not None and not sending.error:
            sending.cancelled = True
        self._cancel(key, "the peer cancelled it")
        if not known and now >= self._not_quiescent.get(key, 0.0):
            self.inbound_peers.tell(key, Written(transfer_id, False, True, 0, 0, 0.0, "it is not known"))

    def _release(self, inbound: InboundPeer, message: Release, now: float) -> None:
        lease, peer = self.leases.get(message.handle), inbound.session.peer
        if peer is None:
            return
        consumer = (peer.engine_id, peer.incarnation, peer.rank)
        if lease is None:
            self.pending.refuse(message.handle, consumer, message.consumers, now)
            return
        self.book.let_go(lease, consumer, message.consumers, now)

    def _finish(self, sending: Sending, now: float) -> None:
        if self._choice.take(sending):
            return
        claims = sending.claims
        claims.sending.discard(sending.key)
        if isinstance(claims, Lease) and not claims.sending:
            claims.move(LeaseEvent.LAST_ENDED)
        count_sent(self._metrics, sending)
        self.inbound_peers.tell(
            sending.key,
            Written(
                transfer_id=sending.key[1],
                ok=not sending.error,
                quiescent=sending.quiescent,
                total_bytes=sending.total_bytes,
                copies=sending.copies,
                seconds=sending.seconds,
                error=sending.error,
                again=sending.again and sending.quiescent,
                epoch=claims.epoch,
                unsettled=tuple(sending.unsettled) if sending.path == "packed" else None,
            ),
        )
        until = now + self._config.quarantine_s
        if not sending.quiescent:
            self._not_quiescent = {key: end for key, end in self._not_quiescent.items() if end > now}
            self._not_quiescent[sending.key] = until
        if isinstance(claims, Lease):
            if not sending.quiescent and sending.path == "direct":
                # The library may still read these blocks: nobody else gets them before that is over.
                claims.busy_until = max(claims.busy_until, until)
            if not sending.error:
                claims.served.add(sending.consumer)
            self.book.end_if_due(claims, now)

    def _lease_ended(self, lease: Lease, reason: str) -> None:
        """A lease is over: whoever still counts on it is told."""
        handle = lease.order.handle
        text = f"the request is no longer held: {reason}"
        self.pending.end(handle, text)
        self._report_sent(lease.order.request_id)
        if not lease.satisfied:
            self._tell_over(handle, text, lease.renewers)

    def _void(self, handle: str, reason: str) -> None:
        """Nothing is held under a handle, nor will be."""
        self.pending.end(handle, reason)
        self._tell_over(handle, reason, self.pending.watchers(handle))

    def _tell_over(self, handle: str, reason: str, links: set[str]) -> None:
        # In an order of their own, so that two runs of one simulated seed are one.
        for link in sorted(links):
            self.inbound_peers.tell((link, -1), Renewed(over=((handle, reason),)))

    def _answer_failure(self, inbound: InboundPeer, pending: PendingFetch, reason: str) -> None:
        self._metrics.transfers.labels("sent", "refused").inc()
        logger.warning("a fetch of %s was refused: %s", pending.link, reason)
        self.inbound_peers.tell(
            pending.key, Written(pending.fetch.transfer_id, False, True, 0, 0, 0.0, reason)
        )
