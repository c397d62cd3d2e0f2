"""Which block of one side belongs to which block of the other: by the tokens they hold.

Block ids never mean anything to the other side; positions in the sequence do. Everything is in
kernel blocks, so that logical sizes may differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvconnect.arithmetic import div_ceil
from kvconnect.cache.region_table import GroupGeometry
from kvconnect.cache.shard import Residue, SharedTokens
from kvconnect.errors import LayoutError
from kvconnect.orders import GroupBlocks
from kvconnect.runner_kit.block_table import BlockIds, expand_block_ids

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

    def of(self, groups: Sequence[GroupBlocks]) -> tuple[GroupBlocks, ...]:
        """The blocks of a side that hold what both keep."""
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


@dataclass(frozen=True)
class BlockPairs:
    """Kernel block ids, int64 of one length: ``source[i]`` holds what ``target[i]`` is to hold.

    Sorted by source, so that runs of adjacent blocks are found for any order of allocation.
    """

    source: BlockIds
    target: BlockIds


def pair_blocks(
    source: GroupBlocks,
    source_geometry: GroupGeometry,
    target: GroupBlocks,
    target_geometry: GroupGeometry,
    num_tokens: int,
) -> BlockPairs:
    """Pair the blocks of two sides that hold the first ``num_tokens`` tokens of one sequence.

    Positions that the target does not want (null) are left out. Positions that the source no longer
    keeps may be left out only where no later token can see them, else it is a ``LayoutError``.
    """
    if target_geometry.is_state:
        return _pair_state(source, target)
    wanted_first, wanted = kernel_positions(target, target_geometry)
    block_tokens = target_geometry.block_tokens
    wanted = wanted[: max(0, div_ceil(num_tokens, block_tokens) - wanted_first)]
    source_ids = page_ids(source, source_geometry, wanted_first, len(wanted))
    present, asked = source_ids != NULL_BLOCK, wanted != NULL_BLOCK
    at = first_needed(wanted_first + np.flatnonzero(asked & ~present), target_geometry, num_tokens)
    if at is not None:
        raise LayoutError(
            f"cache group {target.group}: tokens {at * block_tokens} to {(at + 1) * block_tokens - 1} are "
            f"wanted, but the source holds no block for them"
        )
    source_ids, wanted = source_ids[asked & present], wanted[asked & present]
    order = np.argsort(source_ids, kind="stable")
    return BlockPairs(source_ids[order], wanted[order])


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


def _pair_state(source: GroupBlocks, target: GroupBlocks) -> BlockPairs:
    for side, blocks in (("source", source), ("target", target)):
        if len(blocks.block_ids) != 1 or blocks.block_ids[0] == NULL_BLOCK:
            raise LayoutError(
                f"cache group {blocks.group} of the {side} keeps state: it needs one block, "
                f"it has {list(blocks.block_ids)}"
            )
    return BlockPairs(
        np.asarray(source.block_ids, dtype=np.int64), np.asarray(target.block_ids, dtype=np.int64)
    )


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
    if geometry.blocks_per_kv_block == 1 and not geometry.is_state:
        # A chunk of a long request converts its own blocks, not all of them.
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
