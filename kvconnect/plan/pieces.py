"""Which bytes of a page go where in another page that holds some of the same heads.

The answer is made once per pair of layers when two sides meet, by listing every row that both pages
hold and merging rows that are adjacent on both sides. Equal pages come out as one piece.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvconnect.cache.region_table import PageAxes, Region

Offsets = NDArray[np.int64]


@dataclass(frozen=True)
class Pieces:
    """Runs of bytes within a page: int64 columns ``source``, ``target`` and ``length``, all in bytes."""

    source: Offsets
    target: Offsets
    length: Offsets

    @property
    def total_bytes(self) -> int:
        """Bytes of a page that move."""
        return int(self.length.sum())


def page_pieces(source: Region, target: Region) -> Pieces | None:
    """The runs to copy from a page of ``source`` into a page of ``target``; None if they share nothing.

    Both regions are of one layer, with equal tokens per page and equal row bytes: the caller has
    checked that.
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
    return _merge(
        _offsets(source.axes, plane - source.first_plane, head - source_first, token),
        _offsets(target.axes, plane - target.first_plane, head - target_first, token),
        source.axes.row_bytes,
    )


def _offsets(axes: PageAxes, plane: Offsets, head: Offsets, token: Offsets) -> Offsets:
    return np.asarray(
        plane * axes.plane_stride + head * axes.head_stride + token * axes.token_stride, dtype=np.int64
    )


def _merge(source: Offsets, target: Offsets, row_bytes: int) -> Pieces:
    order = np.argsort(source, kind="stable")
    source, target = source[order], target[order]
    starts = run_starts(source, target, row_bytes)
    return Pieces(source[starts], target[starts], run_lengths(starts, len(source)) * row_bytes)


def run_starts(source: Offsets, target: Offsets, step: int) -> Offsets:
    """The indices at which a run begins: where either column does not go on by ``step``."""
    if len(source) == 0:
        return np.empty(0, dtype=np.int64)
    breaks = (np.diff(source) != step) | (np.diff(target) != step)
    return np.concatenate(([0], np.flatnonzero(breaks) + 1)).astype(np.int64)


def run_lengths(starts: Offsets, total: int) -> Offsets:
    """How many entries each run has, of ``total`` entries cut at ``starts``."""
    return np.diff(np.append(starts, total)).astype(np.int64)
