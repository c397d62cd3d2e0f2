"""When something steps next: at the earliest time that anybody asked for, and not while it is halted."""

from __future__ import annotations

from collections.abc import Callable

from tests.simulator.world import World


class Pace:
    """The steps of one thread.

    ``halted``: it does not run. ``not_before``: it hangs until then.
    """

    def __init__(self, world: World, step: Callable[[], None]) -> None:
        self.halted = False
        self.not_before = 0.0
        self._world = world
        self._step = step
        self._due: float | None = None

    def at(self, time: float) -> None:
        """Step at a time, or before."""
        time = max(time, self.not_before)
        if self.halted or (self._due is not None and self._due <= time):
            return
        self._due = time

        def come() -> None:
            if self._due == time and not self.halted:
                self._due = None
                self._step()

        self._world.at(time, come)

    def halt(self) -> None:
        """Do not step any more."""
        self.halted, self._due = True, None

    def hang(self, until: float) -> None:
        """Do not step before a time, and step then."""
        self.not_before, self._due = until, None
        self.at(until)
