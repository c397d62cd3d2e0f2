"""What a worker reports to its serving stack, from the transfer thread to the thread that takes it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvconnect.orders import Found, Results
from kvconnect.outcome import Reason


class Reports:
    """Requests and handles that are over, until they are taken. ``wake`` is called for each of them."""

    def __init__(self, rank: int) -> None:
        self.wake: Callable[[], None] = lambda: None
        self._rank = rank
        self._ended: deque[tuple[str, str, Reason | None]] = deque()
        self._found: deque[Found] = deque()

    def sent(self, request_id: str) -> None:
        """No peer reads the blocks of a held request any more."""
        self._add("sent", request_id)

    def received(self, request_id: str, error: Reason | None) -> None:
        """No peer writes to the blocks of a loaded request any more; ``error`` states why it failed."""
        self._add("received", request_id, error)

    def settled(self, handle: str) -> None:
        """The peer holds what is awaited, or never will: rank 0 reports it for all ranks."""
        if self._rank == 0:
            self._add("settled", handle)

    def ragged(self, request_id: str) -> None:
        """A request that is received next may have blocks of windows that are not full.

        Every rank reports it: a pipeline rank knows of the windows of its own layers alone.
        """
        self._add("ragged", request_id)

    def found(self, found: Found) -> None:
        """What came of asking a peer for KV by name."""
        self._found.append(found)
        self.wake()

    def take(self) -> Results:
        """What was reported since the last call."""
        if not self._ended and not self._found:
            return Results()
        # No lock: the other thread appends meanwhile.
        ended = [self._ended.popleft() for _ in range(len(self._ended))]
        return Results(
            sent=tuple(name for what, name, _ in ended if what == "sent"),
            received=tuple(name for what, name, _ in ended if what == "received"),
            failed={name: error for _, name, error in ended if error is not None},
            settled=tuple(name for what, name, _ in ended if what == "settled"),
            found=tuple(self._found.popleft() for _ in range(len(self._found))),
            ragged=tuple(name for what, name, _ in ended if what == "ragged"),
        )

    def _add(self, what: str, name: str, error: Reason | None = None) -> None:
        self._ended.append((what, name, error))
        self.wake()
