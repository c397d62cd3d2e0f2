"""What a check found: one row of the table, and what to do about it."""

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
    """``about`` is what was looked at, ``found`` what is so, ``advice`` what to do where it is not well.

    ``figures`` are numbers for programs, each with its unit.
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
    """A failure where something is ``wrong``; else that was found, and it is well."""
    return failure(about, found, advice) if wrong else well(about, found)


def warning_if(
    slow: object, about: str, found: str, advice: str, figures: Mapping[str, float] | None = None
) -> Finding:
    """As ``failure_if``, with a warning."""
    level, shown = (Level.WARNING, advice) if slow else (Level.PASS, "")
    return Finding(level, about, found, shown, figures or {})
