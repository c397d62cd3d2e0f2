"""Which blocks of running requests go to host memory: what a later hit can use, once, as soon as it is final.

Nothing waits: where rows are short, blocks are passed over and counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
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

    def __len__(self) -> int:
        return sum(len(pending.names) for pending in self._pending.values())

    def gather(self, tracked: Tracked, valid_tokens: int, *, is_last: bool = False) -> int:
        """Take what has become final of a request. The token count at which there is more to take.

        ``is_last``: the request has ended, and its blocks are those that it holds now.
        """
        valid = self._limited(tracked, valid_tokens)
        boundary = self._reach.last_boundary(valid)
        behind = False
        for group in self._reach.whole:
            end = boundary // group.block_tokens
            first = tracked.next_position.get(group.group, 0)
            if first < end:
                most = end if is_last else min(end, first + MOST_AT_ONCE)
                tracked.next_position[group.group] = first + self._gather_whole(tracked, group, first, most)
                behind = behind or most < end
        due = boundary + self._reach.align_tokens + self._reach.ahead_tokens
        for group in self._windows:
            self._gather_window(tracked, group, group.num_named(valid), is_last)
            due = min(due, (group.num_named(valid) + 1 + group.is_draft) * group.block_tokens)
        if any(tracked.trail.values()):
            self._supersede(tracked, boundary)
        if behind or tracked.told_tokens < tracked.known_tokens:
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
        for group, pending in self._pending.items():
            self._index.drop(group, pending.names)
        self._pending = {}

    def _limited(self, tracked: Tracked, num_tokens: int) -> int:
        """Of so many tokens those that may be kept."""
        if not tracked.writes:
            return 0
        most = min(tracked.most_tokens, self._most_tokens)
        return min(num_tokens, most if self._decoded else min(most, tracked.prompt_tokens))

    def _gather_whole(self, tracked: Tracked, group: ReachGroup, first: int, end: int) -> int:
        """How many positions from ``first`` on are seen to; what comes after a missing one is of no use."""
        hashes = self._hashes(tracked.view, group.block_tokens)
        names = group.names(hashes, first, end)
        block_ids = tracked.block_ids.get(group.group, [])[first : first + len(names)]
        if 0 in block_ids:
            del block_ids[block_ids.index(0) :]
        names = names[: len(block_ids)]
        # What it began with may have made room for others; then what follows is of no use.
        before = [*group.names(hashes, 0, 1), *group.names(hashes, first - 1, first)] if first else []
        states = self._index.states(group.group, [*before, *names])
        absent = [at for at, state in enumerate(states, -len(before)) if state is ContentState.ABSENT]
        if not absent:
            return len(names)
        if absent[0] < 0:
            self._reasons.count("offload_rows_short")
            return 0
        taken = self._take(group, names, block_ids)
        if taken == len(absent):
            return len(names)
        self._reasons.count("offload_rows_short")
        return absent[taken]

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
