"""The rank fetches of D's loads: each fetch's messages, landing and end.

Owned by the transfer thread. When a fetch fails, slots not proven to be quiescent go into quarantine.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections import OrderedDict
from collections.abc import Container

from kvconnect.cache.region_table import RegionTable
from kvconnect.decode.landing import LandingBay
from kvconnect.decode.loads import OTHER_EPOCH, LoadRecord, RankFetch, RankFetchState
from kvconnect.decode.peers import FetchPath, Peers, RankLink
from kvconnect.errors import LayoutError, LocalError
from kvconnect.outcome import Cause, Reason
from kvconnect.peer.loss import LOSS_RULES, PeerLoss
from kvconnect.peer.messages import Accepted, Cancel, CreditRequest, Fetch, Grant, Landed, PinPrefix, Written
from kvconnect.plan.chunks import PACK_BYTES_PER_S, Chunk, RequestCutter
from kvconnect.timeline import Moment
from kvconnect.transfer.kept import ParkedRows
from kvconnect.transfer.local import without_slots
from kvconnect.transfer.parts import TransferContext

logger = logging.getLogger(__name__)

MOST_REPEATS = 4
"""How often D repeats a fetch whose chunks became void while the peer sent them, as after a preemption, or
that the peer has forgotten with this node's connection."""
_MOST_CANCELLED = 4096
"""Cancelled fetches that are remembered: the peer's messages about them are no fault."""

Opened = tuple[tuple[Chunk, ...], tuple[Grant, ...]]
AboutFetch = Accepted | Landed | CreditRequest | Written


class RankFetches:
    """All rank fetches that were sent to a peer and have not ended."""

    def __init__(self, context: TransferContext, peers: Peers) -> None:
        self.bay = LandingBay(context, peers.send)
        self._config, self._local, self._metrics = context.config, context.local, context.metrics
        self._peers, self._misused = peers, context.misused
        self._asked: dict[int, RankFetch] = {}
        self._cancelled: OrderedDict[int, str] = OrderedDict()
        self._transfer_ids = itertools.count(1)

    def __len__(self) -> int:
        return len(self._asked)

    @property
    def is_any_owed(self) -> bool:
        """A rank fetch has no answer yet: until it arrives the peer may write to landing slots."""
        return any(fetch.state is RankFetchState.ASKED for fetch in self._asked.values())

    def ask(self, fetch: RankFetch, link: RankLink, now: float) -> None:
        """Send a rank the fetch of its part of a load, or fail the load."""
        load, order, transfer_id = fetch.load, fetch.load.order, next(self._transfer_ids)
        try:
            chunks, grants = self._open(fetch, link, transfer_id)
        except LayoutError as error:
            load.fail(Cause.OTHER_LAYOUT(str(error)))
            return
        except LocalError as error:
            load.fail(Cause.INTERNAL(f"it cannot be fetched: {error}"))
            return
        except Exception as error:
            # One request's error must not end other requests.
            logger.debug("request %s could not be planned", order.request_id, exc_info=True)
            load.fail(Cause.INTERNAL(f"its chunks could not be planned: {type(error).__name__}: {error}"))
            return
        fetch.move(RankFetchState.ASKED)
        fetch.transfer_id, fetch.link = transfer_id, link.name
        self._asked[transfer_id] = fetch
        message = Fetch(
            transfer_id=transfer_id,
            handle=order.handle,
            num_tokens=order.num_tokens,
            consumers=link.peer.consumers[link.rank],
            timeout_s=max(0.001, load.deadline - now),
            chunks=chunks,
            grants=grants,
            until_s=load.deadline + link.clock_ahead_s,
            first_token=order.first_token,
        )
        self._note(fetch, Moment.FETCH_SENT, link.rank)
        if order.prefix is not None:
            self._peers.send(link.name, PinPrefix(order.handle, order.prefix, order.num_tokens))
        self._peers.send(link.name, message)

    def _note(self, fetch: RankFetch, moment: str, number: int) -> None:
        self._metrics.timeline.note(
            moment, number, handle=fetch.load.order.handle, transfer_id=fetch.transfer_id
        )

    def _open(self, fetch: RankFetch, link: RankLink, transfer_id: int) -> Opened:
        """The chunks of a fetch, and slots for the first. Raises ``LayoutError``: the caches do not fit."""
        order, fetch.landing = fetch.load.order, None
        parked = self._local.parked if order.parks else None
        packed = self.path_over(link, parked)
        if isinstance(packed, str):
            raise LayoutError(packed)
        cutter, packer = packed
        groups, num_tokens = link.share.of(order.groups), link.share.count(order.num_tokens)
        chunks = cutter.cut(groups, num_tokens)
        if not chunks:
            return (), ()
        if parked is not None:
            groups = parked.pages(groups)
        staged = packer.stage(groups, chunks, num_tokens)
        fetch.landing, grants = self.bay.open(transfer_id, fetch.load, staged, packer, link)
        return chunks, grants

    def path_over(self, link: RankLink, parked: ParkedRows | None = None) -> FetchPath | str:
        """A connection's cutter, and packer to pages or ``parked`` rows, or why the caches do not fit."""
        is_parked = parked is not None
        if is_parked and link.is_ragged:
            # The windows of a load end where the peer's blocks end, which a restore does not report.
            return "its blocks are of another length, and the model has windows"
        if is_parked not in link.paths:
            link.paths[is_parked] = self._make_path(link, None if parked is None else parked.table)
        return link.paths[is_parked]

    def _make_path(self, link: RankLink, table: RegionTable | None) -> FetchPath | str:
        """Make the path of a connection whose peer has introduced itself, to ``table`` or to the pages."""
        ours, peer = link.session.ours, link.session.peer
        slot_bytes = min(ours.slot_bytes, peer.slot_bytes) if peer is not None else 0
        try:
            if peer is None or not slot_bytes:
                raise LayoutError(without_slots("prefill" if ours.slot_bytes else "decode"))
            packer = self._local.packer(peer, ours, "target", self._config.convert_dtype, table)
        except LayoutError as error:
            return str(error)
        rate = PACK_BYTES_PER_S.get(self._local.device.type, PACK_BYTES_PER_S["cuda"])
        return RequestCutter(packer.chunker, peer.table, ours.table, slot_bytes, rate), packer

    # Messages of the peer

    def receive(self, message: AboutFetch, link: str, now: float) -> None:
        """Take a peer's message about a fetch; only the peer that received the fetch may send it."""
        fetch = self._asked.get(message.transfer_id)
        if isinstance(message, Written):
            # Also of a fetch that D has ended: its slots need wait for no quarantine any more.
            self.bay.answered(message, link, now + self._config.quarantine_s)
        if fetch is None or fetch.link != link:
            if self._cancelled.get(message.transfer_id) != link:
                who = self._peers.links.get(link, link)
                what = f"it has not been asked for transfer {message.transfer_id}"
                self._misused(who, what)
            return
        if fetch.state is not RankFetchState.ASKED:
            return
        match message:
            case Written():
                self._written(fetch, message, now)
            case Accepted(epoch=epoch):
                self._accepted(fetch, epoch)
            case CreditRequest():
                self.bay.requested(fetch.landing, message)
            case Landed():
                self._landed(fetch, message)

    def _accepted(self, fetch: RankFetch, epoch: int) -> None:
        if fetch.load.epochs.setdefault(fetch.rank, epoch) != epoch:
            fetch.load.fail(OTHER_EPOCH)

    def _landed(self, fetch: RankFetch, message: Landed) -> None:
        if message.epoch:
            # A fetch that had not to wait is accepted by its first chunk. ``Written`` has the epoch again.
            self._accepted(fetch, message.epoch)
        if fetch.load.error:
            return
        reason = self.bay.landed(fetch.landing, message)
        if reason:
            fetch.load.fail(Cause.LANDING(f"what landed is not what was asked for: {reason}"))

    def _written(self, fetch: RankFetch, written: Written, now: float) -> None:
        """The peer has ended a fetch; of one that it broke off, some batches may still be written."""
        self._note(fetch, Moment.ANSWER_RECEIVED, written.ok)
        fetch.load.touch()
        if written.ok and written.quiescent:
            self._all_written(fetch, written)
        elif not (written.again and written.quiescent and self._repeat(fetch)):
            fetch.load.fail(written.error or Cause.PROTOCOL("the prefill node ended it without a reason"))
            until = None if written.quiescent else now + self._config.quarantine_s
            self._end(fetch, until, written.unsettled)

    def _repeat(self, fetch: RankFetch) -> bool:
        """Have a fetch repeated that the peer serves no more, if it may be. Whether it is.

        Chunks that landed are discarded; it is repeated once none of them is being unpacked.
        """
        if fetch.load.error or fetch.repeats == MOST_REPEATS:
            return False
        fetch.repeats += 1
        fetch.load.epochs.pop(fetch.rank, None)
        self.bay.close(fetch.landing, None)
        self._leave(fetch, RankFetchState.MEETING)
        fetch.load.touch()
        return True

    def _all_written(self, fetch: RankFetch, written: Written) -> None:
        """The peer has written all chunks: they are valid if their epoch is that of the accepted fetch."""
        load = fetch.load
        # A fetch without an epoch had no chunk landed, and fails for that.
        if load.epochs.get(fetch.rank, written.epoch) != written.epoch:
            load.fail(OTHER_EPOCH)
            self._end(fetch, None)
            return
        moved = load.moved.setdefault(self._peers.lane(fetch.link), [0, 0])
        moved[0] += written.total_bytes
        moved[1] += written.copies
        if math.isfinite(written.seconds):
            load.seconds = max(load.seconds, written.seconds)
        load.attachment = load.attachment or written.attachment
        load.on_device &= written.on_device
        self._leave(fetch, RankFetchState.UNPACKING)
        if fetch.landing is not None:
            # The fetch needs no more slots.
            fetch.landing.due = 0

    # How a fetch goes on without a message, and ends

    def move_on(self, load: LoadRecord, now: float) -> None:
        """Advance a load's rank fetches: commit those that were unpacked, end those of a failed load."""
        for fetch in load.fetches.values():
            self._check_landing(fetch)
        for fetch in load.fetches.values() if load.error else ():
            self._wind_up(fetch, now)

    def _check_landing(self, fetch: RankFetch) -> None:
        """Commit a fetch whose chunks were all unpacked, or fail the load."""
        load, landing = fetch.load, fetch.landing
        if fetch.state is not RankFetchState.UNPACKING or fetch.is_unpacking:
            return
        self.bay.close(landing, None)
        # A fetch of nothing has no landing.
        missing = landing.missing if landing is not None else 0
        if missing or load.error:
            text = f"the prefill node reports all chunks as written, and {missing} of them did not land"
            load.fail(Cause.LANDING(text))
            self._leave(fetch, RankFetchState.FAILED)
        else:
            self._leave(fetch, RankFetchState.LANDED)

    def _wind_up(self, fetch: RankFetch, now: float) -> None:
        """End a fetch of a failed load, according to the fetch's state."""
        match fetch.state:
            case RankFetchState.MEETING if not fetch.is_unpacking:
                self._leave(fetch, RankFetchState.FAILED)
            case RankFetchState.ASKED:
                # The peer answers a cancel as soon as it has stopped; until then it may write.
                self._end(fetch, self._longest_write(fetch.load, now))
                self._peers.send(fetch.link, Cancel(fetch.transfer_id))
                self._cancelled[fetch.transfer_id] = fetch.link
                while len(self._cancelled) > _MOST_CANCELLED:
                    self._cancelled.popitem(last=False)
            case RankFetchState.UNPACKING:
                # Chunks that wait in slots for their blocks are not unpacked any more.
                self.bay.close(fetch.landing, None)
                self._check_landing(fetch)

    def _end(
        self, fetch: RankFetch, writes_until: float | None, unsettled: Container[int] | None = None
    ) -> None:
        """End a fetch that failed after it was sent. Until ``writes_until`` the peer may write to its slots.

        ``unsettled``: the generations of these slots, by the peer's report; None: all.
        """
        self.bay.close(fetch.landing, writes_until, unsettled)
        self._leave(fetch, RankFetchState.UNPACKING if fetch.is_unpacking else RankFetchState.FAILED)

    def _longest_write(self, load: LoadRecord, now: float) -> float:
        """When a silent peer's writes have ended: it may begin writes until the load's deadline."""
        return max(now, load.deadline) + self._config.quarantine_s

    def _leave(self, fetch: RankFetch, after: RankFetchState) -> None:
        """Change a fetch's state; forget its transfer number if it has ended or is to be repeated."""
        fetch.move(after)
        if fetch.over or fetch.state is RankFetchState.MEETING:
            self._asked.pop(fetch.transfer_id, None)

    # Peers that are lost

    def lose(self, link: str, loss: PeerLoss, reason: Reason, now: float) -> bool:
        """A connection has ended: fail its fetches, or have them repeated. Whether any is to be repeated."""
        is_any_again = False
        for fetch in list(self._asked.values()):
            load = fetch.load
            if fetch.link != link or fetch.state is not RankFetchState.ASKED:
                continue
            if LOSS_RULES[loss].asks_again and self._repeat(fetch):
                is_any_again = True
                continue
            load.fail(reason)
            self._end(fetch, None if LOSS_RULES[loss].asks_again else self._longest_write(load, now))
        return is_any_again
