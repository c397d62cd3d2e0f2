"""What a worker's transfers are made of and share: P's part, D's part, and what both are given."""

from __future__ import annotations

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
from kvconnect.transfer.timers import Timers

Finished = Callable[[], bool]
Order = TypeVar("Order")

_KEPT = 8
"""Steps whose beginning is remembered: more than a serving stack runs ahead of the results that it has."""


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
