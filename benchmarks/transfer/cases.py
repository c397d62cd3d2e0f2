"""What is measured: layouts, caches, pairs and rounds, what children are told of them and what they answer.

Plain values that cross process borders. Knows no tensors and no processes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvconnect.addresses import RankAddress
from kvconnect.errors import ConfigError

VALUE_BYTES = 2
"""The caches keep bfloat16."""

AXES = {
    "nhd": "block token head content",
    "hnd": "block head token content",
    "planes": "block plane head token content",
}
"""The dimensions of a cache tensor: tokens outside heads, inside, and inside with keys and values apart."""

_ROW_BYTES = 512
_LAYOUT = re.compile(r"(nhd|hnd)([1-9]\d*)?")
_BLOCK_TOKENS = 16


@dataclass(frozen=True)
class Layout:
    """How one side keeps its pages. ``order`` is one of ``AXES``."""

    order: str
    block_tokens: int

    @property
    def axes(self) -> str:
        """The names of a cache tensor's dimensions, in order."""
        return AXES[self.order]

    def __str__(self) -> str:
        return f"{self.order}{self.block_tokens}"


@dataclass(frozen=True)
class Layouts:
    """The layouts of both sides."""

    prefill: Layout
    decode: Layout

    @classmethod
    def parse(cls, text: str) -> Layouts:
        """Read ``PREFILL:DECODE``, each side ``nhd`` or ``hnd`` with its tokens per block, 16 if left out.

        Raises:
            ConfigError: it is something else, or neither block size divides the other.
        """
        found = [_LAYOUT.fullmatch(part) for part in text.split(":")]
        sides = [Layout(one[1], int(one[2] or _BLOCK_TOKENS)) for one in found if one is not None]
        if len(found) != 2 or len(sides) != 2:
            raise ConfigError(f"layouts is {text!r}; accepted: PREFILL:DECODE such as nhd16:hnd32")
        layouts = cls(*sides)
        small, large = sorted(side.block_tokens for side in sides)
        if large % small:
            raise ConfigError(f"layouts is {text!r}; the smaller block size must divide the larger one")
        return layouts

    @property
    def group_tokens(self) -> int:
        """Tokens of the larger block: what whole blocks of both sides cover."""
        return max(self.prefill.block_tokens, self.decode.block_tokens)

    def __str__(self) -> str:
        return f"{self.prefill}:{self.decode}"


@dataclass(frozen=True)
class CacheShape:
    """The cache of one side: ``layers`` tensors of ``num_blocks`` pages."""

    layers: int
    num_blocks: int
    heads: int
    head_size: int
    layout: Layout

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole cache."""
        token_bytes = self.heads * self.head_size * 2 * VALUE_BYTES
        return self.layers * self.num_blocks * self.layout.block_tokens * token_bytes


@dataclass(frozen=True)
class PairCase:
    """What one pair of workers is made for. ``page_bytes`` is a page of the prefill side."""

    engine: str
    protocol: str
    layouts: Layouts
    page_bytes: int

    def heads(self) -> tuple[int, int]:
        """KV heads and head size that give the page its bytes, heads of 128 values where that fits."""
        token_bytes = self.page_bytes // self.layouts.prefill.block_tokens
        heads = token_bytes // _ROW_BYTES if token_bytes % _ROW_BYTES == 0 else 1
        return heads, token_bytes // heads // (2 * VALUE_BYTES)

    def shapes(self, regions: int, blocks: int, in_flight: int) -> tuple[CacheShape, CacheShape]:
        """The caches of both sides, with room for so many requests and a quarter more."""
        heads, head_size = self.heads()
        return (
            CacheShape(regions, _room(blocks, in_flight), heads, head_size, self.layouts.prefill),
            CacheShape(
                regions, _room(self.decode_blocks(blocks), in_flight), heads, head_size, self.layouts.decode
            ),
        )

    def tokens(self, blocks: int) -> int:
        """Tokens of a request of so many of the prefill side's blocks."""
        return blocks * self.layouts.prefill.block_tokens

    def decode_blocks(self, blocks: int) -> int:
        """Blocks of the decode side that a request of so many of the prefill side's takes."""
        return self.tokens(blocks) // self.layouts.decode.block_tokens


def _room(blocks: int, in_flight: int) -> int:
    # One more for the null block, and at least one that no request has.
    return blocks * in_flight * 5 // 4 + 2


@dataclass(frozen=True)
class Round:
    """Requests that are fetched one after the other, ``in_flight`` of them at a time."""

    name: str
    requests: int
    in_flight: int
    tokens: int

    def request_ids(self) -> list[str]:
        """The ids of the requests, in order."""
        return [f"{self.name}-{index}" for index in range(self.requests)]


@dataclass(frozen=True)
class RoundResult:
    """What the decode side saw of a round.

    ``seconds`` runs from the first order to the last result, ``latencies_s`` per request from its order
    to its result. ``last_in_slot`` says by slot which request came to its blocks last. ``bytes_by_lane``
    and ``copies`` are the worker's own counts.
    """

    seconds: float
    latencies_s: tuple[float, ...]
    last_in_slot: Mapping[int, int]
    bytes_by_lane: Mapping[str, int]
    copies: int


@dataclass(frozen=True)
class EngineLimit:
    """What an engine alone reaches between the two devices.

    ``contiguous`` is of batches of ``batch_bytes``, ``peer_copy`` a plain copy of a tensor between the
    devices (None without a GPU).
    """

    engine: str
    device: str
    batch_bytes: int
    contiguous_gb_per_s: float
    peer_copy_gb_per_s: float | None

    def rounded(self) -> EngineLimit:
        """The rates as they are reported."""
        return replace(
            self,
            contiguous_gb_per_s=round(self.contiguous_gb_per_s, 3),
            peer_copy_gb_per_s=self.peer_copy_gb_per_s and round(self.peer_copy_gb_per_s, 3),
        )


@dataclass(frozen=True)
class EngineAddress:
    """What the other side must know of an opened engine. ``max_bytes`` is the most that a batch holds."""

    engine: str
    card: bytes
    address: int
    max_bytes: int


@dataclass(frozen=True)
class WorkerSettings:
    """What a side is made of. ``seed`` fills the cache; None for the side that receives."""

    role: str
    engine: str
    protocol: str
    device: str
    shape: CacheShape
    seed: int | None
    timeout_s: float
    extra: Mapping[str, Any]


@dataclass(frozen=True)
class WorkerAddress:
    """Where a side listens, and the engine that it took."""

    engine_id: str
    engine: str
    rank: RankAddress
