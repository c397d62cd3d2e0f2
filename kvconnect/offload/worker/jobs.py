"""The jobs of one rank, and the reports that each owes the scheduler half.

A job is opened by the call that orders it. It owes one report, or two if it is a store for lower tiers too.
Each end of a part of it sends the next report; once none is owed, later results change nothing. So every job
is reported, even if the thread that works on it has died. The module performs no copy and calls no tier.
"""

from __future__ import annotations

import enum
import itertools
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvconnect.outcome import Cause, Reason
from kvconnect.transfer.orders import CHANGES_AT_ONCE, OffloadReport, Results, RowCopies, TierChange

if TYPE_CHECKING:
    from kvconnect.offload.worker.named_rows import NamedRows

logger = logging.getLogger(__name__)

_HASH_BYTES = 32
"""The bytes of footers that count as one change, where reports bound the number of changes."""

NO_COPIES = RowCopies(0, (), ())


class Report(enum.Enum):
    """A report that a job can owe; the value is its label in metrics."""

    STORED = "store"
    KEPT = "keep"
    FETCHED = "fetch"
    FOUND = "seek"
    RECEIVED = "restore"
    PARKED = "park"


_FILLS = (Report.STORED, Report.FETCHED)
"""After these reports a job's rows hold its contents, except contents that the report names."""


@dataclass(eq=False)
class RankJob:
    """One job of this rank.

    Attributes:
        key: its number in orders, or the request of a restore; None for a read from disk for peers.
        owed: the reports to come, in order. Until the last one its rows may be read or written.
        is_void: everything was cleared since the order.
        num_writing: how many tiers may still read its rows.
    """

    number: int
    key: int | str | None
    hashes: tuple[bytes, ...]
    owed: tuple[Report, ...]
    copies: RowCopies
    is_void: bool = False
    num_writing: int = 0
    footers: Mapping[bytes, bytes] = field(default_factory=dict)


class RankJobs:
    """All jobs of one rank that owe a report, and reports that were not taken yet. Thread-safe."""

    def __init__(self, rank: int) -> None:
        self.names: NamedRows | None = None
        """The names of rows, if peers may fetch KV by name."""
        self._rank = rank
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._open: dict[int, RankJob] = {}
        self._changes: deque[TierChange] = deque()
        self._num_cleared = 0
        self.is_recovering = False
        """Whether a tier has yet to report contents from before its start."""
        self.wake: Callable[[], None] = lambda: None
        """Called, on any thread, when there is something to take."""
        self._start_anew()

    def _start_anew(self) -> None:
        self._done: dict[int, tuple[bytes, ...]] = {}
        self._kept: list[int] = []
        self._received: list[str] = []
        self._failed: dict[str, Reason] = {}

    def open(
        self, key: int | str | None, hashes: tuple[bytes, ...], *owed: Report, copies: RowCopies = NO_COPIES
    ) -> RankJob:
        """Open a job that owes the reports ``owed``."""
        job = RankJob(next(self._numbers), key, hashes, owed, copies)
        if self.names is not None:
            self.names.take(job)
        with self._lock:
            self._open[job.number] = job
        return job

    def end(self, job: RankJob, named: Iterable[bytes] = ()) -> None:
        """Send a job's next report, with the contents ``named``; ignored if it owes none any more."""
        named = tuple(named)
        if self.names is not None and next(iter(job.owed), None) in _FILLS:
            self.names.fill(job, named)
        with self._lock:
            if not job.owed:
                return
            self._report(job, named, "")
        self._notify()

    def fail(self, job: RankJob, error: str) -> None:
        """Send all reports that a job still owes, as failed."""
        self.lose_names(job)
        with self._lock:
            is_new = bool(job.owed)
            while job.owed:
                self._report(job, () if job.owed[0] is Report.FOUND else job.hashes, error)
        if is_new:
            self._notify()

    def lose_names(self, job: RankJob) -> None:
        """Void what peers wait for, if a job reads it for them: its rows may yet be written."""
        if self.names is not None and job.key is None:
            self.names.fill(job, job.hashes)

    def fail_all(self, error: str) -> None:
        with self._lock:
            left = list(self._open.values())
        for job in left:
            self.fail(job, error)

    def _report(self, job: RankJob, named: tuple[bytes, ...], error: str) -> None:
        report, job.owed = job.owed[0], job.owed[1:]
        if isinstance(job.key, str):
            self._received.append(job.key)
            if error:
                self._failed[job.key] = Cause.RESTORE(error)
                # The scheduler half warns of the first.
                logger.debug("the KV of request %s could not be restored: %s", job.key, error)
        elif report is Report.KEPT and job.key is not None:
            self._kept.append(job.key)
        elif job.key is not None:
            self._done[job.key] = named
        if not job.owed:
            del self._open[job.number]

    def change(self, changes: Iterable[TierChange]) -> None:
        """Report contents that a tier gained or lost: at most ``CHANGES_AT_ONCE`` in each change."""
        with self._lock:
            self._changes += changes
        self._notify()

    def forget_changes(self) -> None:
        with self._lock:
            self._changes.clear()

    def forget_names(self, *, only_lent: bool = False) -> None:
        """Hide the contents of all rows from peers, and those of jobs under way; or of lent rows only."""
        if self.names is not None:
            self.names.forget(only_lent=only_lent)

    def cleared(self) -> None:
        """An order to clear was carried out: later changes are of contents from after it."""
        with self._lock:
            self._num_cleared += 1

    def take(self) -> Results:
        """All new reports, and as many changes of tiers as suit one step."""
        with self._lock:
            done, kept, received, failed = self._done, self._kept, self._received, self._failed
            self._start_anew()
            changes, left = [], CHANGES_AT_ONCE
            while self._changes and left > 0:
                changes.append(self._changes.popleft())
                change = changes[-1]
                left -= len(change.added) + len(change.removed) + sum(map(len, change.footers)) // _HASH_BYTES
            if self._changes:
                # The report that a job was kept ends it, so the changes of its tiers must come first.
                self._kept, kept = kept, []
            is_more, num_cleared, is_recovering = bool(self._changes), self._num_cleared, self.is_recovering
        if is_more:
            self._notify()
        report = OffloadReport(
            self._rank,
            num_cleared,
            done,
            tuple(kept),
            changes=tuple(changes),
            is_recovering=is_recovering or is_more,
        )
        return Results(received=tuple(received), failed=failed, offload=(report,) if report else ())

    def counts(self) -> dict[str, int]:
        """The number of owed reports by label."""
        with self._lock:
            found = Counter(report for job in self._open.values() for report in job.owed)
        return {report.value: found[report] for report in Report}

    def _notify(self) -> None:
        try:
            self.wake()
        except Exception:
            logger.exception("internal error in waking the thread that takes results")
