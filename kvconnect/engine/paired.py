"""Two engines as one: a network engine that reaches everybody, and a direct one for peers of this host.

Owns who is reached by which, and the card that says both. It must not know how either moves bytes.

To the outside it is the network engine: it has its name, and its card is the network engine's card with one
more field. Plain engines skip fields that they do not know, and a plain card has no such field, so a node
with both and a node with the network engine alone can talk to each other, in both directions.

GPU memory is registered with both, the host's with the network engine alone. So both know every peer of this
host, and a batch goes over the direct engine if all of its memory is within that one's reach.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import msgspec

from kvconnect.engine.base import Batch, Capabilities, Completion, Engine, Span
from kvconnect.engine.batches import check_batch
from kvconnect.engine.ipc import UnshareableError
from kvconnect.engine.process import own_identity
from kvconnect.engine.span_table import SpanTable
from kvconnect.errors import EngineError

log = logging.getLogger("kvconnect.engine.paired")


_Number = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]


class DirectCard(msgspec.Struct, frozen=True):
    """What a joined card adds to that of the network engine.

    Attributes:
        engine: the direct engine's name.
        host: this boot of this host, and the pid namespace.
        card: the direct engine's card.
        spans: what is registered with it, as (address, length_bytes).
        all: nothing else is registered with the network engine.
    """

    engine: str
    host: str
    card: bytes
    spans: list[tuple[_Number, _Number]]
    all: bool


class _Joined(msgspec.Struct, frozen=True):
    """A card of whatever network engine, of which only this field is read."""

    direct: DirectCard | None = None


def join_cards(network: bytes, direct: DirectCard) -> bytes:
    """The network engine's card with the direct one's in it. Raises ``EngineError`` if it has no fields."""
    fields = msgspec.msgpack.decode(network)
    if not isinstance(fields, dict):
        raise EngineError(f"a card without fields cannot be joined with that of engine {direct.engine!r}")
    return msgspec.msgpack.encode({**fields, "direct": direct})


def direct_part(card: bytes) -> DirectCard | None:
    """What a card adds for the direct engine; None if it is a plain one, or makes no sense."""
    try:
        return msgspec.msgpack.decode(card, type=_Joined).direct
    except msgspec.MsgspecError:
        return None


@dataclass(slots=True)
class _Peer:
    """A connected peer. ``table`` are its spans that the direct engine reaches; None if it does not."""

    engine: str
    table: SpanTable | None = None
    all_direct: bool = False


class PairedEngine:
    """A network engine and a direct one as one engine. See ``kvconnect.engine.base.Engine`` for the verbs.

    Both are owned by this one from here on.
    """

    def __init__(self, network: Engine, direct: Engine) -> None:
        self._network = network
        self._direct = direct
        self._capabilities = _tighter(network.capabilities, direct.capabilities)
        self._shared: list[Span] = []
        self._unshared: list[Span] = []
        self._table = SpanTable(())
        self._peers: dict[str, _Peer] = {}
        self._flights: dict[int, tuple[Engine, str]] = {}
        self._closed = False

    @property
    def capabilities(self) -> Capabilities:
        """What holds for every peer: the network engine's name, and the tighter of both bounds."""
        return self._capabilities

    def capabilities_of(self, peer: str) -> Capabilities:
        """What holds for one peer: wider bounds, where all of its batches go over the direct engine."""
        known = self._peers.get(peer)
        if known is None or not self._is_all_direct(known):
            return self._capabilities
        return replace(self._direct.capabilities, name=self._capabilities.name)

    # ---- memory

    def register(self, spans: Sequence[Span]) -> None:
        """Register memory with both, all or nothing. Raises ``EngineError``.

        GPU memory that no other process can map is registered with the network engine alone.
        """
        self._network.register(spans)
        shared = [span for span in spans if span.device != "cpu"]
        try:
            if shared:
                self._direct.register(shared)
        except UnshareableError as error:
            network, direct = self._network.capabilities.name, self._direct.capabilities.name
            log.warning("%d spans are reached over %s only, not %s: %s", len(shared), network, direct, error)
            shared = []
        except Exception:
            self._network.unregister(spans)
            raise
        self._shared += shared
        self._unshared += [span for span in spans if span not in shared]
        self._tabulate()

    def unregister(self, spans: Sequence[Span]) -> None:
        """Take memory back from both. Raises ``EngineError``."""
        self._network.unregister(spans)
        gone = set(spans)
        shared = [span for span in self._shared if span in gone]
        self._shared = [span for span in self._shared if span not in gone]
        self._unshared = [span for span in self._unshared if span not in gone]
        self._tabulate()
        if shared:
            self._direct.unregister(shared)

    def renew_registration(self) -> bool:
        """Not possible: peers of this host write through their own mapping of our memory."""
        return False

    # ---- peers

    def card(self) -> bytes:
        """The network engine's card; the direct engine's is a field of it while any memory is shared."""
        card = self._network.card()
        if not self._shared:
            return card
        direct = DirectCard(
            engine=self._direct.capabilities.name,
            host=own_identity().host,
            card=self._direct.card(),
            spans=[(span.address, span.length_bytes) for span in self._shared],
            all=not self._unshared,
        )
        return join_cards(card, direct)

    def connect(self, peer: str, card: bytes) -> None:
        """Introduce a peer to the network engine, and to the direct one if it can reach it.

        Raises:
            EngineError: the card is not one of the network engine's kind; then the peer is not known.
        """
        try:
            self._network.connect(peer, card)
        except EngineError:
            self.disconnect(peer)
            raise
        before = self._peers.get(peer)
        known, reason = self._meet(peer, card)
        self._peers[peer] = known
        if before is None or before.engine != known.engine:
            log.info("peer %s is reached over %s (%s)", peer, known.engine, reason)

    def disconnect(self, peer: str) -> None:
        """Forget a peer; batches in flight to it end as failures."""
        self._peers.pop(peer, None)
        self._network.disconnect(peer)
        self._direct.disconnect(peer)

    def _meet(self, peer: str, card: bytes) -> tuple[_Peer, str]:
        """Try the direct way to a peer; the second is why it is taken or not."""
        direct, name = direct_part(card), self._direct.capabilities.name
        host = own_identity().host
        if direct is None or direct.engine != name:
            reason = f"it does not offer {name}"
        elif not host or direct.host != host:
            reason = "it is on another host, or in another pid namespace"
        else:
            try:
                self._direct.connect(peer, direct.card)
                return _Peer(name, SpanTable(direct.spans), direct.all), "it is on this host"
            except EngineError as error:
                reason = str(error)
        self._direct.disconnect(peer)
        return _Peer(self._network.capabilities.name), reason

    # ---- batches

    def submit(self, batch: Batch) -> None:
        """Start a batch on the engine that its memory calls for. Raises ``LocalError``."""
        in_flight = [(batch_id, peer) for batch_id, (_, peer) in self._flights.items()]
        check_batch(batch, self.capabilities_of(batch.peer), self._peers, in_flight)
        engine = self._direct if self._is_direct(batch) else self._network
        engine.submit(batch)
        self._flights[batch.batch_id] = (engine, batch.peer)

    def poll(self) -> list[Completion]:
        """Advance both, and return what ended on either."""
        finished = [*self._direct.poll(), *self._network.poll()]
        return [ended for ended in finished if self._flights.pop(ended.batch_id, None) is not None]

    def cancel(self, batch_id: int) -> None:
        """Ask for an early end of a batch."""
        if batch_id in self._flights:
            self._flights[batch_id][0].cancel(batch_id)

    def close(self) -> None:
        """Close both, the second one even if the first cannot be."""
        if self._closed:
            return
        self._closed = True
        self._peers.clear()
        try:
            self._direct.close()
        finally:
            self._network.close()

    def _is_direct(self, batch: Batch) -> bool:
        """Whether all of a batch's memory is within the direct engine's reach."""
        peer = self._peers[batch.peer]
        if peer.table is None or self._is_all_direct(peer):
            return peer.table is not None
        near = self._table.outside(batch.local, batch.length)
        return near is None and peer.table.outside(batch.remote, batch.length) is None

    def _is_all_direct(self, peer: _Peer) -> bool:
        return peer.table is not None and peer.all_direct and not self._unshared

    def _tabulate(self) -> None:
        self._table = SpanTable((span.address, span.length_bytes) for span in self._shared)


def _tighter(network: Capabilities, direct: Capabilities) -> Capabilities:
    """What both engines can do, under the network engine's name."""
    return Capabilities(
        name=network.name,
        verbs=network.verbs & direct.verbs,
        max_copies=min(network.max_copies, direct.max_copies),
        max_bytes=min(network.max_bytes, direct.max_bytes),
        max_batches_per_peer=min(network.max_batches_per_peer, direct.max_batches_per_peer),
        target_must_poll=network.target_must_poll or direct.target_must_poll,
        device_memory=network.device_memory,
    )
