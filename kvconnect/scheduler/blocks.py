"""Blocks as a serving stack gives them to a request, and as orders name them."""

from __future__ import annotations

from collections.abc import Sequence

from kvconnect.arithmetic import div_ceil
from kvconnect.cache.specs import KVCacheGroup
from kvconnect.orders import GroupBlocks
from kvconnect.scheduler.stack import BlockIdsByGroup


def blocks_of(
    groups: Sequence[KVCacheGroup], block_ids: BlockIdsByGroup, first_token: int, end_token: int
) -> tuple[GroupBlocks, ...]:
    """The blocks of every group that hold tokens ``first_token`` to ``end_token - 1``."""
    made = []
    for index, (group, ids) in enumerate(zip(groups, block_ids, strict=True)):
        if not group.has_cache:
            continue
        if group.is_state:
            made.append(GroupBlocks(index, 0, tuple(ids[-1:])))
            continue
        first = first_token // group.block_size
        end = div_ceil(end_token, group.block_size)
        made.append(GroupBlocks(index, first, tuple(ids[first:end])))
    return tuple(made)
