"""A device that runs late: a step's forward has run when its results are needed, and not before."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class Device:
    """Kernels in the order in which they were launched. One that is not late runs each at once."""

    def __init__(self, *, is_late: bool) -> None:
        self._is_late = is_late
        self._pending: deque[tuple[Callable[[], None], bool]] = deque()
        self.launched = 0
        """How many kernels it was given so far."""
        self._ran = 0

    def launch(self, kernel: Callable[[], None], *, is_long: bool = True) -> None:
        """Give it a kernel. What is not long is over as soon as all before it is."""
        self._pending.append((kernel, is_long))
        self.launched += 1
        self.run(self._ran if self._is_late else self.launched)

    def run(self, number: int) -> None:
        """The first so many kernels have run after this."""
        while self._pending and (self._ran < number or not self._pending[0][1]):
            self._pending.popleft()[0]()
            self._ran += 1

    def record(self) -> Callable[[], bool]:
        """What says whether everything that was launched so far has run."""
        number = self.launched
        return lambda: self._ran >= number
