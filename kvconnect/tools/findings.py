"""The result of a check: one row of the table, with advice."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import partial


class Level(enum.Enum):
    """A failure: a node would not start, or no KV would arrive. A warning: it would be slow."""

    PASS = "pass"
    WARNING = "warning"
    FAILURE = "failure"


@dataclass(frozen=True)
class Finding:
    """``about``: the checked thing; ``found``: its state; ``advice``: how to mend it, or ""."""

    level: Level
    about: str
    found: str
    advice: str = ""


well = partial(Finding, Level.PASS)
warning = partial(Finding, Level.WARNING)
failure = partial(Finding, Level.FAILURE)


def _unless_well(level: Level, wrong: object, about: str, found: str, advice: str) -> Finding:
    """A finding of this level if ``wrong`` is true, else a pass without the advice."""
    return Finding(level, about, found, advice) if wrong else well(about, found)


warning_if = partial(_unless_well, Level.WARNING)
failure_if = partial(_unless_well, Level.FAILURE)
