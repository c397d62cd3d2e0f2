"""What a worker keeps in host memory under names, for peers that ask for it: the seam to the offload.

Rows change by orders of the scheduler half, which knows nothing of who reads them. So nothing is held: what
was read counts only if the rows were not written meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvconnect.cache.region_table import RegionTable
from kvconnect.orders import GroupBlocks, Naming, Prefix


@dataclass(frozen=True)
class Kept:
    """The rows of a prefix, as blocks of ``KeptByName.table``; ``is_intact`` until one is written again."""

    groups: tuple[GroupBlocks, ...]
    is_intact: Callable[[], bool]


class KeptByName(Protocol):
    """The rows of host memory of one rank. The transfer thread asks, while the rows change."""

    naming: Naming
    table: RegionTable
    """Rows as kernel blocks, which ``Kept.groups`` number as it suits; block 0 is none, and no memory."""

    def find(self, prefix: Prefix, max_tokens: int) -> tuple[int, int]:
        """Tokens of a prefix that are kept, ``prefix.start_tokens`` included, and bytes of what is wanted.

        0 and 0 for none. Of other names than ours nothing is kept.
        """
        ...

    def hold(self, prefix: Prefix, num_tokens: int) -> Kept | None:
        """The rows of the first ``num_tokens``; None: not all that such a hit needs is kept any more."""
        ...
