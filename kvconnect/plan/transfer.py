"""The plan of one transfer: three columns of numbers that need no more decisions to be executed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvconnect.errors import LayoutError
from kvconnect.orders import GroupBlocks
from kvconnect.plan.align import (
    Column,
    GroupAlignment,
    PageRows,
    TableAlignment,
    run_lengths,
    run_starts,
)
from kvconnect.plan.blocks import BlockPairs, pair_blocks


@dataclass(frozen=True, repr=False)
class Plan:
    """Copies of ``length[i]`` bytes from ``source[i]`` to ``target[i]``: int64 columns of addresses."""

    source: Column
    target: Column
    length: Column
    pages: int

    @property
    def copies(self) -> int:
        """How many copies an engine is asked for."""
        return len(self.length)

    @property
    def total_bytes(self) -> int:
        """Bytes that the plan moves."""
        return int(self.length.sum())

    def __repr__(self) -> str:
        return f"Plan({self.copies} copies of {self.pages} pages, {self.total_bytes} bytes)"

    def batches(self, max_copies: int, max_bytes: int) -> Iterator[tuple[Column, Column, Column]]:
        """Cut the plan into batches that an engine takes: views of the columns, in order.

        A copy larger than ``max_bytes`` is cut too. A plan without copies gives no batch.
        """
        source, target, length = self.source, self.target, self.length
        if self.copies and int(length.max()) > max_bytes:
            source, target, length = _split_long(source, target, length, max_bytes)
        ends = np.cumsum(length)
        start = 0
        while start < len(length):
            base = int(ends[start - 1]) if start else 0
            stop = int(np.searchsorted(ends, base + max_bytes, side="right"))
            stop = min(max(stop, start + 1), start + max_copies)
            yield source[start:stop], target[start:stop], length[start:stop]
            start = stop


def _split_long(
    source: Column, target: Column, length: Column, max_bytes: int
) -> tuple[Column, Column, Column]:
    parts = -(-length // max_bytes)
    offset = (np.arange(int(parts.sum())) - np.repeat(np.cumsum(parts) - parts, parts)) * max_bytes
    cut = np.minimum(np.repeat(length, parts) - offset, max_bytes)
    return np.repeat(source, parts) + offset, np.repeat(target, parts) + offset, cut


def pair_groups(
    link: TableAlignment, source: Sequence[GroupBlocks], target: Sequence[GroupBlocks], num_tokens: int
) -> Iterator[tuple[GroupAlignment, BlockPairs]]:
    """The groups that the target wants, each with the blocks of both sides that hold the same tokens.

    Raises ``LayoutError``: the target wants a group or a block that the source does not have.
    """
    held = {blocks.group: blocks for blocks in source}
    for wanted in target:
        group = link.get(wanted.group)
        if group is None:
            raise LayoutError(f"cache group {wanted.group} is wanted, the link knows {sorted(link)}")
        if group.source.group not in held:
            raise LayoutError(
                f"cache group {wanted.group} is wanted, but the source holds none of its blocks"
            )
        yield group, pair_blocks(held[group.source.group], group.source, wanted, group.target, num_tokens)


def make_plan(
    link: TableAlignment, source: Sequence[GroupBlocks], target: Sequence[GroupBlocks], num_tokens: int
) -> Plan:
    """Plan the copy of the first ``num_tokens`` tokens of one request. Raises as ``pair_groups``.

    ``source`` and ``target`` list logical blocks by group, each side by its own group indices and
    ids. Groups that the target does not name are not copied.
    """
    made: list[tuple[Column, Column, Column]] = []
    pages = 0
    for group, pairs in pair_groups(link, source, target, num_tokens):
        for rows in group.rows:
            made.append(_expand(rows, pairs))
            pages += len(rows.length) * len(pairs.source)
    if not made:
        empty = np.empty(0, dtype=np.int64)
        return Plan(empty, empty, empty, 0)
    source_column, target_column, length_column = (
        np.concatenate(columns) for columns in zip(*made, strict=True)
    )
    return Plan(source_column, target_column, length_column, pages)


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
    """The size of the plan that ``make_plan`` makes of the same arguments, without making it."""
    copies = total_bytes = most = 0
    least: list[int] = []
    for group, pairs in pair_groups(link, source, target, num_tokens):
        blocks = len(pairs.source)
        for rows in group.rows if blocks else ():
            starts = run_starts(pairs.source, pairs.target, 1) if rows.dense else np.arange(blocks)
            lengths = run_lengths(starts, blocks)
            copies += len(lengths) * len(rows.length)
            total_bytes += blocks * int(rows.length.sum())
            least.append(int(lengths.min() * rows.length.min()))
            most = max(most, int(lengths.max() * rows.length.max()))
    return PlanSize(copies, total_bytes, min(least, default=0), most)


def _expand(rows: PageRows, pairs: BlockPairs) -> tuple[Column, Column, Column]:
    """The copies of a group's rows: an outer sum of row bases and block offsets."""
    if rows.dense:
        starts = run_starts(pairs.source, pairs.target, 1)
        source_ids, target_ids = pairs.source[starts], pairs.target[starts]
        length = np.multiply.outer(rows.length, run_lengths(starts, len(pairs.source)))
    else:
        source_ids, target_ids = pairs.source, pairs.target
        length = np.repeat(rows.length[:, None], len(source_ids), axis=1)
    source = rows.source_base[:, None] + np.multiply.outer(rows.source_stride, source_ids)
    target = rows.target_base[:, None] + np.multiply.outer(rows.target_stride, target_ids)
    return source.reshape(-1), target.reshape(-1), length.reshape(-1)
