"""What worker ranks report of their jobs, and what that makes of the index of host memory."""

from __future__ import annotations

from kvconnect.offload.scheduler.host import Host
from kvconnect.offload.scheduler.jobs import Job, JobKind
from kvconnect.offload.scheduler.prefix_lookup import PrefixLookup
from kvconnect.orders import OffloadReport, TierChange


class Reports:
    """Settles jobs. A content counts as there once every rank has it; what failed on one rank is not there.

    A row is out of use until no rank reads or writes it any more, whatever became of its content.
    """

    def __init__(self, host: Host, lookup: PrefixLookup) -> None:
        self._host, self._lookup = host, lookup
        self._changes: list[TierChange] = []
        self._keeps_changes = False

    def take_changes(self) -> tuple[TierChange, ...]:
        """What lower tiers of rank 0 have got and lost since the last call. Not noted before the first."""
        self._keeps_changes = True
        changes, self._changes = tuple(self._changes), []
        return changes

    def settle(self, report: OffloadReport) -> None:
        """A rank has reported. Jobs that are not known are over already, or were never ordered."""
        rank = report.rank
        if not 0 <= rank < self._host.jobs.num_ranks:
            self._host.failures.count("offload_unknown_rank")
            return
        for kind, named_by_job, end in (
            (JobKind.STORE, report.stored, self._stored),
            (JobKind.FETCH, report.fetched, self._fetched),
            (JobKind.SEEK, report.found, self._sought),
        ):
            for number, named in named_by_job.items():
                if (job := self._host.jobs.report(number, rank, kind, named)) is not None:
                    end(job)
        for number in report.kept:
            if (job := self._host.jobs.report_kept(number, rank)) is not None and not job.unreported:
                self._end_store(job)
        if report.changes:
            self._host.lower.update(rank, report.changes)
            if rank == 0 and self._keeps_changes:
                self._changes.extend(report.changes)

    def check_deadlines(self, now: float) -> None:
        """A step begins. No request waits any more for what is overdue; its rows stay out of use."""
        for job in self._host.jobs.tick(now):
            self._host.failures.count("offload_overdue")
            self._lookup.overdue(job)
            if job.kind is JobKind.SEEK:
                # It has no rows: a late answer changes nothing.
                self._host.jobs.close(job)

    def _stored(self, job: Job) -> None:
        """Every rank has copied what it could."""
        if job.named:
            self._host.failures.count("offload_store_failed")
        if job.stale:
            self._lookup.lost(job.group, job.hashes)
        else:
            stored = [name for name in job.hashes if name not in job.named] if job.named else job.hashes
            self._host.index.commit(job.group, stored)
            job.committed = True
            if job.unkept:
                self._host.index.pin(job.group, stored)
                job.pinned = stored
            self._lookup.arrived(job.group, stored)
            self._lookup.lost(job.group, job.named)
        if not job.unkept:
            self._end_store(job)

    def _end_store(self, job: Job) -> None:
        """No rank reads or writes the job's rows any more."""
        self._host.index.unpin(job.group, job.pinned)
        failed = [name for name in job.hashes if name in job.named] if job.committed else job.hashes
        self._host.index.drop(job.group, failed)
        self._host.jobs.close(job)

    def _fetched(self, job: Job) -> None:
        missing = [name for name in job.hashes if job.stale or name in job.named]
        if job.named:
            self._host.failures.count("offload_fetch_missed")
            self._host.lower.drop(job.tier, job.group, list(job.named))
        if not job.stale:
            fetched = [name for name in job.hashes if name not in job.named]
            self._host.index.commit(job.group, fetched)
            self._lookup.arrived(job.group, fetched, job.tier)
        self._host.index.drop(job.group, missing)
        self._lookup.lost(job.group, missing)
        self._host.jobs.close(job)

    def _sought(self, job: Job) -> None:
        self._lookup.answered(job)
        self._host.jobs.close(job)
