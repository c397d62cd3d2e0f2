"""The jobs of one rank: what each still owes the scheduler half, and rows that may be touched after a job.

A job is opened in the call that orders it and owes one report, a store that is kept two. Each report is sent
once, at the first end that the job comes to, and later ends change nothing. So every job comes back, even if
the thread that works on it has died.
"""

from __future__ import annotations

import enum
import itertools
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvconnect.orders import OffloadReport, Results, RowCopies, TierChange

logger = logging.getLogger(__name__)

CHANGES_AT_ONCE = 2048
"""A tier that finds what it kept before its start has a million of them, and a step some milliseconds."""

HostRow = tuple[int, int]
"""A row of host memory: its class, and its number there."""

_NO_COPIES = RowCopies(0, (), ())


class Report(enum.Enum):
    """What a job can owe; the value is the label of its metric."""

    STORED = "store"
    KEPT = "keep"
    FETCHED = "fetch"
    FOUND = "seek"
    RECEIVED = "restore"


@dataclass(eq=False)
class Job:
    """One order.

    ``key`` is the scheduler half's name of it: a number, or the request of a restore. ``hashes`` are its
    contents; those in ``refused`` have a row that a given-up job may still touch. ``owed`` are the reports to
    come, in order. Of a store ``copies`` are the blocks and rows of all but the refused, named ``copied``;
    ``is_void`` is set where everything was cleared since. While its rows are written to tiers ``num_writing``
    of these have not answered, and ``unkept`` counts how many do not have a content.
    """

    number: int
    key: int | str
    hashes: tuple[bytes, ...]
    owed: tuple[Report, ...]
    refused: tuple[bytes, ...] = ()
    copies: RowCopies = _NO_COPIES
    copied: tuple[bytes, ...] = ()
    is_void: bool = False
    num_writing: int = 0
    unkept: Counter[bytes] = field(default_factory=Counter)


class HeldRows:
    """Rows that a tier or a copy may still read or write although their job was given up.

    The job was reported failed, so the scheduler half uses the rows for something else; until they are
    released, whatever is ordered for them fails. For any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: Counter[HostRow] = Counter()

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, row: HostRow) -> bool:
        return row in self._held

    def hold(self, rows: Iterable[HostRow]) -> None:
        """These may be touched until ``release``, which is due as often."""
        with self._lock:
            self._held.update(rows)

    def release(self, rows: Iterable[HostRow]) -> None:
        """One job does not touch these any more."""
        with self._lock:
            self._held.subtract(rows)
            self._held = +self._held


class Jobs:
    """All jobs of one rank that owe something, and reports that were not taken yet. For any thread."""

    def __init__(self, rank: int) -> None:
        self.held = HeldRows()
        self._rank = rank
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._open: dict[int, Job] = {}
        self._changes: deque[TierChange] = deque()
        self._wake: Callable[[], None] = lambda: None
        self._start_anew()

    def _start_anew(self) -> None:
        self._named: dict[Report, dict[int, tuple[bytes, ...]]] = {report: {} for report in Report}
        self._received: list[str] = []
        self._failed: dict[str, str] = {}

    def on_results(self, wake: Callable[[], None]) -> None:
        """Have ``wake`` called, from any thread, whenever there is something to take."""
        self._wake = wake

    def open(self, key: int | str, hashes: Sequence[bytes], *owed: Report) -> Job:
        """A job begins."""
        job = Job(next(self._numbers), key, tuple(hashes), owed)
        with self._lock:
            self._open[job.number] = job
        return job

    def end(self, job: Job, report: Report, named: Iterable[bytes] = ()) -> bool:
        """A job has come to what it owes next, and names these contents. False: it was given up before."""
        with self._lock:
            is_owed = job.owed[:1] == (report,)
            if is_owed:
                self._report(job, tuple(named), "")
        if is_owed:
            self._notify()
        return is_owed

    def fail(self, job: Job, error: str) -> None:
        """Nothing comes of what a job owes yet."""
        self._fail([job], error)

    def fail_all(self, error: str) -> None:
        """Nothing comes of whatever is open."""
        with self._lock:
            left = list(self._open.values())
        self._fail(left, error)

    def _fail(self, jobs: Sequence[Job], error: str) -> None:
        is_news = False
        with self._lock:
            for job in jobs:
                while job.owed:
                    is_news = True
                    self._report(job, () if job.owed[0] is Report.FOUND else job.hashes, error)
        if is_news:
            self._notify()

    def _report(self, job: Job, named: tuple[bytes, ...], error: str) -> None:
        report, job.owed = job.owed[0], job.owed[1:]
        if isinstance(job.key, str):
            self._received.append(job.key)
            if error:
                self._failed[job.key] = error
        else:
            self._named[report][job.key] = named
        if not job.owed:
            del self._open[job.number]

    def change(self, changes: Iterable[TierChange]) -> None:
        """A tier has got contents, or has them no more: at most ``CHANGES_AT_ONCE`` in each change."""
        with self._lock:
            self._changes += changes
        self._notify()

    def forget_changes(self) -> None:
        """What tiers have got and lost so far is void."""
        with self._lock:
            self._changes.clear()

    def take(self) -> Results:
        """What was not reported yet; of what tiers have got and lost no more than suits one step."""
        with self._lock:
            named, received, failed = self._named, self._received, self._failed
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
            stored=named[Report.STORED],
            kept=named[Report.KEPT],
            fetched=named[Report.FETCHED],
            found=named[Report.FOUND],
            changes=tuple(changes),
        )
        return Results(received=tuple(received), failed=failed, offload=(report,) if report else ())

    def counts(self) -> dict[str, int]:
        """Reports that are owed, by their labels."""
        with self._lock:
            found = Counter(report for job in self._open.values() for report in job.owed)
        return {report.value: found[report] for report in Report}

    def _notify(self) -> None:
        try:
            self._wake()
        except Exception:
            logger.exception("the thread that takes results could not be woken")
