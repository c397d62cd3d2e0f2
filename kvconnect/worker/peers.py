"""Whom we fetch from: the remote engines that D knows, its connections to their ranks, and what they owe.

Knows no load. Owned by the transfer thread.
"""

from __future__ import annotations

import ipaddress
import itertools
import logging
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Iterator, Sequence

from kvconnect.addresses import split_address
from kvconnect.cache.shard import consumer_ranks, partner_ranks
from kvconnect.config import ExtraConfig
from kvconnect.metrics import Metrics
from kvconnect.orders import RankAddress
from kvconnect.peer.allow_list import AllowList, same_host
from kvconnect.peer.channel import Channel
from kvconnect.peer.messages import Release, Side
from kvconnect.peer.session import Event, Ready, Session, State
from kvconnect.worker.breaker import BreakerEvent, BreakerState
from kvconnect.worker.loads import PeerKey
from kvconnect.worker.local import Local
from kvconnect.worker.remote import Peer, RankLink

logger = logging.getLogger(__name__)

_PAST_LINKS = 16
_KEPT_S = 300.0
"""How long after its last use the connection to a peer is made again when it breaks."""


class Peers:
    """Peers by the name that requests give them.

    Args:
        randomness: spreads the attempts to reach a peer that is gone.
    """

    def __init__(
        self,
        config: ExtraConfig,
        channel: Channel,
        local: Local,
        metrics: Metrics,
        randomness: random.Random,
    ) -> None:
        self.peers: dict[PeerKey, Peer] = {}
        self._allowed = AllowList(config.allow_peers)
        self._config = config
        self._channel = channel
        self._local = local
        self._metrics = metrics
        self._randomness = randomness
        self._warm = [known for known in map(split_address, config.warm_peers) if known is not None]
        self._owners: dict[str, Peer] = {}
        self._past: OrderedDict[tuple[str, int, int], deque[tuple[str, str]]] = OrderedDict()
        self._link_numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self.peers)

    def find(self, link: str) -> tuple[Peer, int] | None:
        """Whose connection this is: the peer and its rank."""
        peer = self._owners.get(link)
        if peer is None:
            return None
        return peer, next(rank for rank, known in peer.links.items() if known.name == link)

    def ready_link(self, key: PeerKey, rank: int, name: str) -> RankLink | None:
        """The connection of this name to a rank, if it still is the one and can be spoken over."""
        peer = self.peers.get(key)
        link = peer.links.get(rank) if peer else None
        if link is None or link.name != name or link.session.state is not State.READY:
            return None
        return link

    def tick(self, now: float) -> Iterator[tuple[Peer, int, RankLink, Event]]:
        """Let time pass on all connections: what happened, and where."""
        for peer in list(self.peers.values()):
            for rank, link in list(peer.links.items()):
                for event in link.session.tick(now):
                    yield peer, rank, link, event

    def next_deadline(self) -> float | None:
        """The time by which ``tick`` or ``advance`` has something to do."""
        times = [link.session.next_tick() for peer in self.peers.values() for link in peer.links.values()]
        times += [
            peer.breaker.retry_at
            for peer in self.peers.values()
            if 0 not in peer.links and (peer.is_warm or peer.was_met)
        ]
        return min((time for time in times if time is not None), default=None)

    def advance(self, now: float) -> None:
        """Let time pass: meet those that are to be warm, and meet again those that were lost."""
        self._warm_up(now)
        for peer in self.peers.values():
            if 0 in peer.links or not (peer.is_warm or peer.was_met) or not peer.breaker.may_try(now):
                continue
            if peer.is_warm and peer.key[0]:
                # It may come back under another name, under which it is a peer of its own.
                peer.is_warm = False
            elif peer.is_warm or now - peer.used_at < _KEPT_S:
                self._connect(peer, 0, peer.key[1], peer.key[2], now)
            else:
                peer.was_met = False

    def _warm_up(self, now: float) -> None:
        if not self._warm:
            return
        known = {peer.key[1:]: peer for peer in self.peers.values() if peer.is_warm or 0 in peer.links}
        for host, port in self._warm:
            peer = known.get((host, port)) or self.reach(("", host, port), now)
            peer.is_warm = True

    def refusal(self, key: PeerKey, now: float) -> str:
        """Why there is no use in asking a peer anything now, or nothing."""
        peer = self.peers.get(key)
        return peer.breaker.refusal(now) if peer is not None else ""

    def adopt(self, key: PeerKey, in_use: Container[PeerKey]) -> None:
        """Take a connection that was made before anybody named its engine, if it is to that engine."""
        nameless = ("", *key[1:])
        peer = self.peers.get(nameless)
        if peer is None or key in self.peers or nameless in in_use or 0 not in peer.links:
            return
        found = peer.links[0].session.peer
        if found is None or found.engine_id == key[0]:
            del self.peers[nameless]
            peer.key = key
            self.peers[key] = peer

    def reach(self, key: PeerKey, now: float) -> Peer:
        """The peer of this name; it is greeted if that was not done, and is of use."""
        peer = self.peers.get(key)
        if peer is None:
            peer = self.peers[key] = Peer.of(key)
        peer.used_at = now
        if 0 not in peer.links and peer.breaker.may_try(now):
            self._connect(peer, 0, key[1], key[2], now)
        return peer

    def _connect(self, peer: Peer, rank: int, host: str, port: int, now: float) -> RankLink:
        if peer.breaker.state is BreakerState.OPEN:
            peer.breaker.move(BreakerEvent.TRY)
        session = Session(Side.DECODE, self._local.introduce(), self._config)
        link = RankLink(f"{peer.key[0]}/{rank}#{next(self._link_numbers)}", session)
        peer.links[rank] = link
        self._owners[link.name] = peer
        self._channel.connect(link.name, host, port)
        session.greet(now)
        self.flush(link)
        return link

    def connect_rank(self, peer: Peer, rank: int, now: float) -> RankLink | None:
        """Our connection to a rank, made if there is none; None if its address is not known."""
        if rank in peer.links:
            return peer.links[rank]
        for address in peer.directory:
            if address.rank == rank:
                return self._connect(peer, rank, address.host, address.port, now)
        return None

    def meet(self, peer: Peer, rank: int, ready: Ready, now: float) -> str:
        """A rank has introduced itself. Why it is of no use, or nothing."""
        introduction, directory = ready.peer, ready.directory
        for what, named, found in (
            ("engine", peer.key[0], introduction.engine_id),
            ("rank", rank, introduction.rank),
        ):
            # A request that names no engine means whichever answers at its address.
            if named != found and named != "":
                _, host, port = peer.key
                return f"{host}:{port} is {what} {found}, the request names {named}"
        if rank == 0:
            world_size = introduction.meaning.world_size
            if not {address.rank for address in directory} >= set(range(1, world_size)):
                # Its scheduler has not told it yet where its other ranks listen. It knows soon.
                return "the peer does not know its own ranks yet"
            if refusal := self._foreign_rank(peer.key[1], directory):
                self._metrics.failures.labels("peer_not_trusted").inc()
                return refusal
            peer.world_size = world_size
            peer.directory = directory
            peer.lease_s = ready.lease_s
            peer.was_met = True
            self._route(peer, world_size)
        peer.breaker.met()
        self.tell_let_go(peer, now)
        return ""

    def _foreign_rank(self, host: str, directory: Sequence[RankAddress]) -> str:
        """Why the directory of a peer at ``host`` is not believed, or nothing: it leads to other hosts."""
        for address in directory:
            # Where rank 0 listens is known already.
            named, port = address.host, address.port
            if address.rank and not (same_host(host, named) or self._allowed.allows(named, port)):
                return (
                    f"the peer at {host} says that its rank {address.rank} listens at {named[:256]}:{port}; "
                    "accepted: its own host, and those in kv_connector_extra_config.allow_peers"
                )
        return ""

    def _route(self, peer: Peer, peer_world_size: int) -> None:
        """Work out once which of the peer's ranks each of ours fetches from."""
        rank, meaning = self._local.introduction.rank, self._local.introduction.meaning
        ours, heads = meaning.world_size, meaning.num_heads
        peer.partners = tuple(partner_ranks(rank, ours, peer_world_size, heads))
        consumers = consumer_ranks(ours, peer_world_size, heads)
        peer.consumers = {rank: len(fetching) for rank, fetching in enumerate(consumers)}

    def drop(self, peer: Peer, rank: int) -> None:
        """A connection is over, and with it what was to be said over it."""
        link = peer.links.pop(rank)
        if link.session.peer is not None:
            _, host, port = peer.key
            past = self._past.setdefault((host, port, rank), deque(maxlen=_PAST_LINKS))
            past.append((link.name, link.session.peer.incarnation))
            while len(self._past) > self._config.max_peers:
                self._past.popitem(last=False)
        del self._owners[link.name]
        self._channel.drop(link.name)
        peer.releases.pop(rank, None)
        if rank == 0:
            peer.world_size = None

    def past_links(self, peer: Peer, rank: int, incarnation: str = "") -> set[str]:
        """Our last connections to a rank at this address, but for those to the process of ``incarnation``.

        That another process answers there proves that the one before it ended, unless the address is a
        name, which may stand for many.
        """
        _, host, port = peer.key
        if incarnation and not _is_address(host):
            return set()
        return {name for name, past in self._past.get((host, port, rank), ()) if past != incarnation}

    def greet_anew(self) -> None:
        """Tell all who know us that our introduction has changed."""
        for peer in self.peers.values():
            for link in peer.links.values():
                link.session.greet_anew(self._local.introduce())
                self.flush(link)

    def failed(self, peer: Peer, reason: str, now: float) -> None:
        """A peer could not be reached, or is of no use: it is left alone for a while."""
        peer.breaker.failed(reason, self._config.retry_max_s, self._randomness, now)

    def let_go(self, key: PeerKey, handle: str, now: float) -> None:
        """Nothing will be fetched under a handle. A peer that is out of reach is told when it is back."""
        peer = self.reach(key, now)
        peer.let_go.append(handle)
        self.tell_let_go(peer, now)

    def unused_ranks(self, peer: Peer) -> list[int]:
        """Replicas that no rank of ours fetches from, and whose leases rank 0 ends for all of us."""
        if self._local.introduction.rank != 0:
            return []
        reachable = {address.rank for address in peer.directory}
        return [rank for rank, count in peer.consumers.items() if not count and rank in reachable]

    def release(self, peer: Peer, ranks: Sequence[int], handle: str, now: float) -> None:
        """Report to some ranks that no rank of ours will fetch what they hold under a handle."""
        for rank in ranks:
            peer.releases.setdefault(rank, []).append(handle)
        self.tell_let_go(peer, now)

    def tell_let_go(self, peer: Peer, now: float) -> None:
        """Tell the ranks of the peer that would have waited for us."""
        if peer.world_size is None:
            return
        handles = tuple(peer.let_go)
        peer.let_go.clear()
        for handle in handles:
            for rank in (*peer.partners, *self.unused_ranks(peer)):
                peer.releases.setdefault(rank, []).append(handle)
        for rank in list(peer.releases):
            link = self.connect_rank(peer, rank, now)
            if link is None or link.session.state is not State.READY:
                continue
            for handle in peer.releases.pop(rank):
                link.session.send(Release(handle, max(1, peer.consumers.get(rank, 0))))
            self.flush(link)

    def owe(self, owed: set[str], now: float) -> None:
        """Silence of a peer is a failure only while it owes an answer: over these connections."""
        for peer in self.peers.values():
            for link in peer.links.values():
                link.session.owe(link.name in owed, now)
                self.flush(link)

    def forget_idle(self, in_use: Callable[[], Container[PeerKey]]) -> None:
        """Keep as many peers as we may, those that are used in any case."""
        if len(self.peers) <= self._config.max_peers:
            return
        used = in_use()
        idle = sorted((peer for key, peer in self.peers.items() if key not in used), key=lambda p: p.used_at)
        for peer in idle[: len(self.peers) - self._config.max_peers]:
            for link in peer.links.values():
                del self._owners[link.name]
                self._channel.drop(link.name)
            del self.peers[peer.key]

    def flush(self, link: RankLink) -> None:
        """Send what a session has to say."""
        for frame in link.session.outgoing():
            if link.name in self._owners and not self._channel.send(link.name, frame):
                self._metrics.failures.labels("side_channel_send").inc()
                logger.warning("a message to %s could not be sent", link.name)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
