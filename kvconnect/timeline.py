"""The latest events of one worker's requests, with times: a bounded ring of small records, always on.

The transfer thread records its own events, and a worker those that its scheduler half sends with orders, by
one monotonic clock of the machine. Chunks have records; pages have none.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from operator import itemgetter

Record = tuple[float, str, str, str, int, int]
"""Time in seconds, moment, handle, request id (either may be empty), transfer id, and a number.

The number is a chunk's index, the peer's rank, a count, or 1 for success and 0 for failure.
"""

MOST_RECORDS = 1 << 16
_MOST_REQUEST_ID = 256
"""Characters kept of a request id: a client may choose it."""
LATE_S = 1e-3
"""Seconds that a turn may be late, or take, without a record."""
_IDLE_S = 10e-3
"""Seconds of sleep from which a thread is idle, and never late."""


class Moment:
    """The kinds of record: those of a request in about this sequence, first on P, then on D."""

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
    PARKED = "parked"

    PULL = "pull: "
    """Followed by the outcome of a pull; the number is that of loaded tokens."""

    # Of the transfer thread, with microseconds: it slept longer than it asked for, or a turn took long.
    LATE = "late"
    SLOW = "slow"


class Timeline:
    """The last records of a worker. Any thread may add and read records."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, most: int = MOST_RECORDS) -> None:
        self.clock = clock
        self._records: deque[Record] = deque(maxlen=most)

    def note(
        self, moment: str, number: int = 0, *, handle: str = "", request_id: str = "", transfer_id: int = 0
    ) -> None:
        """Add a record with the present time."""
        request_id = request_id[:_MOST_REQUEST_ID]
        self._records.append((self.clock(), moment, handle, request_id, transfer_id, number))

    def take(self, records: Iterable[Record]) -> None:
        """Add the records that the scheduler half sent with its orders."""
        for at, moment, handle, request_id, transfer_id, number in records:
            kept = request_id[:_MOST_REQUEST_ID]
            self._records.append((at, moment, handle, kept, transfer_id, number))

    def records(self) -> list[Record]:
        """All records kept, in the sequence of their times."""
        # An atomic copy: other threads add records meanwhile.
        return sorted(self._records.copy(), key=itemgetter(0))

    def latest(self, most: int) -> list[Record]:
        """The last ``most`` records added, the latest first."""
        # One by one, since a copy of all takes milliseconds. Records added meanwhile shift the positions.
        found = {self._records[-place] for place in range(1, min(most, len(self._records)) + 1)}
        return sorted(found, key=itemgetter(0), reverse=True)


class Turns:
    """The turns of a thread that sleeps between them: records late and long ones.

    Most likely another thread held the interpreter, not the thread's own work.
    """

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._began_at = 0.0
        self._due_at = math.inf

    def begin(self) -> float:
        """Begin a turn. Returns the time."""
        self._began_at = now = self._timeline.clock()
        self._record(Moment.LATE, now - self._due_at)
        return now

    def end(self, sleep_s: float) -> None:
        """End a turn, before a sleep of at most ``sleep_s``."""
        now = self._timeline.clock()
        self._record(Moment.SLOW, now - self._began_at)
        self._due_at = now + sleep_s if sleep_s < _IDLE_S else math.inf

    def _record(self, moment: str, length_s: float) -> None:
        if length_s > LATE_S:
            self._timeline.note(moment, round(length_s * 1e6))
