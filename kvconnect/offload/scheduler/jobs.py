"""The jobs that worker ranks were ordered, and which ranks have not answered yet.

A job is over when every rank has reported it, in any order; what failed on one rank failed. One that is not
over in time is overdue: nobody waits for it any more, and its rows stay out of use until it is over.
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

    ``waiting`` and ``keeping`` are bits of the ranks that have not reported it done, and kept. ``told`` are
    what ranks have named, and how many of them did. ``pinned`` are its contents that must stay until it was
    kept, ``committed`` whether those that are right count as there. ``stale``: everything was cleared since
    it was ordered.
    """

    number: int
    kind: JobKind
    group: int
    hashes: Sequence[bytes]
    tier: str
    waiting: int
    keeping: int
    deadline: float
    told: dict[bytes, int] = field(default_factory=dict)
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
        self.num_ranks = num_ranks
        self._timeout_s = timeout_s
        self._all = (1 << num_ranks) - 1
        self._jobs: dict[int, Job] = {}
        self._by_deadline: deque[Job] = deque()
        self._serial = 0
        self._now = self._ticked_at = 0.0
        self.num_awaited = 0
        """Jobs that somebody may wait for: not done, and not overdue."""

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
                self.num_awaited -= bool(job.waiting)
                job.overdue = True
                found.append(job)
        return found

    def open(
        self,
        kind: JobKind,
        group: int,
        hashes: Sequence[bytes],
        *,
        tier: str = "",
        keep: bool = False,
    ) -> Job:
        """A job is ordered of all ranks."""
        self._serial += 1
        keeping = self._all if keep else 0
        deadline = self._now + self._timeout_s
        job = Job(self._serial, kind, group, hashes, tier, self._all, keeping, deadline)
        self._jobs[job.number] = job
        self._by_deadline.append(job)
        self.num_awaited += 1
        return job

    def report(self, number: int, rank: int, kind: JobKind, told: Iterable[bytes]) -> Job | None:
        """A rank has done a job. The job, if it was the last one; what it says twice is not heard."""
        job = self._jobs.get(number)
        bit = 1 << rank
        if job is None or job.kind is not kind or not job.waiting & bit:
            return None
        job.waiting &= ~bit
        for content in told:
            job.told[content] = job.told.get(content, 0) + 1
        if job.waiting:
            return None
        self.num_awaited -= not job.overdue
        return job

    def report_kept(self, number: int, rank: int) -> Job | None:
        """A rank does not read a job's rows any more. The job, if it was the last one."""
        job = self._jobs.get(number)
        bit = 1 << rank
        if job is None or not job.keeping & bit:
            return None
        job.keeping &= ~bit
        return None if job.keeping else job

    def close(self, job: Job) -> None:
        """A job is over."""
        del self._jobs[job.number]

    def spoil(self) -> None:
        """Whatever is under way is of no use any more."""
        for job in self._jobs.values():
            job.stale = True
