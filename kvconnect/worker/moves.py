"""Tables of legal moves: what a record becomes when something happens to it, and what cannot happen."""

from __future__ import annotations

import enum
import logging
from collections.abc import Mapping
from types import TracebackType
from typing import TypeVar

from kvconnect.errors import LocalError
from kvconnect.metrics import Metrics

logger = logging.getLogger(__name__)

S = TypeVar("S", bound=enum.Enum)
E = TypeVar("E", bound=enum.Enum)


class IllegalMove(LocalError):
    """An event that cannot happen in the state of its record, which is as it was."""


def next_state(moves: Mapping[tuple[S, E], S], state: S, event: E, who: str) -> S:
    """The state after an event.

    Raises:
        IllegalMove: the event is not legal in this state; the text names ``who`` and both.
    """
    after = moves.get((state, event))
    if after is None:
        raise IllegalMove(f"{who}: {state.value}, but {event.value}")
    return after


def count_error(metrics: Metrics, error: Exception, what: str) -> None:
    """Log an error of ours over one thing, and count it as a failure."""
    reason = "illegal_move" if isinstance(error, IllegalMove) else "internal"
    metrics.failures.labels(reason).inc()
    logger.error("the transfer thread met an error of its own over %s", what, exc_info=error)


class Counted:
    """Keeps an error of ours over one thing from all others: it is logged, and counted as a failure.

    Whatever hangs on that thing has a deadline. A context manager made of a generator takes four times as
    long, several times a step.
    """

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
