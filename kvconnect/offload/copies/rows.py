"""What a row of host memory holds: the pages of one logical block, of all layers of its cache group.

A row has for each region of the group, in the table's order, the bytes of the block's kernel pages one after
the other, without gaps. So what a row holds depends on the cache's shape and not on where its tensors lie.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvconnect.cache.region_table import Region, RegionTable
from kvconnect.errors import LocalError
from kvconnect.offload.index.budgets import ROW_ALIGN_BYTES

Column = NDArray[np.int64]

_WIDEST_BYTES = 16


@dataclass(frozen=True, eq=False)
class GroupRows:
    """How the rows of one cache group lie in device memory, as columns with one number a lane.

    A lane is a stretch that every logical block has: block ``b`` has ``length[i]`` bytes at
    ``address[i] + b * stride[i]``, which are in its row from ``offset[i]`` on. ``unit[i]`` is the widest
    access, a power of two up to 16 bytes, that all of them are aligned to. A row has ``content_bytes``, and
    nothing of use from there to ``row_bytes``.
    """

    group: int
    num_blocks: int
    content_bytes: int
    row_bytes: int
    address: Column
    stride: Column
    length: Column
    offset: Column
    unit: Column


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
    lanes: list[_Lane] = []
    for region in regions:
        for lane in _lanes(region, ratio):
            if lanes and lanes[-1].goes_on_with(lane):
                lanes[-1] = lanes[-1].joined(lane)
            else:
                lanes.append(lane)
    address, stride, length = (
        np.array([getattr(lane, name) for lane in lanes], dtype=np.int64)
        for name in ("address", "stride", "length")
    )
    offset = np.cumsum(length) - length
    content_bytes = int(length.sum())
    return GroupRows(
        group=group,
        num_blocks=num_blocks,
        content_bytes=content_bytes,
        row_bytes=max(1, -(-content_bytes // ROW_ALIGN_BYTES)) * ROW_ALIGN_BYTES,
        address=address,
        stride=stride,
        length=length,
        offset=offset,
        unit=np.gcd.reduce(
            [address, stride, length, offset, np.full(len(lanes), _WIDEST_BYTES)], dtype=np.int64
        ),
    )


@dataclass(frozen=True)
class _Lane:
    """See ``GroupRows``."""

    address: int
    stride: int
    length: int

    def goes_on_with(self, other: _Lane) -> bool:
        """Whether in every block the other lane begins where this one ends."""
        return other.address == self.address + self.length and other.stride == self.stride

    def joined(self, other: _Lane) -> _Lane:
        return _Lane(self.address, self.stride, self.length + other.length)


def _lanes(region: Region, ratio: int) -> Iterator[_Lane]:
    stride = region.block_stride * ratio
    if region.block_stride == region.page_bytes:
        yield _Lane(region.address, stride, region.page_bytes * ratio)
        return
    for page in range(ratio):
        yield _Lane(region.address + page * region.block_stride, stride, region.page_bytes)
