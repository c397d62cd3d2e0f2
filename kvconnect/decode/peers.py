"""The remote engines that D fetches from: its connections to their ranks, and what it owes them.

Knows no load. Owned by the transfer thread.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field

from kvconnect.addresses import RankAddress, is_address, join_address, split_address
from kvconnect.cache.shard import Topology, consumer_ranks, partner_ranks
from kvconnect.decode.loads import PeerKey
from kvconnect.engine.lanes import Transport
from kvconnect.outcome import Cause, Reason
from kvconnect.pack.packer import Packer
from kvconnect.peer.agreement import fills_windows, target_share
from kvconnect.peer.allow_list import AllowList, same_host
from kvconnect.peer.loss import PeerLoss
from kvconnect.peer.messages import Introduction, Message, Release, Side
from kvconnect.peer.session import Event, Ready, Session, SessionState
from kvconnect.plan.blocks import WHOLE, Share
from kvconnect.plan.chunks import RequestCutter
from kvconnect.transfer.breaker import Breaker
from kvconnect.transfer.parts import Timer, TransferContext

logger = logging.getLogger(__name__)

_MOST_LET_GO = 1024
"""Handles that are remembered for a peer out of reach. The leases behind older ones end by their time."""
_PAST_LINKS = 16
_KEPT_S = 300.0
"""How long after its last use the connection to a peer is made again when it breaks."""

FetchPath = tuple[RequestCutter, Packer]
"""What cuts a request into the chunks that a peer sends, and what unpacks them."""


@dataclass(eq=False)
class RankLink:
    """Our connection to one rank of a peer, at ``address``.

    ``path`` is made for the first fetch, or is why nothing fits.
    ``was_met`` once introduced; both keep ``share``. Its clock is ahead by ``clock_ahead_s`` at least.
    ``found`` is what carries its bytes, ``refusal`` why settings refuse it. ``is_ragged``: see ``Results``.
    ``asked`` are the transfers that it owes an answer about.
    """

    name: str
    peer: Peer
    rank: int
    address: str
    session: Session
    timer: Timer
    path: FetchPath | str = ""
    clock_ahead_s: float = 0.0
    was_met: bool = False
    share: Share = WHOLE
    found: Transport | None = None
    refusal: Reason | None = None
    is_ragged: bool = False
    asked: set[int] = field(default_factory=set)

    @property
    def is_ready(self) -> bool:
        """Messages can be sent."""
        return self.session.state is SessionState.READY


@dataclass(eq=False)
class Peer:
    """A remote engine: its ranks, and what waits for it.

    ``partners`` are the ranks that ours fetches from, ``unused`` replicas whose leases ours ends. ``let_go``
    are handles that will not be fetched; ``releases`` the same per rank, once the ranks are known.
    ``lease_s`` is how long it holds what is not renewed, ``renewed_at`` when that was last done. ``was_met``
    as long as it is to be met again after that; ``is_warm`` where an operator wants it met in any case.
    ``is_whole`` until a connection to it is lost.
    ``last_loss`` is when and how a connection to it was lost last, and why.
    ``lanes`` is open while a rank of it is reached otherwise than settings want, and ``breaker`` while it is
    not reached: to greet it resets that one alone. ``timer`` is armed while it is to be met again.
    """

    key: PeerKey
    timer: Timer
    breaker: Breaker = field(default_factory=Breaker)
    lanes: Breaker = field(default_factory=Breaker)
    links: dict[int, RankLink] = field(default_factory=dict)
    directory: tuple[RankAddress, ...] = ()
    partners: tuple[int, ...] = ()
    unused: tuple[int, ...] = ()
    consumers: dict[int, int] = field(default_factory=dict)
    let_go: deque[str] = field(default_factory=lambda: deque(maxlen=_MOST_LET_GO))
    releases: dict[int, list[str]] = field(default_factory=dict)
    used_at: float = 0.0
    renewed_at: float = -math.inf
    lease_s: float = 0.0
    was_met: bool = False
    is_warm: bool = False
    is_whole: bool = True
    last_loss: tuple[float, PeerLoss, Reason] | None = None

    def refusal(self, now: float) -> Reason | None:
        """Why there is no use in asking it anything now, or None."""
        if not self.breaker.failures and not self.lanes.failures:
            return None
        return self.breaker.refusal(now) or (self.lanes.reason if self.lanes.refusal(now) else None)

    @property
    def address(self) -> str:
        """The node that slots are lent to, under any engine id."""
        _, host, port = self.key
        return f"{host}:{port}"

    @property
    def is_ready(self) -> bool:
        """Rank 0 has reported how many ranks there are, and is connected."""
        return 0 in self.links and self.links[0].is_ready

    @property
    def is_to_meet(self) -> bool:
        """It is not connected, and shall be."""
        return 0 not in self.links and (self.is_warm or self.was_met)


class Peers:
    """Peers by the name that requests give them, and connections that are not over by their own.

    ``happened`` is called with what happens to a connection because time passes.
    """

    def __init__(self, context: TransferContext, happened: Callable[[RankLink, Event, float], None]) -> None:
        self.peers: dict[PeerKey, Peer] = {}
        self.links: dict[str, RankLink] = {}
        self._config, self._channel, self._local = context.config, context.channel, context.local
        self._metrics, self._randomness, self._timers = context.metrics, context.randomness, context.timers
        config = context.config
        self._allowed = AllowList(config.allow_peers)
        self._happened = happened
        self._awaited: set[PeerKey] = set()
        # One that is asked by name is to answer the first question too; a list of all may have our own.
        warm = map(split_address, (*config.warm_peers, *config.sources))
        self._warm = [known for known in warm if known is not None and known != (config.host, config.port)]
        self._warming = context.timers.timer(self._warm_all)
        if self._warm:
            self._warming.at(-math.inf)
        self._past: OrderedDict[tuple[str, int, int], deque[tuple[str, str]]] = OrderedDict()
        self._link_numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self.peers)

    def send(self, link: str, message: Message) -> None:
        """Send a message over the connection of this name, if that still is the one and is ready."""
        found = self.links.get(link)
        if found is not None and found.is_ready:
            found.session.send(message)
            self.flush(found)

    def keep_time(self, link: RankLink) -> None:
        """Something was received over a connection, or sent: it has another time to be silent."""
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
        """Meet a peer that was lost, if it was of use lately or is to be warm."""
        if not peer.is_to_meet:
            return
        if not peer.breaker.may_try(now):
            peer.timer.at(peer.breaker.retry_at)
            return
        host, port = peer.key[1:]
        if peer.is_warm and peer.key[0]:
            # It may come back under another name, under which it is a peer of its own.
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
        """Why there is no use in asking a peer anything now, or None."""
        peer = self.peers.get(key)
        return peer.refusal(now) if peer is not None else None

    def lane(self, link: str) -> str:
        """What carries bytes to us over the connection of this name."""
        found = self.links[link].found if link in self.links else None
        return "unknown" if found is None else found.lane

    def adopt(self, key: PeerKey, in_use: Callable[[], Container[PeerKey]]) -> None:
        """Take a connection that was made before anything named its engine, if it is to that engine."""
        nameless = ("", *key[1:])
        peer = self.peers.get(nameless)
        if peer is None or key in self.peers or 0 not in peer.links or nameless in in_use():
            return
        found = peer.links[0].session.peer
        if found is None or found.engine_id == key[0]:
            del self.peers[nameless]
            peer.key = key
            self.peers[key] = peer

    def reach(self, key: PeerKey, now: float) -> Peer:
        """The peer of this name; it is greeted if that was not done, and its breaker permits it."""
        peer = self.peers.get(key) or self._remember(key)
        peer.used_at = now
        if 0 not in peer.links and peer.breaker.may_try(now):
            self._connect(peer, 0, key[1], key[2], now)
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
        self._owe(link, now)
        self.flush(link)
        return link

    def connect_rank(self, peer: Peer, rank: int, now: float) -> RankLink | None:
        """Our connection to a rank, made if there is none; None if it is not ready, or has no address."""
        link = peer.links.get(rank)
        for address in peer.directory if link is None else ():
            if address.rank == rank:
                link = self._connect(peer, rank, address.host, address.port, now)
                break
        return link if link is not None and link.is_ready else None

    def meet(self, link: RankLink, ready: Ready, now: float) -> Reason | None:
        """A rank has introduced itself. Why it is unusable, or None."""
        peer, introduction = link.peer, ready.peer
        engine_id, host, port = peer.key
        for what, named, found in (
            ("engine", engine_id, introduction.engine_id),
            ("rank", link.rank, introduction.rank),
        ):
            # A request that names no engine means whichever answers at its address.
            if named != found and named != "":
                return Cause.NOT_HELD(f"{host}:{port} is {what} {found}, the request names {named}")
        if link.rank == 0:
            topology = introduction.meaning.topology
            if not {address.rank for address in ready.directory} >= set(range(1, topology.size)):
                # Its scheduler has not sent it the addresses of its other ranks yet. It will soon.
                return Cause.OUT_OF_REACH("the peer does not know its own ranks yet")
            if refusal := self._foreign_rank(host, ready.directory):
                return Cause.NOT_TRUSTED(refusal)
            peer.directory, peer.lease_s, peer.was_met = ready.directory, ready.lease_s, True
            _match_ranks(peer, link.session.ours, topology)
        link.share = target_share(introduction, link.session.ours)
        link.clock_ahead_s = ready.clock_s - now
        link.is_ragged = not fills_windows(introduction, link.session.ours)
        peer.breaker.met()
        self._send_releases(peer, now)
        return None

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

    def drop(self, link: RankLink, now: float) -> None:
        """A connection is over, and with it what was to be sent over it."""
        if link.session.peer is not None:
            _, host, port = link.peer.key
            past = self._past.setdefault((host, port, link.rank), deque(maxlen=_PAST_LINKS))
            past.append((link.name, link.session.peer.incarnation))
            while len(self._past) > self._config.max_peers:
                self._past.popitem(last=False)
        del link.peer.links[link.rank]
        link.peer.releases.pop(link.rank, None)
        self._close(link)
        self._plan_meeting(link.peer, now)

    def _close(self, link: RankLink) -> None:
        del self.links[link.name]
        link.timer.cancel()
        self._channel.drop(link.name)

    def past_links(self, link: RankLink, incarnation: str = "") -> set[str]:
        """Our last connections to a rank at this address, but for those to the process of ``incarnation``."""
        # Another process there proves that the one before it ended, unless a name stands for many addresses.
        _, host, port = link.peer.key
        if incarnation and not is_address(host):
            return set()
        return {name for name, past in self._past.get((host, port, link.rank), ()) if past != incarnation}

    def greet_anew(self) -> None:
        """Send our introduction, which has changed, to all peers that we greeted."""
        for link in self.links.values():
            link.session.greet_anew(self._local.introduce())
            self.flush(link)

    def judge(self, link: RankLink, refusal: Reason | None, now: float) -> None:
        """What carries a rank's bytes is accepted or, with a reason, refused.

        Then the peer is left alone for a while, and measures the link again: what disturbed it may be over.
        """
        link.refusal = refusal
        if refusal:
            link.peer.lanes.failed(refusal, self._config.retry_max_s, self._randomness, now)
            link.session.greet_anew(link.session.ours)
            self.flush(link)
        elif not any(other.refusal for other in link.peer.links.values()):
            link.peer.lanes.met()

    def failed(self, peer: Peer, reason: Reason, now: float) -> None:
        """A peer could not be reached, or is unusable: it is left alone for a while."""
        peer.breaker.failed(reason, self._config.retry_max_s, self._randomness, now)
        self._plan_meeting(peer, now)

    def let_go(self, key: PeerKey, handle: str, now: float) -> None:
        """Nothing will be fetched under a handle. A peer that is out of reach is notified when it is back."""
        peer = self.reach(key, now)
        peer.let_go.append(handle)
        self._send_releases(peer, now)

    def release_unused(self, peer: Peer, handle: str, now: float) -> None:
        """A request is fetched: replicas that no rank of ours fetches from need not hold it."""
        for rank in peer.unused:
            peer.releases.setdefault(rank, []).append(handle)
        self._send_releases(peer, now)

    def _send_releases(self, peer: Peer, now: float) -> None:
        """Send the ranks of a peer what they need not hold for us."""
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

    def ask(self, link: RankLink, transfer_id: int, now: float) -> None:
        """A peer owes an answer about a transfer: until then its silence is a failure."""
        link.asked.add(transfer_id)
        self._owe(link, now)

    def answered(self, link: str, transfer_id: int, now: float) -> None:
        """It owes none about that transfer any more."""
        found = self.links.get(link)
        if found is not None:
            found.asked.discard(transfer_id)
            self._owe(found, now)

    def await_news(self, key: PeerKey, is_awaited: bool, now: float) -> None:
        """Whether a peer owes a report of what requests wait for."""
        (self._awaited.add if is_awaited else self._awaited.discard)(key)
        peer = self.peers.get(key)
        for link in peer.links.values() if peer is not None else ():
            self._owe(link, now)

    def _owe(self, link: RankLink, now: float) -> None:
        link.session.owe(bool(link.asked) or link.peer.key in self._awaited, now)
        self.keep_time(link)

    def forget_idle(self, in_use: Callable[[], Container[PeerKey]]) -> None:
        """Keep as many peers as we may, those that are used, or would be met again at once, in any case."""
        if len(self.peers) <= self._config.max_peers:
            return
        used = in_use()
        others = (peer for key, peer in self.peers.items() if not (peer.is_warm or key in used))
        idle = sorted(others, key=lambda peer: peer.used_at)
        for peer in idle[: len(self.peers) - self._config.max_peers]:
            for link in peer.links.values():
                self._close(link)
            peer.timer.cancel()
            del self.peers[peer.key]

    def flush(self, link: RankLink) -> None:
        """Send the frames that a session has queued."""
        for frame in link.session.outgoing():
            if link.name in self.links and not self._channel.send(link.name, frame):
                self._metrics.failures.labels("side_channel_send").inc()
                logger.warning("a message to %s could not be sent", link.name)


def _match_ranks(peer: Peer, ours: Introduction, topology: Topology) -> None:
    """Work out once which of a peer's ranks each of ours fetches from."""
    sides = ours.meaning.topology, topology, ours.meaning.num_heads
    peer.partners = tuple(partner_ranks(ours.rank, *sides))
    peer.consumers = {rank: len(fetching) for rank, fetching in enumerate(consumer_ranks(*sides))}
    reachable = {address.rank for address in peer.directory}
    unused = (rank for rank, count in peer.consumers.items() if not count and rank in reachable)
    # Rank 0 ends their leases for all of us.
    peer.unused = tuple(unused) if ours.rank == 0 else ()
