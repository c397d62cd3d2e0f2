"""Host memory as the scheduler half knows it, and what goes wrong there: what the parts of the half share."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from kvconnect.offload.index.lower_index import LowerIndex
from kvconnect.offload.index.tier_index import TierIndex
from kvconnect.offload.scheduler.hit_requirements import HitGroup, HitRequirements
from kvconnect.offload.scheduler.jobs import Jobs
from kvconnect.offload.scheduler.requests import Pins
from kvconnect.scheduler.stack import RequestView

logger = logging.getLogger(__name__)

Hashes = Callable[[RequestView, int], Sequence[bytes]]
"""The hashes of a request's full blocks of so many tokens, each of everything up to the block's end."""

_FAILURES = {
    "offload_rows_short": "host memory had no row for a block: all are pinned, or being filled",
    "offload_overwritten": "a block was used for something else before it could be stored",
    "offload_wait_timeout": "a request did not wait any longer for what was on its way to host memory",
    "offload_parameters_refused": "kv_transfer_params.max_offload_tokens is not a number of tokens",
    "offload_refused": "a serving stack asked for what could not be restored",
    "offload_restore_failed": "blocks could not be restored: the request is computed, or fails by the policy",
    "offload_restores_paused": "several restores failed one after the other, so none is promised for a while",
    "offload_store_failed": "blocks could not be stored",
    "offload_fetch_missed": "a lower tier did not have what it had reported",
    "offload_overdue": "workers have not reported a job in time; its rows are out of use until they do",
    "offload_unknown_rank": "a report came from a rank that does not exist",
}
"""By reason what it means, for the log."""


class Host:
    """What hits need, what is here, what every rank has below, and what was ordered.

    Failures are logged once by their reason, and counted always: by a worker, since this half has no metrics.
    """

    def __init__(
        self, requirements: HitRequirements, index: TierIndex, hashes: Hashes, num_ranks: int
    ) -> None:
        self.requirements, self.index, self.hashes = requirements, index, hashes
        self.lower, self.jobs = LowerIndex(num_ranks), Jobs(num_ranks)
        self.totals: Counter[str] = Counter()
        self._untaken: list[str] = []

    def names(self, view: RequestView, group: HitGroup, parts: Iterable[range]) -> list[bytes]:
        """What the blocks of a request at these positions are known by, as far as its hashes go."""
        hashes = self.hashes(view, group.block_tokens)
        return [name for part in parts for name in group.names(hashes, part.start, part.stop)]

    def unpin(self, pins: Pins) -> None:
        """Take back all of these pins."""
        for group, names in pins.items():
            self.index.unpin(group, names)
        pins.clear()

    def count(self, reason: str) -> None:
        """Something went wrong once more."""
        self._untaken.append(reason)
        self.totals[reason] += 1
        if self.totals[reason] == 1:
            text = "%s (further ones are only counted, as failures with reason %s)"
            logger.warning(text, _FAILURES[reason], reason)

    def take_failures(self) -> tuple[str, ...]:
        """What went wrong since the last call."""
        taken, self._untaken = tuple(self._untaken), []
        return taken
