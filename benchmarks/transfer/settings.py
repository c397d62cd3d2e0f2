"""What the parent tells the children when they open a side, and what it hears back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.transfer.cases import CacheShape
from kvconnect.orders import RankAddress


@dataclass(frozen=True)
class WorkerSettings:
    """What a side is made of. ``seed`` fills the cache; None for the side that receives."""

    role: str
    engine: str
    path: str
    device: str
    shape: CacheShape
    seed: int | None
    timeout_s: float
    extra: dict[str, Any]


@dataclass(frozen=True)
class WorkerAddress:
    """Where a side listens, and the engine that it took."""

    engine_id: str
    engine: str
    rank: RankAddress


@dataclass(frozen=True)
class EngineSettings:
    """What a side is made of. A batch holds ``batch_bytes``, or the most that the engine takes."""

    engine: str
    device: str
    batch_bytes: int
    timeout_s: float
    repeat: int
    budget_s: float
    extra: dict[str, Any]


@dataclass(frozen=True)
class EngineAddress:
    """What the other side must know of an opened engine. ``max_bytes`` is the most that a batch holds."""

    engine: str
    card: bytes
    address: int
    max_bytes: int
