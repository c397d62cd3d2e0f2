"""What D remembers of a remote engine: one record, forgotten with one ``del``."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from kvconnect.orders import RankAddress
from kvconnect.peer.session import Session
from kvconnect.worker.breaker import Breaker
from kvconnect.worker.loads import PeerKey
from kvconnect.worker.routes import Route

_MOST_LET_GO = 1024
"""Handles that are remembered for a peer out of reach. The leases behind older ones end by their time."""


@dataclass
class RankLink:
    """Our connection to one rank of a peer. ``route`` is made when something is first asked over it.

    The peer's clock is ahead of ours by ``clock_ahead_s`` at least: by more, as far as its greeting was slow.
    """

    name: str
    session: Session
    route: Route | None = None
    clock_ahead_s: float = 0.0


@dataclass
class Peer:
    """A remote engine: its ranks, and what waits for it.

    ``let_go`` are handles that no rank of ours will fetch; ``releases`` the same per rank, once the ranks are
    known. ``lease_s`` is how long it holds what is not renewed, ``renewed_at`` when that was last done.
    ``was_met`` once it introduced itself and as
    long as it is of interest; ``is_warm`` where an operator wants it met in any case.
    """

    key: PeerKey
    breaker: Breaker
    links: dict[int, RankLink] = field(default_factory=dict)
    world_size: int | None = None
    directory: tuple[RankAddress, ...] = ()
    partners: tuple[int, ...] = ()
    consumers: dict[int, int] = field(default_factory=dict)
    let_go: deque[str] = field(default_factory=lambda: deque(maxlen=_MOST_LET_GO))
    releases: dict[int, list[str]] = field(default_factory=dict)
    used_at: float = 0.0
    renewed_at: float = -math.inf
    lease_s: float = 0.0
    was_met: bool = False
    is_warm: bool = False

    @property
    def address(self) -> str:
        """The node that slots are lent to, whatever it calls itself."""
        _, host, port = self.key
        return f"{host}:{port}"

    @classmethod
    def of(cls, key: PeerKey) -> Peer:
        """A peer that nothing is known of but its name."""
        engine_id, host, port = key
        return cls(key, Breaker(f"{engine_id or 'any engine'} at {host}:{port}"))
