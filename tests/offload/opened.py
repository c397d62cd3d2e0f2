"""What a test of this folder has opened is closed when it ends, the last first."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

TESTS: list[ExitStack] = []
"""That of the test which runs."""


def closes_later(made: Any) -> None:
    """Have it closed after the test; elsewhere its maker does that."""
    if TESTS:
        TESTS[-1].callback(made.close)
