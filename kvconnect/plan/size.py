"""How large a plan would be, without making it: what the choice of a path needs to know of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvconnect.orders import GroupBlocks
from kvconnect.plan.align import PageRows, TableAlignment
from kvconnect.plan.blocks import BlockPairs
from kvconnect.plan.pieces import run_lengths, run_starts
from kvconnect.plan.transfer import pair_groups


@dataclass(frozen=True)
class PlanSize:
    """The copies of a plan and their bytes: of all, of the smallest, of the largest."""

    copies: int
    total_bytes: int
    least_bytes: int
    most_bytes: int


def plan_size(
    link: TableAlignment, source: Sequence[GroupBlocks], target: Sequence[GroupBlocks], num_tokens: int
) -> PlanSize:
    """The size of the plan that ``make_plan`` makes of the same arguments.

    Raises:
        LayoutError: the target wants a group or a block that the source does not have.
    """
    sizes = [
        _rows_size(rows, pairs)
        for group, pairs in pair_groups(link, source, target, num_tokens)
        if len(pairs.source)
        for rows in group.rows
    ]
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
