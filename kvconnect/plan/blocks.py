"""Matches blocks of the source with blocks of the target, by the tokens that they hold.

A block id means nothing to the other side, so blocks are matched by their position in the sequence.
Positions count kernel blocks, so that the logical block sizes of the two sides may differ.
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
from kvconnect.errors import LayoutError

BlockIds = NDArray[np.int64]

# Bounds of numbers in a peer's message, checked when the message is decoded.
Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Index = Annotated[int, msgspec.Meta(ge=0, lt=4096)]


BlockIdsByGroup = Sequence[Sequence[int]]
"""Block ids by cache group and position in the sequence; 0 where a position has no block."""


class GroupBlocks(msgspec.Struct, frozen=True, array_like=True):
    """The logical blocks of one request in one cache group, by position in the sequence.

    ``block_ids[i]`` holds the ``block_size`` tokens from ``(first_block + i) * block_size`` on. Id 0, the
    null block, marks a position that is not kept or not requested. A state group has one id: the block of
    the state after the last token.
    """

    group: Index
    first_block: Count
    block_ids: tuple[Count, ...]


NULL_BLOCK = 0


class Share(NamedTuple):
    """The tokens of a request that two ranks both keep, seen from one of them, ``side``.

    Plans number the blocks of these ``tokens`` consecutively. Where ``side`` also keeps tokens that the other
    rank does not keep, its blocks are as long as the unit of ``tokens``. The cache groups ``elsewhere``
    are left out, since this rank shares them with other ranks.
    """

    tokens: SharedTokens
    side: Residue
    elsewhere: frozenset[int] = frozenset()

    @property
    def is_whole(self) -> bool:
        """True if both ranks keep all tokens."""
        return self.tokens.period == 1

    def count(self, num_tokens: int) -> int:
        """The number of tokens among the first ``num_tokens`` that both ranks keep."""
        return num_tokens if self is WHOLE else self.tokens.count(num_tokens)

    def of(self, groups: tuple[GroupBlocks, ...]) -> tuple[GroupBlocks, ...]:
        """The blocks of ``side`` that hold shared tokens, without the groups ``elsewhere``."""
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


def page_ids(blocks: GroupBlocks, geometry: GroupGeometry, first: int, count: int) -> BlockIds:
    """Kernel block ids, int64 ``(count,)``, of the kernel positions from ``first`` on; 0 for no block."""
    ratio = geometry.blocks_per_kv_block
    # The first kernel position of the blocks. A state's block is the first, whatever its position.
    held_first = 0 if geometry.is_state else blocks.first_block * ratio
    start = max(first, held_first)
    stop = min(first + count, held_first + len(blocks.block_ids) * ratio)
    ids = np.zeros(count, dtype=np.int64)
    if start < stop:
        # Only the chunk's blocks are converted, not all of a long request.
        begin, end = start - held_first, stop - held_first
        held = np.array(blocks.block_ids[begin // ratio : div_ceil(end, ratio)], dtype=np.int64)
        if ratio > 1:
            kernel = held[:, None] * ratio + np.arange(ratio)
            # The kernel blocks 0..r-1 of the null block are all null.
            kernel[held == NULL_BLOCK] = NULL_BLOCK
            held = kernel.reshape(-1)[begin % ratio :][: stop - start]
        ids[start - first : stop - first] = held
    return ids


def check_held(ids: BlockIds, first: int, geometry: GroupGeometry, num_tokens: int) -> None:
    """Raises ``LayoutError``: ``ids``, from position ``first`` on, lack a block that a later token sees.

    The target computes the last of the ``num_tokens`` again, so that this token is the first of those.
    """
    if np.count_nonzero(ids) == len(ids):
        return
    what, tokens = "the state", geometry.block_tokens
    if not geometry.is_state:
        missing = first + np.flatnonzero(ids == NULL_BLOCK)
        seen = geometry.rule.blocks(num_tokens, tokens, replay=1)
        lacking = (missing[(missing >= part.start) & (missing < part.stop)] for part in seen)
        at = next((int(some[0]) for some in lacking if len(some)), None)
        if at is None:
            return
        what = f"tokens {at * tokens} to {(at + 1) * tokens - 1}"
    raise LayoutError(
        f"cache group {geometry.group}: {what} of the request shall be packed, but no block holds it"
    )
