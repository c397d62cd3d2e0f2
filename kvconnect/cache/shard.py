"""What a rank owns, as half-open intervals of heads, and who serves whom.

Replication is an interval owned by several ranks; one of them is chosen.
"""

from __future__ import annotations

import msgspec

from kvconnect.errors import LayoutError


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


def partner_ranks(rank: int, world_size: int, peer_world_size: int, num_heads: int | None) -> list[int]:
    """The ranks of a peer that ``rank`` fetches from: each of its heads from exactly one of them.

    ``num_heads`` counts the model's KV heads; None means that every rank keeps the same bytes (MLA).
    Replicas are spread over the ranks that fetch. Raises as ``shard_heads``.
    """
    if not 0 <= rank < world_size:
        raise LayoutError(f"rank {rank} is not in a world of {world_size}")
    if num_heads is None:
        return [rank * peer_world_size // world_size]
    wanted = shard_heads(num_heads, rank, world_size)
    owners: dict[HeadInterval, list[int]] = {}
    for peer in range(peer_world_size):
        interval = shard_heads(num_heads, peer, peer_world_size)
        if len(wanted.intersect(interval)):
            owners.setdefault(interval, []).append(peer)
    return [replicas[rank % len(replicas)] for _, replicas in sorted(owners.items())]


def consumer_ranks(world_size: int, peer_world_size: int, num_heads: int | None) -> list[list[int]]:
    """For every rank of a peer, our ranks that fetch from it: the inverse of ``partner_ranks``."""
    consumers: list[list[int]] = [[] for _ in range(peer_world_size)]
    for rank in range(world_size):
        for partner in partner_ranks(rank, world_size, peer_world_size, num_heads):
            consumers[partner].append(rank)
    return consumers
