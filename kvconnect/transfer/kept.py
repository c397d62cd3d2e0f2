"""The seam to the offload: rows that a worker keeps in host memory under names, for peers.

The scheduler half's orders may overwrite rows; it knows of no reader, so no row is locked. Bytes read from a
row are valid only if the row was not written meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvconnect.cache.identity import Naming, Prefix
from kvconnect.cache.region_table import RegionTable
from kvconnect.pack.page_lanes import Column
from kvconnect.plan.blocks import GroupBlocks


@dataclass(frozen=True, eq=False)
class Kept:
    """The rows of a prefix, as blocks of ``KeptByName.table``; ``is_intact`` until one is written again.

    Rows still being read from disk are valid once ``is_ready``, if intact then. ``rows``: by row class, the
    rows and the numbers of the jobs that fill them.
    """

    groups: tuple[GroupBlocks, ...]
    is_intact: Callable[[], bool]
    is_ready: Callable[[], bool] = lambda: True
    rows: tuple[tuple[int, Column, Column], ...] = ()


Stock = tuple[int, int, int, int, float]
"""Tokens of a prefix in host memory, ``start_tokens`` included, and the bytes to send; 0 for none.

Then tokens and bytes with those on disk included, if more can be read now, and the seconds of that read.
"""


class KeptByName(Protocol):
    """One rank's rows in host memory and on disk. The transfer thread reads them while they change."""

    naming: Naming
    table: RegionTable
    """The rows as kernel blocks, numbered as in ``Kept.groups``; block 0 is no row, and has no memory."""

    def find(self, prefix: Prefix, max_tokens: int) -> Stock:
        """The tokens and bytes kept of a prefix; none if its naming is not this node's."""
        ...

    def hold(self, prefix: Prefix, num_tokens: int) -> Kept | None:
        """The rows of the first ``num_tokens``; a read begins now for rows that are only on disk.

        None: a row that such a hit needs is not kept any more. Raises ``PeerError``: no row is free to read
        into.
        """
        ...
