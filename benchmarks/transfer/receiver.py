"""Ordering requests at a rate: what a router that never pauses has a decode node receive.

Takes the time as an argument. Owns which blocks are free, and what came to them last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.transfer.process import StepFailed
from kvconnect.transfer.orders import Load, Orders, Results


class Receiver:
    """Loads of one size, as many at a time as there are slots of blocks.

    Args:
        request_ids: what may be ordered, in order.
        slots: how many requests fit in the cache.
        make_load: the order for a request and a slot.
        request_bytes: of each; 0 orders whatever fits.
        bytes_per_s: of orders, on average. What could not be ordered in time is made up for, but never
            more than fits at once.
    """

    def __init__(
        self,
        request_ids: Sequence[str],
        slots: int,
        make_load: Callable[[str, int], Load],
        request_bytes: int = 0,
        bytes_per_s: float = 0.0,
    ) -> None:
        self._indexes = {request_id: index for index, request_id in enumerate(request_ids)}
        self._waiting = list(request_ids)[::-1]
        self._free = list(range(slots))
        self._taken: dict[str, tuple[int, float]] = {}
        self._make_load = make_load
        self._request_bytes = request_bytes
        self._bytes_per_s = bytes_per_s
        self._most_bytes = float(slots * request_bytes)
        # The first order is due at once.
        self._due_bytes = float(request_bytes)
        self._asked_at: float | None = None
        self.arrivals: list[float] = []
        self.latencies_s: list[float] = []
        self.last_in_slot: dict[int, int] = {}

    @property
    def done(self) -> bool:
        """Whether everything has arrived."""
        return not self._waiting and not self._taken

    @property
    def in_flight(self) -> int:
        """Requests that were ordered and have not arrived."""
        return len(self._taken)

    def take(self, results: Results, now: float) -> None:
        """Hear what has arrived.

        Raises:
            StepFailed: a request was not loaded.
        """
        for request_id in results.received:
            if request_id in results.failed:
                raise StepFailed(f"request {request_id} was not loaded: {results.failed[request_id]}")
            slot, ordered_at = self._taken.pop(request_id)
            self._free.append(slot)
            self.last_in_slot[slot] = self._indexes[request_id]
            self.arrivals.append(now)
            self.latencies_s.append(now - ordered_at)

    def orders(self, now: float) -> Orders:
        """What is due at ``now``, in seconds of any clock, and has room."""
        if self._asked_at is not None:
            grown = self._due_bytes + (now - self._asked_at) * self._bytes_per_s
            self._due_bytes = min(grown, self._most_bytes)
        self._asked_at = now
        loads = []
        while self._waiting and self._free and self._due_bytes >= self._request_bytes:
            self._due_bytes -= self._request_bytes
            request_id, slot = self._waiting.pop(), self._free.pop()
            self._taken[request_id] = slot, now
            loads.append(self._make_load(request_id, slot))
        return Orders(loads=tuple(loads))
