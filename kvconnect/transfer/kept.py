"""The seams to what a worker keeps: what peers fetch by name (rows in host memory, blocks of its prefix
cache), and the rows that loads fill.

The scheduler half, or the serving stack, may overwrite what has names; neither knows of a reader, so nothing
is locked. Bytes read from a row or a block are valid only if it was not given to another content meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvconnect.cache.identity import Naming, Prefix
from kvconnect.cache.region_table import RegionTable
from kvconnect.plan.blocks import GroupBlocks
from kvconnect.transfer.orders import Park


@dataclass(frozen=True, eq=False)
class Kept:
    """The rows of a prefix, as blocks of ``KeptByName.table``; ``is_intact`` until one is given away.

    Rows still being read from disk, and blocks that the device still computes, are valid once ``is_ready``,
    if intact then. ``on_device``: ``groups`` are logical blocks of the device's prefix cache instead.
    """

    groups: tuple[GroupBlocks, ...]
    is_intact: Callable[[], bool]
    is_ready: Callable[[], bool] = lambda: True
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


@dataclass(eq=False)
class Parked:
    """The KV of a waiting request on its way into rows of host memory, or in them.

    ``groups``: by position the number of each row, plus one. One of ``is_ready`` and ``is_lost`` becomes true
    once all ranks have reported; ``is_lost`` also if no request takes it.
    """

    groups: tuple[GroupBlocks, ...]
    parks: tuple[Park, ...]
    is_ready: bool = False
    is_lost: bool = False


class Parking(Protocol):
    """The rows of the scheduler half for KV of requests that wait for blocks."""

    after_s: float
    """How long a request waits for blocks before its KV is parked."""

    def park(self, wanted: Mapping[int, Sequence[range]]) -> Parked | None:
        """Take rows for these positions, by cache group; None if they do not fit now."""
        ...

    def restore(self, request_id: str, parked: Parked, blocks: Sequence[GroupBlocks]) -> None:
        """Order that what is ready is copied to a request's blocks, which is then reported received."""
        ...

    def leave(self, parked: Parked) -> None:
        """Free the rows, at once or when all ranks have reported: no request takes their KV."""
        ...


class ParkedRows(Protocol):
    """One rank's rows as a target of loads."""

    table: RegionTable
    """The rows as kernel blocks, numbered as in ``pages``."""

    def pages(self, groups: Sequence[GroupBlocks]) -> tuple[GroupBlocks, ...]:
        """The kernel blocks of these rows."""
        ...

    def begin(self, parks: Sequence[Park]) -> None:
        """Note that a load takes these rows. Called by the thread that launches steps, before the load."""
        ...

    def end(self, parks: Sequence[Park], *, ok: bool) -> None:
        """Report the jobs of these rows, which are written no more."""
        ...
