"""Host memory as the scheduler half knows it: what its parts share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvconnect.offload.index.lower_index import LowerIndex
from kvconnect.offload.index.tier_index import TierIndex
from kvconnect.offload.scheduler.failures import FailureCounts
from kvconnect.offload.scheduler.hit_requirements import HitGroup, HitRequirements
from kvconnect.offload.scheduler.jobs import Jobs
from kvconnect.scheduler.stack import RequestView

Hashes = Callable[[RequestView, int], Sequence[bytes]]
"""The hashes of a request's full blocks of so many tokens, each of everything up to the block's end."""


@dataclass(frozen=True, eq=False)
class Host:
    """What hits need, what is here, what every rank has below, and what was ordered."""

    requirements: HitRequirements
    index: TierIndex
    lower: LowerIndex
    jobs: Jobs
    failures: FailureCounts
    hashes: Hashes

    def names(self, view: RequestView, group: HitGroup, parts: Iterable[range]) -> list[bytes]:
        """What the blocks of a request at these positions are known by, as far as its hashes go."""
        return group.names_at(self.hashes(view, group.block_tokens), parts)
