"""The jobs that worker ranks were ordered, and which ranks have not reported them yet.

A job is over when every rank has reported it, in any order; what failed on one rank failed. One that is not
over in time is overdue: no request waits for it any more, and its rows stay out of use until it is over.
"""

from __future__ import annotations

import enum
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvconnect.orders import OffloadReport

_TIMEOUT_S = 60.0
_LONGEST_STEP_S = 1.0


class JobKind(enum.Enum):
    """What a job does with its contents, which are of one group; the value is where reports have it."""

    STORE = "stored"
    FETCH = "fetched"
    SEEK = "found"


@dataclass(eq=False)
class Job:
    """One job.

    ``unreported`` and ``unkept`` are bits of the ranks that have not reported it done, and kept; ``named``
    the contents that ranks have reported, and how many did. Of a store that all have done, ``failed`` are
    those that are not right, and ``pinned`` those that must stay until it was kept. ``stale``: everything was
    cleared since it was ordered.
    """

    number: int
    kind: JobKind
    group: int
    hashes: Sequence[bytes]
    tier: str
    unreported: int
    unkept: int
    deadline: float
    named: Counter[bytes] = field(default_factory=Counter)
    failed: Sequence[bytes] | None = None
    pinned: Sequence[bytes] = ()
    stale: bool = False
    overdue: bool = False


class Jobs:
    """All jobs that are not over. Each of ``num_ranks`` reports each of them."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._jobs: dict[int, Job] = {}
        self._by_deadline: deque[Job] = deque()
        self._serial = 0
        self._now = self._ticked_at = 0.0
        self.num_awaited = 0
        """Jobs that a request may wait for: not done, and not overdue."""

    def __len__(self) -> int:
        return len(self._jobs)

    def tick(self, now: float) -> list[Job]:
        """A step begins. The jobs that have become overdue since the last one.

        Reports come with steps: while there are none, no time passes for jobs.
        """
        self._now += min(now - self._ticked_at, _LONGEST_STEP_S)
        self._ticked_at = now
        found = []
        while self._by_deadline and self._by_deadline[0].deadline <= self._now:
            job = self._by_deadline.popleft()
            if job.number in self._jobs:
                self.num_awaited -= bool(job.unreported)
                job.overdue = True
                found.append(job)
        return found

    def open(
        self, kind: JobKind, group: int, hashes: Sequence[bytes], *, tier: str = "", keep: bool = False
    ) -> Job:
        """A job is ordered of all ranks."""
        self._serial += 1
        all_ranks = (1 << self.num_ranks) - 1
        deadline = self._now + _TIMEOUT_S
        job = Job(self._serial, kind, group, hashes, tier, all_ranks, all_ranks if keep else 0, deadline)
        self._jobs[job.number] = job
        self._by_deadline.append(job)
        self.num_awaited += 1
        return job

    def report(self, report: OffloadReport) -> tuple[Job, ...]:
        """Take what a rank has done; what it reports twice is ignored, and so are jobs that are not known.

        Returns the jobs that all ranks have done, or kept, with this report.
        """
        bit, ended = 1 << report.rank, {}
        for kind in JobKind:
            for number, named in getattr(report, kind.value).items():
                job = self._jobs.get(number)
                if job is None or job.kind is not kind or not job.unreported & bit:
                    continue
                job.unreported &= ~bit
                job.named.update(named)
                if not job.unreported:
                    self.num_awaited -= not job.overdue
                    ended[number] = job
        for number in report.kept:
            job = self._jobs.get(number)
            if job is not None and job.unkept & bit:
                job.unkept &= ~bit
                if not job.unkept:
                    ended[number] = job
        return tuple(ended.values())

    def close(self, job: Job) -> None:
        """A job is over."""
        del self._jobs[job.number]

    def invalidate(self) -> None:
        """Everything was cleared: what is under way arrives for nothing."""
        for job in self._jobs.values():
            job.stale = True
