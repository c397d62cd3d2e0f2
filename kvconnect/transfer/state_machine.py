"""Tables of legal transitions: what a record becomes when something happens to it, and what cannot happen."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import TypeVar

from kvconnect.errors import LocalError

S = TypeVar("S", bound=enum.Enum)
E = TypeVar("E", bound=enum.Enum)


class IllegalTransition(LocalError):
    """An event that cannot happen in the state of its record, which is as it was."""


def next_state(transitions: Mapping[tuple[S, E], S], state: S, event: E, who: str) -> S:
    """The state after an event, or an ``IllegalTransition`` that names ``who``, the state and the event."""
    after = transitions.get((state, event))
    if after is None:
        raise IllegalTransition(f"{who}: {state.value}, but {event.value}")
    return after
