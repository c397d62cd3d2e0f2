"""P serves fetches: each waits until its KV is computed, is sent by chunks, and is answered exactly once.

P keeps a landing slot only if a chunk can be packed for it now. P returns every other slot that D granted,
and requests credit again once more chunks can be packed. Where all chunks can be packed when the fetch
arrives, P sends no credit request. Owned by the transfer thread.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

import msgspec

from kvconnect.errors import LayoutError, PeerError
from kvconnect.metrics import count_error
from kvconnect.outcome import Cause, Reason
from kvconnect.peer.messages import (
    Accepted,
    CreditGrant,
    CreditRequest,
    Fetch,
    Grant,
    Landed,
    Written,
)
from kvconnect.prefill.calibration import LinkMeter, found_by
from kvconnect.prefill.leases import Consumer, Lease, LeaseBook, TransferKey
from kvconnect.prefill.outbox import Parcel, SlotOutbox
from kvconnect.prefill.pending_fetches import PendingFetch, PendingFetches, check_chunks
from kvconnect.prefill.send_path import SendPath, SendPaths
from kvconnect.prefill.sender import Sender, Sending
from kvconnect.timeline import Moment
from kvconnect.transfer.inbound_peers import InboundPeer, InboundPeers, rank_name
from kvconnect.transfer.link_reports import Transports, refusal
from kvconnect.transfer.orders import Results
from kvconnect.transfer.parts import TransferContext

logger = logging.getLogger(__name__)

_REVOKED = Cause.PREFILL_ENDED("the prefill was aborted while its KV was sent")
_EVICTED = Cause.EVICTED("the prefill node evicted it while it was sent")
_DEVICE_POLL_S = 2e-3
"""Seconds between two checks of a prefill that a fetch waits for. More checks would slow the prefill."""
_CALIBRATION = 0
"""The transfer id of a calibration on its connection: peers number their fetches from 1."""


class FetchService:
    """All fetches of peers: pending ones and those being served."""

    def __init__(self, context: TransferContext, book: LeaseBook, inbound_peers: InboundPeers) -> None:
        self._config, self._local, self._metrics = context.config, context.local, context.metrics
        self._randomness, self._book, self._inbound_peers = context.randomness, book, inbound_peers
        self.pending = PendingFetches(context.config, book, context.timers)
        self.sender = Sender(context, self._arrived)
        self.paths = SendPaths(context, self._peers_in_use)
        self._device_poll = context.timers.timer(self._look_at_prefills)
        # Fetches and sendings that wait for tokens which the device was given and may not have computed yet.
        self._waiting: dict[TransferKey, None] = {}
        self.not_quiescent: dict[TransferKey, float] = {}
        self._transports = Transports(context.metrics, context.repeats)
        self._repeats, self._reports = context.repeats, context.reports

    def advance(self, now: float) -> None:
        """Retry pending fetches, submit batches to the engine, answer ended fetches, request credit."""
        for pending in self.pending.take_touched():
            try:
                self.begin(pending, now)
            except Exception as error:
                count_error(self._metrics, error, "a fetch that waited")
        active = list(self.sender.active.values())
        for sending in self.sender.advance(now):
            try:
                self._finish(sending, now)
            except Exception as error:
                count_error(self._metrics, error, f"the end of transfer {sending.key[1]}")
        for sending in active:
            if sending.due_reported is not None and not sending.error and sending.key in self.sender.sendings:
                self._request_credit(sending)
            if sending.streamed and sending.lease is not None:
                self._wait_for_device(sending.lease, sending.key)
        if self._waiting:
            self._device_poll.by(now + _DEVICE_POLL_S)

    def went_on(self, lease: Lease) -> None:
        """A prefill advanced, lost its blocks, or is held: look again at its fetches."""
        self.pending.touch(lease.handle)
        for key in lease.sending:
            self.sender.touch(key)

    def _wait_for_device(self, lease: Lease, key: TransferKey) -> None:
        if lease.order is None and lease.marks:
            self._waiting[key] = None

    def _look_at_prefills(self, now: float) -> None:
        """Look again at fetches of streaming prefills: the device reports computed tokens to no thread."""
        waiting, self._waiting = self._waiting, {}
        for key in waiting:
            self.pending.touch_fetch(key)
            self.sender.touch(key)

    def begin(self, pending: PendingFetch, now: float) -> None:
        """Begin a fetch that arrived or waits, leave it pending, or answer the peer that it is refused."""
        inbound = self._inbound_peers.get(pending.link)
        if inbound is None:
            self.pending.remove(pending)
            return
        try:
            if not self._begin(inbound, pending, now):
                self._wait(pending, now)
        except PeerError as error:
            self._refuse(pending, error.reason)
        except LayoutError as error:
            self._refuse(pending, Cause.OTHER_LAYOUT(str(error)))
        except Exception as error:
            # One peer's faulty fetch must not end the fetches of others.
            logger.debug("a fetch could not be planned", exc_info=True)
            self._refuse(pending, Cause.INTERNAL(f"it could not be planned: {type(error).__name__}"))

    def _begin(self, inbound: InboundPeer, pending: PendingFetch, now: float) -> bool:
        """Begin a fetch. False: it has to wait.

        Raises:
            PeerError: the peer has no right to the request, which may wait no more, or was evicted; or the
                chunks exceed their bounds.
            LayoutError: the two caches do not fit, or the fetch names blocks that are not held.
        """
        fetch, peer = pending.fetch, inbound.peer
        if inbound.disagrees is not None:
            raise PeerError.of(inbound.disagrees)
        if (held := self._book.leases.get(fetch.handle)) is not None:
            # A lease may have expired while this thread stood still; it then serves no load any more.
            self._book.end_if_due(held, now)
        source = self._source(pending) if now < pending.deadline else None
        if source is None:
            return False
        path, streamed = self._measured_path(inbound, pending.link, now), source.order is None
        if path is None:
            return False
        if path.found.refusal:
            raise PeerError(path.found.refusal, Cause.LANE_REFUSED)
        if streamed and not path.share.is_whole:
            # The ranks keep different tokens.
            return False
        consumer = (peer.engine_id, peer.incarnation, peer.rank)
        self._claim(source, fetch, consumer, pending.key)
        check_chunks(fetch, path.packer.chunker, path.slot_bytes)
        note = functools.partial(
            self._metrics.timeline.note, handle=fetch.handle, transfer_id=fetch.transfer_id
        )
        outbox, key = SlotOutbox(source, path, self._local, fetch, note), pending.key
        sending = Sending(key, path, outbox, pending.deadline, now, source, consumer, streamed=streamed)
        spared = outbox.grant(fetch.grants)
        sending.due_reported = 0 if streamed or pending.has_waited else None
        self._note(sending, Moment.FETCH_BEGUN, len(fetch.chunks))
        self.pending.remove(pending)
        # Last, after all that can raise: a lease with a sending that never begins would never end.
        source.sending.add(key)
        self.sender.begin(sending)
        if sending.due_reported is not None:
            self._inbound_peers.send(key[0], Accepted(fetch.transfer_id, sending.epoch))
            self._request_credit(sending, spared)
        return True

    def cancel(self, key: TransferKey, reason: Reason) -> None:
        """End a fetch early, whether it is being served or pending."""
        if (early := self.pending.fetches.get(key)) is not None:
            self._refuse(early, reason)
        self.sender.cancel(key, reason)

    def cancelled(self, key: TransferKey, now: float) -> None:
        """A peer cancels a fetch. P answers even if the fetch itself never arrived."""
        known = key in self.sender.sendings or key in self.pending.fetches
        self.cancel(key, Cause.ABORTED("the decode node cancelled it"))
        if not known and now >= self.not_quiescent.get(key, 0.0):
            self._answer_failure(key, Cause.NOT_HELD("the prefill node does not know the transfer"))

    def granted(self, key: TransferKey, granted: CreditGrant) -> None:
        """A peer grants more landing slots for a fetch. P returns those that no chunk can fill yet."""
        sending = self.sender.sendings.get(key)
        if sending is not None:
            outbox = sending.outbox
            self._note(sending, Moment.CREDITS_RECEIVED, len(granted.grants))
            spared = outbox.grant(granted.grants) if isinstance(outbox, SlotOutbox) else ()
            self.sender.touch(key)
            if sending.due_reported is not None and not sending.error:
                self._request_credit(sending, spared)
        elif key in self.pending.fetches:
            self._inbound_peers.send(key[0], CreditRequest(key[1], 0, _generations(granted.grants)))

    def _source(self, early: PendingFetch) -> Lease | None:
        """The lease that can serve a fetch now: computed, or streaming with the first chunk ready."""
        lease = self._book.get(early.fetch.handle)
        if lease is None:
            return None
        if lease.order is not None:
            if not lease.is_intact:
                raise not_all(lease.num_tokens)
            return lease if lease.is_computed() else None
        return lease if early.first_tokens <= lease.advance() else None

    def _wait(self, pending: PendingFetch, now: float) -> None:
        """Leave a fetch pending; when it first has to wait, return its landing slots to D meanwhile."""
        fetch, handle, had_waited = pending.fetch, pending.fetch.handle, pending.has_waited
        if refusal := self.pending.admit(pending, now):
            raise PeerError.of(refusal)
        if not had_waited:
            if fetch.chunks:
                request = CreditRequest(fetch.transfer_id, 0, _generations(fetch.grants))
                self._inbound_peers.send(pending.link, request)
            pending.fetch = msgspec.structs.replace(fetch, grants=())
            if self._reports.has_wanted and handle in self._book.expected:
                self._reports.add(Results(wanted=((handle, fetch.first_token),)))
        if handle in self._book.leases:
            # A device, a disk and a link report their end to no thread.
            self.pending.touched[pending.key] = None
        elif (lease := self._book.expected.get(handle)) is not None:
            self._wait_for_device(lease, pending.key)

    def _claim(self, source: Lease, fetch: Fetch, consumer: Consumer, key: TransferKey) -> None:
        """Claim a lease for one rank: a fetch covers all tokens of a lease, and a rank fetches it once."""
        if key in self.sender.sendings:
            raise PeerError(f"transfer {fetch.transfer_id} of this decode rank is under way already")
        if fetch.num_tokens != source.num_tokens:
            # Another prompt, or a node that counts tokens differently: part of it is worse than none.
            text = (
                f"the prefill node holds {source.num_tokens} tokens of it, and the decode node's prompt "
                f"needs {fetch.num_tokens}"
            )
            raise PeerError(text, Cause.OTHER_PROMPT)
        if any(self.sender.sendings[other].consumer == consumer for other in source.sending):
            raise PeerError("this decode rank is being sent this request", Cause.FETCHED_BEFORE)
        source.claim(consumer, fetch.consumers)

    def _request_credit(self, sending: Sending, spared: Sequence[Grant] = ()) -> None:
        """Request credit up to ``due`` chunks and return the slots in ``spared``, if either has changed."""
        due = sending.outbox.due if isinstance(sending.outbox, SlotOutbox) else 0
        if spared or due != sending.due_reported:
            sending.due_reported = due
            self._inbound_peers.send(sending.key[0], CreditRequest(sending.key[1], due, _generations(spared)))

    def _arrived(self, sending: Sending, parcel: Parcel) -> None:
        what = parcel.chunk, parcel.grant.generation, parcel.length_bytes, parcel.ticket.digest
        message = Landed(sending.key[1], *what, sending.epoch, parcel.coded is not None)
        self._inbound_peers.send(sending.key[0], message)

    def look_at(self, inbound: InboundPeer, link: str, now: float) -> Reason | None:
        """A peer looks up a prefix: report its link's rate, too. Why there is no path to it, or None."""
        try:
            self._measured_path(inbound, link, now)
        except PeerError as error:
            return error.reason
        except LayoutError as error:
            return Cause.OTHER_LAYOUT(str(error))
        return None

    def _measured_path(self, inbound: InboundPeer, link: str, now: float) -> SendPath | None:
        """``SendPaths.path_to``, or None while the link is not calibrated: its fetches wait.

        A calibration that was cut short is repeated: D starts no load by name over a link of unknown rate.
        """
        path, key = self.paths.path_to(inbound), (link, _CALIBRATION)
        # A calibration from before the peer's latest greeting has the same key: it must end first.
        is_free = key not in self.sender.sendings
        if is_free and (probe := path.next_probe(self._local.look_at_traffic, now)) is not None:
            until = now + self._config.handshake_timeout_s
            self.sender.begin(Sending(key, path, probe, until, now))
        if not path.is_measured:
            return None
        self._announce(path, inbound, link)
        return path

    def _peers_in_use(self) -> set[str]:
        return {sending.path.name for sending in self.sender.sendings.values()}

    def _announce(self, path: SendPath, inbound: InboundPeer, link: str) -> None:
        """Report to a peer, once a connection, the lane to it, and whether P's settings refuse that lane."""
        if path.meter is None:
            refused = refusal(self._config, path.found, "prefill")
            path.found = msgspec.structs.replace(path.found, refusal=str(refused or ""))
            path.meter = LinkMeter(str(inbound), path.found, self._transports, path.calibrated_s)
            self._transports.met(str(inbound), path.found)
            self._inbound_peers.send(link, path.found)

    def _finish(self, sending: Sending, now: float) -> None:
        lease = sending.lease
        if lease is None:
            inbound, path = self._inbound_peers.get(sending.key[0]), sending.path
            if inbound is not None and path is inbound.path and (probe := path.probe) is not None:
                config = self._config
                found = found_by(probe, self._local, inbound.host, config.host)
                path.calibrated(str(sending.error or ""), found, self._metrics)
                if probe.is_whole:
                    path.calibrations.met()
                else:
                    reason = sending.error or Cause.ENGINE("a batch took too long")
                    path.calibrations.failed(reason, config.retry_max_s, self._randomness, now)
                self.pending.touch_link(sending.key[0])
                if not any(link == sending.key[0] for link, _ in self.pending.fetches):
                    # A pending fetch reports the link itself, when it begins or is refused.
                    self._announce(path, inbound, sending.key[0])
            return
        lease.sending.discard(sending.key)
        if lease.handle in self._book.revoked:
            # Before the answer: until it is sent, what arrived is not used.
            sending.stop(_REVOKED)
        if not sending.error and not lease.is_intact:
            self._metrics.failures.labels("evicted").inc()
            sending.stop(_EVICTED)
        self._note(sending, Moment.ANSWER_SENT, not sending.error)
        self._count(sending)
        self._inbound_peers.send(sending.key[0], sending.answer)
        if sending.unsettled:
            until = now + self._config.quarantine_s
            self.not_quiescent = {key: end for key, end in self.not_quiescent.items() if end > now}
            self.not_quiescent[sending.key] = until
        if not sending.error:
            lease.finished.add(sending.consumer)
            if self._repeats.logged:
                self._succeeded(sending)
        self._book.end_if_due(lease, now)

    def _succeeded(self, sending: Sending) -> None:
        """The next failure of this peer is a new one."""
        self._repeats.succeeded(rank_name(sending.consumer[0], sending.consumer[2]))
        if (inbound := self._inbound_peers.get(sending.key[0])) is not None:
            self._repeats.succeeded(str(inbound))

    def _count(self, sending: Sending) -> None:
        metrics, error = self._metrics, sending.error
        # Of a client that left nothing is logged; after "again" the peer fetches anew.
        is_cancelled = error is not None and error.cause is Cause.ABORTED
        failed = "cancelled" if is_cancelled else "again" if sending.again else "failed"
        metrics.transfers.labels("sent", failed if error else "ok").inc()
        metrics.transfer_bytes.labels("sent", sending.path.found.lane).inc(sending.total_bytes)
        metrics.copies.labels("sent").inc(sending.outbox.copies)
        metrics.transfer_seconds.labels("sent").inc(sending.seconds)
        if not error and sending.streamed:
            metrics.streamed.inc()
        if error and not is_cancelled:
            metrics.failures.labels("preempted" if sending.again else "send").inc()
            if not sending.again:
                who = rank_name(sending.consumer[0], sending.consumer[2])
                self._repeats.warn_first("send", who, f"{sending.lease} could not be sent to {who}:", error)

    def _note(self, sending: Sending, moment: str, number: int) -> None:
        handle = sending.lease.handle if sending.lease is not None else ""
        self._metrics.timeline.note(moment, number, handle=handle, transfer_id=sending.key[1])

    def _refuse(self, pending: PendingFetch, reason: Reason) -> None:
        self.pending.remove(pending)
        self._metrics.transfers.labels("sent", "refused").inc()
        if (inbound := self._inbound_peers.get(pending.link)) is not None:
            self._inbound_peers.service.refused(inbound, reason)
        self._answer_failure(pending.key, reason)

    def _answer_failure(self, key: TransferKey, reason: Reason) -> None:
        self._inbound_peers.send(key[0], Written(key[1], False, True, 0, 0, 0.0, reason))


def not_all(num_tokens: int) -> PeerError:
    """The refusal of a fetch by name whose rows hold other content now, or never held all of it."""
    return PeerError(f"not all of {num_tokens} tokens is kept under these names", Cause.EVICTED)


def _generations(grants: Sequence[Grant]) -> tuple[int, ...]:
    return tuple(grant.generation for grant in grants)
