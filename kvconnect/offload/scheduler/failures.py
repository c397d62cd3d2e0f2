"""What goes wrong in the scheduler half of the offload: logged once by its reason, counted always."""

from __future__ import annotations

import logging
from collections import Counter

logger = logging.getLogger(__name__)

TEXTS = {
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


class FailureCounts:
    """Failures by reason. The scheduler half has no metrics: a worker counts what ``take`` returns."""

    def __init__(self) -> None:
        self._untaken: list[str] = []
        self.totals: Counter[str] = Counter()

    def count(self, reason: str) -> None:
        """Something went wrong once more."""
        self._untaken.append(reason)
        self.totals[reason] += 1
        if self.totals[reason] == 1:
            logger.warning(
                "%s (further ones are only counted, as failures with reason %s)", TEXTS[reason], reason
            )

    def take(self) -> tuple[str, ...]:
        """What went wrong since the last call."""
        taken, self._untaken = tuple(self._untaken), []
        return taken
