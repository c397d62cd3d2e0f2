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
    Declined,
    Fetch,
    Grant,
    Granted,
    Introduction,
    LetGo,
    Renew,
    Renewed,
    StillAlive,
    Written,
    other_weights,
)
from kvconnect.peer.session import Ended, Event, Misused, Ready, Received, State
from kvconnect.plan.align import Link
from kvconnect.plan.transfer import make_plan
from kvconnect.worker.growing import Growing, Prefills
from kvconnect.worker.lease_book import LeaseBook, answer_renewal
from kvconnect.worker.ledger import Consumer, Lease, LeaseEvent, Sending, TransferKey
from kvconnect.worker.local import Local
from kvconnect.worker.moves import Counted
from kvconnect.worker.outbox import Arrived
from kvconnect.worker.path_choice import PathChoice
from kvconnect.worker.sender import Sender
from kvconnect.worker.slot_talk import SlotTalk
from kvconnect.worker.supply import GrowingChunks, StagedChunks
from kvconnect.worker.tally import count_sent
from kvconnect.worker.visitors import Visitor, Visitors, Way
from kvconnect.worker.waiting import EarlyFetch, WaitingRoom, check_chunks, check_fetch

logger = logging.getLogger(__name__)


class PrefillSide:
    """Leases, visitors and the writes under way.

    Args:
        introduce: our introduction, made anew for every visitor since the engine's card may change.
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
        self.growing = Prefills(epochs)
        self.visitors = Visitors(config, engine, introduce, local, send, self._give_up, metrics)
        self.waiting = WaitingRoom(config)
        self.sender = Sender(config, engine, local.send, metrics, self._arrived)
        self._slots = SlotTalk(self.sender, self.waiting, self.visitors)
        self._config = config
        self._report_sent = report_sent
        self._metrics = metrics
        self._not_quiet: dict[TransferKey, float] = {}
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
        if not self.waiting.expect(order.handle):
            self._metrics.failures.labels("max_leases").inc()

    def withdraw(self, order: Withdraw) -> None:
        """Nothing comes of a prefill: whoever waits for it is told when time next passes."""
        self._void(order.handle, order.reason)
        self._cut_short(self.growing.pop(order.handle), order.reason, again=False)

    def progress(self, order: Progress, is_computed: Callable[[], bool]) -> None:
        """A prefill went on: what is computed of it can be sent."""
        if order.handle in self.waiting.expected:
            broken = self.growing.progress(order, is_computed)
            self._cut_short(broken, "the prefill's blocks are not known", again=True)

    def preempted(self, order: Preempted) -> None:
        """A prefill lost its blocks: nothing that was sent of it counts."""
        self._cut_short(self.growing.preempted(order), "the prefill was preempted", again=True)

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
        said, growing = self.waiting.hold(order.handle), self.growing.pop(order.handle)
        if growing is not None:
            self._take_over(lease, growing)
        if said is not None and lease.owner in (None, said.owner):
            lease.owner, lease.consumers = said.owner, said.consumers
            lease.let_go |= said.ranks
        for link in sorted(self.waiting.watchers(order.handle)):
            lease.renewers.add(link)
            self.visitors.tell((link, -1), Renewed(epochs=((order.handle, lease.epoch),)))
        self.book.end_if_due(lease, now)

    def _take_over(self, lease: Lease, growing: Growing) -> None:
        """What is being sent of a prefill is sent of a lease from now on."""
        lease.owner, lease.consumers = growing.owner, growing.consumers
        for key in growing.sending:
            sending = self.sender.sendings[key]
            sending.claims = lease
            lease.sending.add(key)
            lease.move(LeaseEvent.FETCH)
            self._metrics.streamed_bytes.inc(sending.total_bytes)
        reason = growing.differs_from(lease.order)
        if reason:
            self._cut_short(growing, reason, again=True)
        else:
            lease.epoch = growing.epoch
        growing.hold, growing.is_computed = lease.order, lease.ready

    def _cut_short(self, growing: Growing | None, reason: str, *, again: bool) -> None:
        """What is being sent of a prefill is of no use any more; ``again``: until it is computed anew."""
        for key in growing.sending if growing is not None else ():
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
        for handle in list(self.growing.handles):
            self.waiting.end(handle, reason)
            self._cut_short(self.growing.pop(handle), reason, again=False)
        self.book.revoke(reason)
        self.visitors.introduce_anew()

    @property
    def drained(self) -> bool:
        """It was drained, and nothing is held, sent, or waited for."""
        return bool(self._draining) and not (self.leases or self.sender.sendings or self.waiting.fetches)

    def _end_drain(self, now: float) -> None:
        """The time to fetch is over: whoever still counts on something is told."""
        for key in list(self.sender.sendings):
            self._cancel(key, self._draining)
        for early in list(self.waiting.fetches):
            self._cancel(early.key, self._draining)
        self.book.revoke(self._draining)

    # Frames and completions

    def receive(self, link: str, data: bytes, now: float, host: str = "") -> None:
        """Take a frame of a visitor, whose connection comes from ``host``."""
        visitor = self.visitors.hear(link, host)
        for event in visitor.session.receive(data, now):
            self._handle(link, visitor, event, now)
        self.visitors.flush(link, visitor)
        if visitor.session.state is State.ENDED:
            self.visitors.forget(link)

    def _handle(self, link: str, visitor: Visitor, event: Event, now: float) -> None:
        match event:
            case Ready():
                self.visitors.met(link, visitor, lambda: {link for link, _ in self.sender.sendings})
            case Received(message=Fetch() as fetch):
                self._fetch(EarlyFetch(link, fetch, now), now)
            case Received(message=Granted() as granted):
                self._slots.granted((link, granted.transfer_id), granted.grants)
            case Received(message=Cancel() as cancel):
                self._cancelled(link, visitor, cancel.transfer_id, now)
            case Received(message=LetGo() as let_go):
                self._let_go(visitor, let_go, now)
            case Received(message=Renew(handles=handles)):
                if (peer := visitor.session.peer) is not None:
                    answer = answer_renewal(self.book, self.waiting, handles, peer.engine_id, link, now)
                    visitor.session.send(answer)
            case Received(message=Alive()):
                visitor.session.send(StillAlive())
            case Misused(reason=reason):
                self._metrics.failures.labels("peer_message").inc()
                if not visitor.has_misspoken:
                    visitor.has_misspoken = True
                    logger.warning("dropped a message from %s, and counts further ones: %s", link, reason)
            case Ended(reason=reason):
                self._metrics.failures.labels("peer_refused").inc()
                logger.warning("connection %s ended: %s", link, reason)

    def completed(self, completion: Completion, now: float) -> None:
        """Take the engine's answer to one of our batches."""
        self.sender.completed(completion, now)

    def advance(self, now: float) -> None:
        """Let time pass: retry early fetches, end leases, feed the engine, answer what is over."""
        if self.waiting:
            for early in self.waiting.take_due(self.leases, self._is_ready, now):
                with Counted(self._metrics, "a fetch that waited"):
                    self._fetch(early, now)
        if now >= self._drained_at:
            self._end_drain(now)
        for sending in self.sender.sendings.values():
            if now >= sending.deadline and not sending.error:
                self._cancel(sending.key, "the time that the peer gave is over")
        for sending in self.sender.advance(now):
            with Counted(self._metrics, f"the end of transfer {sending.key[1]}"):
                self._finish(sending, now)
        self._slots.want_more()
        self.book.advance(now)

    def next_deadline(self, now: float) -> float | None:
        """The time by which ``advance`` has something to do even if nothing arrives."""
        times = [sending.deadline for sending in self.sender.sendings.values()]
        if self._draining and not self.drained:
            times.append(self._drained_at)
        waited = {early.fetch.handle for early in self.waiting.fetches}
        others = (
            self.book.next_deadline(),
            self.waiting.next_deadline(self.leases),
            self.sender.next_deadline(),
            self.growing.next_poll(waited, now),
        )
        return min((*times, *(time for time in others if time is not None)), default=None)

    @property
    def busy(self) -> bool:
        """Something is under way that nobody will wake us for, or a fetch waits for the device."""
        return self.sender.busy or any(early.fetch.handle in self.leases for early in self.waiting.fetches)

    # What the above is made of

    def _is_ready(self, early: EarlyFetch) -> bool:
        if self._choice.is_probing(early.link):
            return False
        return self._source(early) is not None

    def _source(self, early: EarlyFetch) -> Lease | Growing | None:
        """What a fetch can be served from now: what is held, or a prefill that has its first chunk."""
        lease = self.leases.get(early.fetch.handle)
        if lease is not None:
            return lease if lease.ready() else None
        growing, visitor = self.growing.get(early.fetch.handle), self.visitors.get(early.link)
        if growing is None or visitor is None or (visitor.way is not None and visitor.way.packer is None):
            return None
        growing.advance()
        return growing if early.first_tokens <= growing.ready_tokens else None

    def _fetch(self, waiting: EarlyFetch, now: float) -> None:
        """Begin a fetch, leave it waiting, or answer that it cannot be done."""
        visitor = self.visitors.get(waiting.link)
        if visitor is None or visitor.session.peer is None:
            return
        fetch, peer = waiting.fetch, visitor.session.peer
        if refusal := other_weights(visitor.session.ours.meaning, peer.meaning):
            # It greeted us before we replaced ours.
            self._answer_failure(visitor, waiting, refusal)
            return
        if (held := self.leases.get(fetch.handle)) is not None:
            # What we stood still for too long to end in time serves nobody any more.
            self.book.end_if_due(held, now)
        source = self._source(waiting) if now < waiting.deadline else None
        if source is None:
            self._wait(visitor, waiting, now)
            return
        consumer = (peer.engine_id, peer.incarnation, peer.rank)
        in_use = {sending.peer for sending in self.sender.sendings.values()}
        try:
            check_fetch(fetch)
            way = self.visitors.way_to(visitor, in_use)
            if way.probe is not None and fetch.groups and fetch.chunks:
                if self._wait(visitor, waiting, now, is_served=True):
                    self._choice.calibrate(way, waiting.link, now)
                return
            if isinstance(source, Growing) and way.packer is None:
                self._fetch(waiting, now)
                return
            self._claim(source, fetch, consumer, waiting.key)
            sending = Sending(waiting.key, source, consumer, way.name, waiting.deadline, started_at=now)
            self._begin(sending, source, waiting, way)
        except (PeerError, LayoutError) as error:
            self._answer_failure(visitor, waiting, str(error))
            return
        except Exception as error:
            # What a peer asks for must not end what others asked for.
            logger.exception("a fetch of %s could not be planned", waiting.link)
            self._answer_failure(visitor, waiting, f"it could not be planned: {type(error).__name__}")
            return
        if isinstance(source, Lease):
            source.move(LeaseEvent.FETCH)
        source.sending.add(sending.key)

    def _wait(self, visitor: Visitor, waiting: EarlyFetch, now: float, *, is_served: bool = False) -> bool:
        """Leave a fetch waiting, and give back the slots that it holds meanwhile. False: it may not wait."""
        refusal = self.waiting.admit(waiting, self.leases, now, is_served=is_served)
        if refusal:
            self._answer_failure(visitor, waiting, refusal)
            return False
        self._slots.waits(waiting)
        return True

    def _begin(self, sending: Sending, source: Lease | Growing, waiting: EarlyFetch, way: Way) -> None:
        """Choose a path among those that are open on both sides, and begin to send.

        Raises:
            LayoutError: none is, or the peer wants what is not held.
        """
        fetch, key = waiting.fetch, waiting.key
        spared: Sequence[Grant] = ()
        # Whoever wants nothing needs no path.
        link = way.direct if fetch.groups else Link({}) if not fetch.chunks else None
        packer = way.packer if fetch.chunks else None
        if packer is not None:
            check_chunks(fetch, packer.chunker, way.slot_bytes)
        if isinstance(source, Growing) and packer is not None:
            chunks = GrowingChunks(source, packer, self._geometry, fetch.chunks)
            sending.streamed, sending.told_due = True, 0
            spared = self.sender.begin_packed(sending, packer, chunks, fetch.grants)
        elif isinstance(source, Growing):
            raise LayoutError("a prefill under way is sent over the packed path only")
        elif packer is not None and (link is None or self._choice.prefers_packed(source, fetch, way)):
            staged = packer.stage(source.order.groups, fetch.chunks, fetch.num_tokens)
            spared = self.sender.begin_packed(sending, packer, StagedChunks(staged), fetch.grants)
            sending.told_due = 0 if waiting.has_waited else None
        elif link is None:
            closed = "; ".join(f"{path}: {why}" for path, why in way.refusals.items())
            raise LayoutError(f"the peer opens no path that can be used here ({closed})")
        else:
            plan = make_plan(link, source.order.groups, fetch.groups, fetch.num_tokens)
            self.sender.begin_direct(sending, plan)
        if sending.path == "direct" or sending.told_due is not None:
            self.visitors.tell(key, Accepted(fetch.transfer_id, source.epoch))
        if sending.path == "direct" and fetch.chunks:
            self.visitors.tell(key, Declined(fetch.transfer_id))
        elif sending.told_due is not None:
            self._slots.want(sending, spared)

    def _arrived(self, key: TransferKey, arrived: Arrived) -> None:
        self._slots.arrived(key, arrived)

    def _claim(self, source: Lease | Growing, fetch: Fetch, consumer: Consumer, key: TransferKey) -> None:
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
        early = self.waiting.take(key)
        visitor = self.visitors.get(key[0])
        if early is not None and visitor is not None:
            self._answer_failure(visitor, early, reason)
        self.sender.cancel(key, reason)

    def _cancelled(self, link: str, visitor: Visitor, transfer_id: int, now: float) -> None:
        """A peer wants a fetch to end. It hears so even if the fetch itself never arrived."""
        key = (link, transfer_id)
        sending = self.sender.sendings.get(key)
        known = sending is not None or self.waiting.has(key)
        if sending is not None and not sending.error:
            sending.cancelled = True
        self._cancel(key, "the peer cancelled it")
        if not known and now >= self._not_quiet.get(key, 0.0):
            self.visitors.tell(key, Written(transfer_id, False, True, 0, 0, 0.0, "it is not known"))

    def _let_go(self, visitor: Visitor, message: LetGo, now: float) -> None:
        lease, peer = self.leases.get(message.handle), visitor.session.peer
        if peer is None:
            return
        consumer = (peer.engine_id, peer.incarnation, peer.rank)
        if lease is None:
            self.waiting.refuse(message.handle, consumer, message.consumers, now)
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
        self.visitors.tell(
            sending.key,
            Written(
                transfer_id=sending.key[1],
                ok=not sending.error,
                quiet=sending.quiet,
                total_bytes=sending.total_bytes,
                copies=sending.copies,
                seconds=sending.seconds,
                error=sending.error,
                again=sending.again and sending.quiet,
                epoch=claims.epoch,
                unsettled=tuple(sending.unsettled) if sending.path == "packed" else None,
            ),
        )
        until = now + self._config.quarantine_s
        if not sending.quiet:
            self._not_quiet = {key: end for key, end in self._not_quiet.items() if end > now}
            self._not_quiet[sending.key] = until
        if isinstance(claims, Lease):
            if not sending.quiet and sending.path == "direct":
                # The library may still read these blocks: nobody else gets them before that is over.
                claims.busy_until = max(claims.busy_until, until)
            if not sending.error:
                claims.served.add(sending.consumer)
            self.book.end_if_due(claims, now)

    def _lease_ended(self, lease: Lease, reason: str) -> None:
        """A lease is over: whoever still counts on it is told."""
        handle = lease.order.handle
        text = f"the request is no longer held: {reason}"
        self.waiting.end(handle, text)
        self._report_sent(lease.order.request_id)
        if not lease.satisfied:
            self._tell_over(handle, text, lease.renewers)

    def _void(self, handle: str, reason: str) -> None:
        """Nothing is held under a handle, nor will be."""
        self.waiting.end(handle, reason)
        self._tell_over(handle, reason, self.waiting.watchers(handle))

    def _tell_over(self, handle: str, reason: str, links: set[str]) -> None:
        # In an order of their own, so that two runs of one simulated seed are one.
        for link in sorted(links):
            self.visitors.tell((link, -1), Renewed(over=((handle, reason),)))

    def _answer_failure(self, visitor: Visitor, waiting: EarlyFetch, reason: str) -> None:
        self._metrics.transfers.labels("sent", "refused").inc()
        logger.warning("a fetch of %s was refused: %s", waiting.link, reason)
        self.visitors.tell(waiting.key, Written(waiting.fetch.transfer_id, False, True, 0, 0, 0.0, reason))
