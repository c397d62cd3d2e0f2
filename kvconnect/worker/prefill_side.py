"""P's half of a worker: holds blocks under leases and sends them to those who ask.

Owned by the mover thread. Every fetch is answered exactly once; a lease ends exactly once, and only
when nothing reads its blocks any more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvconnect.config import ExtraConfig
from kvconnect.engine.base import Completion, Engine
from kvconnect.errors import LayoutError, PeerError
from kvconnect.metrics import Metrics
from kvconnect.orders import Expect, Hold, Preempted, Progress, Withdraw
from kvconnect.peer.messages import (
    Alive,
    Cancel,
    Declined,
    Fetch,
    Granted,
    Introduction,
    Landed,
    LetGo,
    Message,
    StillAlive,
    Written,
)
from kvconnect.peer.session import Ended, Misused, Ready, Received, State
from kvconnect.plan.align import Link
from kvconnect.plan.cost import LinkCost, Path, fit
from kvconnect.plan.size import plan_size
from kvconnect.plan.transfer import make_plan
from kvconnect.worker.growing import Growing, Prefills
from kvconnect.worker.ledger import (
    Claims,
    Consumer,
    Lease,
    LeaseEvent,
    LeaseState,
    Sending,
    TransferKey,
)
from kvconnect.worker.local import Local
from kvconnect.worker.outbox import Arrived
from kvconnect.worker.sender import Sender
from kvconnect.worker.supply import GrowingChunks, StagedChunks
from kvconnect.worker.visitors import Visitor, Visitors, Way
from kvconnect.worker.waiting import EarlyFetch, WaitingRoom, check_fetch

logger = logging.getLogger(__name__)

_PROBE = 0
"""The number of a calibration among the transfers of a connection: peers count their fetches from 1."""


class PrefillSide:
    """Leases, visitors and the writes under way.

    Args:
        introduce: our introduction, made anew for every visitor since the engine's card may change.
        local: our pages, and the slots that they are packed into.
        send: sends a frame over a connection.
        report_sent: told once per request whose lease ended.
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
    ) -> None:
        self.leases: dict[str, Lease] = {}
        self.growing = Prefills()
        self.visitors = Visitors(config, engine, introduce, local)
        self.waiting = WaitingRoom(config)
        self.sender = Sender(config, engine, local.send, metrics, self._arrived)
        self._config = config
        self._send = send
        self._report_sent = report_sent
        self._metrics = metrics
        self._not_quiet: dict[TransferKey, float] = {}
        self._probed: dict[TransferKey, Way] = {}
        self._pack_bytes_per_s = local.pack_bytes_per_s
        self._geometry = local.table.groups

    # Orders of the scheduler

    def expect(self, order: Expect) -> None:
        """A prefill is under way: whoever asks for it waits."""
        if not self.waiting.expect(order.handle):
            self._metrics.failures.labels("max_leases").inc()

    def withdraw(self, order: Withdraw) -> None:
        """Nothing comes of a prefill: whoever waits for it is told when time next passes."""
        self.waiting.end(order.handle, order.reason)
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
        if order.handle in self.leases:
            # A handle stands for one request. The other one goes on, and this one's blocks are free.
            self._metrics.failures.labels("handle_in_use").inc()
            logger.error("request %s is not held: its handle is in use", order.request_id)
            self._report_sent(order.request_id)
            return
        lease = self.leases[order.handle] = Lease(order, now + order.lease_s, ready)
        self._metrics.leases.set(len(self.leases))
        said, growing = self.waiting.hold(order.handle), self.growing.pop(order.handle)
        if growing is not None:
            self._take_over(lease, growing)
        if said is not None and lease.owner in (None, said.owner):
            lease.owner, lease.consumers = said.owner, said.consumers
            lease.let_go |= said.ranks
        self._end_if_due(lease, now)

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
        growing.hold, growing.is_computed = lease.order, lease.ready

    def _cut_short(self, growing: Growing | None, reason: str, *, again: bool) -> None:
        """What is being sent of a prefill is of no use any more; ``again``: until it is computed anew."""
        for key in growing.sending if growing is not None else ():
            self.sender.cancel(key, reason, again=again)

    # Frames and completions

    def receive(self, link: str, data: bytes, now: float) -> None:
        """Take a frame of a visitor."""
        visitor = self.visitors.hear(link, {sending_link for sending_link, _ in self.sender.sendings})
        for event in visitor.session.receive(data, now):
            match event:
                case Ready():
                    pass
                case Received(message=Fetch() as fetch):
                    self._fetch(EarlyFetch(link, fetch, now), now)
                case Received(message=Granted(transfer_id=transfer_id, grants=grants)):
                    self.sender.grant((link, transfer_id), grants)
                    self.waiting.grant((link, transfer_id), grants)
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
            self.visitors.forget(link)

    def completed(self, completion: Completion, now: float) -> None:
        """Take the engine's answer to one of our batches."""
        self.sender.completed(completion, now)

    def advance(self, now: float) -> None:
        """Let time pass: retry early fetches, end leases, feed the engine, answer what is over."""
        if self.waiting:
            for early in self.waiting.take_due(self.leases, self._is_ready, now):
                self._fetch(early, now)
        for sending in self.sender.sendings.values():
            if now >= sending.deadline and not sending.error:
                self._cancel(sending.key, "the time that the peer gave is over")
        for sending in self.sender.advance(now):
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
        times += [sending.deadline for sending in self.sender.sendings.values()]
        waited = {early.fetch.handle for early in self.waiting.fetches}
        others = (
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
        if (early.link, _PROBE) in self.sender.sendings:
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
        source = self._source(waiting)
        if source is None:
            refusal = self.waiting.admit(waiting, fetch.handle in self.leases, now)
            if refusal:
                self._answer_failure(visitor, waiting, refusal)
            return
        consumer = (peer.engine_id, peer.incarnation, peer.rank)
        in_use = {sending.peer for sending in self.sender.sendings.values()}
        try:
            check_fetch(fetch)
            way = self.visitors.way_to(visitor, in_use)
            if way.probe is not None and fetch.groups and fetch.chunks:
                self._calibrate(way, waiting, now)
                return
            if isinstance(source, Growing) and way.packer is None:
                self._fetch(waiting, now)
                return
            self._claim(source, fetch, consumer, waiting.key)
            sending = Sending(waiting.key, source, consumer, way.name, waiting.deadline, started_at=now)
            if isinstance(source, Lease):
                self._begin(sending, source, fetch, way)
            elif way.packer is not None:
                chunks = GrowingChunks(source, way.packer, self._geometry, fetch.chunks)
                sending.streamed = True
                self.sender.begin_packed(sending, way.packer, chunks, fetch.grants)
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

    def _calibrate(self, way: Way, waiting: EarlyFetch, now: float) -> None:
        """Find out how fast a link is; its first fetch, and those that come meanwhile, wait for that.

        Raises:
            PeerError: too many fetches wait already.
        """
        refusal = self.waiting.admit(waiting, True, now)
        if refusal:
            raise PeerError(refusal)
        key = (waiting.link, _PROBE)
        if way.probe is not None and key not in self.sender.sendings:
            deadline = now + self._config.handshake_timeout_s
            self._probed[key] = way
            self.sender.begin(Sending(key, Claims(), ("", "", 0), way.name, deadline, now), way.probe)

    def _calibrated(self, sending: Sending) -> None:
        way = self._probed.pop(sending.key)
        samples = way.probe.samples if way.probe is not None else []
        pack_bytes_per_s = self._pack_bytes_per_s
        way.cost = LinkCost(fit(samples) if samples else None, pack_bytes_per_s, pack_bytes_per_s)
        way.probe = None
        if sending.error:
            self._metrics.failures.labels("calibration").inc()
            logger.warning("the link to %s could not be calibrated: %s", way.name, sending.error)
        logger.info("the link to %s: %s", way.name, way.cost.describe())
        believed = way.cost.as_metrics()
        for what, gauge in self._metrics.link.items():
            gauge.set(believed[what])

    def _begin(self, sending: Sending, lease: Lease, fetch: Fetch, way: Way) -> None:
        """Choose a path among those that are open on both sides, and begin to send.

        Raises:
            LayoutError: none is, or the peer wants what is not held.
        """
        # Whoever wants nothing needs no path.
        link = way.direct if fetch.groups else Link({}) if not fetch.chunks else None
        packer = way.packer if fetch.chunks else None
        if packer is not None and (link is None or self._prefers_packed(sending, lease, fetch, way)):
            staged = packer.stage(lease.order.groups, fetch.chunks, fetch.num_tokens)
            self.sender.begin_packed(sending, packer, StagedChunks(staged), fetch.grants)
            return
        if link is None:
            closed = "; ".join(f"{path}: {why}" for path, why in way.refusals.items())
            raise LayoutError(f"the peer opens no path that can be used here ({closed})")
        plan = make_plan(link, lease.order.groups, fetch.groups, fetch.num_tokens)
        self.sender.begin_direct(sending, plan)
        if fetch.chunks:
            self._tell(sending.key, Declined(fetch.transfer_id))

    def _prefers_packed(self, sending: Sending, lease: Lease, fetch: Fetch, way: Way) -> bool:
        """Where both paths are open: whether this request is cheaper by slots than page by page."""
        if way.direct is None or way.packer is None:
            return way.direct is None
        way.cost = sending.cost = way.cost or LinkCost()
        direct = plan_size(way.direct, lease.order.groups, fetch.groups, fetch.num_tokens)
        packed_bytes = sum(way.packer.chunker.place(chunk).total_bytes for chunk in fetch.chunks)
        choice = way.cost.choose(direct.copies, direct.total_bytes, packed_bytes, len(fetch.chunks))
        return choice.path == "packed"

    def _arrived(self, key: TransferKey, arrived: Arrived) -> None:
        self._tell(
            key, Landed(key[1], arrived.chunk, arrived.generation, arrived.length_bytes, arrived.digest)
        )

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

    def _cancel(self, key: TransferKey, reason: str) -> None:
        early = self.waiting.take(key)
        visitor = self.visitors.get(key[0])
        if early is not None and visitor is not None:
            self._answer_failure(visitor, early, reason)
        self.sender.cancel(key, reason)

    def _cancelled(self, link: str, visitor: Visitor, transfer_id: int, now: float) -> None:
        """A peer wants a fetch to end. It hears so even if the fetch itself never arrived."""
        key = (link, transfer_id)
        known = key in self.sender.sendings or any(early.key == key for early in self.waiting.fetches)
        self._cancel(key, "the peer cancelled it")
        if not known and now >= self._not_quiet.get(key, 0.0):
            self._tell(key, Written(transfer_id, False, True, 0, 0, 0.0, "it is not known"))

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
        if sending.key in self._probed:
            self._calibrated(sending)
            return
        claims = sending.claims
        claims.sending.discard(sending.key)
        if isinstance(claims, Lease) and not claims.sending:
            claims.move(LeaseEvent.LAST_ENDED)
        self._count(sending)
        self._tell(
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
            self._end_if_due(claims, now)

    def _count(self, sending: Sending) -> None:
        ok = not sending.error
        outcome = "ok" if ok else "again" if sending.again else "failed"
        self._metrics.transfers.labels("sent", outcome).inc()
        self._metrics.transfer_bytes.labels("sent", sending.path).inc(sending.total_bytes)
        self._metrics.copies.labels("sent", sending.path).inc(sending.copies)
        self._metrics.transfer_seconds.labels("sent").inc(sending.seconds)
        if ok and sending.streamed:
            self._metrics.streamed.inc()
        if ok and sending.cost is not None:
            path: Path = "packed" if sending.path == "packed" else "direct"
            sending.cost.observe(path, sending.copies, sending.total_bytes, sending.copies, sending.service_s)
        if not ok:
            self._metrics.failures.labels("preempted" if sending.again else "send").inc()
            logger.warning("%s could not be sent: %s", _name(sending.claims), sending.error)

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
        self._tell(waiting.key, Written(waiting.fetch.transfer_id, False, True, 0, 0, 0.0, reason))

    def _tell(self, key: TransferKey, message: Message) -> None:
        """Say something about a fetch to whoever asked for it, if it still listens."""
        link = key[0]
        visitor = self.visitors.get(link)
        if visitor is not None and visitor.session.state is State.READY:
            visitor.session.send(message)
            self._flush(link, visitor)

    def _flush(self, link: str, visitor: Visitor) -> None:
        for frame in visitor.session.outgoing():
            if not self._send(link, frame):
                self._metrics.failures.labels("side_channel_send").inc()
                logger.warning("an answer to %s could not be sent", link)


def _name(claims: Claims) -> str:
    """What is being sent, for people."""
    return f"request {claims.order.request_id}" if isinstance(claims, Lease) else "an unfinished prefill"
