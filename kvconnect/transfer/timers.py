"""The clock of a transfer thread: one heap of times at which something is to be done.

What waits for a time has a timer on it; a thousand that are not due cost a turn nothing.
Pure, with the time as an argument.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable

_FEW = 64
AGAIN_S = 1.0
"""When something over which we met an error of our own is tried again: it ends nothing that waits."""


class Timer:
    """Calls ``call``, with the time, once it is ``due_at`` or later. Endless: it is not armed."""

    __slots__ = ("_call", "_entered_at", "_timers", "due_at")

    def __init__(self, timers: Timers, call: Callable[[float], None]) -> None:
        self.due_at = math.inf
        self._timers = timers
        self._call = call
        # Where it lies in the heap: no later than it is due, so that to put it off costs nothing.
        self._entered_at = math.inf

    def at(self, when: float) -> None:
        """Arm it for a time, in place of the one before; endless disarms it."""
        self._timers._arm(self, when)

    def by(self, when: float) -> None:
        """Arm it for a time, unless it is armed for an earlier one."""
        if when < self.due_at:
            self._timers._arm(self, when)

    def cancel(self) -> None:
        """Disarm it."""
        self._timers._arm(self, math.inf)


class Timers:
    """All timers of a thread. What a call raises is given to ``failed``, and the call is made again later."""

    def __init__(self, failed: Callable[[Exception], None]) -> None:
        self._failed = failed
        self._heap: list[tuple[float, int, Timer]] = []
        self._numbers = itertools.count()
        self._armed = 0

    def __len__(self) -> int:
        return self._armed

    def timer(self, call: Callable[[float], None]) -> Timer:
        """A timer that is not armed."""
        return Timer(self, call)

    def next_at(self) -> float:
        """When the first timer is due; endless for none."""
        while self._heap:
            entered_at, _, timer = self._heap[0]
            if entered_at == timer._entered_at == timer.due_at:
                return entered_at
            heapq.heappop(self._heap)
            if entered_at == timer._entered_at:
                # It was put off, or disarmed.
                timer._entered_at = math.inf
                if timer.due_at < math.inf:
                    self._enter(timer)
        return math.inf

    def run(self, now: float) -> bool:
        """Call all that is due, each once. Whether anything was.

        What a call arms for this very moment is left for the next time.
        """
        due = []
        while self.next_at() <= now:
            _, _, timer = heapq.heappop(self._heap)
            timer._entered_at = math.inf
            due.append(timer)
        for timer in due:
            # One before it may have put it off, or disarmed it.
            if timer.due_at > now:
                if timer.due_at < timer._entered_at:
                    self._enter(timer)
                continue
            timer.cancel()
            try:
                timer._call(now)
            except Exception as error:
                self._failed(error)
                timer.by(now + AGAIN_S)
        return bool(due)

    def _arm(self, timer: Timer, when: float) -> None:
        self._armed += (when < math.inf) - (timer.due_at < math.inf)
        timer.due_at = when
        if when < timer._entered_at:
            self._enter(timer)

    def _enter(self, timer: Timer) -> None:
        timer._entered_at = timer.due_at
        heapq.heappush(self._heap, (timer.due_at, next(self._numbers), timer))
        if len(self._heap) > 2 * self._armed + _FEW:
            # Most of it was replaced by earlier times, or disarmed.
            live = [entry for entry in self._heap if entry[0] == entry[2]._entered_at]
            for entry in live:
                if entry[2].due_at == math.inf:
                    entry[2]._entered_at = math.inf
            self._heap = [entry for entry in live if entry[2].due_at < math.inf]
            heapq.heapify(self._heap)
