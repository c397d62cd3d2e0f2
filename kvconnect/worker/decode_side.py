"""D's half of a worker: meets peers, asks them for KV, and says when it has landed.

Owned by the mover thread. Every load is reported exactly once, and never while a peer may still write
to its blocks: what could not be proven quiet waits in quarantine.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections import deque
from collections.abc import Callable, Sequence

from kvconnect.cache.shard import consumer_ranks, partner_ranks
from kvconnect.config import ExtraConfig
from kvconnect.metrics import Metrics
from kvconnect.orders import LetGo as LetGoOrder
from kvconnect.orders import Load, RankAddress
from kvconnect.peer.channel import Channel
from kvconnect.peer.messages import CacheMeaning, Cancel, Fetch, Introduction, LetGo, Written
from kvconnect.peer.session import Ended, Misused, Ready, Received, Session, Side, State
from kvconnect.worker.ledger import Leg, LegEvent, LegState, Loading, PeerKey
from kvconnect.worker.remote import Peer, RankLink

logger = logging.getLogger(__name__)

DEAD_PEER_GRACE_S = 1.0
"""A process that is gone writes no more, but what it sent may still be on its way through our kernel."""


class DecodeSide:
    """Loads, peers and the fetches under way.

    Args:
        introduce: our introduction, made anew for every peer since the engine's card may change.
        report_received: told once per request, with the reason if it failed.
    """

    def __init__(
        self,
        config: ExtraConfig,
        channel: Channel,
        rank: int,
        meaning: CacheMeaning,
        introduce: Callable[[], Introduction],
        report_received: Callable[[str, str], None],
        metrics: Metrics,
    ) -> None:
        self.loads: dict[str, Loading] = {}
        self.peers: dict[PeerKey, Peer] = {}
        self._config = config
        self._channel = channel
        self._rank = rank
        self._meaning = meaning
        self._introduce = introduce
        self._report_received = report_received
        self._metrics = metrics
        self._queue: deque[Loading] = deque()
        self._legs: dict[int, Loading] = {}
        self._owners: dict[str, Peer] = {}
        self._transfer_ids = itertools.count(1)
        self._link_numbers = itertools.count(1)

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
        peer = self._peer((order.engine_id, order.host, order.port), now)
        peer.let_go.append(order.handle)
        self._tell_let_go(peer, now)

    # Frames

    def receive(self, link: str, data: bytes, now: float) -> None:
        """Take a frame of a peer."""
        peer = self._owners.get(link)
        if peer is None:
            return
        rank, rank_link = next((r, known) for r, known in peer.links.items() if known.name == link)
        for event in rank_link.session.receive(data, now):
            self._handle(peer, rank, rank_link, event, now)

    def lost(self, link: str, refused: bool, now: float) -> None:
        """A connection broke. ``refused``: the peer's process is gone, so nothing of it writes."""
        peer = self._owners.get(link)
        if peer is None:
            return
        _, host, port = peer.key
        reason = (
            f"nothing listens at {host}:{port}, the peer is gone"
            if refused
            else f"the connection to {host}:{port} was lost"
        )
        rank = next(r for r, known in peer.links.items() if known.name == link)
        self._lose_rank(peer, rank, reason, now, gone=refused)

    def advance(self, now: float) -> None:
        """Let time pass: deadlines, waiting loads, and reports of what is over."""
        for peer in list(self.peers.values()):
            for rank, rank_link in list(peer.links.items()):
                for event in rank_link.session.tick(now):
                    self._handle(peer, rank, rank_link, event, now)
        for loading in self.loads.values():
            if now >= loading.deadline and not loading.error:
                self._fail(loading, f"it did not arrive within {self._config.load_timeout_s} s")
            if loading.error:
                self._wind_up(loading, now)
        for loading in [loading for loading in self.loads.values() if loading.over]:
            self._finish(loading, now)
        # After that, so that a load which ended makes room for the next one at once.
        self._admit(now)
        self._owe(now)
        self._forget_idle_peers(now)
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
        for peer in self.peers.values():
            times += [tick for link in peer.links.values() if (tick := link.session.next_tick()) is not None]
        return min(times, default=None)

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
        """A load waits for the device to be done with its blocks."""
        return any(not loading.ready() for loading in self._queue)

    # Peers

    def _peer(self, key: PeerKey, now: float) -> Peer:
        peer = self.peers.setdefault(key, Peer(key))
        peer.used_at = now
        if 0 not in peer.links:
            self._connect(peer, 0, key[1], key[2], now)
        return peer

    def _connect(self, peer: Peer, rank: int, host: str, port: int, now: float) -> RankLink:
        session = Session(
            Side.DECODE,
            self._introduce(),
            max_message_bytes=self._config.max_message_bytes,
            handshake_timeout_s=self._config.handshake_timeout_s,
            peer_timeout_s=self._config.peer_timeout_s,
        )
        link = RankLink(f"{peer.key[0]}/{rank}#{next(self._link_numbers)}", session)
        peer.links[rank] = link
        self._owners[link.name] = peer
        self._channel.connect(link.name, host, port)
        session.greet(now)
        self._flush(link)
        return link

    def _connect_rank(self, peer: Peer, rank: int, now: float) -> RankLink | None:
        for address in peer.directory:
            if address.rank == rank:
                return self._connect(peer, rank, address.host, address.port, now)
        return None

    def _handle(self, peer: Peer, rank: int, link: RankLink, event: object, now: float) -> None:
        match event:
            case Ready(peer=introduction, directory=directory):
                self._meet(peer, rank, introduction, directory, now)
            case Received(message=Written() as written):
                self._written(written, link.name, now)
            case Misused(reason=reason):
                self._metrics.failures.labels("peer_message").inc()
                logger.warning("peer %s: %s", peer.key, reason)
            case Ended(reason=reason, refused=refused):
                self._lose_rank(peer, rank, reason, now, refused=refused)
        self._flush(link)

    def _meet(
        self,
        peer: Peer,
        rank: int,
        introduction: Introduction,
        directory: tuple[RankAddress, ...],
        now: float,
    ) -> None:
        for what, named, found in (
            ("engine", peer.key[0], introduction.engine_id),
            ("rank", rank, introduction.rank),
        ):
            # A request that names no engine means whichever answers at its address.
            if named != found and named != "":
                _, host, port = peer.key
                reason = f"{host}:{port} is {what} {found}, the request names {named}"
                self._lose_rank(peer, rank, reason, now)
                return
        if rank == 0:
            world_size = introduction.meaning.world_size
            if not {address.rank for address in directory} >= set(range(1, world_size)):
                # Its scheduler has not told it yet where its other ranks listen. It knows soon.
                self._lose_rank(peer, rank, "the peer does not know its own ranks yet", now)
                return
            peer.world_size = world_size
            peer.directory = directory
            self._route(peer, world_size)
        self._tell_let_go(peer, now)

    def _route(self, peer: Peer, peer_world_size: int) -> None:
        """Work out once which of the peer's ranks each of ours fetches from."""
        ours, heads = self._meaning.world_size, self._meaning.num_heads
        peer.partners = tuple(partner_ranks(self._rank, ours, peer_world_size, heads))
        consumers = consumer_ranks(ours, peer_world_size, heads)
        peer.consumers = {rank: len(fetching) for rank, fetching in enumerate(consumers)}

    def _lose_rank(
        self, peer: Peer, rank: int, reason: str, now: float, *, gone: bool = False, refused: bool = False
    ) -> None:
        """A connection is over: everything that hung on it fails, or is asked anew.

        ``gone``: the peer's process ended. ``refused``: the peer said itself that it does nothing.
        """
        self._metrics.failures.labels("peer_lost").inc()
        logger.warning("peer %s rank %d: %s", peer.key, rank, reason)
        link = peer.links.pop(rank)
        del self._owners[link.name]
        self._channel.drop(link.name)
        peer.releases.pop(rank, None)
        if rank == 0:
            peer.world_size = None
            peer.let_go.clear()
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
                self._leave(loading, leg, LegEvent.FORGET, now)
                self._peer(peer.key, now)
            elif leg.state is LegState.ASKED:
                self._fail(loading, reason)
                self._leave(loading, leg, LegEvent.FAIL if refused else LegEvent.LOSE, now)
                if gone:
                    leg.busy_until = now + DEAD_PEER_GRACE_S
            if rank == 0 and 0 not in peer.links:
                # Nobody would ask the other ranks for what has not been asked yet.
                waiting = [other for other in loading.legs.values() if other.state is LegState.MEETING]
                if waiting and not loading.error:
                    self._fail(loading, reason)

    def _forget_idle_peers(self, now: float) -> None:
        if len(self.peers) <= self._config.max_peers:
            return
        used = {loading.peer for loading in self.loads.values()}
        idle = sorted((peer for key, peer in self.peers.items() if key not in used), key=lambda p: p.used_at)
        for peer in idle[: len(self.peers) - self._config.max_peers]:
            for link in peer.links.values():
                del self._owners[link.name]
                self._channel.drop(link.name)
            del self.peers[peer.key]

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
            self._peer(loading.peer, now)
        for loading in self.loads.values():
            if loading.admitted and not loading.error:
                self._ask(loading, now)

    def _ask(self, loading: Loading, now: float) -> None:
        peer = self.peers.get(loading.peer)
        if peer is None or peer.world_size is None:
            return
        if not loading.legs:
            loading.legs = {rank: Leg(rank) for rank in peer.partners}
            self._release(peer, self._unused_ranks(peer), loading.order.handle, now)
        for leg in loading.legs.values():
            link = peer.links.get(leg.rank) or self._connect_rank(peer, leg.rank, now)
            if leg.state is not LegState.MEETING or link is None or link.session.state is not State.READY:
                continue
            leg.move(LegEvent.ASK)
            leg.transfer_id = next(self._transfer_ids)
            leg.link = link.name
            self._legs[leg.transfer_id] = loading
            link.session.send(
                Fetch(
                    transfer_id=leg.transfer_id,
                    handle=loading.order.handle,
                    num_tokens=loading.order.num_tokens,
                    groups=loading.order.groups,
                    consumers=peer.consumers[leg.rank],
                    timeout_s=max(0.001, loading.deadline - now),
                )
            )
            self._flush(link)

    def _written(self, written: Written, link: str, now: float) -> None:
        loading = self._legs.get(written.transfer_id)
        leg = next(
            (leg for leg in loading.legs.values() if leg.transfer_id == written.transfer_id)
            if loading
            else iter(()),
            None,
        )
        if loading is None or leg is None or leg.link != link:
            # Only the peer that was asked can say what became of it.
            self._metrics.failures.labels("peer_message").inc()
            logger.warning("%s answers transfer %d, which it was not asked", link, written.transfer_id)
            return
        loading.total_bytes += written.total_bytes
        loading.copies += written.copies
        if math.isfinite(written.seconds):
            loading.seconds = max(loading.seconds, written.seconds)
        if leg.state is LegState.BUSY:
            if written.quiet:
                self._leave(loading, leg, LegEvent.SETTLE, now)
            else:
                leg.busy_until = max(leg.busy_until, now + self._config.quarantine_s)
            return
        if leg.state is not LegState.ASKED:
            return
        if written.ok and written.quiet:
            self._leave(loading, leg, LegEvent.LAND, now)
            return
        self._fail(loading, written.error or "the peer gave no reason")
        if written.quiet:
            self._leave(loading, leg, LegEvent.FAIL, now)
            return
        # It has stopped submitting, so only what it could not call back is still under way.
        self._leave(loading, leg, LegEvent.LOSE, now)
        leg.busy_until = now + self._config.quarantine_s

    def _fail(self, loading: Loading, reason: str) -> None:
        loading.error = loading.error or reason

    def _wind_up(self, loading: Loading, now: float) -> None:
        """A load that failed: end its legs, each by the way that its state allows."""
        for leg in loading.legs.values():
            match leg.state:
                case LegState.MEETING:
                    self._leave(loading, leg, LegEvent.FAIL, now)
                case LegState.ASKED:
                    # The peer answers a cancel as soon as it has stopped; until then it may write.
                    self._leave(loading, leg, LegEvent.LOSE, now)
                    peer = self.peers.get(loading.peer)
                    link = peer.links.get(leg.rank) if peer else None
                    if link is not None and link.name == leg.link and link.session.state is State.READY:
                        link.session.send(Cancel(leg.transfer_id))
                        self._flush(link)
                case LegState.BUSY:
                    if now >= leg.busy_until:
                        self._metrics.failures.labels("quarantine_over").inc()
                        logger.warning(
                            "request %s: the peer did not say that it stopped; its blocks were kept "
                            "unused until nothing could arrive any more",
                            loading.order.request_id,
                        )
                        self._leave(loading, leg, LegEvent.SETTLE, now)
                case LegState.LANDED | LegState.FAILED:
                    pass

    def _leave(self, loading: Loading, leg: Leg, event: LegEvent, now: float) -> None:
        leg.move(event)
        if leg.state is LegState.BUSY:
            # A peer that we cannot hear may go on writing until the time it was given is over, which
            # is the load's deadline; what it started last may still be on its way after that.
            leg.busy_until = max(now, loading.deadline) + self._config.quarantine_s
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
            if order.handle:
                # The peer need not hold the blocks until its lease is over.
                peer = self.peers.get(loading.peer)
                if peer is not None and 0 in peer.links:
                    peer.let_go.append(order.handle)
                    self._tell_let_go(peer, now)

    def _count_ended(self, loading: Loading, now: float) -> None:
        if not loading.admitted and loading in self._queue:
            self._queue.remove(loading)
        outcome = "failed" if loading.error else "ok"
        self._metrics.transfers.labels("received", outcome).inc()
        if loading.error:
            self._metrics.failures.labels("load").inc()
        else:
            self._metrics.transfer_bytes.labels("received", "direct").inc(loading.total_bytes)
            self._metrics.copies.labels("received", "direct").inc(loading.copies)
            self._metrics.transfer_seconds.labels("received").inc(loading.seconds)
            self._metrics.load_seconds.observe(now - loading.ordered_at)
        self._metrics.loads.set(len(self.loads))

    def _unused_ranks(self, peer: Peer) -> list[int]:
        """Replicas that no rank of ours fetches from, and whose leases rank 0 ends for all of us."""
        if self._rank != 0:
            return []
        reachable = {address.rank for address in peer.directory}
        return [rank for rank, count in peer.consumers.items() if not count and rank in reachable]

    def _release(self, peer: Peer, ranks: Sequence[int], handle: str, now: float) -> None:
        for rank in ranks:
            peer.releases.setdefault(rank, []).append(handle)
        self._tell_let_go(peer, now)

    def _tell_let_go(self, peer: Peer, now: float) -> None:
        """Tell the ranks of the peer that would have waited for us."""
        if peer.world_size is None:
            return
        handles, peer.let_go = peer.let_go, []
        for handle in handles:
            for rank in (*peer.partners, *self._unused_ranks(peer)):
                peer.releases.setdefault(rank, []).append(handle)
        for rank in list(peer.releases):
            link = peer.links.get(rank) or self._connect_rank(peer, rank, now)
            if link is None or link.session.state is not State.READY:
                continue
            for handle in peer.releases.pop(rank):
                link.session.send(LetGo(handle, max(1, peer.consumers.get(rank, 0))))
            self._flush(link)

    def _owe(self, now: float) -> None:
        """Silence of a peer is a failure only while it owes an answer."""
        owed = {
            leg.link
            for loading in self.loads.values()
            for leg in loading.legs.values()
            if leg.state is LegState.ASKED
        }
        for peer in self.peers.values():
            for link in peer.links.values():
                link.session.owe(link.name in owed, now)
                self._flush(link)

    def _flush(self, link: RankLink) -> None:
        for frame in link.session.outgoing():
            if link.name in self._owners and not self._channel.send(link.name, frame):
                self._metrics.failures.labels("side_channel_send").inc()
                logger.warning("a message to %s could not be sent", link.name)

    def _count(self) -> None:
        self._metrics.loads.set(len(self.loads))
        self._metrics.loads_waiting.set(len(self._queue))
        self._metrics.quarantined.set(
            sum(
                any(leg.state is LegState.BUSY for leg in loading.legs.values())
                for loading in self.loads.values()
            )
        )
