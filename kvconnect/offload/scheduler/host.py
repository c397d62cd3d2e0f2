"""The records of the scheduler half: requests, the index of lower tiers, and the jobs that ranks work on.

A job is over when every rank has reported it, in any order; a content that failed on one rank failed. A job
that is late is overdue: the serving stack does not step for it, and its rows stay out of use until it is
over. Requests stop waiting for it after ``wait_s``. The module does not decide what is stored, restored or
fetched.
"""

from __future__ import annotations

import enum
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat

from kvconnect.cache.specs import KVCacheGroup
from kvconnect.config import OffloadConfig
from kvconnect.offload.index.budgets import plan_for
from kvconnect.offload.index.session_pins import Pin, SessionPins
from kvconnect.offload.index.tier_index import TierIndex
from kvconnect.offload.scheduler.hit_requirements import HitGroup, HitRequirements
from kvconnect.offload.tier import Content
from kvconnect.offload.tier_events import TierEvents
from kvconnect.transfer.orders import OffloadReport, OrdersDraft, Restore, Seek, TierChange, TierFetch
from kvconnect.transfer.stack import Names, RequestView


class LowerIndex:
    """The contents of lower tiers by tier and cache group, each with the ranks that have it.

    If events are published, ``events`` receives the changes of rank 0, since all ranks get the same orders.
    """

    def __init__(self, num_ranks: int, events: TierEvents | None = None) -> None:
        # One bit for each rank: a repeated report changes nothing.
        self._all = (1 << num_ranks) - 1
        self._ranks: dict[tuple[str, int], dict[bytes, int]] = {}
        self._events = events

    def update(self, rank: int, changes: Iterable[TierChange]) -> None:
        """Apply a rank's changes. A content that is both added and removed is removed."""
        bit = 1 << rank
        for change in changes:
            if self._events is not None and not rank:
                self._note(self._events, change)
            ranks = self._ranks.setdefault((change.tier, change.group), {})
            for content in change.added:
                ranks[content] = ranks.get(content, 0) | bit
            for content in change.removed:
                if left := ranks.pop(content, 0) & ~bit:
                    ranks[content] = left

    def has(self, tier: str, group: int, hashes: Sequence[bytes]) -> list[bool]:
        """For each hash whether every rank has it in the tier."""
        ranks, every = self._ranks.get((tier, group), {}), self._all
        return [known == every for known in map(ranks.get, hashes, repeat(0))]

    def drop(self, tier: str, group: int, hashes: Sequence[bytes]) -> None:
        """Forget contents that some rank missed, for all ranks, until a rank reports them anew."""
        ranks = self._ranks.get((tier, group), {})
        self._lose(tier, group, hashes)
        for content in hashes:
            ranks.pop(content, None)

    def _note(self, events: TierEvents, change: TierChange) -> None:
        """Send a change of rank 0 to ``events``, before it is applied."""
        tier, group = change.tier, change.group
        ranks = self._ranks.get((tier, group), {})
        gone = set(change.removed)
        new = [name for name in change.added if not ranks.get(name, 0) & 1 and name not in gone]
        events.stored(tier, group, new, dict(zip(change.added, change.footers, strict=False)))
        self._lose(tier, group, change.removed)

    def _lose(self, tier: str, group: int, hashes: Iterable[bytes]) -> None:
        if self._events is not None:
            ranks = self._ranks.get((tier, group), {})
            self._events.removed(tier, group, [name for name in hashes if ranks.get(name, 0) & 1])

    def clear(self) -> None:
        for (tier, group), ranks in self._ranks.items():
            self._lose(tier, group, ranks)
        self._ranks.clear()

    def counts(self) -> dict[str, dict[int, int]]:
        """The number of contents that every rank has, by tier and group. Costs time for all contents."""
        found: dict[str, dict[int, int]] = {}
        for (tier, group), ranks in self._ranks.items():
            found.setdefault(tier, {})[group] = list(ranks.values()).count(self._all)
        return found


NEVER = 1 << 62
"""A token count that no request reaches."""

Pins = dict[int, list[bytes]]
"""Names by group, each pinned once."""


@dataclass(eq=False)
class Lookup:
    """The prefix lookup of one request: first the contents that it waits for, then the tokens promised to it.

    Attributes:
        deadline: from then on it waits for nothing, and looks in host memory alone: at last when it answered.
        waits_for: contents under way to host memory, and seek jobs by number, each with its tier; the tier is
            empty if another request stores the content.
        found, brought: contents that seek jobs found, by tier; and the tier of contents that were fetched.
        lost: contents that could not be fetched, and are not tried again.
        pins: contents pinned in host memory: those promised, or those already here while it waits.
        length: tokens beyond ``start_tokens`` that are promised to a request of ``num_tokens``, 0 before.
        version: that of host memory when the answer was found.
    """

    deadline: float
    waits_for: dict[Content | int, str] = field(default_factory=dict)
    found: dict[str, set[Content]] = field(default_factory=dict)
    lost: set[Content] = field(default_factory=set)
    brought: dict[Content, str] = field(default_factory=dict)
    pins: Pins = field(default_factory=dict)
    start_tokens: int = 0
    num_tokens: int = 0
    length: int = 0
    version: int = 0


@dataclass(eq=False)
class OffloadRequest:
    """The offload's record of one request.

    Attributes:
        reads, most_tokens: whether it may get restored tokens; how many of its tokens may be kept.
        known_tokens: its tokens when it was last admitted, which need no sampling.
        computed_tokens, computed_before: its computed tokens as of the last step, and of the step before.
        boundaries, kept: where windows and states of the known tokens are kept, and positions kept for that.
        junction: a boundary where other prompts begin to differ; 0 for none.
        next_position: by group the first position that was not considered for a store yet.
        trail: by group the position and name of contents kept while decoding, until the answer outgrows them.
        ragged_tokens: no window block that begins before this is kept: a peer may not have filled it.
        is_admitted: it has had blocks at some time.
        sources: how many of the tokens promised to it each lower tier brought; None if none were promised.
        pin: its session's pin, which holds its kept contents, if a hint asked for that.
    """

    host: Host
    view: RequestView
    reads: bool
    most_tokens: int
    prompt_tokens: int = 0
    known_tokens: int = 0
    computed_tokens: int = 0
    computed_before: int = 0
    boundaries: tuple[int, ...] = ()
    junction: int = 0
    kept: dict[int, tuple[range, ...]] = field(default_factory=dict)
    block_ids: dict[int, list[int]] = field(default_factory=dict)
    next_position: dict[int, int] = field(default_factory=dict)
    trail: dict[int, deque[tuple[int, bytes]]] = field(default_factory=dict)
    lookup: Lookup | None = None
    ragged_tokens: int = 0
    is_admitted: bool = False
    sources: dict[str, int] | None = None
    pin: Pin | None = None

    @property
    def last_boundary(self) -> int:
        """The last boundary in the known tokens; windows and states kept after it belong to the answer."""
        return self.boundaries[-1] if self.boundaries else 0

    def lay_out(self) -> None:
        self.known_tokens, requirements = self.view.num_tokens, self.host.requirements
        most_tokens = min(self.known_tokens, self.most_tokens)
        found = set(requirements.boundaries(most_tokens, self.host.config.checkpoint_tokens))
        if 0 < self.junction < self.known_tokens:
            found.add(self.junction)
        self.boundaries = tuple(sorted(found))
        self.kept = requirements.kept(self.boundaries)

    def checkpoints(self) -> tuple[int, ...]:
        """Token counts at which its state is worth storing: boundaries, and those that the answer may add."""
        requirements = self.host.requirements
        align, last = requirements.align_tokens, requirements.last_boundary(self.known_tokens)
        if self.boundaries and self.boundaries[-1] < last:
            return self.boundaries
        return (*self.boundaries, *range(last + align, self.known_tokens + 1, align))

    def lose_blocks(self) -> None:
        self.block_ids = {}
        self.next_position = {}
        self.computed_tokens = self.computed_before = 0

    def computed(self, num_tokens: int, new_block_ids: Sequence[Sequence[int]] | None) -> None:
        """A step was launched: ``num_tokens`` are computed, and the request has new blocks, by group."""
        self.computed_before, self.computed_tokens = self.computed_tokens, num_tokens
        if new_block_ids is None:
            return
        for group in self.host.requirements.groups:
            if not group.is_state and (ids := new_block_ids[group.group]):
                self.block_ids.setdefault(group.group, []).extend(ids)

    def valid_tokens(self) -> int:
        """The number of its tokens whose KV is final, and computed or being computed."""
        # A sampled token counts once the next token is known: until then a draft may have been in its place.
        return min(self.computed_tokens, max(self.known_tokens, self.view.num_tokens - 1))

    def final_tokens(self) -> int:
        """``valid_tokens`` when the request has ended. The last sampled token has no KV."""
        if self.view.num_tokens > self.known_tokens > 0:
            # A token was sampled since the request was admitted, so all tokens before are computed.
            return self.view.num_tokens - 1
        return self.valid_tokens()

    def held(self, group: HitGroup) -> tuple[range, ...]:
        """The positions of a group whose blocks the request still held in the last ``computed`` step."""
        # While decoding not every step is reported; each step computes at least one token.
        is_prefill = self.computed_before < self.known_tokens
        return group.held(max(0, self.computed_before if is_prefill else self.computed_tokens - 1))

    def worth_keeping(self, group: HitGroup, positions: range) -> list[int]:
        """The positions of a window group that are to be kept."""
        found: list[int] = []
        for span in self.kept.get(group.group, ()):
            found.extend(range(max(positions.start, span.start), min(positions.stop, span.stop)))
        if self.host.config.decoded:
            begin = max(positions.start, self.last_boundary // group.block_tokens)
            found.extend(at for at in range(begin, positions.stop) if self.host.requirements.lasts(group, at))
        return found


REASONS = {
    "offload_rows_short": "host memory had no row for a block: all are pinned, or being filled",
    "offload_overwritten": "a block was used again before it could be stored",
    "offload_wait_timeout": "a request waited too long for what was on its way to host memory",
    "offload_parameters_refused": "kv_transfer_params.max_offload_tokens is not a number of tokens",
    "offload_refused": "a serving stack asked for what could not be restored",
    "offload_restore_failed": "blocks could not be restored: the request is computed, or fails by the policy",
    "offload_restores_paused": "several restores failed in a row: none is promised for a while",
    "offload_store_failed": "blocks could not be stored",
    "offload_fetch_missed": "a lower tier did not have what it had reported",
    "offload_overdue": "workers have not reported a job in time: its rows are out of use until they do",
    "offload_unknown_rank": "a rank that does not exist reported",
    "park_rows_short": "host memory had no room for the KV of a request that waits for blocks: it waits on",
}
"""The log text of each counted reason."""

_TIMEOUT_S = 60.0
_LONGEST_STEP_S = 1.0


class JobKind(enum.Enum):
    """What a job does with its contents of one group."""

    STORE, FETCH, SEEK, PARK = range(4)


@dataclass(eq=False)
class Job:
    """One order to all ranks that they have not all finished.

    ``unreported`` and ``unkept`` have a bit for each rank that has yet to report the job done, and kept.
    ``named`` counts, for each content, the ranks that named it in their reports. For a store that all ranks
    have done, ``failed`` are the failed contents, and ``pinned`` those pinned until lower tiers have written
    them. ``stale``: everything was cleared since the order.
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
    """All jobs that are not over. Each of ``num_ranks`` ranks reports each job."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._jobs: dict[int, Job] = {}
        self._by_deadline: deque[Job] = deque()
        self._serial = 0
        self._now = self._ticked_at = 0.0
        self.num_awaited = 0
        """The number of jobs that a request may wait for: not done, and not overdue."""

    def __len__(self) -> int:
        return len(self._jobs)

    def tick(self, now: float) -> list[Job]:
        """A step begins: jobs that are overdue now. Time counts only in steps, which bring reports."""
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
        """The jobs that all ranks have done, or kept, as of this report. Repeated reports are ignored."""
        bit, ended = 1 << report.rank, {}
        for number, named in report.done.items():
            job = self._jobs.get(number)
            if job is None or not job.unreported & bit:
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
        """Contents of a group that lower tiers are still to write."""
        jobs = [job for job in self._jobs.values() if job.group == group and job.unkept]
        return {name for job in jobs for name in job.hashes}

    @property
    def are_due(self) -> bool:
        """Whether a job that is not overdue lacks a report, if only the one that it was kept."""
        return any(not job.overdue for job in self._jobs.values())

    def is_open(self, job: Job) -> bool:
        return job.number in self._jobs

    def close(self, job: Job) -> None:
        del self._jobs[job.number]

    def invalidate(self) -> None:
        """Everything was cleared: mark all jobs as stale, so that their contents are discarded."""
        for job in self._jobs.values():
            job.stale = True


@dataclass(frozen=True)
class KeptBlocks:
    """The traits that a stack states of the blocks kept below the device's memory.

    Attributes:
        requirements, row_bytes: of those of ``groups`` that are kept; rows are as long on all ranks.
        hashes: names the contents of a request's blocks, for the block sizes of groups, and for
            ``align_tokens`` where a group keeps states. Called often: a view is better than a new list.
        events: receives the contents that tiers gain and lose.
        parks: on every rank, loads can fill rows.
    """

    groups: Sequence[KVCacheGroup]
    requirements: HitRequirements
    hashes: Names
    row_bytes: Mapping[int, int]
    clock: Callable[[], float] = time.monotonic
    num_ranks: int = 1
    events: TierEvents | None = None
    parks: bool = False


class Host:
    """The state that the scheduler half's modules share, and the orders of the next step but for stores.

    ``draft`` gets what is counted.
    """

    def __init__(self, config: OffloadConfig, kept: KeptBlocks, draft: OrdersDraft) -> None:
        self.config, self.requirements, self.hashes = config, kept.requirements, kept.hashes
        least_rows = kept.requirements.least_rows(config.min_tokens)
        self.plan = plan_for(config, kept.groups, kept.row_bytes, least_rows)
        self.index = TierIndex(self.plan, kept.events)
        self.pins = SessionPins(self.index, self.plan, config.pin_quota, config.disk_bytes)
        self.lower, self.jobs = LowerIndex(kept.num_ranks, kept.events), Jobs(kept.num_ranks)
        self.events, self.draft = kept.events, draft
        self.restores: list[Restore] = []
        self.fetches: list[TierFetch] = []
        self.seeks: list[Seek] = []

    def take(self) -> tuple[tuple[Restore, ...], tuple[TierFetch, ...], tuple[Seek, ...]]:
        """The orders since the last call, but for stores."""
        orders = tuple(self.restores), tuple(self.fetches), tuple(self.seeks)
        for taken in (self.restores, self.fetches, self.seeks):
            taken.clear()
        return orders

    def forget_names(self, group: int, names: Iterable[bytes]) -> None:
        """Drop the event origins of contents that no tier will store any more."""
        if self.events is not None:
            self.events.forget(group, names)

    def names(self, view: RequestView, group: HitGroup, parts: Iterable[range]) -> list[bytes]:
        """The names of a request's blocks at these positions, fewer if its hashes end before."""
        hashes = self.hashes(view, group.block_tokens)
        return [name for part in parts for name in group.names(hashes, part.start, part.stop)]

    def unpin(self, pins: Pins) -> None:
        for group, names in pins.items():
            self.index.unpin(group, names)
        pins.clear()

    def count(self, reason: str) -> None:
        self.draft.warn(reason, "offload: %s", REASONS[reason])
