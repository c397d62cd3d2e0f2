"""What a serving stack states of one rank: its caches, and which are sent to peers or kept in tiers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvconnect.cache.identity import Identity, Naming
from kvconnect.peer.messages import CacheMeaning
from kvconnect.transfer.stack import RankCache

if TYPE_CHECKING:
    from kvconnect.offload.scheduler.hit_requirements import HitRequirements


@dataclass(frozen=True)
class KeptCache:
    """The caches of which a rank keeps blocks below the device's memory.

    ``identity``: what their bytes depend on and only the stack knows; ``label``: the model's name for people.
    ``naming``: how peers may name rows; None: they may not. ``announces``: report the contents of tiers.
    """

    cache: RankCache
    identity: Identity
    requirements: HitRequirements
    label: str = ""
    naming: Naming | None = None
    announces: bool = False


@dataclass(frozen=True)
class SentCache:
    """The caches of which a rank sends blocks to peers, and the meaning that peers must agree on.

    ``shared``: how peers may name the blocks of the stack's prefix cache, and which of them a hit needs; None
    where peers fetch under handles only, or by name from the offload.
    """

    cache: RankCache
    meaning: CacheMeaning
    shared: tuple[Naming, HitRequirements] | None = None


@dataclass(frozen=True)
class RankTraits:
    """The traits that a stack states of one rank; it will still allocate ``reserved_bytes`` of the device.

    ``reports_fetches``: ``Results.wanted`` has the expected handles that a peer fetches, each with the first
    token of the fetch, and those that a peer released, with -1; for a stack that prefills only then.
    """

    rank: int = 0
    world_size: int = 1
    reserved_bytes: int = 0
    sent: SentCache | None = None
    kept: KeptCache | None = None
    reports_fetches: bool = False
