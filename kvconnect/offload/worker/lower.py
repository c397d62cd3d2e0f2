"""The tiers below host memory, as one rank uses them: each job goes there and comes back, or is given up.

A tier answers in its own time. What it does not answer in time is reported failed, and its rows stay held
until it does: a tier that reads or writes late can then harm no other job.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvconnect.metrics import OffloadMetrics
from kvconnect.offload.copies.arena import RowArena
from kvconnect.offload.tier import Content, LowerTier, TierNews, TierRow
from kvconnect.offload.worker.jobs import CHANGES_AT_ONCE, Job, Jobs, Report
from kvconnect.orders import TierChange

logger = logging.getLogger(__name__)
T = TypeVar("T")

WRITE_TIMEOUT_S = 60.0
"""How long a tier may take to write the rows of a job."""

READ_TIMEOUT_S = 20.0
"""How long it may take to read them, or to answer whether it has them."""

_Key = tuple[str, str, int]
"""A call of a tier: the tier's name, its method, and the number of the job."""


@dataclass(eq=False)
class _Call:
    """What one tier was asked to do for a job."""

    job: Job
    began_s: float
    deadline_s: float
    given_up: bool = False


class LowerTiers:
    """All lower tiers of a rank, in the order in which they are written. One thread owns it."""

    def __init__(
        self, tiers: Sequence[LowerTier], arena: RowArena, jobs: Jobs, metrics: OffloadMetrics
    ) -> None:
        self.tiers = tiers
        self._arena, self._jobs, self._metrics = arena, jobs, metrics
        self._write_timeout_s, self._read_timeout_s = WRITE_TIMEOUT_S, READ_TIMEOUT_S
        self._calls: dict[_Key, _Call] = {}
        self.next_deadline_s: float | None = None
        """When ``advance`` has something to do though no tier has anything to report."""
        self._logged: set[tuple[str, str]] = set()

    def __len__(self) -> int:
        """Calls that were not answered, those given up included."""
        return len(self._calls)

    def keep(self, job: Job, now: float) -> None:
        """Write the rows of a store to all tiers; the job ends once none of them reads the rows any more."""
        if not self.tiers or not job.named:
            self._jobs.end(job, Report.KEPT)
            return
        job.num_writing = len(self.tiers)
        rows = self._memory(job)
        for tier in self.tiers:
            self._begin(tier, "write", job, rows, now)

    def fetch(self, job: Job, name: str, now: float) -> None:
        """Read contents into rows; the job ends once the tier does not write them any more."""
        tier = self._tier(job, name)
        if tier is not None and not job.named:
            self._jobs.end(job, Report.FETCHED, job.refused)
        elif tier is not None:
            self._begin(tier, "read", job, self._memory(job), now)

    def seek(self, job: Job, name: str, now: float) -> None:
        """Ask a tier what it has; the job ends with its answer."""
        tier = self._tier(job, name)
        if tier is not None:
            self._begin(tier, "seek", job, [(job.copies.group, hash_) for hash_ in job.hashes], now)

    def clear(self, now: float) -> None:
        """Have all tiers forget everything that they were given before."""
        for tier in self.tiers:
            self._safely(tier, "clear", tier.clear)
            # What was added before is gone, as the scheduler half knows.
            self._take(tier, self._poll(tier), now, with_changes=False)

    def advance(self, now: float) -> bool:
        """Take what the tiers report, and give up what is late. Whether there was anything."""
        progress = False
        for tier in self.tiers:
            if news := self._poll(tier):
                progress = True
                self._take(tier, news, now)
        if self.next_deadline_s is not None and now >= self.next_deadline_s:
            progress = True
            self._give_up_late(now)
        return progress

    def close(self, now: float, *, with_changes: bool = True) -> None:
        """Close all tiers, and have none. Whatever they did not do fails."""
        for tier in self.tiers:
            is_quiescent = self._safely(tier, "close", tier.close) is True
            self._take(tier, self._poll(tier), now, with_changes=with_changes)
            for key in [key for key in self._calls if key[0] == tier.name]:
                self._give_up(key, "closed")
                call = self._calls.pop(key)
                if is_quiescent:
                    self._jobs.release(call.job)
        self.tiers, self.next_deadline_s = (), None

    def _begin(self, tier: LowerTier, verb: str, job: Job, given: Sequence[object], now: float) -> None:
        key = (tier.name, verb, job.number)
        deadline_s = now + (self._write_timeout_s if verb == "write" else self._read_timeout_s)
        self._calls[key] = _Call(job, now, deadline_s)
        next_s = self.next_deadline_s
        self.next_deadline_s = deadline_s if next_s is None else min(next_s, deadline_s)
        try:
            getattr(tier, verb)(job.number, given)
        except Exception:
            # It may have begun: the rows are held until it answers or is closed.
            self._log(tier.name, verb, "an error of its own in %s", verb, exc_info=True)
            self._give_up(key, "refused")

    def _take(self, tier: LowerTier, news: TierNews, now: float, *, with_changes: bool = True) -> None:
        for reason, times in news.failures.items():
            self._metrics.failures.labels(reason).inc(times)
        for verb, answers in (("write", news.written), ("read", news.read), ("seek", news.found)):
            for number, contents in answers.items():
                self._answered((tier.name, verb, number), contents, now)
        if with_changes and (news.added or news.removed):
            self._jobs.change(_changes(tier.name, news))

    def _answered(self, key: _Key, contents: Iterable[Content], now: float) -> None:
        name, verb, number = key
        call = self._calls.pop(key, None)
        if call is None:
            self._log(name, "answer", "an answer to job %d that was not asked", number)
            return
        job = call.job
        if call.given_up:
            self._jobs.release(job)
            return
        named_by_tier = {hash_ for group, hash_ in contents if group == job.copies.group}
        named = [hash_ for hash_ in job.named if hash_ in named_by_tier]
        if verb == "seek":
            self._jobs.end(job, Report.FOUND, named)
            return
        row_bytes = self._arena.plan.row_class(job.copies.group).row_bytes
        num_moved = len(job.named) - len(named)
        good, bad = ("kept", "unkept") if verb == "write" else ("fetched", "missed")
        self._metrics.moved(good, name, num_moved, num_moved * row_bytes, now - call.began_s)
        self._metrics.moved(bad, name, len(named), len(named) * row_bytes)
        if verb == "write":
            self._kept(job)
        else:
            self._jobs.end(job, Report.FETCHED, (*named, *job.refused))

    def _kept(self, job: Job) -> None:
        """One of the tiers that a job's rows are written to has ended."""
        job.num_writing -= 1
        if not job.num_writing:
            self._jobs.end(job, Report.KEPT)

    def _give_up_late(self, now: float) -> None:
        for key in [key for key, call in self._calls.items() if not call.given_up]:
            if now >= self._calls[key].deadline_s:
                self._log(key[0], key[1], "no answer in time to an order to %s", key[1])
                self._give_up(key, "timeout")
        self.next_deadline_s = min(
            (call.deadline_s for call in self._calls.values() if not call.given_up), default=None
        )

    def _give_up(self, key: _Key, why: str) -> None:
        """End a call as failed. Its rows are held before that is reported."""
        call = self._calls[key]
        if call.given_up:
            return
        call.given_up = True
        self._jobs.hold(call.job)
        self._metrics.failures.labels(f"{key[0]}_{key[1]}_{why}").inc()
        if key[1] == "write":
            self._kept(call.job)
        else:
            self._jobs.fail(call.job, why)

    def _poll(self, tier: LowerTier) -> TierNews:
        return self._safely(tier, "poll", tier.poll) or TierNews()

    def _safely(self, tier: LowerTier, verb: str, call: Callable[[], T]) -> T | None:
        """What a call of a tier returns. If it raises, that is its bug, logged once and counted."""
        try:
            return call()
        except Exception:
            self._log(tier.name, verb, "an error of its own in %s", verb, exc_info=True)
            self._metrics.failures.labels(f"{tier.name}_internal").inc()
            return None

    def _tier(self, job: Job, name: str) -> LowerTier | None:
        """The tier that a job is for; the job fails where there is none."""
        for tier in self.tiers:
            if tier.name == name:
                return tier
        self._log(name, "unknown", "orders for it, but there is no such tier")
        self._metrics.failures.labels("offload_unknown_tier").inc()
        self._jobs.fail(job, "there is no such tier")
        return None

    def _log(self, name: str, kind: str, text: str, *about: object, exc_info: bool = False) -> None:
        """Log once of each tier and kind what went wrong there; the count has the others."""
        if (name, kind) not in self._logged:
            self._logged.add((name, kind))
            logger.error("lower tier %s: " + text, name, *about, exc_info=exc_info)

    def _memory(self, job: Job) -> list[TierRow]:
        group = job.copies.group
        return [
            TierRow(group, hash_, self._arena.row(group, row))
            for hash_, row in zip(job.named, job.copies.rows, strict=True)
        ]


def _changes(name: str, news: TierNews) -> Iterator[TierChange]:
    """What a tier has lost and got, by group, in pieces that each fit in a report."""
    for contents, is_added in ((news.removed, False), (news.added, True)):
        by_group: dict[int, list[bytes]] = {}
        for group, hash_ in contents:
            by_group.setdefault(group, []).append(hash_)
        for group, hashes in by_group.items():
            for first in range(0, len(hashes), CHANGES_AT_ONCE):
                part = tuple(hashes[first : first + CHANGES_AT_ONCE])
                yield TierChange(name, group, part) if is_added else TierChange(name, group, (), part)
