"""What a worker keeps in host memory under names, for peers that ask for it: the seam to the offload.

Rows change by orders of the scheduler half, which knows nothing of who reads them. So nothing is held: what
was read counts only if the rows were not written meanwhile.
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

    What is being read from disk counts once ``is_ready``, if it is intact then. ``rows`` are by class the
    rows, and the numbers of the jobs that fill them.
    """

    groups: tuple[GroupBlocks, ...]
    is_intact: Callable[[], bool]
    is_ready: Callable[[], bool] = lambda: True
    rows: tuple[tuple[int, Column, Column], ...] = ()


Stock = tuple[int, int, int, int, float]
"""Tokens of a prefix in host memory, ``start_tokens`` included, and bytes of what is wanted: 0 for none.

Then the same with what can be read from disk now, if that is more, and how long that takes.
"""


class KeptByName(Protocol):
    """The rows of host memory of one rank, and its disk. The transfer thread asks, while the rows change."""

    naming: Naming
    table: RegionTable
    """Rows as kernel blocks, which ``Kept.groups`` number as it suits; block 0 is none, and no memory."""

    def find(self, prefix: Prefix, max_tokens: int) -> Stock:
        """What is kept of a prefix. Of other names than ours nothing is."""
        ...

    def hold(self, prefix: Prefix, num_tokens: int) -> Kept | None:
        """The rows of the first ``num_tokens``, those that are on disk alone being read from now on.

        None: not all that such a hit needs is kept any more. Raises ``PeerError``: there are no rows to read
        it into.
        """
        ...
