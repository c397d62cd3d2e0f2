"""The virtual clock, the only source of randomness, and what happened so far.

Everything in a run is an event on this clock: it is run to its end before the next one begins.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

Action = Callable[[], object]

START_S = 1000.0
"""When a run begins. Not zero, so that a time that nobody has set shows."""


class Violation(Exception):
    """An invariant does not hold. ``invariant`` is the name of its checker."""

    def __init__(self, invariant: str, text: str) -> None:
        super().__init__(f"{invariant}: {text}")
        self.invariant = invariant
        self.text = text


class World:
    """One run: its time, its random numbers, its events.

    Args:
        seed: what decides everything.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.now = START_S
        self.steps = 0
        self.trace: list[tuple[object, ...]] = []
        self.violation: Violation | None = None
        self._events: list[tuple[float, int, Action]] = []
        self._order = 0

    def clock(self) -> float:
        return self.now

    def at(self, time: float, action: Action) -> None:
        """Have something happen at a time; what is due together happens in the order of the calls."""
        self._order += 1
        heapq.heappush(self._events, (max(time, self.now), self._order, action))

    def after(self, seconds: float, action: Action) -> None:
        self.at(self.now + seconds, action)

    def note(self, who: str, what: str, *details: object) -> None:
        """Write down that something happened. Nothing in it may depend on addresses or on hashes of text."""
        self.trace.append((self.now, who, what, *details))

    def run(self, until: float, most_events: int) -> bool:
        """Let time pass. False: nothing is left to happen.

        Raises:
            Violation: an invariant is broken, or so many events happen that something must be spinning.
        """
        events = self._events
        while events and events[0][0] <= until:
            self.now, _, action = heapq.heappop(events)
            self.steps += 1
            if self.steps > most_events:
                raise Violation(
                    "nothing_spins", f"more than {most_events} events by {self.now - START_S:g} s"
                )
            action()
            if self.violation is not None:
                raise self.violation
        if events:
            self.now = until
        return bool(events)

    def fail(self, invariant: str, text: str) -> None:
        """An invariant is broken. The run ends with this event: what is simulated may not catch it before."""
        if self.violation is None:
            self.note("checks", "violation", invariant, text)
            self.violation = Violation(invariant, text)

    def chance(self, share: float) -> bool:
        return self.random.random() < share


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
        self.halted, self._due = True, None

    def hang(self, until: float) -> None:
        """Do not step before a time, and step then."""
        self.not_before, self._due = until, None
        self.at(until)
