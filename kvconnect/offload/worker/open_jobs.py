"""Which jobs of a worker's tiers are open, and what became of the others: every job comes back exactly once.

A job is opened in the call that orders it and ends once, with the first thing that is said of its end;
what is said later is not heard. So it ends even if the thread that works on it does not.
"""

from __future__ import annotations

import enum
import itertools
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvconnect.orders import OffloadReport, Results, TierChange

logger = logging.getLogger(__name__)

CHANGES_AT_ONCE = 2048
"""A tier that finds what it kept before its start has a million of them, and a step some milliseconds."""


class JobKind(enum.Enum):
    """What somebody waits for."""

    STORE = "store"
    KEEP = "keep"
    FETCH = "fetch"
    SEEK = "seek"
    RESTORE = "restore"


@dataclass(frozen=True)
class OpenJob:
    """One job: whose it is, and the contents it is about. ``since_s`` is when it was ordered."""

    kind: JobKind
    key: int | str
    hashes: tuple[bytes, ...]
    since_s: float


class OpenJobs:
    """All jobs of one rank, and what was not reported yet of those that ended. For any thread."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._open: dict[int, OpenJob] = {}
        self._changes: deque[TierChange] = deque()
        self._wake: Callable[[], None] = lambda: None
        self._start_anew()

    def _start_anew(self) -> None:
        self._told: dict[JobKind, dict[int, tuple[bytes, ...]]] = {
            kind: {} for kind in JobKind if kind is not JobKind.RESTORE
        }
        self._received: list[str] = []
        self._failed: dict[str, str] = {}

    def on_results(self, wake: Callable[[], None]) -> None:
        """Have ``wake`` called, from any thread, whenever there is something to take."""
        self._wake = wake

    def open(self, kind: JobKind, key: int | str, hashes: Sequence[bytes], now: float) -> int:
        """A job begins. Returns the number under which it ends."""
        with self._lock:
            number = next(self._numbers)
            self._open[number] = OpenJob(kind, key, tuple(hashes), now)
        return number

    def end(self, number: int, told: Iterable[bytes] = ()) -> OpenJob | None:
        """A job ended well; ``told`` are the hashes that its report names. None: it had ended before."""
        with self._lock:
            job = self._open.pop(number, None)
            if job is not None:
                self._report(job, tuple(told), "")
        if job is not None:
            self._notify()
        return job

    def fail(self, number: int, error: str) -> OpenJob | None:
        """Nothing came of a job. None: it had ended before."""
        with self._lock:
            job = self._open.pop(number, None)
            if job is not None:
                self._report(job, () if job.kind is JobKind.SEEK else job.hashes, error)
        if job is not None:
            self._notify()
        return job

    def fail_all(self, error: str) -> int:
        """Nothing comes of whatever is open. Returns how many jobs that were."""
        with self._lock:
            # In the order they were opened, so that a block is not told kept before it is told stored.
            left = list(self._open.values())
            self._open = {}
            for job in left:
                self._report(job, () if job.kind is JobKind.SEEK else job.hashes, error)
        if left:
            self._notify()
        return len(left)

    def tell(self, changes: Sequence[TierChange]) -> None:
        """A tier has got contents, or has them no more."""
        if changes:
            parts = [part for change in changes for part in _parts(change)]
            with self._lock:
                self._changes += parts
            self._notify()

    def forget_changes(self) -> None:
        """What tiers have got and lost so far is of no interest any more."""
        with self._lock:
            self._changes.clear()

    def take(self) -> Results:
        """What was not reported yet; of what tiers have got and lost no more than suits one step."""
        with self._lock:
            told, received, failed = self._told, self._received, self._failed
            self._start_anew()
            changes, left = [], CHANGES_AT_ONCE
            while self._changes and left > 0:
                changes.append(self._changes.popleft())
                left -= len(changes[-1].added) + len(changes[-1].removed)
            is_more = bool(self._changes)
        if is_more:
            self._notify()
        report = OffloadReport(
            self._rank,
            stored=told[JobKind.STORE],
            kept=told[JobKind.KEEP],
            fetched=told[JobKind.FETCH],
            found=told[JobKind.SEEK],
            changes=tuple(changes),
        )
        return Results(received=tuple(received), failed=failed, offload=(report,) if report else ())

    def counts(self) -> dict[str, int]:
        """Open jobs by kind."""
        with self._lock:
            found = Counter(job.kind for job in self._open.values())
        return {kind.value: found[kind] for kind in JobKind}

    def _report(self, job: OpenJob, told: tuple[bytes, ...], error: str) -> None:
        if isinstance(job.key, str):
            self._received.append(job.key)
            if error:
                self._failed[job.key] = error
        else:
            self._told[job.kind][job.key] = told

    def _notify(self) -> None:
        try:
            self._wake()
        except Exception:
            logger.exception("whoever waits for results could not be woken")


def _parts(change: TierChange) -> Iterator[TierChange]:
    """A change in pieces that each fit in a report. No content is both in ``added`` and in ``removed``."""
    for start in range(0, len(change.removed), CHANGES_AT_ONCE):
        yield TierChange(change.tier, change.group, removed=change.removed[start : start + CHANGES_AT_ONCE])
    for start in range(0, len(change.added), CHANGES_AT_ONCE):
        yield TierChange(change.tier, change.group, change.added[start : start + CHANGES_AT_ONCE])
