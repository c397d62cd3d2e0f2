"""P's half of a worker: holds blocks under leases and writes them to those who ask.

Owned by the mover thread. Every fetch is answered exactly once; a lease ends exactly once, and only
when nothing reads its blocks any more.
"""

from __future__ import annotations

import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvconnect.config import ExtraConfig
from kvconnect.engine.base import Addresses, Batch, Completion, Engine, Verb
from kvconnect.errors import EngineError, LayoutError, PeerError
from kvconnect.metrics import Metrics
from kvconnect.orders import Expect, Hold, RankAddress, Withdraw
from kvconnect.peer.messages import (
    Alive,
    Cancel,
    Fetch,
    Introduction,
    LetGo,
    StillAlive,
    Written,
)
from kvconnect.peer.session import Ended, Misused, Ready, Received, Session, Side, State
from kvconnect.plan.align import Link, align_tables
from kvconnect.plan.transfer import make_plan
from kvconnect.worker.ledger import (
    Consumer,
    Lease,
    LeaseEvent,
    LeaseState,
    Sending,
    TransferKey,
)
from kvconnect.worker.waiting import EarlyFetch, WaitingRoom

logger = logging.getLogger(__name__)


@dataclass
class Visitor:
    """One connection that D opened to us."""

    session: Session
    link: Link | None = None
    peer: str = ""


@dataclass
class Outbox:
    """Batches of one sending that the engine has not been given yet."""

    sending: Sending
    batches: Iterator[tuple[Addresses, Addresses, Addresses]]


class PrefillSide:
    """Leases, visitors and the writes under way.

    Args:
        introduce: our introduction, made anew for every visitor since the engine's card may change.
        send: sends a frame over a connection.
        report_sent: told once per request whose lease ended.
    """

    def __init__(
        self,
        config: ExtraConfig,
        engine: Engine,
        introduce: Callable[[], Introduction],
        send: Callable[[str, bytes], bool],
        report_sent: Callable[[str], None],
        metrics: Metrics,
    ) -> None:
        self.directory: tuple[RankAddress, ...] = ()
        self.leases: dict[str, Lease] = {}
        self.sendings: dict[TransferKey, Sending] = {}
        self.visitors: OrderedDict[str, Visitor] = OrderedDict()
        self.waiting = WaitingRoom(config)
        self._config = config
        self._engine = engine
        self._introduce = introduce
        self._send = send
        self._report_sent = report_sent
        self._metrics = metrics
        self._outboxes: dict[str, list[Outbox]] = {}
        self._batches: dict[int, TransferKey] = {}
        self._batch_ids = itertools.count(1)
        self._in_flight_bytes = 0
        self._not_quiet: dict[TransferKey, float] = {}
        self._peers: OrderedDict[str, None] = OrderedDict()

    # Orders of the scheduler

    def expect(self, order: Expect) -> None:
        """A prefill is under way: whoever asks for it waits."""
        if not self.waiting.expect(order.handle):
            self._metrics.failures.labels("max_leases").inc()

    def withdraw(self, order: Withdraw) -> None:
        """Nothing comes of a prefill: whoever waits for it is told when time next passes."""
        self.waiting.end(order.handle, order.reason)

    def hold(self, order: Hold, ready: Callable[[], bool], now: float) -> None:
        """Begin a lease, unless everybody who would fetch has said already that they will not."""
        if order.handle in self.leases:
            # A handle stands for one request. The other one goes on, and this one's blocks are free.
            self._metrics.failures.labels("handle_in_use").inc()
            logger.error("request %s is not held: its handle is in use", order.request_id)
            self._report_sent(order.request_id)
            return
        lease = self.leases[order.handle] = Lease(order, now + order.lease_s, ready)
        self._metrics.leases.set(len(self.leases))
        said = self.waiting.hold(order.handle)
        if said is not None:
            lease.owner, lease.consumers = said.owner, said.consumers
            lease.let_go |= said.ranks
            self._end_if_due(lease, now)

    # Frames and completions

    def receive(self, link: str, data: bytes, now: float) -> None:
        """Take a frame of a visitor."""
        visitor = self.visitors.get(link)
        if visitor is None:
            visitor = self._admit(link)
        self.visitors.move_to_end(link)
        for event in visitor.session.receive(data, now):
            match event:
                case Ready():
                    pass
                case Received(message=Fetch() as fetch):
                    self._fetch(EarlyFetch(link, fetch, now), now)
                case Received(message=Cancel() as cancel):
                    self._cancelled(link, visitor, cancel.transfer_id, now)
                case Received(message=LetGo() as let_go):
                    self._let_go(visitor, let_go, now)
                case Received(message=Alive()):
                    visitor.session.send(StillAlive())
                case Misused(reason=reason):
                    self._metrics.failures.labels("peer_message").inc()
                    logger.warning("dropped a message from %s: %s", link, reason)
                case Ended(reason=reason):
                    self._metrics.failures.labels("peer_refused").inc()
                    logger.warning("connection %s ended: %s", link, reason)
        self._flush(link, visitor)
        if visitor.session.state is State.ENDED:
            del self.visitors[link]

    def completed(self, completion: Completion, now: float) -> None:
        """Take the engine's answer to one of our batches."""
        key = self._batches.pop(completion.batch_id)
        sending = self.sendings[key]
        self._in_flight_bytes -= sending.in_flight.pop(completion.batch_id)
        self._metrics.inflight_bytes.set(self._in_flight_bytes)
        sending.last_ended_at = now
        if completion.ok:
            sending.total_bytes += completion.total_bytes
        else:
            sending.quiet &= completion.quiet
            sending.error = sending.error or completion.error or "the engine gave no reason"

    def advance(self, now: float) -> None:
        """Let time pass: retry early fetches, end leases, feed the engine, answer what is over."""
        if self.waiting:
            for early in self.waiting.take_due(self.leases, self._is_ready, now):
                self._fetch(early, now)
        for sending in self.sendings.values():
            if now >= sending.deadline and not sending.error:
                self._cancel(sending.key, "the time that the peer gave is over")
        self._feed(now)
        for sending in [sending for sending in self.sendings.values() if sending.over]:
            self._finish(sending, now)
        for lease in list(self.leases.values()):
            self._end_if_due(lease, now)

    def next_deadline(self, now: float) -> float | None:
        """The time by which ``advance`` has something to do even if nothing arrives."""
        times = [
            max(lease.busy_until, now if lease.satisfied else lease.expires_at)
            for lease in self.leases.values()
            if lease.state is LeaseState.HELD
        ]
        times += [sending.deadline for sending in self.sendings.values()]
        waiting = self.waiting.next_deadline(self.leases)
        if waiting is not None:
            times.append(waiting)
        return min(times, default=None)

    @property
    def busy(self) -> bool:
        """The engine has something under way for us, or a fetch waits for the device."""
        return bool(self.sendings) or any(early.fetch.handle in self.leases for early in self.waiting.fetches)

    # What the above is made of

    def _admit(self, link: str) -> Visitor:
        while len(self.visitors) >= self._config.max_peers:
            # The one that has been silent longest. If it is still there it is told to greet again.
            idle = next(
                (name for name in self.visitors if not any(key[0] == name for key in self.sendings)), None
            )
            if idle is None:
                break
            del self.visitors[idle]
        visitor = Visitor(
            Session(
                Side.PREFILL,
                self._introduce(),
                directory=self.directory,
                max_message_bytes=self._config.max_message_bytes,
                handshake_timeout_s=self._config.handshake_timeout_s,
                peer_timeout_s=self._config.peer_timeout_s,
            )
        )
        self.visitors[link] = visitor
        return visitor

    def _line_up(self, visitor: Visitor) -> Link:
        """The link to a visitor's cache: made when it first fetches, since it may only ask for directions.

        Raises:
            LayoutError: the two caches cannot be matched.
            PeerError: the peer's engine card is no use.
        """
        peer = visitor.session.peer
        if peer is None:
            raise PeerError("the peer has not introduced itself")
        if visitor.link is None:
            visitor.link = align_tables(visitor.session.ours.table, peer.table)
            visitor.peer = f"{peer.engine_id}/{peer.incarnation}/{peer.rank}"
        if visitor.peer not in self._peers:
            try:
                self._engine.connect(visitor.peer, peer.engine_card)
            except EngineError as error:
                raise PeerError(f"the engine cannot reach the peer: {error}") from error
            self._peers[visitor.peer] = None
        self._peers.move_to_end(visitor.peer)
        self._forget_idle_peers(visitor.peer)
        return visitor.link

    def _forget_idle_peers(self, current: str) -> None:
        used = {current, *(sending.peer for sending in self.sendings.values())}
        for name in [name for name in self._peers if name not in used]:
            if len(self._peers) <= self._config.max_peers:
                return
            del self._peers[name]
            self._engine.disconnect(name)

    def _is_ready(self, handle: str) -> bool:
        lease = self.leases.get(handle)
        return lease is not None and lease.ready()

    def _fetch(self, waiting: EarlyFetch, now: float) -> None:
        """Begin a fetch, leave it waiting, or answer that it cannot be done."""
        visitor = self.visitors.get(waiting.link)
        if visitor is None or visitor.session.peer is None:
            return
        fetch, peer = waiting.fetch, visitor.session.peer
        lease = self.leases.get(fetch.handle)
        if lease is None or not lease.ready():
            refusal = self.waiting.admit(waiting, lease is not None, now)
            if refusal:
                self._answer_failure(visitor, waiting, refusal)
            return
        consumer = (peer.engine_id, peer.incarnation, peer.rank)
        try:
            _check_groups(fetch)
            self._claim(lease, fetch, consumer, waiting.key)
            plan = make_plan(self._line_up(visitor), lease.order.groups, fetch.groups, fetch.num_tokens)
        except (PeerError, LayoutError) as error:
            self._answer_failure(visitor, waiting, str(error))
            return
        except Exception as error:
            # What a peer asks for must not end what others asked for.
            logger.exception("a fetch of %s could not be planned", waiting.link)
            self._answer_failure(visitor, waiting, f"it could not be planned: {type(error).__name__}")
            return
        sending = Sending(
            key=waiting.key,
            handle=fetch.handle,
            consumer=consumer,
            peer=visitor.peer,
            plan=plan,
            deadline=waiting.deadline,
            started_at=now,
        )
        lease.move(LeaseEvent.FETCH)
        lease.sending.add(sending.key)
        self.sendings[sending.key] = sending
        capabilities = self._engine.capabilities
        batches = plan.batches(
            capabilities.max_copies, min(capabilities.max_bytes, self._config.max_batch_bytes)
        )
        self._outboxes.setdefault(visitor.peer, []).append(Outbox(sending, batches))

    def _claim(self, lease: Lease, fetch: Fetch, consumer: Consumer, key: TransferKey) -> None:
        """Handles are single-use: one engine, and each of its ranks once.

        Raises:
            PeerError: this fetch has no right to the lease.
        """
        if key in self.sendings:
            raise PeerError(f"transfer {fetch.transfer_id} is under way already")
        if fetch.num_tokens != lease.order.num_tokens:
            # Of another prompt, or of a node that counts differently: part of it is worse than none.
            raise PeerError(f"{fetch.num_tokens} tokens are wanted, {lease.order.num_tokens} are held")
        if lease.owner not in (None, consumer[0]):
            raise PeerError("another engine has fetched this request")
        if consumer in lease.served or consumer in lease.let_go:
            raise PeerError("this rank has had this request")
        if any(self.sendings[other].consumer == consumer for other in lease.sending):
            raise PeerError("this rank is being sent this request")
        lease.owner = consumer[0]
        lease.consumers = fetch.consumers

    def _feed(self, now: float) -> None:
        """Give the engine batches while it and our own bounds allow, peer by peer."""
        capabilities = self._engine.capabilities
        for peer, waiting in list(self._outboxes.items()):
            room = capabilities.max_batches_per_peer - sum(
                len(outbox.sending.in_flight) for outbox in waiting
            )
            for outbox in waiting:
                while room > 0 and self._submit_next(outbox, now):
                    room -= 1
            self._outboxes[peer] = [
                outbox for outbox in waiting if outbox.sending.in_flight or not outbox.sending.over
            ]
            if not self._outboxes[peer]:
                del self._outboxes[peer]

    def _submit_next(self, outbox: Outbox, now: float) -> bool:
        sending = outbox.sending
        if sending.exhausted or sending.error:
            return False
        if self._in_flight_bytes >= self._config.max_inflight_bytes:
            return False
        columns = next(outbox.batches, None)
        if columns is None:
            sending.exhausted = True
            return False
        source, target, length = columns
        batch = Batch(
            batch_id=next(self._batch_ids),
            peer=sending.peer,
            verb=Verb.WRITE,
            source=source,
            target=target,
            length=length,
            timeout_s=min(self._config.transfer_timeout_s, max(0.001, sending.deadline - now)),
        )
        try:
            self._engine.submit(batch)
        except Exception as error:
            # This batch will never be answered, so the fetch must not pass for done.
            logger.exception("a batch to %s could not be submitted", sending.peer)
            sending.error = f"the engine does not take a batch: {error}"
            return False
        total_bytes = batch.total_bytes
        self._batches[batch.batch_id] = sending.key
        sending.in_flight[batch.batch_id] = total_bytes
        self._in_flight_bytes += total_bytes
        self._metrics.inflight_bytes.set(self._in_flight_bytes)
        return True

    def _cancel(self, key: TransferKey, reason: str) -> None:
        early = self.waiting.take(key)
        visitor = self.visitors.get(key[0])
        if early is not None and visitor is not None:
            self._answer_failure(visitor, early, reason)
        sending = self.sendings.get(key)
        if sending is not None and not sending.error:
            sending.error = reason
            for batch_id in sending.in_flight:
                self._engine.cancel(batch_id)

    def _cancelled(self, link: str, visitor: Visitor, transfer_id: int, now: float) -> None:
        """A peer wants a fetch to end. It hears so even if the fetch itself never arrived."""
        key = (link, transfer_id)
        known = key in self.sendings or any(early.key == key for early in self.waiting.fetches)
        self._cancel(key, "the peer cancelled it")
        if not known and now >= self._not_quiet.get(key, 0.0):
            self._answer(link, visitor, Written(transfer_id, False, True, 0, 0, 0.0, "it is not known"))

    def _let_go(self, visitor: Visitor, message: LetGo, now: float) -> None:
        lease, peer = self.leases.get(message.handle), visitor.session.peer
        if peer is None:
            return
        consumer = (peer.engine_id, peer.incarnation, peer.rank)
        if lease is None:
            self.waiting.refuse(message.handle, consumer, message.consumers, now)
            return
        if lease.owner not in (None, consumer[0]):
            return
        lease.owner = consumer[0]
        lease.consumers = message.consumers
        lease.let_go.add(consumer)
        self._end_if_due(lease, now)

    def _finish(self, sending: Sending, now: float) -> None:
        del self.sendings[sending.key]
        lease = self.leases[sending.handle]
        lease.sending.discard(sending.key)
        if not lease.sending:
            lease.move(LeaseEvent.LAST_ENDED)
        ok = not sending.error
        outcome = "ok" if ok else "failed"
        seconds = max(0.0, sending.last_ended_at - sending.started_at)
        self._metrics.transfers.labels("sent", outcome).inc()
        self._metrics.transfer_bytes.labels("sent", "direct").inc(sending.total_bytes)
        self._metrics.copies.labels("sent", "direct").inc(sending.plan.copies)
        self._metrics.transfer_seconds.labels("sent").inc(seconds)
        if not ok:
            self._metrics.failures.labels("send").inc()
            logger.warning("request %s could not be sent: %s", lease.order.request_id, sending.error)
        visitor = self.visitors.get(sending.key[0])
        if visitor is not None:
            self._answer(
                sending.key[0],
                visitor,
                Written(
                    transfer_id=sending.key[1],
                    ok=ok,
                    quiet=sending.quiet,
                    total_bytes=sending.total_bytes,
                    copies=sending.plan.copies,
                    seconds=seconds,
                    error=sending.error,
                ),
            )
        if not sending.quiet:
            # The library may still read these blocks: nobody else gets them before that is over.
            lease.busy_until = max(lease.busy_until, now + self._config.quarantine_s)
            self._not_quiet = {key: until for key, until in self._not_quiet.items() if until > now}
            self._not_quiet[sending.key] = lease.busy_until
        if ok:
            lease.served.add(sending.consumer)
        self._end_if_due(lease, now)

    def _end_if_due(self, lease: Lease, now: float) -> None:
        """End a lease that nobody reads and that was served to all, or that is over."""
        if lease.state is not LeaseState.HELD or now < lease.busy_until:
            return
        if lease.satisfied:
            lease.move(LeaseEvent.SATISFIED)
            self._end(lease, "every rank that wanted it was served")
        elif now >= lease.expires_at:
            lease.move(LeaseEvent.EXPIRED)
            self._metrics.failures.labels("lease_expired").inc()
            logger.warning(
                "request %s was not fetched within %s s, its blocks are freed",
                lease.order.request_id,
                lease.order.lease_s,
            )
            self._end(lease, f"its lease of {lease.order.lease_s} s is over")

    def _end(self, lease: Lease, reason: str) -> None:
        del self.leases[lease.order.handle]
        self._metrics.leases.set(len(self.leases))
        self.waiting.end(lease.order.handle, f"the request is no longer held: {reason}")
        self._report_sent(lease.order.request_id)

    def _answer_failure(self, visitor: Visitor, waiting: EarlyFetch, reason: str) -> None:
        self._metrics.transfers.labels("sent", "refused").inc()
        logger.warning("a fetch of %s was refused: %s", waiting.link, reason)
        written = Written(waiting.fetch.transfer_id, False, True, 0, 0, 0.0, reason)
        self._answer(waiting.link, visitor, written)

    def _answer(self, link: str, visitor: Visitor, written: Written) -> None:
        if visitor.session.state is State.READY:
            visitor.session.send(written)
            self._flush(link, visitor)

    def _flush(self, link: str, visitor: Visitor) -> None:
        for frame in visitor.session.outgoing():
            if not self._send(link, frame):
                self._metrics.failures.labels("side_channel_send").inc()
                logger.warning("an answer to %s could not be sent", link)


def _check_groups(fetch: Fetch) -> None:
    """Refuse a fetch that names more blocks than its tokens can fill.

    Raises:
        PeerError: a group is named twice, or has more blocks than tokens.
    """
    groups = [blocks.group for blocks in fetch.groups]
    if len(set(groups)) != len(groups):
        raise PeerError(f"cache groups {groups} are wanted, each may be named once")
    for blocks in fetch.groups:
        if len(blocks.block_ids) > fetch.num_tokens + 1:
            raise PeerError(f"{len(blocks.block_ids)} blocks are wanted for {fetch.num_tokens} tokens")
