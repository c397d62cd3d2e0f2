"""What the parts of a worker's transfer thread share: their context, timers and paces."""

from __future__ import annotations

import enum
import heapq
import itertools
import logging
import math
import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from kvconnect.config import ExtraConfig
from kvconnect.metrics import Metrics, count_error
from kvconnect.outcome import Cause
from kvconnect.peer.channel import Channel
from kvconnect.transfer.duplicate_filter import DuplicateFilter
from kvconnect.transfer.local import Local
from kvconnect.transfer.orders import Reports

logger = logging.getLogger(__name__)

Finished = Callable[[], bool]

_KEPT = 8
"""Steps whose start is remembered: more than a serving stack runs ahead of its results."""

_FEW = 64
AGAIN_S = 1.0
"""Seconds before work that raised an internal error is tried again: no wait is ended by the error."""


def always() -> bool:
    """The check of a device that finishes each step at once: a CPU."""
    return True


class DeviceSteps:
    """Device events, one before each recent step: an order waits for the end of the step it names.

    Args:
        record: records an event; returns a check whether the device has finished all work given so far.
    """

    def __init__(self, record: Callable[[], Finished]) -> None:
        self._record = record
        self._begun: deque[tuple[int, Finished]] = deque(maxlen=_KEPT)

    def begin(self, step: int) -> None:
        """Record the start of a step: all kernels of earlier steps were launched, and none of this one."""
        if self._begun and step <= self._begun[-1][0]:
            # Another scheduler half, which counts its steps anew.
            self._begun.clear()
        self._begun.append((step, self._record()))

    def finished(self, step: int) -> Finished:
        """A check whether the device has finished a step; of the last step, all work launched so far."""
        for begun, is_finished in self._begun:
            if begun > step:
                return is_finished
        return self._record()


class Timer:
    """Calls ``call`` with the time once ``due_at`` has passed; infinite while not armed.

    ``number`` is that of its entry in the heap: entries of an earlier time are void.
    """

    __slots__ = ("_timers", "call", "due_at", "number")

    def __init__(self, timers: Timers, call: Callable[[float], None]) -> None:
        self.due_at = math.inf
        self.number = 0
        self.call = call
        self._timers = timers

    def at(self, when: float) -> None:
        """Arm it for a time, in place of the one before; infinite disarms it."""
        if when != self.due_at:
            self.due_at = when
            self._timers.enter(self)

    def by(self, when: float) -> None:
        """Arm it for a time, unless it is armed for an earlier one."""
        if when < self.due_at:
            self.at(when)

    def cancel(self) -> None:
        """Disarm it."""
        self.at(math.inf)


class Timers:
    """All timers of a thread, on one heap: timers that are not due cost a turn nothing.

    An exception of a call goes to ``failed``, and the call is repeated later. Time is an argument.
    """

    def __init__(self, failed: Callable[[Exception], None]) -> None:
        self._failed = failed
        self._heap: list[tuple[float, int, Timer]] = []
        self._numbers = itertools.count(1)
        self._most = _FEW

    def timer(self, call: Callable[[float], None]) -> Timer:
        """A timer that is not armed."""
        return Timer(self, call)

    def next_at(self) -> float:
        """The time of the first timer; infinite without any."""
        while self._heap and self._heap[0][1] != self._heap[0][2].number:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else math.inf

    def run(self, now: float) -> bool:
        """Call all timers that are due, once each. Returns whether any was.

        A timer that a call arms for ``now`` is left for the next run.
        """
        due = []
        while self.next_at() <= now:
            due.append(heapq.heappop(self._heap))
        for _, number, timer in due:
            if number != timer.number:
                # An earlier call of this run has postponed or disarmed it.
                continue
            timer.cancel()
            try:
                timer.call(now)
            except Exception as error:
                self._failed(error)
                timer.by(now + AGAIN_S)
        return bool(due)

    def enter(self, timer: Timer) -> None:
        """A timer's time has changed."""
        timer.number = next(self._numbers)
        if timer.due_at < math.inf:
            heapq.heappush(self._heap, (timer.due_at, timer.number, timer))
        if len(self._heap) > self._most:
            self._heap = [entry for entry in self._heap if entry[1] == entry[2].number]
            heapq.heapify(self._heap)
            self._most = 2 * len(self._heap) + _FEW


@dataclass(frozen=True, eq=False)
class TransferContext:
    """What all parts of one worker share; ``randomness`` is the only source of random numbers.

    ``repeats`` decides which failures of peers are logged.
    """

    config: ExtraConfig
    local: Local
    channel: Channel
    reports: Reports
    metrics: Metrics
    randomness: random.Random
    timers: Timers
    repeats: DuplicateFilter = field(default_factory=DuplicateFilter)

    def send(self, link: str, frames: Iterable[bytes], who: object) -> None:
        """Send frames over a connection to ``who``; count those that are dropped, and log the first."""
        for frame in frames:
            if not self.channel.send(link, frame):
                self.metrics.failures.labels("side_channel_send").inc()
                if self.repeats.is_first(str(who), Cause.LOST):
                    logger.warning(
                        "a message to %s was dropped, and later ones are only counted (side_channel_send): "
                        "it reads none",
                        who,
                    )

    def misused(self, who: object, what: str) -> None:
        """Count a message of a peer that is of no use, and log the first."""
        self.metrics.failures.labels("peer_message").inc()
        if self.repeats.is_first(str(who), Cause.PROTOCOL):
            text = "a message of %s was dropped: %s (further ones are only counted, as peer_message)"
            logger.warning(text, who, what)


class Pace(enum.IntEnum):
    """How soon a part needs the next turn, in ascending order."""

    IDLE = 0
    """An event wakes the thread."""
    BUSY = 1
    """Work is under way whose end wakes no thread."""
    SENDING = 2
    """Sends are under way, which are slower the less often the engine is polled."""
    DUE = 3
    """An event has not been handled yet."""


def carry_out_each(metrics: Metrics, *kinds: tuple[str, Iterable[Any], Callable[[Any], None]]) -> None:
    """Carry out orders kind by kind, named for people: an internal error in one of them ends no other."""
    for what, orders, carry_out in kinds:
        for order in orders:
            try:
                carry_out(order)
            except Exception as error:
                count_error(metrics, error, f"an order to {what}")
