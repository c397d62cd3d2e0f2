"""Tables of legal moves: what a record becomes when something happens to it, and what cannot happen."""

from __future__ import annotations

import enum
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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


@contextmanager
def counted(metrics: Metrics, what: str) -> Iterator[None]:
    """Keep an error of ours over one thing from all others: it is logged, and counted as a failure.

    Whatever hangs on that thing has a deadline.
    """
    try:
        yield
    except Exception as error:
        count_error(metrics, error, what)
