"""What a row of host memory holds: the pages of one logical block, of all layers of its cache group.

A row has for each region of the group, in the table's order, the bytes of the block's kernel pages one after
the other, without gaps. So what a row holds depends on the cache's shape and not on where its tensors lie.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from kvconnect.cache.region_table import Region, RegionTable
from kvconnect.errors import LocalError
from kvconnect.offload.index.budgets import ROW_ALIGN_BYTES
from kvconnect.orders import RowCopies
from kvconnect.pack.lanes import Column, Lanes, flat_lane, join_lanes


@dataclass(frozen=True)
class RowLane:
    """What every logical block has: block ``b`` has ``length`` bytes at ``address + b * stride``.

    In the block's row they begin at ``offset``.
    """

    address: int
    stride: int
    length: int
    offset: int


@dataclass(frozen=True, eq=False)
class GroupRows:
    """How the rows of one cache group lie in device memory.

    A row has ``content_bytes``, and nothing of use from there to ``row_bytes``.
    """

    group: int
    num_blocks: int
    content_bytes: int
    row_bytes: int
    lanes: tuple[RowLane, ...]

    def lanes_of(self, part: int, first: int, stop: int) -> tuple[Lanes, ...]:
        """The bytes ``first`` to ``stop - 1`` of rows, as lanes to a slot that holds them: group ``part``."""
        cut = [
            flat_lane(
                part,
                self.num_blocks,
                lane.address + begin - lane.offset,
                lane.stride,
                end - begin,
                begin - first,
            )
            for lane in self.lanes
            if (begin := max(lane.offset, first)) < (end := min(lane.offset + lane.length, stop))
        ]
        return join_lanes(cut, [(part, 1)])

    def columns(self, copies: RowCopies) -> tuple[Column, Column]:
        """Blocks and rows of an order, as columns.

        Raises:
            LocalError: they are not pairs, or a block is none of the cache, or the null block.
        """
        blocks, rows = (np.array(ids, dtype=np.int64) for ids in (copies.block_ids, copies.rows))
        if len(blocks) != len(rows):
            raise LocalError(f"{len(blocks)} blocks of cache group {self.group} came with {len(rows)} rows")
        if len(blocks) and not 0 < int(blocks.min()) <= int(blocks.max()) < self.num_blocks:
            raise LocalError(
                f"cache group {self.group} has blocks 1 to {self.num_blocks - 1}; asked for are "
                f"{int(blocks.min())} to {int(blocks.max())}"
            )
        return blocks, rows


@dataclass(frozen=True, eq=False)
class RowLayout:
    """The rows of all cache groups of a worker, by group index."""

    groups: Mapping[int, GroupRows]

    @classmethod
    def build(cls, table: RegionTable) -> RowLayout:
        """The rows of a table's blocks. A group that has no layer on this worker has rows without content."""
        regions: dict[int, list[Region]] = {geometry.group: [] for geometry in table.groups}
        for region in table.regions:
            regions[region.group].append(region)
        ratios = {geometry.group: geometry.blocks_per_kv_block for geometry in table.groups}
        most = max(region.num_blocks // ratios[region.group] for region in table.regions)
        return cls(
            {group: _group_rows(group, found, ratios[group], most) for group, found in regions.items()}
        )

    @property
    def row_bytes(self) -> dict[int, int]:
        """Bytes of a row by group index, multiples of 64."""
        return {group: rows.row_bytes for group, rows in self.groups.items()}

    def of(self, group: int) -> GroupRows:
        """The rows of a group.

        Raises:
            LocalError: the cache has no such group.
        """
        if group not in self.groups:
            raise LocalError(f"there is no cache group {group}; accepted: {sorted(self.groups)}")
        return self.groups[group]


def _group_rows(group: int, regions: list[Region], ratio: int, num_blocks: int) -> GroupRows:
    lanes: list[RowLane] = []
    at = 0
    for region in regions:
        for address, stride, length in _stretches(region, ratio):
            last = lanes[-1] if lanes else None
            if last is not None and (last.address + last.length, last.stride) == (address, stride):
                lanes[-1] = RowLane(last.address, stride, last.length + length, last.offset)
            else:
                lanes.append(RowLane(address, stride, length, at))
            at += length
    row_bytes = max(1, -(-at // ROW_ALIGN_BYTES)) * ROW_ALIGN_BYTES
    return GroupRows(group, num_blocks, at, row_bytes, tuple(lanes))


def _stretches(region: Region, ratio: int) -> Iterator[tuple[int, int, int]]:
    """Address, stride and length of what lies side by side in a logical block."""
    stride = region.block_stride * ratio
    if region.block_stride == region.page_bytes:
        yield region.address, stride, region.page_bytes * ratio
        return
    for page in range(ratio):
        yield region.address + page * region.block_stride, stride, region.page_bytes
