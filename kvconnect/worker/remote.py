"""What D remembers of a remote engine: one record, forgotten with one ``del``."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvconnect.orders import RankAddress
from kvconnect.peer.session import Session
from kvconnect.worker.ledger import PeerKey
from kvconnect.worker.routes import Route


@dataclass
class RankLink:
    """Our connection to one rank of a peer. ``route`` is made when something is first asked over it."""

    name: str
    session: Session
    route: Route | None = None


@dataclass
class Peer:
    """A remote engine: its ranks, and what waits for it.

    ``let_go`` are handles that nobody will fetch; ``releases`` the same per rank, once the ranks are
    known.
    """

    key: PeerKey
    links: dict[int, RankLink] = field(default_factory=dict)
    world_size: int | None = None
    directory: tuple[RankAddress, ...] = ()
    partners: tuple[int, ...] = ()
    consumers: dict[int, int] = field(default_factory=dict)
    let_go: list[str] = field(default_factory=list)
    releases: dict[int, list[str]] = field(default_factory=dict)
    used_at: float = 0.0
