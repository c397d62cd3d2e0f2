"""Which of the steps that a device was given it has finished."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

Finished = Callable[[], bool]

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
