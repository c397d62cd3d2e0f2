"""D's half of a worker: asks peers for KV, and says when it has landed.

Owned by the mover thread. Every load is reported exactly once, and never while a peer may still write
to its blocks: what could not be proven quiet waits in quarantine.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections import deque
from collections.abc import Callable

from kvconnect.config import ExtraConfig
from kvconnect.metrics import Metrics
from kvconnect.orders import LetGo as LetGoOrder
from kvconnect.orders import Load
from kvconnect.peer.channel import Channel
from kvconnect.peer.messages import (
    CacheMeaning,
    Cancel,
    Declined,
    Fetch,
    Granted,
    Introduction,
    Landed,
    Written,
)
from kvconnect.peer.session import Ended, Event, Misused, Ready, Received, State
from kvconnect.worker.landing import LandingBay
from kvconnect.worker.ledger import Leg, LegEvent, LegState, Loading
from kvconnect.worker.local import Local
from kvconnect.worker.peers import Peers
from kvconnect.worker.remote import Peer, RankLink
from kvconnect.worker.routes import Route, make_route

logger = logging.getLogger(__name__)

DEAD_PEER_GRACE_S = 1.0
"""A process that is gone writes no more, but what it sent may still be on its way through our kernel."""
MOST_REPEATS = 4
"""How often a fetch is asked for anew because the peer lost what it was sending, and began again itself."""


class DecodeSide:
    """Loads and the fetches under way.

    Args:
        introduce: our introduction, made anew for every peer since the engine's card may change.
        local: our pages, and the slots that land beside them.
        report_received: told once per request, with the reason if it failed.
    """

    def __init__(
        self,
        config: ExtraConfig,
        channel: Channel,
        rank: int,
        meaning: CacheMeaning,
        introduce: Callable[[], Introduction],
        local: Local,
        report_received: Callable[[str, str], None],
        metrics: Metrics,
    ) -> None:
        self.loads: dict[str, Loading] = {}
        self.peers = Peers(config, channel, rank, meaning, introduce, metrics)
        self.bay = LandingBay(local.landing, config.check_digest, metrics)
        self._config = config
        self._local = local
        self._report_received = report_received
        self._metrics = metrics
        self._queue: deque[Loading] = deque()
        self._legs: dict[int, Loading] = {}
        self._transfer_ids = itertools.count(1)

    # Orders of the scheduler

    def load(self, order: Load, ready: Callable[[], bool], now: float) -> None:
        """Begin to fetch a request."""
        key = (order.engine_id, order.host, order.port)
        loading = Loading(order, key, now, now + self._config.load_timeout_s, ready)
        self.loads[order.request_id] = loading
        if order.refusal:
            loading.error = order.refusal
        else:
            self._queue.append(loading)

    def abort(self, request_id: str) -> None:
        """The request is of no use any more. It is still reported, once its blocks are quiet."""
        loading = self.loads.get(request_id)
        if loading is not None:
            self._fail(loading, "the request was aborted")

    def let_go(self, order: LetGoOrder, now: float) -> None:
        """Tell a peer that nothing will be fetched under a handle."""
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

    def lost(self, link: str, refused: bool, now: float) -> None:
        """A connection broke. ``refused``: the peer's process is gone, so nothing of it writes."""
        found = self.peers.find(link)
        if found is None:
            return
        peer, rank = found
        _, host, port = peer.key
        reason = (
            f"nothing listens at {host}:{port}, the peer is gone"
            if refused
            else f"the connection to {host}:{port} was lost"
        )
        self._lose_rank(peer, rank, reason, now, gone=refused)

    def advance(self, now: float) -> None:
        """Let time pass: deadlines, waiting loads, and reports of what is over."""
        for peer, rank, link, event in self.peers.tick(now):
            self._handle(peer, rank, link, event, now)
        for transfer_id, grants in self.bay.advance(now):
            self._grant(transfer_id, Granted(transfer_id, grants))
        for loading in self.loads.values():
            if now >= loading.deadline and not loading.error:
                self._fail(loading, f"it did not arrive within {self._config.load_timeout_s} s")
            for leg in loading.legs.values():
                self._check_landing(loading, leg, now)
            if loading.error:
                self._wind_up(loading, now)
        for loading in [loading for loading in self.loads.values() if loading.over]:
            self._finish(loading, now)
        # After that, so that a load which ended makes room for the next one at once.
        self._admit(now)
        owed = {leg.link for load in self.loads.values() for leg in load.legs.values() if leg.owed}
        self.peers.owe(owed, now)
        self.peers.forget_idle({loading.peer for loading in self.loads.values()})
        self._count()

    def next_deadline(self) -> float | None:
        """The time by which ``advance`` has something to do even if nothing arrives."""
        times = [loading.deadline for loading in self.loads.values() if not loading.error]
        times += [
            leg.busy_until
            for loading in self.loads.values()
            for leg in loading.legs.values()
            if leg.state is LegState.BUSY
        ]
        others = (self.peers.next_deadline(), self.bay.next_deadline())
        return min((*times, *(time for time in others if time is not None)), default=None)

    @property
    def waiting_for_writes(self) -> bool:
        """A peer may be writing to us right now."""
        return any(
            leg.state in (LegState.ASKED, LegState.BUSY)
            for loading in self.loads.values()
            for leg in loading.legs.values()
        )

    @property
    def waiting_for_device(self) -> bool:
        """A load waits for the device to be done with its blocks, or to unpack what landed."""
        return self.bay.busy or any(not loading.ready() for loading in self._queue)

    # Peers

    def _handle(self, peer: Peer, rank: int, link: RankLink, event: Event, now: float) -> None:
        match event:
            case Ready(peer=introduction, directory=directory):
                reason = self.peers.meet(peer, rank, introduction, directory, now)
                if reason:
                    self._lose_rank(peer, rank, reason, now)
            case Received(message=Declined() | Landed() | Written() as message):
                self._hear(message, link.name, now)
            case Misused(reason=reason):
                self._metrics.failures.labels("peer_message").inc()
                logger.warning("peer %s: %s", peer.key, reason)
            case Ended(reason=reason, refused=refused):
                self._lose_rank(peer, rank, reason, now, refused=refused)
        self.peers.flush(link)

    def _lose_rank(
        self, peer: Peer, rank: int, reason: str, now: float, *, gone: bool = False, refused: bool = False
    ) -> None:
        """A connection is over: everything that hung on it fails, or is asked anew.

        ``gone``: the peer's process ended. ``refused``: the peer said itself that it does nothing.
        """
        self._metrics.failures.labels("peer_lost").inc()
        logger.warning("peer %s rank %d: %s", peer.key, rank, reason)
        self.peers.drop(peer, rank)
        for loading in self.loads.values():
            if loading.peer != peer.key:
                continue
            leg = loading.legs.get(rank)
            if leg is None:
                if rank == 0 and loading.admitted and not loading.legs:
                    self._fail(loading, reason)
            elif leg.state is LegState.MEETING:
                self._fail(loading, reason)
            elif leg.state is LegState.ASKED and refused and not loading.met_again and not loading.error:
                loading.met_again = True
                self.bay.close(leg.transfer_id, None)
                self._leave(loading, leg, LegEvent.FORGET)
                self.peers.reach(peer.key, now)
            elif leg.state is LegState.ASKED:
                self._fail(loading, reason)
                # A process that is gone writes no more; one that only cannot be heard may go on.
                until = now + DEAD_PEER_GRACE_S if gone else self._longest_write(loading, now)
                self._end(loading, leg, None if refused else until)
            if rank == 0 and 0 not in peer.links:
                # Nobody would ask the other ranks for what has not been asked yet.
                waiting = [other for other in loading.legs.values() if other.state is LegState.MEETING]
                if waiting and not loading.error:
                    self._fail(loading, reason)

    # Loads

    def _admit(self, now: float) -> None:
        """Move queued loads on: meet their peer, then ask it."""
        active = sum(loading.admitted for loading in self.loads.values())
        for _ in range(len(self._queue)):
            loading = self._queue.popleft()
            if loading.error:
                continue
            if active >= self._config.max_loads or not loading.ready():
                self._queue.append(loading)
                continue
            active += 1
            loading.admitted = True
            self.peers.reach(loading.peer, now)
        for loading in self.loads.values():
            if loading.admitted and not loading.error:
                self._ask(loading, now)

    def _ask(self, loading: Loading, now: float) -> None:
        peer = self.peers.peers.get(loading.peer)
        if peer is None or peer.world_size is None:
            return
        if not loading.legs:
            loading.legs = {rank: Leg(rank) for rank in peer.partners}
            self.peers.release(peer, self.peers.unused_ranks(peer), loading.order.handle, now)
        for leg in loading.legs.values():
            link = self.peers.connect_rank(peer, leg.rank, now)
            if leg.state is not LegState.MEETING or link is None or link.session.state is not State.READY:
                continue
            if self._is_unpacking(leg):
                continue
            transfer_id = next(self._transfer_ids)
            try:
                fetch = self._route(link).fetch(self.bay, loading.order, transfer_id)
            except Exception as error:
                # What one request meets must not end what others asked for.
                logger.exception("request %s could not be asked for", loading.order.request_id)
                fetch = f"it could not be planned: {type(error).__name__}: {error}"
            if isinstance(fetch, str):
                self._fail(loading, fetch)
                return
            leg.move(LegEvent.ASK)
            leg.transfer_id = transfer_id
            leg.link = link.name
            leg.path = fetch.only_path
            self._legs[transfer_id] = loading
            link.session.send(
                Fetch(
                    transfer_id=transfer_id,
                    handle=loading.order.handle,
                    num_tokens=loading.order.num_tokens,
                    groups=fetch.groups,
                    consumers=peer.consumers[leg.rank],
                    timeout_s=max(0.001, loading.deadline - now),
                    chunks=fetch.chunks,
                    grants=fetch.grants,
                )
            )
            self.peers.flush(link)

    def _route(self, link: RankLink) -> Route:
        if link.route is None:
            link.route = make_route(self._config, self._local, link.session)
            if link.route.refusal:
                logger.info("%s: the packed path is closed: %s", link.name, link.route.refusal)
        return link.route

    def _grant(self, transfer_id: int, granted: Granted) -> None:
        loading = self._legs.get(transfer_id)
        for leg in loading.legs.values() if loading else ():
            if loading is not None and leg.transfer_id == transfer_id and leg.state is LegState.ASKED:
                link = self.peers.ready_link(loading.peer, leg.rank, leg.link)
                if link is not None:
                    link.session.send(granted)
                    self.peers.flush(link)

    def _hear(self, message: Declined | Landed | Written, link: str, now: float) -> None:
        """A peer says something about a fetch. Only the peer that was asked can."""
        loading = self._legs.get(message.transfer_id)
        legs = loading.legs.values() if loading else ()
        leg = next((leg for leg in legs if leg.transfer_id == message.transfer_id), None)
        if loading is None or leg is None or leg.link != link:
            # Of a fetch that is over for us. Whether slots may be lent again is all that is left to hear.
            if not self.bay.hear(message.transfer_id, link, isinstance(message, Written) and message.quiet):
                self._metrics.failures.labels("peer_message").inc()
                logger.warning("%s speaks of transfer %d, which it was not asked", link, message.transfer_id)
            return
        match message:
            case Declined():
                if leg.state is LegState.ASKED and leg.path == "":
                    leg.path = "direct"
                    self.bay.close(leg.transfer_id, None)
            case Landed():
                self._landed(loading, leg, message)
            case Written():
                self._written(loading, leg, message, now)

    def _landed(self, loading: Loading, leg: Leg, message: Landed) -> None:
        if leg.state is not LegState.ASKED or loading.error:
            return
        reason = self.bay.landed(message)
        if reason:
            self._metrics.failures.labels("landing").inc()
            self._fail(loading, f"what landed is not what was asked for: {reason}")
        elif leg.path == "":
            leg.path = "packed"

    def _written(self, loading: Loading, leg: Leg, written: Written, now: float) -> None:
        if leg.state is LegState.BUSY:
            if written.quiet:
                self.bay.settle(leg.transfer_id)
                self._leave(loading, leg, LegEvent.SETTLE)
            else:
                leg.busy_until = max(leg.busy_until, now + self._config.quarantine_s)
            return
        if leg.state is LegState.UNPACKING and written.quiet:
            # It failed before this; its slots need not wait for our kernel, nor for time to prove it.
            self.bay.settle(leg.transfer_id)
        if leg.state is not LegState.ASKED:
            return
        if written.ok and written.quiet:
            moved = loading.moved.setdefault(leg.path or "direct", [0, 0])
            moved[0] += written.total_bytes
            moved[1] += written.copies
            if math.isfinite(written.seconds):
                loading.seconds = max(loading.seconds, written.seconds)
            if leg.path == "direct":
                self.bay.close(leg.transfer_id, None)
                self._leave(loading, leg, LegEvent.LAND)
            else:
                leg.move(LegEvent.ARRIVE)
            return
        if written.again and written.quiet and not loading.error and leg.repeats < MOST_REPEATS:
            # Nothing that landed counts. It is asked for anew once none of it is being unpacked any more.
            leg.repeats += 1
            self.bay.close(leg.transfer_id, None)
            self._leave(loading, leg, LegEvent.REPEAT)
            return
        self._fail(loading, written.error or "the peer gave no reason")
        # It has stopped submitting, so only what it could not call back is still under way.
        self._end(loading, leg, None if written.quiet else now + self._config.quarantine_s)

    def _check_landing(self, loading: Loading, leg: Leg, now: float) -> None:
        """What landed is unpacked: commit it, or fail."""
        landing = self.bay.find(leg.transfer_id)
        if landing is not None and landing.error and leg.state in (LegState.ASKED, LegState.UNPACKING):
            self._fail(loading, landing.error)
        if leg.state is not LegState.UNPACKING or (landing is not None and not landing.idle):
            return
        if landing is not None and landing.complete and not loading.error:
            self.bay.close(leg.transfer_id, None)
            self._leave(loading, leg, LegEvent.LAND)
            return
        missing = "its" if landing is None else len(landing.chunks) - landing.committed
        self._fail(loading, f"the peer says that all is written, but {missing} chunks did not land")
        self.bay.close(leg.transfer_id, None)
        self._leave(loading, leg, LegEvent.FAIL)

    def _is_unpacking(self, leg: Leg) -> bool:
        """A kernel of ours works for what was asked last, which may be over for the peer."""
        landing = self.bay.find(leg.transfer_id)
        return landing is not None and not landing.idle

    def _fail(self, loading: Loading, reason: str) -> None:
        loading.error = loading.error or reason

    def _end(self, loading: Loading, leg: Leg, writes_until: float | None) -> None:
        """End a leg that failed after it was asked. ``writes_until``: the peer may write until then.

        Over the packed path a peer can only write to slots: they go to quarantine, our pages are ours.
        """
        unpacking = self._is_unpacking(leg)
        self.bay.close(leg.transfer_id, writes_until, leg.link)
        if leg.path == "packed":
            self._leave(loading, leg, LegEvent.ARRIVE if unpacking else LegEvent.FAIL)
        elif writes_until is None:
            self._leave(loading, leg, LegEvent.FAIL)
        else:
            self._leave(loading, leg, LegEvent.LOSE)
            leg.busy_until = writes_until

    def _longest_write(self, loading: Loading, now: float) -> float:
        """When a peer that we cannot hear has stopped for sure.

        It may go on until the time that it was given is over, which is the load's deadline; what it
        started last may still be on its way after that.
        """
        return max(now, loading.deadline) + self._config.quarantine_s

    def _wind_up(self, loading: Loading, now: float) -> None:
        """A load that failed: end its legs, each by the way that its state allows."""
        for leg in loading.legs.values():
            match leg.state:
                case LegState.MEETING:
                    if not self._is_unpacking(leg):
                        self._leave(loading, leg, LegEvent.FAIL)
                case LegState.ASKED:
                    # The peer answers a cancel as soon as it has stopped; until then it may write.
                    self._end(loading, leg, self._longest_write(loading, now))
                    link = self.peers.ready_link(loading.peer, leg.rank, leg.link)
                    if link is not None:
                        link.session.send(Cancel(leg.transfer_id))
                        self.peers.flush(link)
                case LegState.BUSY:
                    if now >= leg.busy_until:
                        self._metrics.failures.labels("quarantine_over").inc()
                        logger.warning(
                            "request %s: the peer did not say that it stopped; its blocks were kept "
                            "unused until nothing could arrive any more",
                            loading.order.request_id,
                        )
                        self._leave(loading, leg, LegEvent.SETTLE)
                case LegState.UNPACKING | LegState.LANDED | LegState.FAILED:
                    pass

    def _leave(self, loading: Loading, leg: Leg, event: LegEvent) -> None:
        leg.move(event)
        if leg.over or leg.state is LegState.MEETING:
            self._legs.pop(leg.transfer_id, None)

    def _finish(self, loading: Loading, now: float) -> None:
        order = loading.order
        del self.loads[order.request_id]
        try:
            self._count_ended(loading, now)
        finally:
            # Whoever hears of it finds it counted. Whatever fails: a request that is forgotten
            # unreported is lost.
            self._report_received(order.request_id, loading.error)
        if loading.error:
            logger.warning("request %s was not loaded: %s", order.request_id, loading.error)
            peer = self.peers.peers.get(loading.peer)
            if order.handle and peer is not None and 0 in peer.links:
                # The peer need not hold the blocks until its lease is over.
                self.peers.let_go(peer.key, order.handle, now)

    def _count_ended(self, loading: Loading, now: float) -> None:
        if not loading.admitted and loading in self._queue:
            self._queue.remove(loading)
        outcome = "failed" if loading.error else "ok"
        self._metrics.transfers.labels("received", outcome).inc()
        if loading.error:
            self._metrics.failures.labels("load").inc()
        else:
            for path, (total_bytes, copies) in loading.moved.items():
                self._metrics.transfer_bytes.labels("received", path).inc(total_bytes)
                self._metrics.copies.labels("received", path).inc(copies)
            self._metrics.transfer_seconds.labels("received").inc(loading.seconds)
            self._metrics.load_seconds.observe(now - loading.ordered_at)
        self._metrics.loads.set(len(self.loads))

    def _count(self) -> None:
        self._metrics.loads.set(len(self.loads))
        self._metrics.loads_waiting.set(len(self._queue))
        self._metrics.quarantined.set(
            sum(
                any(leg.state is LegState.BUSY for leg in loading.legs.values())
                for loading in self.loads.values()
            )
        )
