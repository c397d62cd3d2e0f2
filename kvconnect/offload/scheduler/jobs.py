"""The jobs that worker ranks were ordered, and which ranks have not reported them yet.

A job is over when every rank has reported it, in any order; what failed on one rank failed. One that is not
over in time is overdue: no request waits for it any more, and its rows stay out of use until it is over.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

_LONGEST_STEP_S = 1.0


class JobKind(enum.Enum):
    """What a job does with its contents, which are of one group."""

    STORE = "store"
    FETCH = "fetch"
    SEEK = "seek"


@dataclass(eq=False)
class Job:
    """One job.

    ``unreported`` and ``unkept`` are bits of the ranks that have not reported it done, and kept. ``named``
    are the contents that ranks have reported, and how many of them did. ``pinned`` are those that must stay
    until the job was kept, ``committed`` whether those that are right count as there. ``stale``: everything
    was cleared since it was ordered.
    """

    number: int
    kind: JobKind
    group: int
    hashes: Sequence[bytes]
    tier: str
    unreported: int
    unkept: int
    deadline: float
    named: dict[bytes, int] = field(default_factory=dict)
    pinned: Sequence[bytes] = ()
    committed: bool = False
    stale: bool = False
    overdue: bool = False


class Jobs:
    """All jobs that are not over.

    Args:
        num_ranks: how many ranks report each job.
        timeout_s: after which a job is overdue.
    """

    def __init__(self, num_ranks: int, timeout_s: float) -> None:
        self.num_ranks, self._timeout_s = num_ranks, timeout_s
        self._all_ranks = (1 << num_ranks) - 1
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
        unkept = self._all_ranks if keep else 0
        deadline = self._now + self._timeout_s
        job = Job(self._serial, kind, group, hashes, tier, self._all_ranks, unkept, deadline)
        self._jobs[job.number] = job
        self._by_deadline.append(job)
        self.num_awaited += 1
        return job

    def report(self, number: int, rank: int, kind: JobKind, named: Iterable[bytes]) -> Job | None:
        """A rank has done a job; a second report is ignored. The job, after its last rank."""
        job = self._jobs.get(number)
        bit = 1 << rank
        if job is None or job.kind is not kind or not job.unreported & bit:
            return None
        job.unreported &= ~bit
        for content in named:
            job.named[content] = job.named.get(content, 0) + 1
        if job.unreported:
            return None
        self.num_awaited -= not job.overdue
        return job

    def report_kept(self, number: int, rank: int) -> Job | None:
        """A rank does not read a job's rows any more. The job, after its last rank."""
        job = self._jobs.get(number)
        bit = 1 << rank
        if job is None or not job.unkept & bit:
            return None
        job.unkept &= ~bit
        return None if job.unkept else job

    def close(self, job: Job) -> None:
        """A job is over."""
        del self._jobs[job.number]

    def invalidate(self) -> None:
        """Everything was cleared: what is under way arrives for nothing."""
        for job in self._jobs.values():
            job.stale = True
