"""The threads on which lower tiers wait for a disk or a store."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable


class IoThreads:
    """A few daemon threads, which take work in the order of its submission.

    An executor of the standard library would keep the process from exiting while a disk or a store hangs.
    """

    def __init__(self, name: str, count: int, on_error: Callable[[Exception], object]) -> None:
        self._on_error = on_error
        self._lock = threading.Lock()
        self._is_closed = False
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{index}", daemon=True) for index in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, work: Callable[[], object]) -> None:
        """Run work on one of the threads, or on the calling thread once they were closed."""
        with self._lock:
            if not self._is_closed:
                self._queue.put(work)
                return
        self._do(work)

    def close(self, deadline_s: float) -> bool:
        """Let the threads finish until ``deadline_s`` (``time.monotonic``); returns whether all ended."""
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
            # Work may hold the memory of rows, and the next piece may be long in coming.
            del work

    def _do(self, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:
            self._on_error(error)
