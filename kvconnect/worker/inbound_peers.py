"""Who fetches from us: P's connections, and by which paths each inbound's cache can be reached.

Owned by the transfer thread.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field

from kvconnect.config import ExtraConfig
from kvconnect.engine.adapter import card_host
from kvconnect.errors import EngineError, PeerError
from kvconnect.metrics import Metrics
from kvconnect.orders import MAX_NAMES, RankAddress
from kvconnect.peer.allow_list import AllowList, same_host
from kvconnect.peer.channel import Channel
from kvconnect.peer.messages import Introduction, Message, Side
from kvconnect.peer.session import Session, State
from kvconnect.worker.local import Local
from kvconnect.worker.send_path import SendPath, make_send_path, owner_name

logger = logging.getLogger(__name__)


_NAMES_PER_S = 200_000
"""To read and look up those takes about a twentieth of the transfer thread's time, for each cache group."""


class NameAllowance:
    """For how many names one peer is answered: all of a prompt at once, and then so many a second."""

    def __init__(self) -> None:
        self._left, self._looked_at = float(MAX_NAMES), 0.0

    def take(self, names: int, now: float) -> bool:
        """Whether it is answered for so many more."""
        grown = self._left + (now - self._looked_at) * _NAMES_PER_S
        self._left, self._looked_at = min(float(MAX_NAMES), grown), now
        if names > self._left:
            return False
        self._left -= names
        return True


@dataclass
class InboundPeer:
    """One connection that D opened to us, from ``host`` if the channel knows.

    ``has_misspoken``: one of its messages could not be used. ``names`` bounds what it may ask for by name.
    """

    session: Session
    host: str = ""
    path: SendPath | None = None
    has_misspoken: bool = False
    names: NameAllowance = field(default_factory=NameAllowance)


class InboundPeers:
    """All connections to us, the last the one that sent most recently."""

    def __init__(
        self,
        config: ExtraConfig,
        local: Local,
        channel: Channel,
        metrics: Metrics,
    ) -> None:
        self.directory: tuple[RankAddress, ...] = ()
        self._allowed = AllowList(config.allow_peers)
        self._config = config
        self._local = local
        self._channel = channel
        self._metrics = metrics
        self._peers: OrderedDict[str, InboundPeer] = OrderedDict()
        self._connected: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._peers)

    def __iter__(self) -> Iterator[InboundPeer]:
        return iter(self._peers.values())

    def know_ranks(self, directory: tuple[RankAddress, ...]) -> None:
        """Where all ranks of this node listen; orders that name none change nothing."""
        self.directory = directory or self.directory

    def get(self, link: str) -> InboundPeer | None:
        """The peer of a connection that has introduced itself."""
        return self._peers.get(link)

    def find(self, link: str, host: str) -> InboundPeer:
        """The peer of a link. One that has not introduced itself is not kept, and displaces no other."""
        inbound = self._peers.get(link)
        if inbound is None:
            ours = self._local.introduce()
            return InboundPeer(Session(Side.PREFILL, ours, self._config, self.directory), host)
        self._peers.move_to_end(link)
        return inbound

    def met(self, link: str, inbound: InboundPeer, links_in_use: Container[str]) -> None:
        """A peer has introduced itself, perhaps anew, and with another engine card than before.

        ``links_in_use`` are those that must stay. Of the others, those that have been silent longest make
        room; if one is still there, its session has it greet again.
        """
        inbound.path = None
        while link not in self._peers and len(self._peers) >= self._config.max_peers:
            idle = next((name for name in self._peers if name not in links_in_use), None)
            if idle is None:
                break
            self.forget(idle)
        self._peers[link] = inbound

    def send(self, link: str, message: Message) -> None:
        """Send a message over a connection, if it is there."""
        inbound = self._peers.get(link)
        if inbound is not None and inbound.session.state is State.READY:
            inbound.session.send(message)
            self.flush(link, inbound)

    def flush(self, link: str, inbound: InboundPeer) -> None:
        """Send the frames of a session."""
        for frame in inbound.session.outgoing():
            if not self._channel.send(link, frame):
                self._metrics.failures.labels("side_channel_send").inc()
                logger.warning("an answer to %s could not be sent", link)

    def introduce_anew(self) -> None:
        """Our introduction has changed: messages are compared with the new one."""
        for inbound in self._peers.values():
            inbound.session.ours = self._local.introduce()

    def forget(self, link: str) -> None:
        """A conversation is over, if there was one."""
        self._peers.pop(link, None)

    def path_to(self, inbound: InboundPeer, in_use: Callable[[], set[str]]) -> SendPath:
        """How a peer is reached: worked out when it first fetches, since it may only ask for directions.

        ``in_use`` returns the engine's peers that must stay connected.

        Raises:
            LayoutError: the two caches do not fit; the text has every reason.
            PeerError: the peer's engine card is no use, or it has not introduced itself.
        """
        peer = inbound.session.peer
        if peer is None:
            raise PeerError("the peer has not introduced itself")
        if inbound.path is None:
            ours = inbound.session.ours
            inbound.path = make_send_path(self._config, self._local, ours, peer, self._metrics)
            who = f"{peer.engine_id} rank {peer.rank}"
            over = "shared memory" if inbound.path.mapped else self._local.engine.capabilities
            logger.info("decode node %s at %s fetches: over %s", who, inbound.host, over)
        if inbound.path.mapped is None:
            self.connect(inbound, inbound.path, in_use)
        return inbound.path

    def connect(self, inbound: InboundPeer, path: SendPath, in_use: Callable[[], set[str]]) -> None:
        """Have the engine reach a peer. Raises as ``path_to``."""
        peer = inbound.session.peer
        assert peer is not None, "it has a path"
        if path.name not in self._connected:
            self._check_host(inbound, peer)
            try:
                self._local.engine.connect(path.name, peer.engine_card)
            except EngineError as error:
                raise PeerError(f"the engine cannot reach the peer: {error}") from error
            self._connected[path.name] = None
        self._connected.move_to_end(path.name)
        if len(self._connected) > self._config.max_peers:
            self._disconnect_idle(in_use() | {path.name})

    def _check_host(self, inbound: InboundPeer, peer: Introduction) -> None:
        """Connect to no other host for a peer: it would be given the KV that the peer asks for.

        Raises:
            PeerError: its engine's card names a host that is neither its own nor listed.
        """
        named = card_host(peer.engine_card)
        is_own = not named or not inbound.host or same_host(named, inbound.host)
        if is_own or self._allowed.allows(named, None):
            return
        self._metrics.failures.labels("peer_not_trusted").inc()
        raise PeerError(
            f"the engine card of {owner_name(peer)} names host {named[:256]!r}, its connection comes from "
            f"{inbound.host}; accepted: that address, and hosts in kv_connector_extra_config.allow_peers"
        )

    def _disconnect_idle(self, in_use: Container[str]) -> None:
        for name in [name for name in self._connected if name not in in_use]:
            if len(self._connected) <= self._config.max_peers:
                return
            del self._connected[name]
            self._local.engine.disconnect(name)
