"""The connections that peers open to a worker: their sessions, and the service for their messages.

Owned by the transfer thread.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from kvconnect.addresses import RankAddress
from kvconnect.cache.identity import MAX_NAMES
from kvconnect.outcome import Cause, Reason
from kvconnect.peer.agreement import other_weights
from kvconnect.peer.messages import (
    MAX_HANDLES,
    Alive,
    Answer,
    Fetch,
    FindPrefix,
    Hello,
    Introduction,
    Message,
    PrefixFound,
    Question,
    Renew,
    Renewed,
    Side,
    StillAlive,
    Written,
)
from kvconnect.peer.session import Ended, Event, Misused, Session, SessionState
from kvconnect.transfer.duplicate_filter import DuplicateFilter
from kvconnect.transfer.parts import TransferContext
from kvconnect.transfer.topics import Topics

NO_PREFILL = Cause.WRONG_ROLE("the node that was asked hands out no KV: its kv_role is kv_consumer")


_NAMES_PER_S = 200_000
"""Reading and looking up that many takes about a twentieth of the transfer thread's time, per cache group."""


class NameAllowance:
    """How many names P looks up for a peer: a burst of one prompt (``MAX_NAMES``), then a steady rate."""

    def __init__(self) -> None:
        self._left, self._looked_at = float(MAX_NAMES), 0.0

    def take(self, names: int, now: float) -> bool:
        """Take ``names`` from the allowance. Returns whether it covers them; if not, nothing is taken."""
        grown = self._left + (now - self._looked_at) * _NAMES_PER_S
        self._left, self._looked_at = min(float(MAX_NAMES), grown), now
        if names > self._left:
            return False
        self._left -= names
        return True


@dataclass
class InboundPeer:
    """One connection that a peer opened to this worker, from ``host`` if the channel knows the address.

    ``disagrees``: this node's weights were replaced after the greeting, and the peer has others. ``names``:
    how many names P still looks up for it. ``path``: P's ``SendPath`` to it, once it has asked for KV.
    """

    session: Session
    host: str = ""
    disagrees: Reason | None = None
    names: NameAllowance = field(default_factory=NameAllowance)
    path: Any = None

    @property
    def peer(self) -> Introduction:
        """Its introduction, which every peer that is kept or served has made."""
        assert self.session.peer is not None
        return self.session.peer

    def __str__(self) -> str:
        return decode_node(self.session.peer, self.host)


def decode_node(peer: Introduction | None, host: str) -> str:
    """A rank of a decode node, or a client that has not introduced itself, for people."""
    who = "a client" if peer is None else rank_name(peer.engine_id, peer.rank)
    return f"{who} at {host.removeprefix('::ffff:') or 'an unknown host'}"


def rank_name(engine_id: str, rank: int) -> str:
    """A rank of a decode node, for people."""
    return f"rank {rank} of decode node {engine_id}"


class Service:
    """Serves peers that have introduced themselves. This base class refuses all: the node hands out no KV."""

    def __init__(self, repeats: DuplicateFilter) -> None:
        self._repeats = repeats

    def links_in_use(self) -> Collection[str]:
        """The connections that must not be dropped."""
        return ()

    def met(self, link: str) -> None:
        """A peer has introduced itself, perhaps anew."""

    def serve(self, link: str, inbound: InboundPeer, message: Message, now: float) -> None:
        """Answer a message, now or later."""
        match message:
            case Fetch():
                self.refused(inbound, NO_PREFILL)
                inbound.session.send(Written(message.transfer_id, False, True, 0, 0, 0.0, NO_PREFILL))
            case FindPrefix():
                inbound.session.send(PrefixFound(message.number, error=NO_PREFILL))
            case Renew():
                over = tuple((one, NO_PREFILL) for one in message.handles[:MAX_HANDLES])
                inbound.session.send(Renewed(over=over))

    def refused(self, inbound: InboundPeer, reason: Reason) -> None:
        """Log the first refused fetch of a peer and cause."""
        who = str(inbound)
        self._repeats.warn_first("refused transfers", who, f"a fetch of {who} was refused:", reason)


class InboundPeers:
    """All inbound connections, the one that sent most recently last; ``service`` serves their messages."""

    def __init__(self, context: TransferContext) -> None:
        self.directory: tuple[RankAddress, ...] = ()
        self.topics = Topics(context.config.max_message_bytes, context.timers)
        self.service = Service(context.repeats)
        self._context, self._repeats = context, context.repeats
        self._config, self._local = context.config, context.local
        self._peers: OrderedDict[str, InboundPeer] = OrderedDict()

    def __len__(self) -> int:
        return len(self._peers)

    def __iter__(self) -> Iterator[tuple[str, InboundPeer]]:
        return iter(self._peers.items())

    def know_ranks(self, directory: tuple[RankAddress, ...]) -> None:
        """Set the addresses of all ranks of this node; an empty directory changes nothing."""
        self.directory = directory or self.directory

    def get(self, link: str) -> InboundPeer | None:
        """The peer of a connection, once it has introduced itself."""
        return self._peers.get(link)

    def receive(self, link: str, data: bytes, now: float, host: str = "") -> None:
        """Take a peer's frame; its connection comes from ``host``."""
        inbound = self._find(link, host)
        for event in inbound.session.receive(data, now):
            self._handle(link, inbound, event, now)
        self._context.send(link, inbound.session.outgoing(), inbound)
        if inbound.session.state is SessionState.ENDED:
            self._peers.pop(link, None)

    def send(self, link: str, message: Message) -> None:
        """Send a message over a connection, if that is open and ready."""
        inbound = self._peers.get(link)
        if inbound is not None and inbound.session.state is SessionState.READY:
            inbound.session.send(message)
            self._context.send(link, inbound.session.outgoing(), inbound)

    def introduce_anew(self) -> None:
        """This node's introduction has changed: compare each peer's weights with the new one."""
        for inbound in self._peers.values():
            inbound.session.ours = ours = self._local.introduce()
            inbound.disagrees = other_weights(ours.meaning, inbound.peer.meaning)

    def _find(self, link: str, host: str) -> InboundPeer:
        """The peer of a connection. A peer without an introduction is not kept, and displaces no other."""
        inbound = self._peers.get(link)
        if inbound is None:
            ours = self._local.introduce()
            return InboundPeer(Session(Side.PREFILL, ours, self._config, self.directory), host)
        self._peers.move_to_end(link)
        return inbound

    def _handle(self, link: str, inbound: InboundPeer, event: Event, now: float) -> None:
        match event:
            case Hello():
                # Its engine card may be another than before.
                inbound.disagrees = inbound.path = None
                self._repeats.succeeded(str(inbound))
                self._keep(link, inbound)
                self.service.met(link)
            case Alive():
                inbound.session.send(StillAlive())
            case Question():
                self.topics.ask(event, functools.partial(self._reply, link, inbound), now)
            case Misused(reason=reason):
                self._context.misused(inbound, reason.text)
            case Ended(reason=reason, refused=refused):
                self._context.metrics.failures.labels("peer_refused").inc()
                who = decode_node(refused, inbound.host)
                self._repeats.warn_first("peer_refused", who, f"{who} was refused:", reason)
            case _:
                self.service.serve(link, inbound, event, now)

    def _keep(self, link: str, inbound: InboundPeer) -> None:
        """Keep a peer; beyond ``max_peers``, drop the peer not in use that was silent longest.

        If the dropped peer still exists, its next message makes it greet again.
        """
        while link not in self._peers and len(self._peers) >= self._config.max_peers:
            in_use = self.service.links_in_use()
            idle = next((name for name in self._peers if name not in in_use), None)
            if idle is None:
                break
            del self._peers[idle]
        self._peers[link] = inbound

    def _reply(self, link: str, inbound: InboundPeer, answer: Answer) -> None:
        """Send an answer, also to a peer that has not introduced itself and is not kept."""
        inbound.session.answer(answer)
        self._context.send(link, inbound.session.outgoing(), inbound)
