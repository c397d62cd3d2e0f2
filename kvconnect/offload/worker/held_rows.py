"""Rows that a tier may still read or write although their job was given up: nobody else may have them.

A tier that does not answer in time leaves its rows in doubt. The job is reported failed, so the scheduler
half uses the rows for something else; until the tier has let go of them, whatever is ordered for them fails.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable

Place = tuple[int, int]
"""A row: its class, and its number there."""


class HeldRows:
    """Counts who still holds a row. For any thread; costs next to nothing while no row is held."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: Counter[Place] = Counter()

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, place: Place) -> bool:
        return place in self._held

    def hold(self, places: Iterable[Place]) -> None:
        """Somebody may touch these until ``release``."""
        with self._lock:
            self._held.update(places)

    def release(self, places: Iterable[Place]) -> None:
        """Somebody does not touch these any more."""
        with self._lock:
            for place in places:
                self._held[place] -= 1
                if self._held[place] <= 0:
                    del self._held[place]
