"""Shards: the layers, heads and tokens that a rank owns; and which ranks of two nodes exchange KV.

Replicas are ranks that own the same shard; a fetching rank chooses one of them.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import msgspec

from kvconnect.errors import LayoutError

_MOST_RANKS = 256
_MOST_LAYERS = 65_536


class HeadInterval(msgspec.Struct, frozen=True, array_like=True, order=True):
    """The heads ``start <= h < stop`` of a layer, numbered over the whole model."""

    start: int
    stop: int

    def __len__(self) -> int:
        return max(0, self.stop - self.start)

    def intersect(self, other: HeadInterval) -> HeadInterval:
        """The heads that are in both intervals; an interval of length 0 if there are none."""
        start = max(self.start, other.start)
        return HeadInterval(start, max(start, min(self.stop, other.stop)))


class Residue(NamedTuple):
    """The tokens ``t`` with ``t // interleave % context == rank``: all, where ``context`` is 1."""

    context: int = 1
    rank: int = 0
    interleave: int = 1


class SharedTokens(NamedTuple):
    """The tokens of two residues: in every ``period`` units of ``unit`` tokens, unit number ``first``."""

    unit: int
    first: int
    period: int

    def count(self, num_tokens: int) -> int:
        """The number of shared tokens among the first ``num_tokens``."""
        units, rest = divmod(num_tokens, self.unit)
        whole = max(0, -(-(units - self.first) // self.period))
        is_cut = units >= self.first and (units - self.first) % self.period == 0
        return whole * self.unit + rest * is_cut

    def stride(self, side: Residue) -> tuple[int, int]:
        """Start and step of the shared units, counted in the units that ``side`` keeps."""
        return (self.first - side.rank) // side.context, self.period // side.context


def shared_tokens(one: Residue, other: Residue) -> SharedTokens | None:
    """The tokens in both residues; None if there are none. Residues that are both divided must have equal
    ``interleave``."""
    unit = max((side.interleave for side in (one, other) if side.context > 1), default=1)
    gap, common = other.rank - one.rank, math.gcd(one.context, other.context)
    if gap % common:
        return None
    # The Chinese remainder theorem: the first unit that is in both residues.
    rest = other.context // common
    turns = gap // common * pow(one.context // common, -1, rest) % rest
    return SharedTokens(unit, one.rank + one.context * turns, one.context * rest)


class Shard(NamedTuple):
    """The layers that a rank owns, by number, the heads of each, and the tokens."""

    layers: range
    heads: HeadInterval
    tokens: Residue = Residue()

    def shares(self, other: Shard) -> bool:
        """Whether some bytes are in both shards."""
        if shared_tokens(self.tokens, other.tokens) is None:
            return False
        layers = range(max(self.layers.start, other.layers.start), min(self.layers.stop, other.layers.stop))
        return bool(layers) and len(self.heads.intersect(other.heads)) > 0


class Topology(NamedTuple):
    """How a node divides its cache over its ranks, which are numbered pipeline rank by pipeline rank.

    ``stages`` has the first layer of each pipeline rank; the last rank owns all layers from there on, also a
    draft model's. Within a pipeline rank, heads are divided over ``tensor`` ranks. Of the ranks with the
    same heads, ``context`` ranks keep tokens in turns of ``interleave`` tokens.
    """

    tensor: int = 1
    stages: tuple[int, ...] = (0,)
    context: int = 1
    interleave: int = 1

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.stages) * self.tensor

    def refusal(self, rank: int, num_heads: int | None) -> str | None:
        """Why no node can have this topology and this rank; None if one can."""
        if self.context > 1 and self.tensor % (self.context * (num_heads or 1)):
            return (
                f"{self.tensor} tensor-parallel ranks with {num_heads or 1} heads do not have {self.context} "
                "ranks of each, to keep tokens in turns"
            )
        ascends = self.stages[0] == 0 and list(self.stages) == sorted(self.stages)
        if ascends and self.stages[-1] < _MOST_LAYERS and rank < self.size <= _MOST_RANKS:
            return None
        return (
            f"rank {rank} is in no world of {self.tensor} tensor-parallel ranks in pipeline ranks that begin "
            f"with layers {list(self.stages[:32])}"
        )

    def layers(self, rank: int) -> range:
        """The layers of a rank. Raises ``LayoutError`` for a rank that is not in the world."""
        if not 0 <= rank < self.size:
            raise LayoutError(f"rank {rank} is not in a world of {self.size}")
        stage = rank // self.tensor
        return range(self.stages[stage], [*self.stages[1:], _MOST_LAYERS][stage])

    def shard(self, rank: int, num_heads: int | None) -> Shard:
        """The shard of a rank. With ``num_heads`` None, tensor-parallel ranks keep the same bytes (MLA)."""
        heads = shard_heads(num_heads or 1, rank % self.tensor, self.tensor)
        return Shard(self.layers(rank), heads, self.tokens(rank))

    def tokens(self, rank: int) -> Residue:
        """The tokens that a rank keeps of the layers and heads that it owns."""
        return Residue(self.context, rank % self.tensor % self.context, self.interleave)

    def owns(self, rank: int, layer: str) -> bool:
        """Whether a rank owns a layer, by the number in its name; all ranks own a layer without a number."""
        number = layer_number(layer)
        return number is None or number in self.layers(rank)


def layer_number(layer: str) -> int | None:
    """The first number in a layer's name, or None; the last possible number for a draft model's layer."""
    parts = layer.split(".")
    if "draft" in layer or "mtp" in parts:
        return _MOST_LAYERS - 1
    return next((int(part) for part in parts if part.isdecimal()), None)


def shard_heads(num_heads: int, rank: int, world_size: int) -> HeadInterval:
    """The heads that tensor-parallel ``rank`` keeps.

    With more ranks than heads, several ranks keep each head. With fewer, the heads are spread as evenly
    as possible. Raises ``LayoutError`` for a rank that is not in the world.
    """
    if not 0 <= rank < world_size:
        raise LayoutError(f"rank {rank} is not in a world of {world_size}")
    if world_size >= num_heads:
        head = rank * num_heads // world_size
        return HeadInterval(head, head + 1)
    return HeadInterval(rank * num_heads // world_size, (rank + 1) * num_heads // world_size)


@functools.lru_cache(64)
def _owners(topology: Topology, num_heads: int | None) -> dict[Shard, list[int]]:
    """The ranks of a node by their shard."""
    owners: dict[Shard, list[int]] = {}
    for rank in range(topology.size):
        owners.setdefault(topology.shard(rank, num_heads), []).append(rank)
    return owners


def partner_ranks(rank: int, ours: Topology, theirs: Topology, num_heads: int | None) -> list[int]:
    """The ranks of a peer that ``rank`` fetches from, each byte of its shard from exactly one of them.

    ``num_heads`` counts the model's KV heads; None means that tensor-parallel ranks keep the same (MLA).
    Fetching ranks are spread over replicas. Raises ``LayoutError``: the rank is not in the world.
    """
    wanted = ours.shard(rank, num_heads)
    owners = _owners(theirs, num_heads).items()
    return sorted(replicas[rank % len(replicas)] for shard, replicas in owners if wanted.shares(shard))
