"""The result of a check: one row of the table, with advice."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial


class Level(enum.Enum):
    """A failure: a node would not start, or no KV would arrive. A warning: it would be slow."""

    PASS = "pass"
    WARNING = "warning"
    FAILURE = "failure"


@dataclass(frozen=True)
class Finding:
    """``about``: the checked thing; ``found``: its state; ``advice``: how to mend it, or "".

    ``figures`` are numbers for programs; each name ends with its unit.
    """

    level: Level
    about: str
    found: str
    advice: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)


well = partial(Finding, Level.PASS)
warning = partial(Finding, Level.WARNING)
failure = partial(Finding, Level.FAILURE)


def failure_if(wrong: object, about: str, found: str, advice: str) -> Finding:
    """A failure if ``wrong`` is true, else a pass without the advice."""
    return failure(about, found, advice) if wrong else well(about, found)


def warning_if(
    slow: object, about: str, found: str, advice: str, figures: Mapping[str, float] | None = None
) -> Finding:
    """As ``failure_if``, with a warning."""
    level, shown = (Level.WARNING, advice) if slow else (Level.PASS, "")
    return Finding(level, about, found, shown, figures or {})
