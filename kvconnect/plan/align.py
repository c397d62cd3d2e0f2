"""Two region tables lined up: which region of one side feeds which region of the other.

All refusals are collected, so that an operator sees them at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvconnect.cache.region_table import GroupGeometry, PageAxes, Region, RegionTable, are_scales
from kvconnect.cache.retention import parse
from kvconnect.cache.shard import HeadInterval
from kvconnect.errors import LayoutError


class TableCard(msgspec.Struct, frozen=True, array_like=True):
    """A region table as a peer gets to know it."""

    regions: tuple[Region, ...]
    groups: tuple[GroupGeometry, ...]

    @classmethod
    def of(cls, table: RegionTable) -> TableCard:
        """The card of a table: all but what only its owner needs."""
        return cls(table.regions, table.groups)

    def geometry(self) -> dict[int, GroupGeometry]:
        """The block geometry by group index."""
        return {geometry.group: geometry for geometry in self.groups}


_MOST_REGIONS = 65_536
_MOST_ROWS = 65_536
_MOST_BLOCKS = 2**31
_MOST_BYTES = 2**48


def card_refusal(card: TableCard) -> str | None:
    """Why a peer's table cannot be a cache, or None if it can.

    A peer may lie about its addresses, which are its own to be written to. It must not be able to make
    us compute with numbers that no cache has.
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


Column = NDArray[np.int64]
Pieces = tuple[Column, Column, Column]
"""Runs of bytes within a page: where each begins in the source's and the target's, and its length."""


@dataclass(frozen=True)
class PageRows:
    """Region pairs of one group pair whose pages are copied alike: int64 columns, one entry a pair.

    ``length`` bytes go from ``source_base + source_block * source_stride`` to ``target_base +
    target_block * target_stride``. If ``dense``, the pages of both sides lie side by side, so that
    adjacent blocks are one run.
    """

    source_base: Column
    target_base: Column
    source_stride: Column
    target_stride: Column
    length: Column
    dense: bool


@dataclass(frozen=True)
class GroupAlignment:
    """A cache group of the source and the group of the target that holds the same layers."""

    source: GroupGeometry
    target: GroupGeometry
    rows: tuple[PageRows, ...]


TableAlignment = dict[int, GroupAlignment]
"""Everything that the plan of a transfer between two workers needs, by target group."""


def align_tables(source: TableCard, target: TableCard) -> TableAlignment:
    """Line up the regions of two workers. Raises ``LayoutError`` that lists why layers cannot be copied."""
    source_by_layer: dict[str, list[Region]] = defaultdict(list)
    for region in source.regions:
        source_by_layer[region.layer].append(region)
    source_groups, target_groups = source.geometry(), target.geometry()
    refusals: list[str] = []
    matches: dict[int, list[tuple[Region, Region, Pieces]]] = defaultdict(list)
    partner: dict[int, set[int]] = defaultdict(set)
    fed: set[str] = set()
    for theirs in target.regions:
        for ours in source_by_layer.get(theirs.layer, []):
            refusal = _region_refusal(ours, theirs) or group_refusal(
                theirs.layer, source_groups[ours.group], target_groups[theirs.group]
            )
            if refusal:
                refusals.append(refusal)
                continue
            pieces = _page_pieces(ours, theirs)
            if pieces is not None:
                fed.add(theirs.layer)
                matches[theirs.group].append((ours, theirs, pieces))
                partner[theirs.group].add(ours.group)
    if not refusals:
        # One rank of several may hold a part of a layer, but a layer of which it holds nothing is wrong.
        refusals = [
            f"layer {layer!r}: the source has none of the bytes that the target keeps"
            for layer in dict.fromkeys(region.layer for region in target.regions)
            if layer not in fed
        ]
    refusals.extend(
        f"cache group {group} of the target is spread over groups {sorted(groups)} of the source"
        for group, groups in partner.items()
        if len(groups) > 1
    )
    if refusals:
        raise LayoutError("the two caches cannot be matched: " + "; ".join(dict.fromkeys(refusals)))
    return {
        group: GroupAlignment(
            source_groups[next(iter(partner[group]))], target_groups[group], _page_rows(pairs)
        )
        for group, pairs in matches.items()
    }


def _region_refusal(source: Region, target: Region) -> str | None:
    for what, ours, theirs in (
        ("dtype", source.dtype, target.dtype),
        ("scales of K and V", source.scales, target.scales),
        ("row bytes", source.axes.row_bytes, target.axes.row_bytes),
        ("rows in a page", source.axes.tokens, target.axes.tokens),
    ):
        if ours != theirs:
            return f"layer {target.layer!r}: {what} differ, source {ours}, target {theirs}"
    heads = heads_refusal(source.heads, target.heads, source.axes.heads, target.axes.heads)
    return heads and f"layer {target.layer!r}: {heads}"


def heads_refusal(
    source: HeadInterval | None, target: HeadInterval | None, source_count: int, target_count: int
) -> str | None:
    """Why pages cannot be matched head by head, or as a whole where neither is divided; None if they can."""
    if (source is None) != (target is None):
        return "only one side's pages can be divided by head"
    if source is None and source_count != target_count:
        return (
            f"pages cannot be divided by head, and hold {source_count} heads on the source, "
            f"{target_count} on the target"
        )
    return None


def group_refusal(layer: str, source: GroupGeometry, target: GroupGeometry) -> str | None:
    """Why the blocks of two groups cannot hold the same tokens of a layer; None if they can."""
    if source.is_state != target.is_state:
        return f"layer {layer!r}: one side keeps state, the other keeps tokens"
    if not source.is_state and source.block_tokens != target.block_tokens:
        return (
            f"layer {layer!r}: kernel blocks differ, source {source.block_tokens} tokens, "
            f"target {target.block_tokens} tokens"
        )
    return None


def _page_pieces(source: Region, target: Region) -> Pieces | None:
    """The runs to copy from a page of ``source`` into a page of ``target``; None if they share nothing.

    Every row that both pages hold is listed, and rows that are adjacent on both sides are merged. Equal pages
    come out as one run. Both regions are of one layer, with equal tokens per page and equal row bytes.
    """
    planes = range(
        max(source.first_plane, target.first_plane),
        min(source.first_plane + source.axes.planes, target.first_plane + target.axes.planes),
    )
    if source.heads is None or target.heads is None:
        heads = range(source.axes.heads)
        source_first = target_first = 0
    else:
        shared = source.heads.intersect(target.heads)
        heads = range(shared.start, shared.stop)
        source_first, target_first = source.heads.start, target.heads.start
    if not planes or not heads:
        return None
    plane, head, token = (
        axis.reshape(-1)
        for axis in np.meshgrid(
            np.asarray(planes), np.asarray(heads), np.arange(source.axes.tokens), indexing="ij"
        )
    )
    row_bytes = source.axes.row_bytes
    from_ = _offsets(source.axes, plane - source.first_plane, head - source_first, token)
    to = _offsets(target.axes, plane - target.first_plane, head - target_first, token)
    order = np.argsort(from_, kind="stable")
    from_, to = from_[order], to[order]
    starts = run_starts(from_, to, row_bytes)
    return from_[starts], to[starts], run_lengths(starts, len(from_)) * row_bytes


def _offsets(axes: PageAxes, plane: Column, head: Column, token: Column) -> Column:
    return np.asarray(
        plane * axes.plane_stride + head * axes.head_stride + token * axes.token_stride, dtype=np.int64
    )


def run_starts(source: Column, target: Column, step: int) -> Column:
    """The indices at which a run begins: where either column does not go on by ``step``."""
    if len(source) == 0:
        return np.empty(0, dtype=np.int64)
    breaks = (np.diff(source) != step) | (np.diff(target) != step)
    return np.concatenate(([0], np.flatnonzero(breaks) + 1)).astype(np.int64)


def run_lengths(starts: Column, total: int) -> Column:
    """How many entries each run has, of ``total`` entries cut at ``starts``."""
    return np.diff(np.append(starts, total)).astype(np.int64)


Row = tuple[int, int, int, int, int]


def _page_rows(pairs: Sequence[tuple[Region, Region, Pieces]]) -> tuple[PageRows, ...]:
    """Region pairs as columns: those with whole dense pages together, the others together."""
    rows = [
        (
            source.address + int(from_offset),
            target.address + int(to_offset),
            source.block_stride,
            target.block_stride,
            int(length),
        )
        for source, target, pieces in pairs
        for from_offset, to_offset, length in zip(*pieces, strict=True)
    ]
    by_density: dict[bool, list[Row]] = {True: [], False: []}
    for row in _merge_neighbours(rows):
        by_density[row[2] == row[3] == row[4]].append(row)
    made = []
    for dense, kept in by_density.items():
        if kept:
            table = np.array(kept, dtype=np.int64).T
            made.append(PageRows(table[0], table[1], table[2], table[3], table[4], dense))
    return tuple(made)


def _merge_neighbours(rows: Sequence[Row]) -> list[Row]:
    """Rows that touch within a block on both sides become one: layers packed inside a block."""
    merged: list[Row] = []
    for row in sorted(rows):
        if merged:
            source, target, source_stride, target_stride, length = merged[-1]
            touches = (source + length, target + length) == row[:2]
            fits = length + row[4] <= min(source_stride, target_stride)
            if touches and fits and (source_stride, target_stride) == row[2:4]:
                merged[-1] = (source, target, source_stride, target_stride, length + row[4])
                continue
        merged.append(row)
    return merged
