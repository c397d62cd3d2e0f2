"""How large a plan would be, without making it: what the choice of a path needs to know of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvconnect.errors import LayoutError
from kvconnect.orders import GroupBlocks
from kvconnect.plan.align import Link, PageRows
from kvconnect.plan.blocks import BlockPairs, pair_blocks
from kvconnect.plan.pieces import run_lengths, run_starts


@dataclass(frozen=True)
class PlanSize:
    """The copies of a plan and their bytes: of all, of the smallest, of the largest."""

    copies: int
    total_bytes: int
    least_bytes: int
    most_bytes: int


def plan_size(
    link: Link, source: Sequence[GroupBlocks], target: Sequence[GroupBlocks], num_tokens: int
) -> PlanSize:
    """The size of the plan that ``make_plan`` makes of the same arguments.

    Raises:
        LayoutError: the target wants a group or a block that the source does not have.
    """
    held = {blocks.group: blocks for blocks in source}
    sizes = []
    for wanted in target:
        group = link.groups.get(wanted.group)
        if group is None or group.source.group not in held:
            raise LayoutError(
                f"cache group {wanted.group} is wanted, but the source holds none of its blocks"
            )
        pairs = pair_blocks(held[group.source.group], group.source, wanted, group.target, num_tokens)
        if len(pairs.source):
            sizes += [_rows_size(rows, pairs) for rows in group.rows]
    return PlanSize(
        sum(size.copies for size in sizes),
        sum(size.total_bytes for size in sizes),
        min((size.least_bytes for size in sizes), default=0),
        max((size.most_bytes for size in sizes), default=0),
    )


def _rows_size(rows: PageRows, pairs: BlockPairs) -> PlanSize:
    blocks = len(pairs.source)
    copies, least, most = blocks, 1, 1
    if rows.dense:
        lengths = run_lengths(run_starts(pairs.source, pairs.target, 1), blocks)
        copies, least, most = len(lengths), int(lengths.min()), int(lengths.max())
    return PlanSize(
        copies * len(rows.length),
        blocks * int(rows.length.sum()),
        least * int(rows.length.min()),
        most * int(rows.length.max()),
    )
