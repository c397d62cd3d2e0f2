"""The card of a region table, which peers exchange, and the check that a peer's card is plausible."""

from __future__ import annotations

import msgspec

from kvconnect.cache.region_table import GroupGeometry, Region, RegionTable, are_scales
from kvconnect.cache.retention import parse
from kvconnect.errors import LayoutError


class TableCard(msgspec.Struct, frozen=True, array_like=True):
    """A region table as it is sent to peers."""

    regions: tuple[Region, ...]
    groups: tuple[GroupGeometry, ...]

    @classmethod
    def of(cls, table: RegionTable) -> TableCard:
        """The card of a table: its regions and group geometries, without its storages."""
        return cls(table.regions, table.groups)

    def geometry(self) -> dict[int, GroupGeometry]:
        """The block geometry by group index."""
        return {geometry.group: geometry for geometry in self.groups}


_MOST_REGIONS = 65_536
_MOST_ROWS = 65_536
_MOST_BLOCKS = 2**31
_MOST_BYTES = 2**48


def card_refusal(card: TableCard) -> str | None:
    """Why no cache can have a peer's table, or None if one can.

    A false address harms only the peer, whose own memory is written there. Sizes and counts are bounded,
    so that a peer cannot make this node compute with numbers that no cache has.
    """
    groups = card.geometry()
    if len(card.regions) > _MOST_REGIONS or len(groups) != len(card.groups):
        return f"a table of {len(card.regions)} regions and {len(card.groups)} groups, some of them alike"
    for geometry in card.groups:
        if not (
            0 <= geometry.group < _MOST_ROWS
            and 0 < geometry.block_tokens < _MOST_BLOCKS
            and 0 < geometry.blocks_per_kv_block <= _MOST_ROWS
        ):
            return f"cache group {geometry.group} of the peer's table has impossible block sizes"
        try:
            parse(geometry.retention)
        except LayoutError as error:
            return f"cache group {geometry.group} of the peer's table: {error}"
    for region in card.regions:
        axes = region.axes
        counts = (axes.planes, axes.heads, axes.tokens)
        strides = (axes.plane_stride, axes.head_stride, axes.token_stride)
        if not (
            region.group in groups
            and 0 < region.address < 2**62
            and 0 < region.num_blocks < _MOST_BLOCKS
            and 0 < region.page_bytes <= region.block_stride < _MOST_BYTES
            and all(0 < count <= _MOST_ROWS for count in counts)
            and axes.planes * axes.heads * axes.tokens <= 2**22
            and 0 < axes.row_bytes <= region.page_bytes
            and all(0 <= stride < _MOST_BYTES for stride in strides)
            and 0 <= region.first_plane < _MOST_ROWS
            and (region.heads is None or 0 <= region.heads.start <= region.heads.stop <= _MOST_ROWS)
            and (region.key_bytes is None or 0 <= region.key_bytes <= axes.row_bytes)
        ):
            return f"layer {region.layer[:200]!r} of the peer's table has impossible sizes"
        if not are_scales(region.scales):
            return f"layer {region.layer[:200]!r} of the peer's table has impossible scales {region.scales}"
    return None
