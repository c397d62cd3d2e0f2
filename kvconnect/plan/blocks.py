"""Which block of one side belongs to which block of the other: by the tokens they hold.

Block ids never mean anything to the other side; positions in the sequence do. Everything is in
kernel blocks, so that logical sizes may differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvconnect.cache.region_table import GroupGeometry
from kvconnect.cache.shard import Residue, SharedTokens
from kvconnect.cache.specs import div_ceil

BlockIds = NDArray[np.int64]

# Bounds of what a peer may send. They hold where a message is read; our own values are within them.
Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Index = Annotated[int, msgspec.Meta(ge=0, lt=4096)]


BlockIdsByGroup = Sequence[Sequence[int]]
"""Block ids by cache group and position in the sequence; 0 where a position has no block."""


class GroupBlocks(msgspec.Struct, frozen=True, array_like=True):
    """The logical blocks of one request in one cache group, by position in the sequence.

    ``block_ids[i]`` holds the tokens from ``(first_block + i) * block_size``; 0 is the null block, of a
    position that is not kept or not wanted. A state group has one id, of the state after the last token.
    """

    group: Index
    first_block: Count
    block_ids: tuple[Count, ...]


NULL_BLOCK = 0


class Share(NamedTuple):
    """What two ranks both keep of a request, seen from one: its blocks are numbered anew for their plans.

    Of a side that keeps other ``tokens`` between these, each unit of them is a block. The cache groups
    ``elsewhere`` are shared with other ranks.
    """

    tokens: SharedTokens
    side: Residue
    elsewhere: frozenset[int] = frozenset()

    @property
    def is_whole(self) -> bool:
        """Both keep all tokens."""
        return self.tokens.period == 1

    def count(self, num_tokens: int) -> int:
        """How many of the first ``num_tokens`` both keep."""
        return num_tokens if self is WHOLE else self.tokens.count(num_tokens)

    def of(self, groups: tuple[GroupBlocks, ...]) -> tuple[GroupBlocks, ...]:
        """The blocks of a side that hold what both keep."""
        if self is WHOLE:
            return groups
        start, step = self.tokens.stride(self.side)
        made = []
        for blocks in groups:
            if blocks.group in self.elsewhere:
                continue
            first = max(0, div_ceil(blocks.first_block - start, step))
            ids = blocks.block_ids[start + step * first - blocks.first_block :: step]
            made.append(GroupBlocks(blocks.group, first, ids))
        return tuple(made)


WHOLE = Share(SharedTokens(1, 0, 1), Residue())


def first_needed(positions: BlockIds, geometry: GroupGeometry, num_tokens: int) -> int | None:
    """The first of these positions of kernel blocks that the next token, or a later one, reads.

    The next token is the last of the ``num_tokens``, where the target computes it again.
    """
    if not len(positions):
        return None
    for part in geometry.rule.blocks(num_tokens, geometry.block_tokens, replay=1):
        found = positions[(positions >= part.start) & (positions < part.stop)]
        if len(found):
            return int(found[0])
    return None


def expand_block_ids(block_ids: Sequence[int] | BlockIds, blocks_per_kv_block: int) -> BlockIds:
    """Kernel block ids of logical block ids: ``(n,)`` to int64 of shape ``(n * blocks_per_kv_block,)``."""
    ids = np.asarray(block_ids, dtype=np.int64)
    if blocks_per_kv_block == 1:
        return ids
    return (ids[:, None] * blocks_per_kv_block + np.arange(blocks_per_kv_block)).reshape(-1)


def kernel_positions(blocks: GroupBlocks, geometry: GroupGeometry) -> tuple[int, BlockIds]:
    """The first kernel position and the kernel ids from there on; 0 where there is no block."""
    ratio = geometry.blocks_per_kv_block
    logical = np.asarray(blocks.block_ids, dtype=np.int64)
    kernel = expand_block_ids(logical, ratio)
    if ratio > 1:
        # The null block's kernel blocks are 0..r-1; all of them stand for nothing.
        kernel = np.where(np.repeat(logical == NULL_BLOCK, ratio), NULL_BLOCK, kernel)
    return blocks.first_block * ratio, kernel


def page_ids(blocks: GroupBlocks, geometry: GroupGeometry, first: int, count: int) -> BlockIds:
    """The kernel blocks at ``count`` kernel positions from ``first`` on; 0 where there is none."""
    if geometry.blocks_per_kv_block == 1:
        # A chunk of a long request converts its own blocks, not all of them; a state has one, the first.
        at = first - blocks.first_block
        if 0 <= at <= len(blocks.block_ids) - count:
            return np.array(blocks.block_ids[at : at + count], dtype=np.int64)
    held_first, held = kernel_positions(blocks, geometry)
    if geometry.is_state:
        held_first = 0
    ids = np.zeros(count, dtype=np.int64)
    start, stop = max(first, held_first), min(first + count, held_first + len(held))
    if start < stop:
        ids[start - first : stop - first] = held[start - held_first : stop - held_first]
    return ids
