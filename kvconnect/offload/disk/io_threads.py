"""Threads that take work from one queue, and outlive the failures of that work."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable


class IoThreads:
    """A few threads for work that waits for a disk. Work is done in the order it came, several at once.

    An executor of the standard library would keep the process from ending while a disk hangs.
    """

    def __init__(self, name: str, count: int, on_error: Callable[[Exception], object]) -> None:
        self._on_error = on_error
        self._lock = threading.Lock()
        self._is_closed = False
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{index}", daemon=True) for index in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, work: Callable[[], None]) -> None:
        """Have this done by one of the threads; by the caller, once they were closed."""
        with self._lock:
            if not self._is_closed:
                self._queue.put(work)
                return
        self._do(work)

    def close(self, deadline_s: float) -> bool:
        """Let them finish what was submitted, until a moment of ``time.monotonic``; whether all ended."""
        with self._lock:
            self._is_closed = True
            for _ in self._threads:
                self._queue.put(None)
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            self._do(work)
            # What was done may hold the memory of rows, and the next piece may be long in coming.
            del work

    def _do(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self._on_error(error)
