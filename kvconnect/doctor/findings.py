"""What a check found: one row of the table, and what to do about it."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field


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


def well(about: str, found: str, figures: Mapping[str, float] | None = None) -> Finding:
    """Nothing is to be done."""
    return Finding(Level.PASS, about, found, figures=figures or {})


def warning(about: str, found: str, advice: str, figures: Mapping[str, float] | None = None) -> Finding:
    """It works, and not as it could."""
    return Finding(Level.WARNING, about, found, advice, figures or {})


def failure(about: str, found: str, advice: str) -> Finding:
    """It does not work."""
    return Finding(Level.FAILURE, about, found, advice)
