"""D's half of a worker: asks peers for KV, and says when it has landed.

Owned by the transfer thread. Every load is reported exactly once, and never while a peer may still write
to its blocks: what could not be proven quiet waits in quarantine.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable, Sequence

from kvconnect.config import ExtraConfig
from kvconnect.errors import EngineError
from kvconnect.metrics import Metrics
from kvconnect.orders import Await, Load
from kvconnect.orders import LetGo as LetGoOrder
from kvconnect.peer.channel import Channel, LinkLost
from kvconnect.peer.loss import LOSS_RULES, PeerLoss
from kvconnect.peer.messages import (
    Accepted,
    CreditGrant,
    CreditRequest,
    Declined,
    Fetch,
    Landed,
    Message,
    Renewed,
    Written,
)
from kvconnect.peer.session import Ended, Event, Misused, Ready, Received, State
from kvconnect.worker.error_counting import count_error
from kvconnect.worker.landing import LandingBay
from kvconnect.worker.loads import LoadEvent, LoadRecord, RankFetch, RankFetchState
from kvconnect.worker.local import Local
from kvconnect.worker.peers import Peers
from kvconnect.worker.rank_fetches import RankFetches
from kvconnect.worker.remote import Peer, RankLink
from kvconnect.worker.renewals import Renewals
from kvconnect.worker.reports import Reports
from kvconnect.worker.routes import Route, make_route
from kvconnect.worker.tally import count_loaded

logger = logging.getLogger(__name__)


class DecodeSide:
    """Loads and the fetches under way.

    Args:
        randomness: spreads the attempts to reach a peer that is gone.
    """

    def __init__(
        self,
        config: ExtraConfig,
        local: Local,
        channel: Channel,
        reports: Reports,
        metrics: Metrics,
        randomness: random.Random,
    ) -> None:
        self.loads: dict[str, LoadRecord] = {}
        self.peers = Peers(config, channel, local, metrics, randomness)
        self.renewals = Renewals(config, self.peers, self.loads, metrics, reports.settled)
        self.bay = LandingBay(local.landing, config.check_digest, metrics)
        can_renew = local.engine.capabilities.can_renew
        self.rank_fetches = RankFetches(config, self.bay, self._say, metrics, can_renew=can_renew)
        self._config = config
        self._local = local
        self._reports = reports
        self._metrics = metrics
        self._queue: deque[LoadRecord] = deque()

    # Orders of the scheduler

    def load(self, order: Load, ready: Callable[[], bool], now: float) -> None:
        """Begin to fetch a request."""
        key = (order.engine_id, order.host, order.port)
        loading = LoadRecord(order, key, now, now + self._config.load_timeout_s, ready)
        self.peers.adopt(key, self.renewals.peers_in_use())
        self.loads[order.request_id] = loading
        self.renewals.load(loading)
        reason = loading.error or order.refusal or self.peers.refusal(key, now)
        if reason:
            loading.fail(reason)
            return
        self._queue.append(loading)
        # Also where it has to wait for its turn: its lease is renewed meanwhile.
        self.peers.reach(key, now)

    def wait(self, order: Await, now: float) -> None:
        """A request that may fetch has to wait for blocks: what its peer holds for it is renewed."""
        self.peers.adopt((order.engine_id, order.host, order.port), self.renewals.peers_in_use())
        self.renewals.keep(order, now)

    def abort(self, request_id: str) -> None:
        """The request is of no use any more. It is still reported, once its blocks are quiet."""
        loading = self.loads.get(request_id)
        if loading is not None:
            loading.abort()

    def let_go(self, order: LetGoOrder, now: float) -> None:
        """Tell a peer that nothing will be fetched under a handle."""
        self.renewals.end(order.handle)
        self.peers.let_go((order.engine_id, order.host, order.port), order.handle, now)

    # Frames

    def receive(self, link: str, data: bytes, now: float) -> None:
        """Take a frame of a peer."""
        found = self.peers.find(link)
        if found is None:
            return
        peer, rank = found
        rank_link = peer.links[rank]
        for event in rank_link.session.receive(data, now):
            self._handle(peer, rank, rank_link, event, now)

    def link_lost(self, lost: LinkLost, now: float) -> None:
        """A connection broke."""
        found = self.peers.find(lost.link)
        if found is None:
            return
        peer, rank = found
        _, host, port = peer.key
        if lost.reason:
            reason = f"cannot talk to {host}:{port}: {lost.reason}"
        elif lost.loss is PeerLoss.PROCESS_GONE:
            reason = f"nothing listens at {host}:{port}, the peer is gone"
        else:
            reason = f"the connection to {host}:{port} was lost"
        self._lose_rank(peer, rank, lost.loss, reason, now)

    def advance(self, now: float) -> None:
        """Let time pass: deadlines, waiting loads, and reports of what is over."""
        for peer, rank, link, event in self.peers.tick(now):
            self._handle(peer, rank, link, event, now)
        if self.rank_fetches.has_unproven(self.loads.values(), now):
            self._renew_registration()
        for transfer_id, grants in self.bay.advance(now):
            self._grant(transfer_id, CreditGrant(transfer_id, grants))
        is_any_wrong = self.bay.take_wrong()
        self._look_after(
            [load for load in self.loads.values() if is_any_wrong or load.error or load.is_due(now)], now
        )
        # After that, so that a load which ended makes room for the next one at once.
        self._admit(now)
        # What came to nothing there would wait to be reported until something else wakes us.
        self._look_after([load for load in self.loads.values() if load.error], now)
        self.renewals.advance(now)
        owed = {fetch.link for load in self.loads.values() for fetch in load.fetches.values() if fetch.owed}
        self.peers.owe(owed | self.renewals.owed(), now)
        self.peers.advance(now)
        self.peers.forget_idle(self.renewals.peers_in_use)
        self._count()

    def _look_after(self, loads: Sequence[LoadRecord], now: float) -> None:
        for loading in loads:
            try:
                self._move_on(loading, now)
            except Exception as error:
                count_error(self._metrics, error, f"request {loading.order.request_id}")

    def _move_on(self, loading: LoadRecord, now: float) -> None:
        if now >= loading.deadline and not loading.error:
            loading.fail(f"it did not arrive within {self._config.load_timeout_s} s")
        for fetch in loading.fetches.values():
            self.rank_fetches.check_landing(loading, fetch)
        if loading.error:
            self.rank_fetches.wind_up(loading, now)
            if loading.order.handle and not loading.given_back:
                # The peer need not hold the blocks until its lease is over.
                loading.given_back = True
                self.peers.let_go(loading.peer, loading.order.handle, now)
        if loading.over:
            self._finish(loading, now)

    def next_deadline(self) -> float | None:
        """The time by which ``advance`` has something to do even if nothing arrives."""
        loads = self.loads.values()
        busy = (f for loading in loads for f in loading.fetches.values() if f.state is RankFetchState.BUSY)
        times = [loading.deadline for loading in loads if not loading.error]
        times += [self.renewals.next_deadline(), *(fetch.quarantine.until for fetch in busy)]
        others = (self.peers.next_deadline(), self.bay.next_deadline())
        return min((*times, *(time for time in others if time is not None)), default=None)

    @property
    def waiting_for_writes(self) -> bool:
        """A peer may be writing to us right now."""
        return any(
            fetch.state in (RankFetchState.ASKED, RankFetchState.BUSY)
            for loading in self.loads.values()
            for fetch in loading.fetches.values()
        )

    @property
    def waiting_for_device(self) -> bool:
        """A load waits for the device to be done with its blocks, or to unpack what landed."""
        return self.bay.busy or any(not loading.ready() for loading in self._queue)

    # Peers

    def _handle(self, peer: Peer, rank: int, link: RankLink, event: Event, now: float) -> None:
        match event:
            case Ready():
                self._met(peer, rank, event, now)
            case Received(
                message=Accepted() | Declined() | Landed() | CreditRequest() | Written() as message
            ):
                self.rank_fetches.hear(message, link.name, now)
            case Received(message=Renewed() as renewed):
                self.renewals.heard(peer, rank, renewed, now)
            case Misused(reason=reason):
                self._metrics.failures.labels("peer_message").inc()
                logger.warning("peer %s: %s", peer.key, reason)
            case Ended(reason=reason, loss=loss):
                self._lose_rank(peer, rank, loss, reason, now)
        self.peers.flush(link)

    def _met(self, peer: Peer, rank: int, ready: Ready, now: float) -> None:
        reason = self.peers.meet(peer, rank, ready, now)
        if reason:
            self._lose_rank(peer, rank, PeerLoss.UNUSABLE, reason, now)
            return
        peer.links[rank].clock_ahead_s = ready.clock_s - now
        self._end_writes(PeerLoss.OTHER_INCARNATION, peer, rank, now, ready.peer.incarnation)
        self.renewals.met(peer.key, now)

    def _lose_rank(self, peer: Peer, rank: int, loss: PeerLoss, reason: str, now: float) -> None:
        """A connection is over: what hangs on it fails, or is asked for again, as ``LOSS_RULES`` has it."""
        self._metrics.failures.labels("peer_lost").inc()
        logger.warning("peer %s rank %d: %s", peer.key, rank, reason)
        rule, link = LOSS_RULES[loss], peer.links[rank]
        self.peers.drop(peer, rank)
        if rule.is_out_of_reach or link.session.peer is None:
            self.peers.failed(peer, reason, now)
            self.renewals.failed(peer.key, reason)
        elif rule.asks_again:
            # It has forgotten us, having more peers than it remembers: back only with something to ask.
            peer.was_met = False
        loads = [loading for loading in self.loads.values() if loading.peer == peer.key]
        for loading in loads:
            fetch = loading.fetches.get(rank)
            # Until the peer said how many ranks it has, a load hangs on rank 0.
            was_to_ask = rank == 0 and loading.admitted and not loading.fetches
            if was_to_ask or (fetch is not None and fetch.state is RankFetchState.MEETING):
                loading.fail(reason)
        if self.rank_fetches.lose(self.loads.values(), rank, link.name, loss, reason, now):
            self.peers.reach(peer.key, now)
        self._end_writes(loss, peer, rank, now)
        if rank == 0 and 0 not in peer.links:
            # Only rank 0 knows where the others listen: what they were not asked for cannot be asked.
            for loading in loads:
                if loading.fetches and loading.is_to_ask and not loading.error:
                    loading.fail(reason)

    def _end_writes(self, loss: PeerLoss, peer: Peer, rank: int, now: float, incarnation: str = "") -> None:
        """When writes over past connections to a rank end, but for those to ``incarnation``."""
        writes_end_s = LOSS_RULES[loss].writes_end_s
        if writes_end_s is not None and (links := self.peers.past_links(peer, rank, incarnation)):
            self.rank_fetches.hasten(self.loads.values(), links, now + writes_end_s, proven=True)

    def _renew_registration(self) -> None:
        """Keep out peers that may still write, and send all others the address of our memory now."""
        try:
            if not self._local.engine.renew_registration():
                return
        except EngineError:
            self._metrics.failures.labels("registration").inc()
            logger.exception("our memory could not be registered anew: nothing may be able to reach it")
            return
        self._metrics.failures.labels("registration_renewed").inc()
        logger.warning(
            "a peer did not say that it stopped: our memory is registered anew, without its access"
        )
        self.rank_fetches.renewed(self.loads.values())
        self.peers.greet_anew()

    # Loads

    def _admit(self, now: float) -> None:
        """Move queued loads on: meet their peer, then ask it."""
        active = sum(loading.admitted for loading in self.loads.values()) if self._queue else 0
        for _ in range(len(self._queue)):
            loading = self._queue.popleft()
            if loading.error:
                continue
            if active >= self._config.max_loads or not loading.ready():
                self._queue.append(loading)
                continue
            reason = self.peers.refusal(loading.peer, now)
            if reason:
                loading.fail(reason)
                continue
            active += 1
            loading.move(LoadEvent.ADMIT)
            loading.admitted = True
            self.peers.reach(loading.peer, now)
        for loading in self.loads.values():
            if loading.admitted and not loading.error and loading.is_to_ask:
                self._ask(loading, now)

    def _ask(self, loading: LoadRecord, now: float) -> None:
        peer = self.peers.peers.get(loading.peer)
        if peer is None or peer.world_size is None:
            return
        if not loading.fetches:
            loading.fetches = {rank: RankFetch(rank) for rank in peer.partners}
            self.peers.release(peer, self.peers.unused_ranks(peer), loading.order.handle, now)
        for fetch in loading.fetches.values():
            link = self.peers.connect_rank(peer, fetch.rank, now)
            if (
                fetch.state is not RankFetchState.MEETING
                or link is None
                or link.session.state is not State.READY
            ):
                continue
            if self.rank_fetches.is_unpacking(fetch):
                continue
            transfer_id = self.rank_fetches.new_transfer_id()
            try:
                asked = self._route(link).fetch(self.bay, loading.order, transfer_id, peer.address)
            except Exception as error:
                # What one request meets must not end what others asked for.
                logger.exception("request %s could not be asked for", loading.order.request_id)
                asked = f"it could not be planned: {type(error).__name__}: {error}"
            if isinstance(asked, str):
                loading.fail(asked)
                return
            self.rank_fetches.asked(loading, fetch, transfer_id, link.name, asked)
            link.session.send(
                Fetch(
                    transfer_id=transfer_id,
                    handle=loading.order.handle,
                    num_tokens=loading.order.num_tokens,
                    groups=asked.groups,
                    consumers=peer.consumers[fetch.rank],
                    timeout_s=max(0.001, loading.deadline - now),
                    chunks=asked.chunks,
                    grants=asked.grants,
                    until_s=loading.deadline + link.clock_ahead_s,
                )
            )
            self.peers.flush(link)

    def _route(self, link: RankLink) -> Route:
        if link.route is None:
            link.route = make_route(self._config, self._local, link.session)
            if link.route.refusal:
                logger.info("%s: the packed path is closed: %s", link.name, link.route.refusal)
        return link.route

    def _grant(self, transfer_id: int, granted: CreditGrant) -> None:
        found = self.rank_fetches.find(transfer_id)
        if found is not None and found[1].state is RankFetchState.ASKED:
            self._say(*found, granted)

    def _say(self, loading: LoadRecord, fetch: RankFetch, message: Message) -> None:
        """Tell the rank that a fetch was asked of, if that connection is still the one."""
        link = self.peers.ready_link(loading.peer, fetch.rank, fetch.link)
        if link is not None:
            link.session.send(message)
            self.peers.flush(link)

    def _finish(self, loading: LoadRecord, now: float) -> None:
        order = loading.order
        loading.move(LoadEvent.END)
        del self.loads[order.request_id]
        try:
            if not loading.admitted and loading in self._queue:
                self._queue.remove(loading)
            count_loaded(self._metrics, loading, now)
            self._metrics.loads.set(len(self.loads))
        finally:
            # Who is told finds it counted. Whatever fails: a request that is forgotten unreported is lost.
            self._reports.received(order.request_id, loading.error)
        level = logging.DEBUG if loading.aborted else logging.WARNING
        if loading.error:
            logger.log(level, "request %s was not loaded: %s", order.request_id, loading.error)

    def _count(self) -> None:
        self._metrics.loads.set(len(self.loads))
        self._metrics.loads_waiting.set(len(self._queue))
        failed = [loading.fetches.values() for loading in self.loads.values() if loading.error]
        busy = (any(fetch.state is RankFetchState.BUSY for fetch in fetches) for fetches in failed)
        self._metrics.quarantined.set(sum(busy))
