"""What worker ranks report of their jobs, and what that makes of the index of host memory."""

from __future__ import annotations

from kvconnect.offload.index.lower_index import LowerIndex
from kvconnect.offload.index.tier_index import TierIndex
from kvconnect.offload.scheduler.hits import Hits
from kvconnect.offload.scheduler.jobs import Job, JobKind, Jobs
from kvconnect.offload.scheduler.reasons import Reasons
from kvconnect.orders import OffloadReport, TierChange


class Reports:
    """Settles jobs. A content counts as there once every rank has it; what failed on one rank is not there.

    A row is out of use until no rank reads or writes it any more, whatever became of its content.
    """

    def __init__(self, index: TierIndex, lower: LowerIndex, jobs: Jobs, hits: Hits, reasons: Reasons) -> None:
        self._index = index
        self._lower = lower
        self._jobs = jobs
        self._hits = hits
        self._reasons = reasons
        self._changes: list[TierChange] = []
        self._is_asked = False

    def take_changes(self) -> tuple[TierChange, ...]:
        """What lower tiers of rank 0 have got and lost since the last call. Not noted before the first."""
        self._is_asked = True
        changes, self._changes = tuple(self._changes), []
        return changes

    def settle(self, report: OffloadReport) -> None:
        """A rank has reported. Jobs that are not known are over already, or were never ordered."""
        rank = report.rank
        if not 0 <= rank < self._jobs.num_ranks:
            self._reasons.count("offload_unknown_rank")
            return
        for number, told in report.stored.items():
            if (job := self._jobs.report(number, rank, JobKind.STORE, told)) is not None:
                self._stored(job)
        for number in report.kept:
            if (job := self._jobs.report_kept(number, rank)) is not None and not job.waiting:
                self._end_store(job)
        for number, told in report.fetched.items():
            if (job := self._jobs.report(number, rank, JobKind.FETCH, told)) is not None:
                self._fetched(job)
        for number, told in report.found.items():
            if (job := self._jobs.report(number, rank, JobKind.SEEK, told)) is not None:
                self._hits.answered(job)
                self._jobs.close(job)
        if report.changes:
            self._lower.update(rank, report.changes)
            if rank == 0 and self._is_asked:
                self._changes.extend(report.changes)

    def check_deadlines(self, now: float) -> None:
        """A step begins. Nobody waits any more for what should be over by now; its rows stay out of use."""
        for job in self._jobs.tick(now):
            self._reasons.count("offload_overdue")
            self._hits.overdue(job)
            if job.kind is JobKind.SEEK:
                # It has no rows: whoever answers now is not heard.
                self._jobs.close(job)

    def _stored(self, job: Job) -> None:
        """Every rank has copied what it could."""
        if job.told:
            self._reasons.count("offload_store_failed")
        if job.stale:
            self._hits.lost(job.group, job.hashes)
        else:
            stored = [name for name in job.hashes if name not in job.told] if job.told else job.hashes
            self._index.commit(job.group, stored)
            job.committed = True
            if job.keeping:
                self._index.pin(job.group, stored)
                job.pinned = stored
            self._hits.arrived(job.group, stored)
            self._hits.lost(job.group, job.told)
        if not job.keeping:
            self._end_store(job)

    def _end_store(self, job: Job) -> None:
        """Nobody reads or writes the job's rows any more."""
        self._index.unpin(job.group, job.pinned)
        failed = [name for name in job.hashes if name in job.told] if job.committed else job.hashes
        self._index.drop(job.group, failed)
        self._jobs.close(job)

    def _fetched(self, job: Job) -> None:
        missing = [name for name in job.hashes if job.stale or name in job.told]
        if job.told:
            self._reasons.count("offload_fetch_missed")
            self._lower.drop(job.tier, job.group, list(job.told))
        if not job.stale:
            fetched = [name for name in job.hashes if name not in job.told]
            self._index.commit(job.group, fetched)
            self._hits.arrived(job.group, fetched, job.tier)
        self._index.drop(job.group, missing)
        self._hits.lost(job.group, missing)
        self._jobs.close(job)
