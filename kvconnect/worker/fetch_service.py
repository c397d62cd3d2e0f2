"""P serves fetches: each waits for its KV, is sent over one of two paths, and is answered exactly once.

A landing slot of D is of use only for a chunk that can be packed: what D lends for others is given back, and
requested as credit once they can be. Where all can be packed when the fetch comes, no credit is requested.
Owned by the transfer thread.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from kvconnect.config import ExtraConfig
from kvconnect.errors import LayoutError, PeerError
from kvconnect.metrics import Metrics
from kvconnect.peer.messages import (
    Accepted,
    CreditGrant,
    CreditRequest,
    Declined,
    Fetch,
    Grant,
    Landed,
    Written,
    other_weights,
)
from kvconnect.plan.align import TableAlignment
from kvconnect.plan.transfer import make_plan
from kvconnect.worker.error_counting import ErrorsCounted
from kvconnect.worker.inbound_peers import InboundPeer, InboundPeers, Way
from kvconnect.worker.lease_book import LeaseBook
from kvconnect.worker.leases import Consumer, Lease, LeaseEvent, Sending, TransferKey
from kvconnect.worker.local import Local
from kvconnect.worker.outbox import Arrived
from kvconnect.worker.path_choice import PathChoice
from kvconnect.worker.pending_fetches import PendingFetch, PendingFetches, check_chunks, check_fetch
from kvconnect.worker.sender import Sender
from kvconnect.worker.streaming_prefill import StreamingPrefill, StreamingPrefills
from kvconnect.worker.supply import StagedChunks, StreamedChunks
from kvconnect.worker.tally import count_sent

logger = logging.getLogger(__name__)


class FetchService:
    """All fetches of peers, those that are pending and those that are being served."""

    def __init__(
        self,
        config: ExtraConfig,
        local: Local,
        book: LeaseBook,
        streaming: StreamingPrefills,
        inbound_peers: InboundPeers,
        metrics: Metrics,
    ) -> None:
        self.pending = PendingFetches(config)
        self.sender = Sender(config, local, metrics, self._arrived)
        self.not_quiescent: dict[TransferKey, float] = {}
        self._config = config
        self._book = book
        self._streaming = streaming
        self._inbound_peers = inbound_peers
        self._choice = PathChoice(config, self.sender, local, metrics)
        self._geometry = local.table.groups
        self._metrics = metrics

    def advance(self, now: float) -> None:
        """Let time pass: retry pending fetches, feed the engine, answer what is over, request credit."""
        if self.pending:
            for pending in self.pending.take_due(self._book.leases, self._is_ready, now):
                with ErrorsCounted(self._metrics, "a fetch that waited"):
                    self.begin(pending, now)
        for sending in self.sender.sendings.values():
            if now >= sending.deadline and not sending.error:
                self.cancel(sending.key, "the time that the peer gave is over")
        for sending in self.sender.advance(now):
            with ErrorsCounted(self._metrics, f"the end of transfer {sending.key[1]}"):
                self._finish(sending, now)
        for sending in self.sender.sendings.values():
            if sending.due_reported is not None and not sending.error:
                self._request_credit(sending)

    def next_deadline(self, now: float) -> float | None:
        """The time by which ``advance`` has something to do even if nothing arrives."""
        times = [sending.deadline for sending in self.sender.sendings.values()]
        waited = {pending.fetch.handle for pending in self.pending.fetches}
        others = (
            self.pending.next_deadline(self._book.leases),
            self.sender.next_deadline(),
            self._streaming.next_poll(waited, now),
        )
        return min((*times, *(time for time in others if time is not None)), default=None)

    @property
    def busy(self) -> bool:
        """Something is under way that nothing will wake us for, or a fetch waits for the device."""
        handles = (pending.fetch.handle for pending in self.pending.fetches)
        return self.sender.busy or any(handle in self._book.leases for handle in handles)

    def begin(self, pending: PendingFetch, now: float) -> None:
        """Begin a fetch, leave it pending, or answer that it cannot be done."""
        inbound = self._inbound_peers.get(pending.link)
        if inbound is None or inbound.session.peer is None:
            return
        fetch, peer = pending.fetch, inbound.session.peer
        if refusal := other_weights(inbound.session.ours.meaning, peer.meaning):
            # It greeted us before we replaced ours.
            self._answer_failure(inbound, pending, refusal)
            return
        if (held := self._book.leases.get(fetch.handle)) is not None:
            # What we stood still for too long to end in time serves no load any more.
            self._book.end_if_due(held, now)
        source = self._source(pending) if now < pending.deadline else None
        if source is None:
            self._wait(inbound, pending, now)
            return
        consumer = (peer.engine_id, peer.incarnation, peer.rank)
        in_use = {sending.peer for sending in self.sender.sendings.values()}
        try:
            check_fetch(fetch)
            way = self._inbound_peers.way_to(inbound, in_use)
            if way.probe is not None and fetch.groups and fetch.chunks:
                if self._wait(inbound, pending, now, is_served=True):
                    self._choice.calibrate(way, pending.link, now)
                return
            if isinstance(source, StreamingPrefill) and way.packer is None:
                self.begin(pending, now)
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

    def cancel(self, key: TransferKey, reason: str) -> None:
        """End a fetch early, whether it is served or pending."""
        early = self.pending.take(key)
        inbound = self._inbound_peers.get(key[0])
        if early is not None and inbound is not None:
            self._answer_failure(inbound, early, reason)
        self.sender.cancel(key, reason)

    def cancelled(self, link: str, transfer_id: int, now: float) -> None:
        """A peer wants a fetch to end. It hears so even if the fetch itself never arrived."""
        key = (link, transfer_id)
        sending = self.sender.sendings.get(key)
        known = sending is not None or self.pending.has(key)
        if sending is not None and not sending.error:
            sending.cancelled = True
        self.cancel(key, "the peer cancelled it")
        if not known and now >= self.not_quiescent.get(key, 0.0):
            self._inbound_peers.tell(key, Written(transfer_id, False, True, 0, 0, 0.0, "it is not known"))

    def give_up(self, peer: str) -> None:
        """A peer of the engine is about to be disconnected."""
        for sending in self.sender.sendings.values():
            if sending.peer == peer:
                self.sender.cancel(sending.key, "the peer's memory was registered anew")

    def granted(self, key: TransferKey, granted: CreditGrant) -> None:
        """A peer lends more slots for a fetch, which may have no use for them yet."""
        sending = self.sender.sendings.get(key)
        if sending is not None:
            spared = self.sender.grant(key, granted.grants)
            if sending.due_reported is not None and not sending.error:
                self._request_credit(sending, spared)
        elif self.pending.has(key):
            self._inbound_peers.tell(key, CreditRequest(key[1], 0, _generations(granted.grants)))

    def _is_ready(self, early: PendingFetch) -> bool:
        if self._choice.is_probing(early.link):
            return False
        return self._source(early) is not None

    def _source(self, early: PendingFetch) -> Lease | StreamingPrefill | None:
        """What a fetch can be served from now: what is held, or a prefill that has its first chunk."""
        lease = self._book.leases.get(early.fetch.handle)
        if lease is not None:
            return lease if lease.ready() else None
        prefill, inbound = self._streaming.get(early.fetch.handle), self._inbound_peers.get(early.link)
        if prefill is None or inbound is None or (inbound.way is not None and inbound.way.packer is None):
            return None
        prefill.advance()
        return prefill if early.first_tokens <= prefill.ready_tokens else None

    def _wait(
        self, inbound: InboundPeer, pending: PendingFetch, now: float, *, is_served: bool = False
    ) -> bool:
        """Leave a fetch pending, and give back the slots that it holds meanwhile. False: it may not wait."""
        refusal = self.pending.admit(pending, self._book.leases, now, is_served=is_served)
        if refusal:
            self._answer_failure(inbound, pending, refusal)
            return False
        self._return_slots(pending)
        return True

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

    def _begin(
        self, sending: Sending, source: Lease | StreamingPrefill, pending: PendingFetch, way: Way
    ) -> None:
        """Choose a path among those that are open on both sides, and begin to send.

        Raises:
            LayoutError: none is, or the peer wants what is not held.
        """
        fetch, key = pending.fetch, pending.key
        spared: Sequence[Grant] = ()
        # A fetch of nothing needs no path.
        link = way.direct if fetch.groups else TableAlignment({}) if not fetch.chunks else None
        packer = way.packer if fetch.chunks else None
        if packer is not None:
            check_chunks(fetch, packer.chunker, way.slot_bytes)
        if isinstance(source, StreamingPrefill) and packer is not None:
            chunks = StreamedChunks(source, packer, self._geometry, fetch.chunks)
            sending.streamed, sending.due_reported = True, 0
            spared = self.sender.begin_packed(sending, packer, chunks, fetch.grants)
        elif isinstance(source, StreamingPrefill):
            raise LayoutError("a prefill under way is sent over the packed path only")
        elif packer is not None and (link is None or self._choice.prefers_packed(source, fetch, way)):
            staged = packer.stage(source.order.groups, fetch.chunks, fetch.num_tokens)
            spared = self.sender.begin_packed(sending, packer, StagedChunks(staged), fetch.grants)
            sending.due_reported = 0 if pending.has_waited else None
        elif link is None:
            closed = "; ".join(f"{path}: {why}" for path, why in way.refusals.items())
            raise LayoutError(f"the peer opens no path that can be used here ({closed})")
        else:
            plan = make_plan(link, source.order.groups, fetch.groups, fetch.num_tokens)
            self.sender.begin_direct(sending, plan)
        if sending.path == "direct" or sending.due_reported is not None:
            self._inbound_peers.tell(key, Accepted(fetch.transfer_id, source.epoch))
        if sending.path == "direct" and fetch.chunks:
            self._inbound_peers.tell(key, Declined(fetch.transfer_id))
        elif sending.due_reported is not None:
            self._request_credit(sending, spared)

    def _return_slots(self, pending: PendingFetch) -> None:
        fetch = pending.fetch
        if fetch.chunks and not pending.has_waited:
            request = CreditRequest(fetch.transfer_id, 0, _generations(fetch.grants))
            self._inbound_peers.tell(pending.key, request)

    def _request_credit(self, sending: Sending, spared: Sequence[Grant] = ()) -> None:
        """Report for how many chunks slots are of use, and which slots are of none, if that has changed."""
        due = self.sender.due(sending.key)
        if spared or due != sending.due_reported:
            sending.due_reported = due
            self._inbound_peers.tell(sending.key, CreditRequest(sending.key[1], due, _generations(spared)))

    def _arrived(self, key: TransferKey, arrived: Arrived) -> None:
        self._inbound_peers.tell(
            key,
            Landed(
                key[1],
                arrived.chunk,
                arrived.generation,
                arrived.length_bytes,
                arrived.digest,
                self.sender.sendings[key].claims.epoch,
            ),
        )

    def _finish(self, sending: Sending, now: float) -> None:
        if self._choice.take(sending):
            return
        claims = sending.claims
        claims.sending.discard(sending.key)
        if isinstance(claims, Lease) and not claims.sending:
            claims.move(LeaseEvent.LAST_ENDED)
        count_sent(self._metrics, sending)
        self._inbound_peers.tell(
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
            self.not_quiescent = {key: end for key, end in self.not_quiescent.items() if end > now}
            self.not_quiescent[sending.key] = until
        if isinstance(claims, Lease):
            if not sending.quiescent and sending.path == "direct":
                # The library may still read these blocks: no other request gets them before that is over.
                claims.busy_until = max(claims.busy_until, until)
            if not sending.error:
                claims.served.add(sending.consumer)
            self._book.end_if_due(claims, now)

    def _answer_failure(self, inbound: InboundPeer, pending: PendingFetch, reason: str) -> None:
        self._metrics.transfers.labels("sent", "refused").inc()
        logger.warning("a fetch of %s was refused: %s", pending.link, reason)
        self._inbound_peers.tell(
            pending.key, Written(pending.fetch.transfer_id, False, True, 0, 0, 0.0, reason)
        )


def _generations(grants: Sequence[Grant]) -> tuple[int, ...]:
    return tuple(grant.generation for grant in grants)
