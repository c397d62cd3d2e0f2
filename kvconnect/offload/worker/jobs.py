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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvconnect.outcome import Cause, Reason
from kvconnect.transfer.orders import CHANGES_AT_ONCE, OffloadReport, Results, RowCopies, TierChange

if TYPE_CHECKING:
    from kvconnect.offload.worker.named_rows import NamedRows

logger = logging.getLogger(__name__)

HostRow = tuple[int, int]
"""A row of host memory: its class, and its number there."""

_HASH_BYTES = 32
"""What one counts as whose number is bounded."""

NO_COPIES = RowCopies(0, (), ())


class Report(enum.Enum):
    """What a job can owe; the value is the label of its metric."""

    STORED = "store"
    KEPT = "keep"
    FETCHED = "fetch"
    FOUND = "seek"
    RECEIVED = "restore"


_FILLS = (Report.STORED, Report.FETCHED)
"""With these the rows of a job hold its contents, but for those that the report names."""


@dataclass(eq=False)
class RankJob:
    """``key`` is the scheduler half's name of it: a number, or the request of a restore; None where that half
    has not ordered it. ``hashes`` are its contents, ``owed`` the reports to come, in order. ``named`` are the
    contents of ``copies``: all but those ``refused``, whose row a job that was given up may still touch.
    Where everything was cleared since, ``is_void`` is set. ``num_writing`` tiers are to answer yet that they
    do not read its rows any more. ``footers`` are those of contents, if any.
    """

    number: int
    key: int | str | None
    hashes: tuple[bytes, ...]
    owed: tuple[Report, ...]
    copies: RowCopies
    row_class: int
    named: Sequence[bytes]
    refused: tuple[bytes, ...] = ()
    is_void: bool = False
    num_writing: int = 0
    footers: Mapping[bytes, bytes] = field(default_factory=dict)

    @property
    def rows(self) -> list[HostRow]:
        """Its rows, whichever group of their class uses them."""
        return [(self.row_class, row) for row in self.copies.rows]


class RankJobs:
    """All jobs of one rank that owe something, and reports that were not taken yet. For any thread."""

    def __init__(self, rank: int) -> None:
        self.class_of: Mapping[int, int] = {}
        """Classes of rows by cache group, once they are known."""
        self.held: Counter[HostRow] = Counter()
        """Rows that a tier or a copy may still touch although their job was given up, so that the scheduler
        half uses them for something else: until they are released, all orders for them fail."""
        self.names: NamedRows | None = None
        """What rows hold, where peers ask for that."""
        self._rank = rank
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._open: dict[int, RankJob] = {}
        self._changes: deque[TierChange] = deque()
        self._num_cleared = 0
        self.is_recovering = False
        """Whether a tier has more to report of what it had before its start."""
        self._wake: Callable[[], None] = lambda: None
        self._start_anew()

    def _start_anew(self) -> None:
        self._named: dict[Report, dict[int, tuple[bytes, ...]]] = {report: {} for report in Report}
        self._received: list[str] = []
        self._failed: dict[str, Reason] = {}

    def on_results(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def open(
        self, key: int | str | None, hashes: tuple[bytes, ...], *owed: Report, copies: RowCopies = NO_COPIES
    ) -> RankJob:
        """A job begins. Rows are held before the job that had them is reported: held ones are seen here."""
        job = RankJob(
            next(self._numbers), key, hashes, owed, copies, self.class_of.get(copies.group, -1), hashes
        )
        if self.held:
            free = [at for at, row in enumerate(job.rows) if row not in self.held]
            if len(free) < len(copies.rows):
                blocks = tuple(copies.block_ids[at] for at in free if copies.block_ids)
                job.copies = RowCopies(copies.group, blocks, tuple(copies.rows[at] for at in free))
                job.named = tuple(hashes[at] for at in free)
                job.refused = tuple(set(hashes) - set(job.named))
        if self.names is not None:
            self.names.take(job)
        with self._lock:
            self._open[job.number] = job
        return job

    def end(self, job: RankJob, report: Report, named: Iterable[bytes] = ()) -> None:
        """A job has come to what it owes next, and names these contents, unless it was given up before."""
        named = tuple(named)
        if self.names is not None and report in _FILLS and job.owed[:1] == (report,):
            self.names.fill(job, named)
        with self._lock:
            is_owed = job.owed[:1] == (report,)
            if is_owed:
                self._report(job, named, "")
        if is_owed:
            self._notify()

    def fail(self, job: RankJob, error: str) -> None:
        """Nothing comes of what a job owes yet."""
        if self.names is not None and job.key is None:
            self.names.fill(job, job.hashes)
        with self._lock:
            is_new = bool(job.owed)
            while job.owed:
                self._report(job, () if job.owed[0] is Report.FOUND else job.hashes, error)
        if is_new:
            self._notify()

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
                logger.warning("the KV of request %s could not be restored: %s", job.key, error)
        elif job.key is not None:
            self._named[report][job.key] = named
        if not job.owed:
            del self._open[job.number]

    def hold(self, job: RankJob) -> None:
        """The rows of a job may be touched until ``release``, which is due as often."""
        with self._lock:
            self.held.update(job.rows)

    def release(self, job: RankJob) -> None:
        with self._lock:
            self.held.subtract(job.rows)
            self.held = +self.held

    def change(self, changes: Iterable[TierChange]) -> None:
        """A tier has got contents, or has them no more: at most ``CHANGES_AT_ONCE`` in each change."""
        with self._lock:
            self._changes += changes
        self._notify()

    def forget_changes(self) -> None:
        with self._lock:
            self._changes.clear()

    def forget_names(self, *, only_lent: bool = False) -> None:
        """Of what rows hold, or will once a job under way is done, nothing is named to peers any more."""
        if self.names is not None:
            self.names.forget(only_lent=only_lent)

    def cleared(self) -> None:
        """An order to clear was carried out: what changes from now on belongs to what came after it."""
        with self._lock:
            self._num_cleared += 1

    def take(self) -> Results:
        """What was not reported yet; of what tiers have got and lost no more than suits one step."""
        with self._lock:
            named, received, failed = self._named, self._received, self._failed
            self._start_anew()
            changes, left = [], CHANGES_AT_ONCE
            while self._changes and left > 0:
                changes.append(self._changes.popleft())
                change = changes[-1]
                left -= len(change.added) + len(change.removed) + sum(map(len, change.footers)) // _HASH_BYTES
            if self._changes:
                # A job that was kept is over: what its tiers got with it must be known before.
                self._named[Report.KEPT] = named.pop(Report.KEPT)
            is_more, num_cleared, is_recovering = bool(self._changes), self._num_cleared, self.is_recovering
        if is_more:
            self._notify()
        report = OffloadReport(
            self._rank,
            num_cleared,
            stored=named[Report.STORED],
            kept=tuple(named.get(Report.KEPT, ())),
            fetched=named[Report.FETCHED],
            found=named[Report.FOUND],
            changes=tuple(changes),
            is_recovering=is_recovering,
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
