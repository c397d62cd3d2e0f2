"""What happened lately to the requests of one worker, and when: a bounded ring of small records, always on.

The transfer thread records what it does, and a worker what its scheduler half reports with orders, by one
monotonic clock of the machine. There is no record of a page; what is packed has one for each chunk.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from operator import itemgetter

Record = tuple[float, str, str, str, int, int]
"""Time in seconds, moment, handle and request id as far as it has them, the transfer id, and a number.

The number is that of a chunk, or of the peer's rank, or what is counted, or whether it went well.
"""

MOST_RECORDS = 1 << 16
_MOST_REQUEST_ID = 256
"""Characters that are kept of one: a client may choose it."""
LATE_S = 1e-3
"""What a turn may be late, or take, without a record of it."""
_IDLE_S = 10e-3
"""A thread that sleeps so long has nothing under way, and is not late."""


class Moment:
    """What is recorded. Of a request, in about this sequence, on P and then on D."""

    QUEUED = "queued"
    ADMITTED = "admitted"
    LAUNCHED = "prefill launched"
    COMPUTED = "prefill done"
    HELD = "held"
    FETCH_RECEIVED = "fetch received"
    FETCH_BEGUN = "fetch begun"
    CREDITS_RECEIVED = "credits received"
    PACKING = "packing"
    PACKED = "packed"
    SUBMITTED = "submitted"
    WRITTEN = "written"
    ANSWER_SENT = "answer sent"
    LEASE_ENDED = "lease ended"
    FREED = "blocks freed"

    LOAD_ORDERED = "load ordered"
    LOAD_TAKEN = "load taken"
    FETCH_SENT = "fetch sent"
    CREDITS_SENT = "credits sent"
    LANDED = "landed"
    UNPACKING = "unpacking"
    UNPACKED = "unpacked"
    ANSWER_RECEIVED = "answer received"
    REPORTED = "reported"
    LOADED = "loaded"
    FIRST_TOKEN = "first token"

    PULL = "pull: "
    """What came of asking others for a request's KV by name follows, with the tokens that were loaded."""

    # Of the transfer thread, each with its microseconds: it slept longer than it wanted, or a turn took long.
    LATE = "late"
    SLOW = "slow"


class Timeline:
    """The last records of a worker. Any thread may add some, and read them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, most: int = MOST_RECORDS) -> None:
        self.clock = clock
        self._records: deque[Record] = deque(maxlen=most)

    def note(
        self, moment: str, number: int = 0, *, handle: str = "", request_id: str = "", transfer_id: int = 0
    ) -> None:
        """Record what happens now."""
        request_id = request_id[:_MOST_REQUEST_ID]
        self._records.append((self.clock(), moment, handle, request_id, transfer_id, number))

    def take(self, records: Iterable[Record]) -> None:
        """Add what another part of this machine recorded."""
        for at, moment, handle, request_id, transfer_id, number in records:
            kept = request_id[:_MOST_REQUEST_ID]
            self._records.append((at, moment, handle, kept, transfer_id, number))

    def records(self) -> list[Record]:
        """All that are kept, in the sequence of their times."""
        # Copied in one go: other threads add to it meanwhile.
        return sorted(self._records.copy(), key=itemgetter(0))

    def latest(self, most: int) -> list[Record]:
        """So many that were added last, the last one first."""
        # One by one, since a copy of all takes milliseconds. What is added meanwhile shifts their places.
        found = {self._records[-place] for place in range(1, min(most, len(self._records)) + 1)}
        return sorted(found, key=itemgetter(0), reverse=True)


class Turns:
    """The turns of a thread that sleeps between them: what made one late, or long, was not its own work.

    Most likely another thread had the interpreter.
    """

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._began_at = 0.0
        self._due_at = math.inf

    def begin(self) -> float:
        """A turn begins. Returns the time."""
        self._began_at = now = self._timeline.clock()
        self._record(Moment.LATE, now - self._due_at)
        return now

    def end(self, sleep_s: float) -> None:
        """A turn is over, and the thread wants to sleep so long at most."""
        now = self._timeline.clock()
        self._record(Moment.SLOW, now - self._began_at)
        self._due_at = now + sleep_s if sleep_s < _IDLE_S else math.inf

    def _record(self, moment: str, length_s: float) -> None:
        if length_s > LATE_S:
            self._timeline.note(moment, round(length_s * 1e6))
