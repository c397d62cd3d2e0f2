"""The result of a check: one row of the table, with advice."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any


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


def _unless_well(level: Level, wrong: object, about: str, found: str, advice: str, **more: Any) -> Finding:
    """A finding of this level if ``wrong`` is true, else a pass without the advice."""
    return Finding(level, about, found, advice, **more) if wrong else well(about, found, **more)


warning_if = partial(_unless_well, Level.WARNING)
failure_if = partial(_unless_well, Level.FAILURE)
