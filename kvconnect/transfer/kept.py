"""The seam to what a worker keeps under names for peers: rows in host memory, blocks of its prefix cache.

The scheduler half, or the serving stack, may overwrite them; neither knows of a reader, so nothing is locked.
Bytes read from a row or a block are valid only if it was not given to another content meanwhile.
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
    """The rows of a prefix, as blocks of ``KeptByName.table``; ``is_intact`` until one is given away.

    Rows still being read from disk, and blocks that the device still computes, are valid once ``is_ready``,
    if intact then. ``rows``: by row class, the rows and the numbers of the jobs that fill them.
    ``on_device``: ``groups`` are logical blocks of the device's prefix cache instead.
    """

    groups: tuple[GroupBlocks, ...]
    is_intact: Callable[[], bool]
    is_ready: Callable[[], bool] = lambda: True
    rows: tuple[tuple[int, Column, Column], ...] = ()
    on_device: bool = False


Stock = tuple[int, int, int, int, float]
"""Tokens of a prefix in memory, ``start_tokens`` included, and the bytes to send; 0 for none.

Then tokens and bytes with those on disk included, if more can be read now, and the seconds of that read.
"""


class KeptByName(Protocol):
    """One rank's rows and named blocks. The transfer thread reads them while they change."""

    naming: Naming

    @property
    def table(self) -> RegionTable | None:
        """The rows as kernel blocks, numbered as in ``Kept.groups``; None without rows.

        Block 0 is no row, and has no memory.
        """
        ...

    def find(self, prefix: Prefix, max_tokens: int) -> Stock:
        """The tokens and bytes kept of a prefix; none if its naming is not this node's."""
        ...

    def hold(self, prefix: Prefix, num_tokens: int) -> Kept | None:
        """What holds the first ``num_tokens``; a read begins now for rows that are only on disk.

        None: something that such a hit needs is not kept any more. Raises ``PeerError``: no row is free to
        read into.
        """
        ...
