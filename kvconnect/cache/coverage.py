"""Proof that the pages of a region table lie where they may.

Two rules. Pages of one group never share a byte. Pages of different groups may share bytes only
under one and the same logical block id, because a block id belongs to one group at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvconnect.errors import LayoutError

if TYPE_CHECKING:
    from kvconnect.cache.region_table import Region


def check_pages_apart(regions: Sequence[Region]) -> None:
    """Raises ``LayoutError`` that names both layers: two pages of one group share a byte."""
    for group in sorted({region.group for region in regions}):
        cluster: list[Region] = []
        cluster_end = 0
        for region in sorted((r for r in regions if r.group == group), key=lambda r: r.address):
            if cluster and region.address < cluster_end:
                cluster.append(region)
            else:
                _check_cluster(cluster)
                cluster = [region]
            cluster_end = max(cluster_end, region.end)
        _check_cluster(cluster)


def _check_cluster(cluster: Sequence[Region]) -> None:
    """Regions whose stretches interleave, such as layers packed inside a block: compare every page."""
    if len(cluster) < 2:
        return
    starts = np.concatenate([r.address + np.arange(r.num_blocks) * r.block_stride for r in cluster])
    lengths = np.concatenate([np.full(r.num_blocks, r.page_bytes) for r in cluster])
    owner = np.concatenate([np.full(r.num_blocks, index) for index, r in enumerate(cluster)])
    order = np.argsort(starts, kind="stable")
    starts, ends, owner = starts[order], (starts + lengths)[order], owner[order]
    clash = np.flatnonzero(starts[1:] < ends[:-1])
    if len(clash):
        first, second = cluster[int(owner[clash[0]])], cluster[int(owner[clash[0] + 1])]
        raise LayoutError(
            f"pages of layers {first.layer!r} and {second.layer!r}, both in cache group {first.group}, "
            f"overlap at address {int(starts[clash[0] + 1]):#x}"
        )


def check_overlays(regions: Sequence[Region], blocks_per_kv_block: Mapping[int, int]) -> None:
    """Raises ``LayoutError`` that names both layers: pages share bytes under different logical block ids."""
    ordered = sorted(regions, key=lambda region: region.address)
    for position, first in enumerate(ordered):
        for second in ordered[position + 1 :]:
            if second.address >= first.end:
                break
            if first.group != second.group:
                _check_overlay(first, second, blocks_per_kv_block)


def _check_overlay(first: Region, second: Region, blocks_per_kv_block: Mapping[int, int]) -> None:
    a, b = (_logical_pages(region, blocks_per_kv_block[region.group]) for region in (first, second))
    if a[1] != b[1]:
        # With two strides, some block of one meets a differently numbered block of the other.
        raise LayoutError(
            f"layers {first.layer!r} and {second.layer!r} of cache groups {first.group} and {second.group} "
            f"share memory, but their logical blocks are {a[1]} and {b[1]} bytes apart; they must be equal"
        )
    stride, distance = a[1], b[0] - a[0]
    shift, offset = divmod(distance, stride)
    meets_next = offset + b[2] > stride
    if meets_next or (shift and offset < a[2]):
        raise LayoutError(
            f"layers {first.layer!r} and {second.layer!r} of cache groups {first.group} and {second.group} "
            f"share memory under different block ids (their first pages are {distance} bytes apart)"
        )


def _logical_pages(region: Region, ratio: int) -> tuple[int, int, int]:
    """Address, stride and size in bytes of the region's logical pages."""
    stride = region.block_stride * ratio
    return region.address, stride, region.block_stride * (ratio - 1) + region.page_bytes
