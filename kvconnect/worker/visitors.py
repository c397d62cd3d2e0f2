"""Who fetches from us: P's connections, and by which paths each visitor's cache can be reached.

Owned by the mover thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container
from dataclasses import dataclass, field

from kvconnect.config import ExtraConfig
from kvconnect.engine.base import Engine
from kvconnect.errors import EngineError, LayoutError, PeerError
from kvconnect.orders import RankAddress
from kvconnect.pack.packer import Packer
from kvconnect.peer.messages import Introduction
from kvconnect.peer.session import Session, Side
from kvconnect.plan.align import Link, align_tables
from kvconnect.plan.cost import LinkCost
from kvconnect.worker.calibration import ProbeOutbox, typical_page_bytes
from kvconnect.worker.local import Local


@dataclass
class Way:
    """How a visitor's cache is reached: ``name`` for the engine, and the paths, worked out when first used.

    ``direct`` and ``packer`` are None where that path is closed; ``refusals`` say why. Where both are
    open, ``cost`` chooses; it is None until the link is calibrated, and ``probe`` is what is yet to be
    tried or being tried for that.
    """

    name: str
    direct: Link | None = None
    packer: Packer | None = None
    cost: LinkCost | None = None
    probe: ProbeOutbox | None = None
    refusals: dict[str, str] = field(default_factory=dict)


@dataclass
class Visitor:
    """One connection that D opened to us."""

    session: Session
    way: Way | None = None


class Visitors:
    """All connections to us, the most recently heard last.

    Args:
        introduce: our introduction, made anew for every visitor since the engine's card may change.
        local: what there is to pack from.
    """

    def __init__(
        self,
        config: ExtraConfig,
        engine: Engine,
        introduce: Callable[[], Introduction],
        local: Local,
    ) -> None:
        self.directory: tuple[RankAddress, ...] = ()
        self._config = config
        self._engine = engine
        self._introduce = introduce
        self._local = local
        self._visitors: OrderedDict[str, Visitor] = OrderedDict()
        self._connected: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._visitors)

    def get(self, link: str) -> Visitor | None:
        """The visitor of a connection."""
        return self._visitors.get(link)

    def hear(self, link: str, in_use: Container[str]) -> Visitor:
        """The visitor who says something, admitted if it is new. ``in_use`` are links that must stay."""
        visitor = self._visitors.get(link)
        if visitor is None:
            visitor = self._admit(link, in_use)
        self._visitors.move_to_end(link)
        return visitor

    def forget(self, link: str) -> None:
        """A conversation is over."""
        del self._visitors[link]

    def _admit(self, link: str, in_use: Container[str]) -> Visitor:
        while len(self._visitors) >= self._config.max_peers:
            # The one that has been silent longest. If it is still there it is told to greet again.
            idle = next((name for name in self._visitors if name not in in_use), None)
            if idle is None:
                break
            del self._visitors[idle]
        visitor = self._visitors[link] = Visitor(
            Session(
                Side.PREFILL,
                self._introduce(),
                directory=self.directory,
                max_message_bytes=self._config.max_message_bytes,
                handshake_timeout_s=self._config.handshake_timeout_s,
                peer_timeout_s=self._config.peer_timeout_s,
            )
        )
        return visitor

    def way_to(self, visitor: Visitor, in_use: set[str]) -> Way:
        """How a visitor is reached: worked out when it first fetches, since it may only ask for directions.

        ``in_use`` are the engine's peers that must stay connected.

        Raises:
            LayoutError: no path is open; the text has every reason.
            PeerError: the peer's engine card is no use, or it has not introduced itself.
        """
        peer = visitor.session.peer
        if peer is None:
            raise PeerError("the peer has not introduced itself")
        if visitor.way is None:
            visitor.way = self._make_way(visitor.session.ours, peer)
        way = visitor.way
        if way.direct is None and way.packer is None:
            raise LayoutError("; ".join(f"{path}: {why}" for path, why in way.refusals.items()))
        if way.name not in self._connected:
            try:
                self._engine.connect(way.name, peer.engine_card)
            except EngineError as error:
                raise PeerError(f"the engine cannot reach the peer: {error}") from error
            self._connected[way.name] = None
        self._connected.move_to_end(way.name)
        self._disconnect_idle(in_use | {way.name})
        return way

    def _make_way(self, ours: Introduction, peer: Introduction) -> Way:
        way = Way(f"{peer.engine_id}/{peer.incarnation}/{peer.rank}")
        if self._config.path == "packed":
            way.refusals["direct"] = "this node's path is 'packed'"
        else:
            try:
                way.direct = align_tables(ours.table, peer.table)
            except LayoutError as error:
                way.refusals["direct"] = str(error)
        if not ours.slot_bytes or not peer.slot_bytes:
            way.refusals["packed"] = f"the {'decode' if ours.slot_bytes else 'prefill'} node has no slots"
        else:
            try:
                way.packer = self._local.packer(
                    ours, peer, "source", self._config.pack_programs, self._config.convert_dtype
                )
            except LayoutError as error:
                way.refusals["packed"] = str(error)
        if way.direct is not None and way.packer is not None:
            way.probe = self._make_probe(way.direct, ours, peer)
            way.cost = None if way.probe else LinkCost()
        return way

    def _make_probe(self, link: Link, ours: Introduction, peer: Introduction) -> ProbeOutbox | None:
        scratch_bytes = min(ours.scratch_bytes, peer.scratch_bytes)
        page_bytes = typical_page_bytes(link)
        if scratch_bytes < page_bytes:
            return None
        return ProbeOutbox(
            ours.scratch_address,
            peer.scratch_address,
            scratch_bytes,
            page_bytes,
            self._engine.capabilities.max_copies,
        )

    def _disconnect_idle(self, in_use: Container[str]) -> None:
        for name in [name for name in self._connected if name not in in_use]:
            if len(self._connected) <= self._config.max_peers:
                return
            del self._connected[name]
            self._engine.disconnect(name)
