"""Errors of ours over one thing: logged, counted, and kept from everything else."""

from __future__ import annotations

import logging
from types import TracebackType

from kvconnect.metrics import Metrics
from kvconnect.transfer.state_machine import IllegalTransition

logger = logging.getLogger(__name__)


def count_error(metrics: Metrics, error: Exception, what: str) -> None:
    """Log an error of ours over one thing, and count it as a failure."""
    reason = "illegal_move" if isinstance(error, IllegalTransition) else "internal"
    metrics.failures.labels(reason).inc()
    logger.error("the transfer thread met an error of its own over %s", what, exc_info=error)


class ErrorsCounted:
    """Keeps an error of ours over one thing from all others: it is logged, and counted as a failure."""

    # A context manager made of a generator takes four times as long, several times a step.

    __slots__ = ("_metrics", "_what")

    def __init__(self, metrics: Metrics, what: str) -> None:
        self._metrics = metrics
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        count_error(self._metrics, error, self._what)
        return True
