"""The connections that peers open to a worker: who they are, and what serves their messages.

Owned by the transfer thread.
"""

from __future__ import annotations

import functools
import logging
from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from kvconnect.addresses import RankAddress
from kvconnect.outcome import Cause, Reason
from kvconnect.peer.agreement import other_weights
from kvconnect.peer.messages import (
    MAX_HANDLES,
    Alive,
    Answer,
    Fetch,
    FindPrefix,
    Message,
    PrefixFound,
    Question,
    Renew,
    Renewed,
    Side,
    StillAlive,
    Written,
)
from kvconnect.peer.session import Ended, Event, Misused, Ready, Received, Session, SessionState
from kvconnect.transfer.parts import TransferContext
from kvconnect.transfer.topics import Topics

logger = logging.getLogger(__name__)

NO_PREFILL = Cause.WRONG_ROLE("this node hands out no KV: its kv_role is kv_consumer")


@dataclass
class InboundPeer:
    """One connection that a peer opened to us, from ``host`` if the channel knows.

    ``has_misspoken``: one of its messages could not be used. ``disagrees``: our weights were replaced since
    it greeted us, and it has others.
    """

    session: Session
    host: str = ""
    has_misspoken: bool = False
    disagrees: Reason | None = None


class Service:
    """What serves peers that have introduced themselves; this one is a node's that hands out nothing."""

    def links_in_use(self) -> Collection[str]:
        """Connections that must stay."""
        return ()

    def met(self, link: str) -> None:
        """A peer has introduced itself, perhaps anew, and with another engine card than before."""

    def forgotten(self, link: str) -> None:
        """A conversation is over."""

    def serve(self, link: str, inbound: InboundPeer, message: Message, now: float) -> None:
        """Answer a message, now or later."""
        match message:
            case Fetch():
                logger.warning("a fetch of %s was refused: %s", link, NO_PREFILL)
                inbound.session.send(Written(message.transfer_id, False, True, 0, 0, 0.0, NO_PREFILL))
            case FindPrefix():
                inbound.session.send(PrefixFound(message.number, error=NO_PREFILL))
            case Renew():
                over = tuple((one, NO_PREFILL) for one in message.handles[:MAX_HANDLES])
                inbound.session.send(Renewed(over=over))


class InboundPeers:
    """All connections to us, the last the one that sent most recently; ``service`` is what serves them."""

    def __init__(self, context: TransferContext) -> None:
        self.directory: tuple[RankAddress, ...] = ()
        self.topics = Topics(context.config.max_message_bytes, context.timers)
        self.service = Service()
        self._config, self._local = context.config, context.local
        self._channel, self._metrics = context.channel, context.metrics
        self._peers: OrderedDict[str, InboundPeer] = OrderedDict()

    def __len__(self) -> int:
        return len(self._peers)

    def __iter__(self) -> Iterator[tuple[str, InboundPeer]]:
        return iter(self._peers.items())

    def know_ranks(self, directory: tuple[RankAddress, ...]) -> None:
        """Where all ranks of this node listen; orders that name none change nothing."""
        self.directory = directory or self.directory

    def get(self, link: str) -> InboundPeer | None:
        """The peer of a connection that has introduced itself."""
        return self._peers.get(link)

    def receive(self, link: str, data: bytes, now: float, host: str = "") -> None:
        """Take a frame of a peer, whose connection comes from ``host``."""
        inbound = self._find(link, host)
        for event in inbound.session.receive(data, now):
            self._handle(link, inbound, event, now)
        self._flush(link, inbound)
        if inbound.session.state is SessionState.ENDED:
            self._forget(link)

    def send(self, link: str, message: Message) -> None:
        """Send a message over a connection, if it is there."""
        inbound = self._peers.get(link)
        if inbound is not None and inbound.session.state is SessionState.READY:
            inbound.session.send(message)
            self._flush(link, inbound)

    def introduce_anew(self) -> None:
        """Our introduction has changed: messages are compared with the new one."""
        for inbound in self._peers.values():
            inbound.session.ours = ours = self._local.introduce()
            if (peer := inbound.session.peer) is not None:
                inbound.disagrees = other_weights(ours.meaning, peer.meaning)

    def _find(self, link: str, host: str) -> InboundPeer:
        """The peer of a link. One that has not introduced itself is not kept, and displaces no other."""
        inbound = self._peers.get(link)
        if inbound is None:
            ours = self._local.introduce()
            return InboundPeer(Session(Side.PREFILL, ours, self._config, self.directory), host)
        self._peers.move_to_end(link)
        return inbound

    def _handle(self, link: str, inbound: InboundPeer, event: Event, now: float) -> None:
        match event:
            case Ready():
                inbound.disagrees = None
                self._keep(link, inbound)
                self.service.met(link)
            case Received(message=Alive()):
                inbound.session.send(StillAlive())
            case Received(message=Question() as question):
                self.topics.ask(question, functools.partial(self._reply, link, inbound), now)
            case Received(message=message):
                self.service.serve(link, inbound, message, now)
            case Misused(reason=reason):
                self._metrics.failures.labels("peer_message").inc()
                if not inbound.has_misspoken:
                    inbound.has_misspoken = True
                    logger.warning("dropped a message from %s, and counts further ones: %s", link, reason)
            case Ended(reason=reason):
                self._metrics.failures.labels("peer_refused").inc()
                logger.warning("connection %s ended: %s", link, reason)

    def _keep(self, link: str, inbound: InboundPeer) -> None:
        """Remember a peer. Of those that are not in use the one that was silent longest makes room.

        If that one is still there, its session has it greet again.
        """
        while link not in self._peers and len(self._peers) >= self._config.max_peers:
            in_use = self.service.links_in_use()
            idle = next((name for name in self._peers if name not in in_use), None)
            if idle is None:
                break
            self._forget(idle)
        self._peers[link] = inbound

    def _reply(self, link: str, inbound: InboundPeer, answer: Answer) -> None:
        """Also to a peer that has not introduced itself, of which nothing else is kept."""
        inbound.session.answer(answer)
        self._flush(link, inbound)

    def _flush(self, link: str, inbound: InboundPeer) -> None:
        for frame in inbound.session.outgoing():
            if not self._channel.send(link, frame):
                self._metrics.failures.labels("side_channel_send").inc()
                logger.warning("an answer to %s could not be sent", link)

    def _forget(self, link: str) -> None:
        """A conversation is over, if there was one."""
        if self._peers.pop(link, None) is not None:
            self.service.forgotten(link)
