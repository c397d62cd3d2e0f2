"""The copies between a device and its rows that are under way, from their orders to their ends."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from kvconnect.metrics import OffloadMetrics
from kvconnect.offload.copies.copier import Copier, CopyTicket
from kvconnect.offload.index.budgets import ArenaPlan
from kvconnect.offload.worker.jobs import Job, Jobs, Report
from kvconnect.offload.worker.lower import LowerTiers
from kvconnect.orders import RowCopies

logger = logging.getLogger(__name__)

_TIMEOUT_S = 60.0
CPU = "cpu"
"""What metrics call host memory."""


@dataclass(eq=False)
class _Copy:
    """Blocks on their way to the rows of ``jobs``; or rows on their way to blocks, ``restored``, for one."""

    ticket: CopyTicket
    jobs: Sequence[Job]
    began_s: float
    restored: Sequence[RowCopies] | None = None
    is_late: bool = False


class DeviceCopies:
    """Snapshots and restores under way. One thread owns it; snapshots were begun by another."""

    def __init__(
        self, copier: Copier, plan: ArenaPlan, jobs: Jobs, lower: LowerTiers, metrics: OffloadMetrics
    ) -> None:
        self._copier, self._plan, self._jobs = copier, plan, jobs
        self._lower, self._metrics, self._timeout_s = lower, metrics, _TIMEOUT_S
        self._copies: list[_Copy] = []
        self._logged: set[str] = set()

    def __len__(self) -> int:
        """Copies under way."""
        return len(self._copies)

    def begun(self, ticket: CopyTicket, jobs: Sequence[Job], began_s: float, _: float) -> None:
        """The blocks of these jobs are being copied to their rows."""
        self._copies.append(_Copy(ticket, jobs, began_s))

    def restore(self, job: Job, copies: Sequence[RowCopies], after: object, began_s: float, _: float) -> None:
        """Copy rows to the blocks of a request."""
        ticket = self._copier.restore(copies, after)
        self._copies.append(_Copy(ticket, [job], began_s, copies))

    def clear(self) -> None:
        """What is being copied is not written to lower tiers any more."""
        for copy in self._copies:
            for job in copy.jobs:
                job.is_void = True

    def advance(self, now: float) -> bool:
        """End what is done. Whether anything was."""
        done = [copy for copy in self._copies if copy.ticket.done]
        for copy in done:
            self._copies.remove(copy)
            if copy.restored is None:
                self._stored(copy, now)
            else:
                self._restored(copy.jobs[0], copy.ticket.error, copy.restored, now - copy.began_s)
        for copy in self._copies:
            if not copy.is_late and now - copy.began_s > self._timeout_s:
                copy.is_late = True
                self._give_up(copy)
        return bool(done)

    def _stored(self, copy: _Copy, now: float) -> None:
        self._metrics.wait_seconds.labels("staging").inc(copy.ticket.waited_s)
        for job in copy.jobs:
            if copy.is_late:
                self._jobs.release(job)
                continue
            if copy.ticket.error is not None:
                self._fail(job, "offload_store", copy.ticket.error)
                continue
            try:
                self._moved("stored", [job.copies], now - copy.began_s)
                self._jobs.end(job, Report.STORED, job.refused)
                if job.is_void:
                    self._jobs.fail(job, "cleared")
                elif job.owed:
                    self._lower.keep(job, now)
            except Exception as error:
                # What the job has reported before this stands.
                self._fail(job, "internal", f"an error of our own: {error}")

    def _restored(self, job: Job, error: str | None, copies: Sequence[RowCopies], took_s: float) -> None:
        if error is not None:
            self._fail(job, "offload_restore", error)
            return
        self._moved("restored", copies, took_s)
        self._jobs.end(job, Report.RECEIVED)

    def _give_up(self, copy: _Copy) -> None:
        if copy.restored is not None:
            # Its blocks may still be written, so it has not ended for the scheduler half.
            self._count("offload_restore_late", f"it did not end within {self._timeout_s} s")
            return
        for job in copy.jobs:
            self._jobs.hold(job)
            self._fail(job, "offload_store_late", "the device did not finish the copy in time")

    def _moved(self, move: str, copies: Sequence[RowCopies], took_s: float) -> None:
        length_bytes = sum(len(one.rows) * self._plan.row_class(one.group).row_bytes for one in copies)
        self._metrics.moved(move, CPU, sum(len(one.rows) for one in copies), length_bytes, took_s)

    def _fail(self, job: Job, reason: str, error: str) -> None:
        self._count(reason, error)
        self._jobs.fail(job, error)

    def _count(self, reason: str, error: str) -> None:
        self._metrics.failures.labels(reason).inc()
        if reason not in self._logged:
            self._logged.add(reason)
            text = "%s: a copy of blocks failed, which is a miss, counted from now on: %s"
            logger.error(text, reason, error)
