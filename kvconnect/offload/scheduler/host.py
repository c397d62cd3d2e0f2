"""Host memory as the scheduler half knows it, and the jobs that worker ranks were ordered there.

A job is over when every rank has reported it, in any order; what failed on one rank failed. One that is not
over in time is overdue: no request waits for it any more, and its rows stay out of use until it is over.
"""

from __future__ import annotations

import enum
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvconnect.offload.index.lower_index import LowerIndex
from kvconnect.offload.index.session_pins import SessionPins
from kvconnect.offload.index.tier_index import TierIndex
from kvconnect.offload.scheduler.hit_requirements import HitGroup, HitRequirements
from kvconnect.offload.scheduler.offload_requests import Pins
from kvconnect.offload.tier_events import TierEvents
from kvconnect.transfer.orders import OffloadReport
from kvconnect.transfer.stack import RequestView

logger = logging.getLogger(__name__)

Hashes = Callable[[RequestView, int], Sequence[bytes]]
"""The hashes of a request's full blocks of so many tokens, each of everything up to the block's end."""

REASONS = {
    "offload_rows_short": "host memory had no row for a block: all are pinned, or being filled",
    "offload_overwritten": "a block was used for something else before it could be stored",
    "offload_wait_timeout": "a request did not wait any longer for what was on its way to host memory",
    "offload_parameters_refused": "kv_transfer_params.max_offload_tokens is not a number of tokens",
    "offload_refused": "a serving stack asked for what could not be restored",
    "offload_restore_failed": "blocks could not be restored: the request is computed, or fails by the policy",
    "offload_restores_paused": "several restores failed one after the other, so none is promised for a while",
    "offload_store_failed": "blocks could not be stored",
    "offload_fetch_missed": "a lower tier did not have what it had reported",
    "offload_overdue": "workers have not reported a job in time; its rows are out of use until they do",
    "offload_unknown_rank": "a report came from a rank that does not exist",
}
"""By reason what it means, for the log."""

_TIMEOUT_S = 60.0
_LONGEST_STEP_S = 1.0


class JobKind(enum.Enum):
    """What a job does with its contents, which are of one group; the value is where reports have it."""

    STORE = "stored"
    FETCH = "fetched"
    SEEK = "found"


@dataclass(eq=False)
class Job:
    """``unreported`` and ``unkept`` are bits of the ranks that have not reported it done, and kept; ``named``
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
        """A step begins: the jobs that are overdue now. Without steps no time passes, as no reports come."""
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
        self._serial += 1
        all_ranks = (1 << self.num_ranks) - 1
        deadline = self._now + _TIMEOUT_S
        job = Job(self._serial, kind, group, hashes, tier, all_ranks, all_ranks if keep else 0, deadline)
        self._jobs[job.number] = job
        self._by_deadline.append(job)
        self.num_awaited += 1
        return job

    def report(self, report: OffloadReport) -> tuple[Job, ...]:
        """The jobs that all ranks have done, or kept, with this report. Repetitions are ignored."""
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

    def being_kept(self, group: int) -> set[bytes]:
        """Contents that are on their way to lower tiers."""
        jobs = [job for job in self._jobs.values() if job.group == group and job.unkept]
        return {name for job in jobs for name in job.hashes}

    @property
    def are_due(self) -> bool:
        """Whether any that is not overdue is to be reported yet, as kept if by nothing else."""
        return any(not job.overdue for job in self._jobs.values())

    def is_open(self, job: Job) -> bool:
        return job.number in self._jobs

    def close(self, job: Job) -> None:
        del self._jobs[job.number]

    def invalidate(self) -> None:
        """Everything was cleared: what is under way arrives for nothing."""
        for job in self._jobs.values():
            job.stale = True


class Host:
    """What hits need, what is here, what every rank has below, and what was ordered.

    Failures are logged once by their reason, and counted always: by a worker, since this half has no metrics.
    """

    def __init__(
        self,
        requirements: HitRequirements,
        index: TierIndex,
        pins: SessionPins,
        hashes: Hashes,
        num_ranks: int,
    ) -> None:
        self.requirements, self.index, self.pins, self.hashes = requirements, index, pins, hashes
        self.lower, self.jobs = LowerIndex(num_ranks), Jobs(num_ranks)
        self.totals: Counter[str] = Counter()
        self.events: TierEvents | None = None
        self._untaken: list[str] = []

    def forget(self, jobs: Iterable[Job]) -> None:
        """Those of the jobs that are over bring nothing any more, nowhere."""
        for job in jobs if self.events is not None else ():
            if job.kind is not JobKind.SEEK and not self.jobs.is_open(job):
                self.forget_names(job.group, job.hashes)

    def forget_names(self, group: int, names: Iterable[bytes]) -> None:
        """What was described is stored nowhere, or everywhere."""
        if self.events is not None:
            self.events.forget(group, names)

    def names(self, view: RequestView, group: HitGroup, parts: Iterable[range]) -> list[bytes]:
        """What the blocks of a request at these positions are known by, as far as its hashes go."""
        hashes = self.hashes(view, group.block_tokens)
        return [name for part in parts for name in group.names(hashes, part.start, part.stop)]

    def unpin(self, pins: Pins) -> None:
        for group, names in pins.items():
            self.index.unpin(group, names)
        pins.clear()

    def count(self, reason: str) -> None:
        self._untaken.append(reason)
        self.totals[reason] += 1
        if self.totals[reason] == 1:
            logger.warning("%s (from now on counted only, as %s)", REASONS[reason], reason)

    def take_failures(self) -> tuple[str, ...]:
        taken, self._untaken = tuple(self._untaken), []
        return taken
