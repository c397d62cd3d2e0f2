"""What a check found: one row of the table, and what to do about it."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Level(enum.Enum):
    """A failure: a node would not start, or no KV would arrive. A warning: it would be slow."""

    PASS = "pass"
    WARNING = "warning"
    FAILURE = "failure"


@dataclass(frozen=True)
class Finding:
    """``about`` is what was looked at, ``found`` what is so, ``advice`` what to do where it is not well."""

    level: Level
    about: str
    found: str
    advice: str = ""


def well(about: str, found: str) -> Finding:
    """Nothing is to be done."""
    return Finding(Level.PASS, about, found)


def warning(about: str, found: str, advice: str) -> Finding:
    """It works, and not as it could."""
    return Finding(Level.WARNING, about, found, advice)


def failure(about: str, found: str, advice: str) -> Finding:
    """It does not work."""
    return Finding(Level.FAILURE, about, found, advice)
