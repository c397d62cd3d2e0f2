"""The remote engines that D fetches from: D's connections to their ranks, and releases to be sent.

Knows no load. Owned by the transfer thread.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field

from kvconnect.addresses import RankAddress, join_address, split_address
from kvconnect.cache.shard import Topology, partner_ranks
from kvconnect.engine.lanes import Transport
from kvconnect.outcome import Cause, Reason
from kvconnect.pack.packer import Packer
from kvconnect.peer.agreement import fills_windows, target_share
from kvconnect.peer.allow_list import AllowList, same_host
from kvconnect.peer.loss import PeerLoss
from kvconnect.peer.messages import Introduction, Message, Release, Side, Welcome
from kvconnect.peer.session import Event, Session, SessionState
from kvconnect.plan.blocks import WHOLE, Share
from kvconnect.plan.chunks import RequestCutter
from kvconnect.transfer.breaker import Breaker
from kvconnect.transfer.orders import PeerKey
from kvconnect.transfer.parts import Timer, TransferContext

_MOST_LET_GO = 1024
"""Released handles kept for a peer out of reach. The leases of older ones expire."""
_KEPT_S = 300.0
"""Seconds after its last use in which a peer's broken connection is made again."""

FetchPath = tuple[RequestCutter, Packer]
"""The cutter, which divides a request into chunks for the peer to send, and the packer that unpacks them."""


@dataclass(eq=False)
class RankLink:
    """D's connection to one rank of a peer, at ``address``.

    ``paths``: made for the first fetch, or the reason why the caches do not fit, to pages and, under True, to
    rows of host memory. ``was_met``: the rank has introduced itself. ``share``: the tokens that both ranks
    keep. ``clock_ahead_s``: the rank's clock is ahead of D's by at least this. ``found``: the lane and its
    rate; ``refusal``: why settings refuse the lane. ``is_ragged``: see ``Results``.
    """

    name: str
    peer: Peer
    rank: int
    address: str
    session: Session
    timer: Timer
    paths: dict[bool, FetchPath | str] = field(default_factory=dict)
    clock_ahead_s: float = 0.0
    was_met: bool = False
    share: Share = WHOLE
    found: Transport | None = None
    refusal: Reason | None = None
    is_ragged: bool = False

    def __str__(self) -> str:
        engine_id = self.peer.key[0] or (self.session.peer.engine_id if self.session.peer else "")
        return f"rank {self.rank} of prefill node {engine_id}{' ' * bool(engine_id)}at {self.address}"

    @property
    def is_ready(self) -> bool:
        """Messages can be sent over it."""
        return self.session.state is SessionState.READY

    def is_before(self, link: RankLink, incarnation: str) -> bool:
        """It has ended, and led to where ``link`` leads, but to another process than ``incarnation``."""
        is_over = self.peer.links.get(self.rank) is not self
        is_alike = (self.peer.address, self.rank) == (link.peer.address, link.rank)
        known = self.session.peer
        return is_over and is_alike and (known is None or known.incarnation != incarnation)


@dataclass(eq=False)
class Peer:
    """A remote engine: its ranks, and the messages that wait for a connection to it.

    ``partners``: the ranks that this rank fetches from; ``unused``: replicas whose leases this rank ends.
    ``let_go``: released handles; ``releases``: the same by rank, once the ranks are known. ``lease_s``: the
    seconds after which the peer ends a lease without renewal.
    ``was_met``: a lost connection is to be made again; ``is_warm``: the same, in any case, by the operator's
    settings. ``is_whole``: no connection was lost since the peer was met. ``last_loss``: when, how and why a
    connection was last lost. ``lanes`` is open while settings refuse the lane of one of its ranks,
    ``breaker`` while it is out of reach; a greeting resets only the latter. ``timer`` fires when the peer is
    to be met again.
    """

    key: PeerKey
    timer: Timer
    breaker: Breaker = field(default_factory=Breaker)
    lanes: Breaker = field(default_factory=Breaker)
    links: dict[int, RankLink] = field(default_factory=dict)
    directory: tuple[RankAddress, ...] = ()
    partners: tuple[int, ...] = ()
    unused: tuple[int, ...] = ()
    consumers: Counter[int] = field(default_factory=Counter)
    let_go: deque[str] = field(default_factory=lambda: deque(maxlen=_MOST_LET_GO))
    releases: dict[int, list[str]] = field(default_factory=dict)
    used_at: float = 0.0
    lease_s: float = 0.0
    was_met: bool = False
    is_warm: bool = False
    is_whole: bool = True
    last_loss: tuple[float, PeerLoss, Reason] | None = None

    def refusal(self, now: float) -> Reason | None:
        """Why D should send the peer no request now, or None."""
        if not self.breaker.failures and not self.lanes.failures:
            return None
        return self.breaker.refusal(now) or (self.lanes.reason if self.lanes.refusal(now) else None)

    @property
    def address(self) -> str:
        """The holder of slots granted to this peer, under any engine id: host and port of rank 0."""
        _, host, port = self.key
        return f"{host}:{port}"

    @property
    def is_ready(self) -> bool:
        """Rank 0 is connected, and has sent the directory of the peer's ranks."""
        return 0 in self.links and self.links[0].is_ready

    @property
    def is_to_meet(self) -> bool:
        """The peer is not connected, and has to be."""
        return 0 not in self.links and (self.is_warm or self.was_met)


class Peers:
    """Peers by the key that requests give, and open connections by their own names.

    ``happened`` is called with events of a connection that only the passing of time causes. ``in_use``
    returns the peers of requests under way.
    """

    def __init__(
        self,
        context: TransferContext,
        happened: Callable[[RankLink, Event, float], None],
        in_use: Callable[[], Container[PeerKey]],
    ) -> None:
        self.peers: dict[PeerKey, Peer] = {}
        self.links: dict[str, RankLink] = {}
        self._config, self._channel, self._local = context.config, context.channel, context.local
        self._send, self._randomness, self._timers = context.send, context.randomness, context.timers
        config = context.config
        self._allowed = AllowList(config.allow_peers)
        self._happened, self._in_use = happened, in_use
        # Sources are warm, to answer the first lookup; a list for all nodes may contain this node's own
        # address.
        warm = map(split_address, (*config.warm_peers, *config.sources))
        self._warm = [known for known in warm if known is not None and known != (config.host, config.port)]
        self._warming = context.timers.timer(self._warm_all)
        if self._warm:
            self._warming.at(-math.inf)
        self._link_numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self.peers)

    def send(self, link: str, message: Message) -> None:
        """Send a message over the named connection, if that is open and ready."""
        found = self.links.get(link)
        if found is not None and found.is_ready:
            found.session.send(message)
            self.flush(found)

    def keep_time(self, link: RankLink) -> None:
        """Set a connection's timer anew after a message: its time to be silent starts again."""
        if link.name in self.links:
            link.timer.at(link.session.next_tick())

    def _let_pass(self, link: RankLink, now: float) -> None:
        for event in link.session.tick(now):
            self._happened(link, event, now)
        self.flush(link)
        self.keep_time(link)

    def _plan_meeting(self, peer: Peer, now: float) -> None:
        if peer.is_to_meet:
            peer.timer.at(max(now, peer.breaker.retry_at))

    def _meet_again(self, peer: Peer, now: float) -> None:
        """Meet a lost peer again, if it was used lately or is to be warm."""
        if not peer.is_to_meet:
            return
        if not peer.breaker.may_try(now):
            peer.timer.at(peer.breaker.retry_at)
            return
        host, port = peer.key[1:]
        if peer.is_warm and peer.key[0]:
            # It may come back with another engine id, as a peer of its own.
            peer.is_warm = False
            self._warm_up(host, port, now)
        if peer.is_warm or now - peer.used_at < _KEPT_S:
            self._connect(peer, 0, host, port, now)
        else:
            peer.was_met = False

    def _warm_all(self, now: float) -> None:
        for host, port in self._warm:
            self._warm_up(host, port, now)

    def _warm_up(self, host: str, port: int, now: float) -> None:
        known = (peer for peer in self.peers.values() if peer.key[1:] == (host, port))
        met = next((peer for peer in known if peer.is_warm or 0 in peer.links), None)
        peer = met or self.reach(("", host, port), now)
        peer.is_warm = True
        self._plan_meeting(peer, now)

    def refusal(self, key: PeerKey, now: float) -> Reason | None:
        """Why D should send a peer no request now, or None."""
        peer = self.peers.get(key)
        return peer.refusal(now) if peer is not None else None

    def lane(self, link: str) -> str:
        """The lane of the named connection, "unknown" before it is reported."""
        found = self.links[link].found if link in self.links else None
        return "unknown" if found is None else found.lane

    def reach(self, key: PeerKey, now: float) -> Peer:
        """The peer of this key; D connects to it if there is no connection and its breaker permits."""
        peer = self.find(key) or self._remember(key)
        peer.used_at = now
        if 0 not in peer.links and peer.breaker.may_try(now):
            self._connect(peer, 0, key[1], key[2], now)
        return peer

    def find(self, key: PeerKey) -> Peer | None:
        """The peer of this key, if D remembers it, also by its address alone."""
        return self.peers.get(key) or self._adopt(key)

    def _adopt(self, key: PeerKey) -> Peer | None:
        """The peer of a connection made before its engine id was known, if it leads to that engine."""
        nameless = ("", *key[1:])
        peer = self.peers.get(nameless)
        if peer is None or 0 not in peer.links or nameless in self._in_use():
            return None
        found = peer.links[0].session.peer
        if found is not None and found.engine_id != key[0]:
            return None
        del self.peers[nameless]
        peer.key, self.peers[key] = key, peer
        return peer

    def _remember(self, key: PeerKey) -> Peer:
        peer = Peer(key, self._timers.timer(lambda now: self._meet_again(peer, now)))
        self.peers[key] = peer
        return peer

    def _connect(self, peer: Peer, rank: int, host: str, port: int, now: float) -> RankLink:
        peer.breaker.tried()
        session = Session(Side.DECODE, self._local.introduce(), self._config)
        name = f"{peer.key[0]}/{rank}#{next(self._link_numbers)}"
        timer = self._timers.timer(lambda now: self._let_pass(link, now))
        link = RankLink(name, peer, rank, join_address(host, port), session, timer)
        peer.links[rank] = self.links[link.name] = link
        self._channel.connect(link.name, host, port)
        session.greet(now)
        self.keep_time(link)
        self.flush(link)
        return link

    def connect_rank(self, peer: Peer, rank: int, now: float) -> RankLink | None:
        """The connection to a rank, made if there is none; None if it is not ready, or has no address."""
        link = peer.links.get(rank)
        for address in peer.directory if link is None else ():
            if address.rank == rank:
                link = self._connect(peer, rank, address.host, address.port, now)
                break
        return link if link is not None and link.is_ready else None

    def meet(self, link: RankLink, welcome: Welcome, now: float) -> Reason | None:
        """Take a rank's introduction. Returns why the rank is unusable, or None."""
        peer, introduction = link.peer, welcome.introduction
        engine_id, host, port = peer.key
        for what, named, found in (
            ("engine", engine_id, introduction.engine_id),
            ("rank", link.rank, introduction.rank),
        ):
            # A request without an engine id accepts any engine at its address.
            if named != found and named != "":
                return Cause.NOT_HELD(
                    f"{what} {found} serves at {join_address(host, port)} now, and the request names "
                    f"{named}: the prefill node was restarted"
                )
        if link.rank == 0:
            topology = introduction.meaning.topology
            if not {address.rank for address in welcome.directory} >= set(range(1, topology.size)):
                # The peer's scheduler half has not yet sent rank 0 the other ranks' addresses.
                return Cause.OUT_OF_REACH("the prefill node is starting: it does not know its own ranks yet")
            if refusal := self._foreign_rank(host, welcome.directory):
                return Cause.NOT_TRUSTED(refusal)
            peer.directory, peer.lease_s, peer.was_met = welcome.directory, welcome.lease_s, True
            _match_ranks(peer, link.session.ours, topology)
        link.share = target_share(introduction, link.session.ours)
        link.clock_ahead_s = welcome.clock_s - now
        link.is_ragged = not fills_windows(introduction, link.session.ours)
        peer.breaker.met()
        self._send_releases(peer, now)
        return None

    def _foreign_rank(self, host: str, directory: Sequence[RankAddress]) -> str:
        """Why a peer's directory is refused: it names other hosts than ``host``. Empty if accepted."""
        for address in directory:
            # The address of rank 0 is known already.
            named, port = address.host, address.port
            if address.rank and not (same_host(host, named) or self._allowed.allows(named, port)):
                return (
                    f"the prefill node at {host} reports that its rank {address.rank} listens at "
                    f"{named[:256]}:{port}; accepted: its own host, and those in "
                    "kv_connector_extra_config.allow_peers of the decode node"
                )
        return ""

    def drop(self, link: RankLink, now: float) -> None:
        """Drop a connection that has ended, with the messages queued for it."""
        del link.peer.links[link.rank]
        link.peer.releases.pop(link.rank, None)
        self._close(link)
        self._plan_meeting(link.peer, now)

    def _close(self, link: RankLink) -> None:
        del self.links[link.name]
        link.timer.cancel()
        self._channel.drop(link.name)

    def greet_anew(self) -> None:
        """Send D's introduction, which has changed, to all greeted peers."""
        for link in self.links.values():
            link.session.greet_anew(self._local.introduce())
            self.flush(link)

    def judge(self, link: RankLink, refusal: Reason | None, now: float) -> None:
        """Accept the lane of a link or, with a reason, refuse it.

        D leaves a refused peer alone for a while, and then has it measure the link again.
        """
        link.refusal = refusal
        if refusal:
            link.peer.lanes.failed(refusal, self._config.retry_max_s, self._randomness, now)
            link.session.greet_anew(link.session.ours)
            self.flush(link)
        elif not any(other.refusal for other in link.peer.links.values()):
            link.peer.lanes.met()

    def failed(self, peer: Peer, reason: Reason, now: float) -> None:
        """A peer is out of reach or unusable: D leaves it alone for a while."""
        peer.breaker.failed(reason, self._config.retry_max_s, self._randomness, now)
        self._plan_meeting(peer, now)

    def let_go(self, key: PeerKey, handle: str, now: float) -> None:
        """Release a handle. A peer that is out of reach is informed when it is met again."""
        peer = self.reach(key, now)
        peer.let_go.append(handle)
        self._send_releases(peer, now)

    def release_unused(self, peer: Peer, handle: str, now: float) -> None:
        """Release a fetched request's handle on the replicas that no rank of D fetches from."""
        for rank in peer.unused:
            peer.releases.setdefault(rank, []).append(handle)
        self._send_releases(peer, now)

    def _send_releases(self, peer: Peer, now: float) -> None:
        """Send a peer's ranks the handles that they need not hold for D."""
        if not peer.is_ready:
            return
        while peer.let_go:
            handle = peer.let_go.popleft()
            for rank in (*peer.partners, *peer.unused):
                peer.releases.setdefault(rank, []).append(handle)
        for rank in list(peer.releases):
            link = self.connect_rank(peer, rank, now)
            if link is not None:
                for handle in peer.releases.pop(rank):
                    link.session.send(Release(handle, max(1, peer.consumers.get(rank, 0))))
                self.flush(link)

    def forget_idle(self) -> None:
        """Drop idle peers beyond ``max_peers``, least recently used first; never those in use or warm."""
        if len(self.peers) <= self._config.max_peers:
            return
        used = self._in_use()
        others = (peer for key, peer in self.peers.items() if not (peer.is_warm or key in used))
        idle = sorted(others, key=lambda peer: peer.used_at)
        for peer in idle[: len(self.peers) - self._config.max_peers]:
            for link in peer.links.values():
                self._close(link)
            peer.timer.cancel()
            del self.peers[peer.key]

    def flush(self, link: RankLink) -> None:
        """Send the frames that a session has queued."""
        if link.name in self.links:
            self._send(link.name, link.session.outgoing(), link)


def _match_ranks(peer: Peer, ours: Introduction, topology: Topology) -> None:
    """Compute, once, which of a peer's ranks each rank of D fetches from."""
    sides = ours.meaning.topology, topology, ours.meaning.num_heads
    partners = [partner_ranks(rank, *sides) for rank in range(ours.meaning.topology.size)]
    peer.partners = tuple(partners[ours.rank])
    peer.consumers = Counter(itertools.chain.from_iterable(partners))
    reachable = {address.rank for address in peer.directory}
    unused = (rank for rank in range(topology.size) if rank in reachable and not peer.consumers[rank])
    # D's rank 0 ends the leases of unused replicas, for all ranks of D.
    peer.unused = tuple(unused) if ours.rank == 0 else ()
