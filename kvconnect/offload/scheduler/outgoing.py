"""Which blocks of running requests go to host memory: what a later hit can use, once, as soon as it is final.

Nothing waits: where rows are short, blocks are passed over and counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from kvconnect.offload.index.tier_index import ContentState, TierIndex
from kvconnect.offload.scheduler.jobs import JobKind, Jobs
from kvconnect.offload.scheduler.reach import Reach, ReachGroup
from kvconnect.offload.scheduler.reasons import Reasons
from kvconnect.offload.scheduler.tracked import NEVER, Tracked
from kvconnect.orders import RequestView, RowCopies, Store

MOST_AT_ONCE = 1024
"""Blocks of one group that one call looks at; of a long prefix that was there before the rest comes later."""

Hashes = Callable[[RequestView, int], Sequence[bytes]]
"""The hashes of a request's full blocks of so many tokens, each of everything up to the block's end."""


@dataclass(eq=False)
class _Pending:
    names: list[bytes] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class _Part:
    """Positions of a request in one group, from ``first`` on, of no use without the contents ``before``."""

    tracked: Tracked
    first: int
    before: list[bytes]
    names: Sequence[bytes]
    block_ids: list[int]

    @property
    def all_names(self) -> Sequence[bytes]:
        return [*self.before, *self.names]

    def seen_to(self, group: ReachGroup, count: int) -> None:
        self.tracked.next_position[group.group] = self.first + count


class Outgoing:
    """Blocks that are to be stored with the next orders.

    Args:
        most_tokens: contents beyond this many tokens can be part of no hit, for want of rows.
        lag_tokens: tokens that the stack may have begun to compute beyond what it tells.
        decoded: keep blocks that were filled while decoding too.
        keep: write what is stored to lower tiers too.
    """

    def __init__(
        self,
        reach: Reach,
        index: TierIndex,
        jobs: Jobs,
        hashes: Hashes,
        reasons: Reasons,
        *,
        most_tokens: int,
        lag_tokens: int,
        decoded: bool,
        keep: bool,
    ) -> None:
        self._reach = reach
        self._index = index
        self._jobs = jobs
        self._hashes = hashes
        self._reasons = reasons
        self._most_tokens = most_tokens
        self._lag_tokens = lag_tokens
        self._decoded = decoded
        self._keep = keep
        self._windows = tuple(group for group in reach.partial if not group.is_state)
        self._pending: dict[int, _Pending] = {}
        self._noted: dict[str, tuple[Tracked, int]] = {}
        self.due: dict[str, int] = {}
        """By request the token count at which there is more to take, for those that are in here."""

    def __len__(self) -> int:
        return len(self._noted) + sum(len(pending.names) for pending in self._pending.values())

    def note(self, tracked: Tracked, valid_tokens: int) -> None:
        """Take what has become final of a request, together with that of others: see ``settle``."""
        self._noted[tracked.request_id] = (tracked, valid_tokens)

    def settle(self, request_id: str | None = None) -> None:
        """See to the requests that were noted, if one of them is this one.

        To be called before anything of that request changes, and before anybody else looks at the index.
        """
        if self._noted and (request_id is None or request_id in self._noted):
            noted, self._noted = self._noted, {}
            if len(self._reach.groups) == 1:
                self._gather(noted, is_last=False)
                return
            # Where rows are short a request gets them in all groups, rather than all requests in one.
            for name, one in noted.items():
                self._gather({name: one}, is_last=False)

    def gather_last(self, tracked: Tracked, valid_tokens: int) -> None:
        """Take what has become final of a request that has ended: its blocks are those that it holds now."""
        self._gather({tracked.request_id: (tracked, valid_tokens)}, is_last=True)

    def _gather(self, noted: Mapping[str, tuple[Tracked, int]], *, is_last: bool) -> None:
        valid = {name: self._limited(tracked, tokens) for name, (tracked, tokens) in noted.items()}
        behind: set[str] = set()
        for group in self._reach.whole:
            parts = []
            for name, (tracked, _) in noted.items():
                end = self._reach.last_boundary(valid[name]) // group.block_tokens
                first = tracked.next_position.get(group.group, 0)
                if end > first + MOST_AT_ONCE and not is_last:
                    end = first + MOST_AT_ONCE
                    behind.add(name)
                if first < end:
                    parts.append(self._part(tracked, group, first, end))
            if parts:
                self._gather_whole(group, parts)
        for name, (tracked, _) in noted.items():
            due = self._gather_partial(tracked, valid[name], is_last)
            if name in self.due:
                self.due[name] = 0 if name in behind else due

    def _gather_partial(self, tracked: Tracked, valid: int, is_last: bool) -> int:
        """Take what groups with windows have. The token count at which there is more to take of any group."""
        boundary = self._reach.last_boundary(valid)
        due = boundary + self._reach.align_tokens + self._reach.ahead_tokens
        for group in self._windows:
            self._gather_window(tracked, group, group.num_named(valid), is_last)
            due = min(due, (group.num_named(valid) + 1 + group.is_draft) * group.block_tokens)
        if any(tracked.trail.values()):
            self._supersede(tracked, boundary)
        if tracked.told_tokens < tracked.known_tokens:
            return 0
        return NEVER if due > self._limited(tracked, NEVER) else due

    def gather_state(
        self, tracked: Tracked, group: ReachGroup, num_tokens: int, block_id: int, *, chosen: bool
    ) -> None:
        """A block holds the state after so many tokens until the next step.

        ``chosen``: the stack keeps states at boundaries of its own choice, and this is one.
        """
        align = self._reach.align_tokens
        if num_tokens % align or not block_id or not 0 < num_tokens == self._limited(tracked, num_tokens):
            return
        self.settle(tracked.request_id)
        if chosen and num_tokens not in tracked.boundaries and num_tokens <= tracked.known_tokens:
            tracked.boundaries = tuple(sorted({*tracked.boundaries, num_tokens}))
            tracked.kept = self._reach.kept(tracked.boundaries)
        is_decoded = num_tokens > (tracked.boundaries[-1] if tracked.boundaries else 0)
        if not is_decoded and num_tokens not in tracked.boundaries:
            return
        position = num_tokens // align - 1
        names = group.names(self._hashes(tracked.view, align), position, position + 1)
        if not names:
            return
        taken = self._take(group, names, [block_id])
        if taken and is_decoded:
            tracked.trail.setdefault(group.group, deque()).append((position, names[0]))

    def overwritten(self, block_ids: Collection[int]) -> None:
        """These blocks are overwritten before the next orders are carried out."""
        self.settle()
        gone = frozenset(block_ids)
        for group, pending in self._pending.items():
            if gone.isdisjoint(pending.block_ids):
                continue
            kept = _Pending()
            for name, block_id, row in zip(pending.names, pending.block_ids, pending.rows, strict=True):
                if block_id in gone:
                    self._index.drop(group, [name])
                    self._reasons.count("offload_overwritten")
                else:
                    kept.names.append(name)
                    kept.block_ids.append(block_id)
                    kept.rows.append(row)
            self._pending[group] = kept

    def take(self) -> tuple[Store, ...]:
        """The orders."""
        self.settle()
        if not self._pending:
            return ()
        stores = []
        for group, pending in self._pending.items():
            if pending.names:
                names = tuple(pending.names)
                job = self._jobs.open(JobKind.STORE, group, names, keep=self._keep)
                copies = RowCopies(group, tuple(pending.block_ids), tuple(pending.rows))
                stores.append(Store(job.number, copies, names, self._keep))
        self._pending = {}
        return tuple(stores)

    def clear(self) -> None:
        """Forget what was taken since the last orders."""
        self.settle()
        for group, pending in self._pending.items():
            self._index.drop(group, pending.names)
        self._pending = {}

    def _limited(self, tracked: Tracked, num_tokens: int) -> int:
        """Of so many tokens those that may be kept."""
        if not tracked.writes:
            return 0
        most = min(tracked.most_tokens, self._most_tokens)
        return min(num_tokens, most if self._decoded else min(most, tracked.prompt_tokens))

    def _part(self, tracked: Tracked, group: ReachGroup, first: int, end: int) -> _Part:
        hashes = self._hashes(tracked.view, group.block_tokens)
        names = group.names(hashes, first, end)
        block_ids = tracked.block_ids.get(group.group, [])[first : first + len(names)]
        if 0 in block_ids:
            del block_ids[block_ids.index(0) :]
        before = [*group.names(hashes, 0, 1), *group.names(hashes, first - 1, first)] if first else []
        return _Part(tracked, first, before, names[: len(block_ids)], block_ids)

    def _gather_whole(self, group: ReachGroup, parts: Sequence[_Part]) -> None:
        """Take of each request the positions of its part; what comes after a missing one is of no use."""
        states = self._index.states(group.group, [name for part in parts for name in part.all_names])
        wanted: list[_Part] = []
        num_absent = at = 0
        for part in parts:
            first, at = at + len(part.before), at + len(part.before) + len(part.names)
            absent = states[first:at].count(ContentState.ABSENT)
            if ContentState.ABSENT in states[first - len(part.before) : first]:
                # What it began with has made room for others; then what follows is of no use.
                self._reasons.count("offload_rows_short")
                part.seen_to(group, 0)
                continue
            part.seen_to(group, len(part.names))
            if absent:
                num_absent += absent
                wanted.append(part)
        if not wanted:
            return
        taken = self._take(
            group,
            [name for part in wanted for name in part.names],
            [block_id for part in wanted for block_id in part.block_ids],
        )
        for part in wanted if taken < num_absent else ():
            states = self._index.states(group.group, part.names)
            if ContentState.ABSENT in states:
                self._reasons.count("offload_rows_short")
                part.seen_to(group, states.index(ContentState.ABSENT))

    def _gather_window(self, tracked: Tracked, group: ReachGroup, end: int, is_last: bool) -> None:
        # Of a draft's window no wider than a block nothing is kept: blocks leave it before they have a name.
        first = tracked.next_position.get(group.group, 0)
        block_ids = tracked.block_ids.get(group.group, [])
        hashes = self._hashes(tracked.view, group.block_tokens) if first < end else ()
        end = min(end, len(block_ids), len(hashes) - group.is_draft)
        if first >= end:
            return
        tracked.next_position[group.group] = end
        held = 0 if is_last else tracked.first_held(group, self._lag_tokens)
        wanted = tracked.wants(self._reach, group, first, end, decoded=self._decoded)
        there = [at for at in wanted if at >= held and block_ids[at]]
        if not there:
            return
        names = [hashes[at + group.is_draft] for at in there]
        absent = [
            (at, name)
            for at, name, state in zip(there, names, self._index.states(group.group, names), strict=True)
            if state is ContentState.ABSENT
        ]
        taken = self._take(group, names, [block_ids[at] for at in there])
        if taken < len(absent):
            self._reasons.count("offload_rows_short")
        begin = tracked.boundaries[-1] if tracked.boundaries else 0
        for at, name in absent[:taken]:
            if at * group.block_tokens >= begin:
                tracked.trail.setdefault(group.group, deque()).append((at, name))

    def _take(self, group: ReachGroup, names: Sequence[bytes], block_ids: Sequence[int]) -> int:
        """Take rows for those that have none. How many got one: the first of those that are absent."""
        taken, rows = self._index.reserve(group.group, names)
        if taken:
            ids = dict(zip(names, block_ids, strict=True))
            pending = self._pending.setdefault(group.group, _Pending())
            pending.names.extend(taken)
            pending.rows.extend(rows)
            pending.block_ids.extend(ids[name] for name in taken)
        return len(taken)

    def _supersede(self, tracked: Tracked, boundary: int) -> None:
        """Forget what was kept of an answer for boundaries that are well behind its end."""
        for group in self._reach.partial:
            trail = tracked.trail.get(group.group)
            first = group.first_needed(max(0, boundary - self._reach.align_tokens))
            if not trail or trail[0][0] >= first:
                continue
            old = []
            while trail and trail[0][0] < first:
                old.append(trail.popleft()[1])
            self._index.drop_unused(group.group, old)
