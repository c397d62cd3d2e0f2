"""What the transfers of a worker are made of: its parts, what all of them are given, and their clock."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from kvconnect.config import ExtraConfig
from kvconnect.engine.base import Completion
from kvconnect.metrics import Metrics, count_error
from kvconnect.peer.channel import Arrival, Channel
from kvconnect.transfer.local import Local
from kvconnect.transfer.orders import Orders, Reports

Finished = Callable[[], bool]
Order = TypeVar("Order")

_KEPT = 8
"""Steps whose beginning is remembered: more than a serving stack runs ahead of the results that it has."""

_FEW = 64
AGAIN_S = 1.0
"""When something over which we met an error of our own is tried again: it ends nothing that waits."""


def always() -> bool:
    """Of a device that is done with what it is given at once."""
    return True


class DeviceSteps:
    """An event of the device before each of its last steps: an order waits for the step that it speaks of.

    Args:
        record: returns what reports whether the device has finished everything that it was given so far.
    """

    def __init__(self, record: Callable[[], Finished]) -> None:
        self._record = record
        self._begun: deque[tuple[int, Finished]] = deque(maxlen=_KEPT)

    def begin(self, step: int) -> None:
        """All kernels of the steps before this one were launched, and none of this one."""
        if self._begun and step <= self._begun[-1][0]:
            # Another scheduler, which counts its steps anew.
            self._begun.clear()
        self._begun.append((step, self._record()))

    def finished(self, step: int) -> Finished:
        """What knows whether a step is over; of one after which none began, all that was launched so far."""
        for begun, is_finished in self._begun:
            if begun > step:
                return is_finished
        return self._record()


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
    """All timers of a thread, on one heap: a thousand that are not due cost a turn nothing.

    What a call raises is given to ``failed``, and the call is made again later. Time is an argument.
    """

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


@dataclass(frozen=True, eq=False)
class TransferContext:
    """What all parts of one worker use; ``randomness`` is where everything random comes from."""

    config: ExtraConfig
    local: Local
    channel: Channel
    reports: Reports
    metrics: Metrics
    randomness: random.Random
    timers: Timers


class TransferPart:
    """What a prefill node, or a decode node, does on the transfer thread, which alone calls it.

    A hook that a part has no use for does nothing.
    """

    name = ""

    def carry_out(self, orders: Orders, finished: Mapping[int, Finished], now: float) -> None:
        """One step's orders; ``finished`` reports by step whether the device is done with it."""

    def receive(self, arrival: Arrival, now: float) -> None:
        """Something came over a connection that we opened."""

    def completed(self, completion: Completion, now: float) -> None:
        """The engine has ended a batch."""

    def advance(self, now: float) -> bool:
        """Do what can be done now. Whether something went on that no message and no completion brought."""
        return False

    @property
    def is_due(self) -> bool:
        """Something happened that was not looked after since."""
        return False

    @property
    def is_busy(self) -> bool:
        """Something is under way whose end wakes no thread."""
        return False

    @property
    def is_sending(self) -> bool:
        """The engine must be polled often for it: the less, the slower it is."""
        return False


def each(metrics: Metrics, what: str, orders: Iterable[Order], carry_out: Callable[[Order], None]) -> None:
    """Carry out orders of one kind: an error of ours over one of them ends no other."""
    for order in orders:
        try:
            carry_out(order)
        except Exception as error:
            count_error(metrics, error, f"an order to {what}")
