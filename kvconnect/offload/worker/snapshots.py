"""The copies between a device and its rows that are under way, from their orders to their ends."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvconnect.metrics import OffloadMetrics
from kvconnect.offload.copies.arena import RowArena
from kvconnect.offload.copies.copier import Copier, CopyTicket
from kvconnect.offload.worker.jobs import HostRow, Job, Jobs, Report
from kvconnect.offload.worker.lower import LowerTiers
from kvconnect.orders import Restore

logger = logging.getLogger(__name__)

COPY_TIMEOUT_S = 60.0
CPU = "cpu"
"""What metrics call host memory."""


@dataclass
class _Snapshot:
    ticket: CopyTicket
    jobs: Sequence[Job]
    began_s: float
    given_up: bool = False


@dataclass
class _Restoring:
    ticket: CopyTicket
    job: Job
    num_rows: int
    length_bytes: int
    began_s: float
    is_late: bool = False


class Copies:
    """Snapshots and restores under way. One thread owns it; snapshots were begun by another."""

    def __init__(
        self,
        copier: Copier,
        arena: RowArena,
        jobs: Jobs,
        lower: LowerTiers,
        metrics: OffloadMetrics,
        *,
        timeout_s: float = COPY_TIMEOUT_S,
    ) -> None:
        self._copier, self._arena, self._jobs = copier, arena, jobs
        self._lower, self._metrics, self._timeout_s = lower, metrics, timeout_s
        self._snapshots: deque[_Snapshot] = deque()
        self._restores: list[_Restoring] = []
        self._said: set[str] = set()

    def __len__(self) -> int:
        """Copies under way."""
        return len(self._snapshots) + len(self._restores)

    def begun(self, ticket: CopyTicket, jobs: Sequence[Job], began_s: float) -> None:
        """The blocks of these jobs are being copied to their rows."""
        self._snapshots.append(_Snapshot(ticket, jobs, began_s))

    def restore(self, job: Job, order: Restore, after: object, ordered_s: float, _: float) -> None:
        """Copy rows to the blocks of a request."""
        num_rows = sum(len(copies.rows) for copies in order.copies)
        length_bytes = sum(len(copies.rows) * self._row_bytes(copies.group) for copies in order.copies)
        ticket = self._copier.restore(order.copies, after)
        self._restores.append(_Restoring(ticket, job, num_rows, length_bytes, ordered_s))

    def clear(self) -> None:
        """What is being copied is not written to lower tiers any more."""
        for snapshot in self._snapshots:
            for job in snapshot.jobs:
                job.is_void = True

    def advance(self, now: float) -> bool:
        """End what is done. Whether anything was."""
        progress = False
        for _ in range(len(self._snapshots)):
            snapshot = self._snapshots.popleft()
            if snapshot.ticket.done:
                progress = True
                self._stored(snapshot, now)
                continue
            self._snapshots.append(snapshot)
            if now - snapshot.began_s > self._timeout_s and not snapshot.given_up:
                self._give_up(snapshot)
        for restoring in [one for one in self._restores if one.ticket.done]:
            progress = True
            self._restores.remove(restoring)
            self._restored(restoring, now)
        for restoring in self._restores:
            if now - restoring.began_s > self._timeout_s and not restoring.is_late:
                # Its blocks may still be written, so it cannot be said to have ended.
                restoring.is_late = True
                self._count("offload_restore_late", f"it did not end within {self._timeout_s} s")
        return progress

    def _stored(self, snapshot: _Snapshot, now: float) -> None:
        ticket = snapshot.ticket
        self._metrics.wait_seconds.labels("staging").inc(ticket.waited_s)
        if snapshot.given_up:
            self._jobs.held.release(self._places(snapshot))
            return
        for job in snapshot.jobs:
            if ticket.error is not None:
                self._fail(job, ticket.error, "offload_store")
                continue
            try:
                self._end(job, now - snapshot.began_s, now)
            except Exception as error:
                # What the job has reported before this stands.
                self._fail(job, f"an error of our own: {error}", "internal")

    def _end(self, job: Job, took_s: float, now: float) -> None:
        num_rows = len(job.copies.rows)
        self._metrics.moved("stored", CPU, num_rows, num_rows * self._row_bytes(job.copies.group), took_s)
        self._jobs.end(job, Report.STORED, job.refused)
        if job.is_void:
            self._jobs.fail(job, "cleared")
        elif job.owed:
            self._lower.keep(job, now)

    def _restored(self, restoring: _Restoring, now: float) -> None:
        error = restoring.ticket.error
        if error is not None:
            self._count("offload_restore", error)
            self._jobs.fail(restoring.job, error)
            return
        took_s = now - restoring.began_s
        self._metrics.moved("restored", CPU, restoring.num_rows, restoring.length_bytes, took_s)
        self._jobs.end(restoring.job, Report.RECEIVED)

    def _give_up(self, snapshot: _Snapshot) -> None:
        snapshot.given_up = True
        self._jobs.held.hold(self._places(snapshot))
        for job in snapshot.jobs:
            self._fail(job, "the device did not finish the copy in time", "offload_store_late")

    def _fail(self, job: Job, error: str, reason: str) -> None:
        self._count(reason, error)
        self._jobs.fail(job, error)

    def _count(self, reason: str, error: str) -> None:
        self._metrics.failures.labels(reason).inc()
        if reason not in self._said:
            self._said.add(reason)
            logger.error(
                "%s: a copy of blocks failed, which is a miss, counted from now on: %s", reason, error
            )

    def _places(self, snapshot: _Snapshot) -> list[HostRow]:
        class_of = self._arena.plan.class_of
        return [(class_of[job.copies.group], row) for job in snapshot.jobs for row in job.copies.rows]

    def _row_bytes(self, group: int) -> int:
        return self._arena.plan.row_class(group).row_bytes
