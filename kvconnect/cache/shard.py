"""What a rank owns, as intervals of layers and of heads, and who serves whom.

Replication is a shard owned by several ranks; one of them is chosen.
"""

from __future__ import annotations

import functools
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
        """The heads that are in both. Empty intervals have length 0."""
        start = max(self.start, other.start)
        return HeadInterval(start, max(start, min(self.stop, other.stop)))


class Shard(NamedTuple):
    """The layers that a rank owns, by number, and the heads of each."""

    layers: range
    heads: HeadInterval

    def shares(self, other: Shard) -> bool:
        """Some bytes are in both."""
        layers = range(max(self.layers.start, other.layers.start), min(self.layers.stop, other.layers.stop))
        return bool(layers) and len(self.heads.intersect(other.heads)) > 0


class Topology(NamedTuple):
    """How a node divides its cache over its ranks, which are numbered pipeline rank by pipeline rank.

    ``stages`` is the first layer of each pipeline rank; the last one owns all from there on, those of a draft
    model too. Within a pipeline rank heads are divided over ``tensor`` ranks.
    """

    tensor: int = 1
    stages: tuple[int, ...] = (0,)

    @property
    def size(self) -> int:
        """Ranks in all."""
        return len(self.stages) * self.tensor

    def refusal(self, rank: int) -> str | None:
        """Why no node can be divided like that and have this rank; None if it can."""
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
        """What a rank owns. Without ``num_heads`` all of a pipeline rank keep the same bytes (MLA)."""
        return Shard(self.layers(rank), shard_heads(num_heads or 1, rank % self.tensor, self.tensor))

    def owns(self, rank: int, layer: str) -> bool:
        """Whether a rank keeps a layer of this name; any that has one keeps a layer without a number."""
        number = layer_number(layer)
        return number is None or number in self.layers(rank)


def layer_number(layer: str) -> int | None:
    """The number of a layer, by the first in its name; those of a draft model come after all others."""
    parts = layer.split(".")
    if "draft" in layer or "mtp" in parts:
        return _MOST_LAYERS - 1
    return next((int(part) for part in parts if part.isdecimal()), None)


def shard_heads(num_heads: int, rank: int, world_size: int) -> HeadInterval:
    """The heads that tensor-parallel ``rank`` keeps.

    With more ranks than heads every head is kept by several ranks. With fewer, the heads are spread
    as evenly as possible. Raises ``LayoutError`` for a rank that is not in the world.
    """
    if not 0 <= rank < world_size:
        raise LayoutError(f"rank {rank} is not in a world of {world_size}")
    if world_size >= num_heads:
        head = rank * num_heads // world_size
        return HeadInterval(head, head + 1)
    return HeadInterval(rank * num_heads // world_size, (rank + 1) * num_heads // world_size)


@functools.lru_cache(64)
def _owners(topology: Topology, num_heads: int | None) -> dict[Shard, list[int]]:
    """The ranks of a node by what they own."""
    owners: dict[Shard, list[int]] = {}
    for rank in range(topology.size):
        owners.setdefault(topology.shard(rank, num_heads), []).append(rank)
    return owners


def partner_ranks(rank: int, ours: Topology, theirs: Topology, num_heads: int | None) -> list[int]:
    """The ranks of a peer that ``rank`` fetches from: each byte that it owns from exactly one of them.

    ``num_heads`` counts the model's KV heads; None means that tensor-parallel ranks keep the same (MLA).
    Replicas are spread over the ranks that fetch. Raises ``LayoutError``: the rank is not in the world.
    """
    wanted = ours.shard(rank, num_heads)
    owners = _owners(theirs, num_heads).items()
    return sorted(replicas[rank % len(replicas)] for shard, replicas in owners if wanted.shares(shard))


def consumer_ranks(ours: Topology, theirs: Topology, num_heads: int | None) -> list[list[int]]:
    """For every rank of a peer, our ranks that fetch from it: the inverse of ``partner_ranks``."""
    consumers: list[list[int]] = [[] for _ in range(theirs.size)]
    for rank in range(ours.size):
        for partner in partner_ranks(rank, ours, theirs, num_heads):
            consumers[partner].append(rank)
    return consumers
