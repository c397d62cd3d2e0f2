"""Stores: the blocks of running requests that go to host memory, each once and as soon as its KV is final.

Only blocks that a later hit can use are stored. No request waits: if rows are short, blocks are skipped, and
the shortage is counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence

from kvconnect.cache.specs import div_ceil
from kvconnect.offload.index.tier_index import ContentState
from kvconnect.offload.scheduler.hit_requirements import HitGroup
from kvconnect.offload.scheduler.host import NEVER, Host, Job, JobKind, OffloadRequest
from kvconnect.offload.scheduler.prefix_lookup import PrefixLookup
from kvconnect.offload.tier import DISK, HOST, lower_tier_names
from kvconnect.offload.tier_events import Part
from kvconnect.plan.blocks import BlockIdsByGroup
from kvconnect.transfer.orders import RowCopies, Store
from kvconnect.transfer.stack import StateBlock

MOST_AT_ONCE = 1024
"""The most blocks of one request and group that a call considers; later calls consider the rest."""


class Stores:
    """Collects the blocks that the next orders store, of a request up to the longest hit in host memory."""

    def __init__(self, host: Host, lookup: PrefixLookup) -> None:
        self._host, self._lookup, self._decoded = host, lookup, host.config.decoded
        self._most_tokens = host.requirements.most_tokens(host.plan.limits)
        self._tiers = lower_tier_names(host.config)
        self._windows = tuple(group for group in host.requirements.partial if not group.is_state)
        self._batches: dict[int, dict[bytes, tuple[int, int]]] = {}
        """By group and name the block and the row of each content that the next orders store."""
        self.due: dict[str, int] = {}
        """By request the token count from which there is more to collect; the owner adds and removes keys."""

    def __len__(self) -> int:
        return sum(map(len, self._batches.values()))

    def collect(self, request: OffloadRequest, *, is_last: bool = False) -> None:
        tokens = self._limited(request, request.final_tokens() if is_last else request.valid_tokens())
        whole = self._host.requirements.whole
        is_behind = [self._collect_whole(request, group, tokens, is_last) for group in whole]
        due = self._collect_partial(request, tokens, is_last)
        if request.view.request_id in self.due:
            self.due[request.view.request_id] = 0 if any(is_behind) else due

    def collect_last(self, request: OffloadRequest, block_ids: BlockIdsByGroup) -> None:
        request.block_ids = {
            group.group: list(block_ids[group.group])
            for group in self._host.requirements.groups
            if not group.is_state
        }
        self.collect(request, is_last=True)
        for group in self._host.requirements.whole:
            # So that the end of a prompt is evicted first: no hit can use it without the beginning.
            end = request.next_position.get(group.group, 0)
            self._host.index.touch(group.group, self._host.names(request.view, group, (range(end),)))

    def collect_state(self, request: OffloadRequest, group: HitGroup, state: StateBlock) -> None:
        align, num_tokens = self._host.requirements.align_tokens, state.num_tokens
        is_possible = num_tokens > 0 and num_tokens % align == 0 and state.block_id
        if not is_possible or num_tokens > self._limited(request, num_tokens):
            return
        if state.is_chosen and num_tokens not in request.boundaries and num_tokens <= request.known_tokens:
            request.boundaries = tuple(sorted({*request.boundaries, num_tokens}))
            request.kept = self._host.requirements.kept(request.boundaries)
        is_decoded = num_tokens > request.last_boundary
        if not is_decoded and num_tokens not in request.boundaries:
            return
        position = num_tokens // align - 1
        hashes = self._host.hashes(request.view, align)
        names = group.names(hashes, position, position + 1)
        if not names or not self._reserve(group, names, [state.block_id]):
            return
        self._describe(group, [(request.view, hashes, position, position + 1)])
        self._hold(request, group, names)
        if is_decoded:
            request.trail.setdefault(group.group, deque()).append((position, names[0]))

    def overwritten(self, block_ids: Collection[int]) -> None:
        gone = frozenset(block_ids)
        for group, batch in self._batches.items():
            lost = [name for name, (block_id, _) in batch.items() if block_id in gone]
            self._host.index.drop(group, lost)
            self._host.forget_names(group, lost)
            self._lookup.lost(group, lost)
            for name in lost:
                del batch[name]
                self._host.count("offload_overwritten")

    def take(self) -> tuple[Store, ...]:
        batches, self._batches = self._batches, {}
        # The disk keeps footers for events after a restart.
        events, keep = self._host.events if DISK in self._tiers else None, bool(self._tiers)
        stores = []
        for group, batch in batches.items():
            if batch:
                names, (block_ids, rows) = tuple(batch), zip(*batch.values(), strict=True)
                job = self._host.jobs.open(JobKind.STORE, group, names, keep=keep)
                footers = () if events is None else events.footers(group, names)
                stores.append(Store(job.number, RowCopies(group, block_ids, rows), names, keep, footers))
        return tuple(stores)

    def settle(self, job: Job) -> None:
        """All ranks have reported a job as stored, as kept, or both.

        A content is ready once every rank has stored it. Its row is not reused until no rank reads or writes
        it any more, even if the content failed.
        """
        if job.unreported:
            return
        if job.failed is None:
            stored = job.hashes
            if job.named:
                self._host.count("offload_store_failed")
                stored = [name for name in job.hashes if name not in job.named]
            job.failed = job.hashes if job.stale else [name for name in job.hashes if name in job.named]
            if not job.stale:
                self._host.index.commit(job.group, stored)
                if job.unkept:
                    self._host.index.pin(job.group, stored)
                    job.pinned = stored
                self._lookup.arrived(job.group, stored)
            self._lookup.lost(job.group, job.failed)
        if not job.unkept:
            self._host.index.unpin(job.group, job.pinned)
            self._host.index.drop(job.group, job.failed)
            self._host.jobs.close(job)

    def clear(self) -> None:
        for group, batch in self._batches.items():
            self._host.index.drop(group, list(batch))
            self._host.forget_names(group, list(batch))
        self._batches = {}

    def _limited(self, request: OffloadRequest, num_tokens: int) -> int:
        most = min(request.most_tokens, self._most_tokens)
        return min(num_tokens, most if self._decoded else min(most, request.prompt_tokens))

    def _collect_whole(self, request: OffloadRequest, group: HitGroup, tokens: int, is_last: bool) -> bool:
        """Collect blocks up to the first one without a row: no hit can use blocks after it.

        Returns whether later calls are to consider more.
        """
        index, number = self._host.index, group.group
        first = request.next_position.get(number, 0)
        end = self._host.requirements.last_boundary(tokens) // group.block_tokens
        if is_behind := end > first + MOST_AT_ONCE and not is_last:
            end = first + MOST_AT_ONCE
        if first >= end:
            return False
        hashes = self._host.hashes(request.view, group.block_tokens)
        names = group.names(hashes, first, end)
        block_ids = request.block_ids.get(number, [])[first : first + len(names)]
        if 0 in block_ids:
            del block_ids[block_ids.index(0) :]
        names = names[: len(block_ids)]
        before = [*group.names(hashes, 0, 1), *group.names(hashes, first - 1, first)] if first else []
        states = index.states(number, [*before, *names])
        if ContentState.ABSENT in states[: len(before)]:
            # Contents before these were evicted, so no hit can use these.
            self._host.count("offload_rows_short")
            return is_behind
        end = first + len(names)
        if ContentState.ABSENT in states:
            taken = self._reserve(group, names, block_ids)
            self._describe(group, [(request.view, hashes, first, end)])
            states = index.states(number, names) if taken < states.count(ContentState.ABSENT) else []
            if ContentState.ABSENT in states:
                self._host.count("offload_rows_short")
                end = first + states.index(ContentState.ABSENT)
        self._hold(request, group, names)
        request.next_position[number] = end
        return is_behind

    def _collect_partial(self, request: OffloadRequest, valid: int, is_last: bool) -> int:
        """Collect blocks of window groups; returns the token count from which there is more to collect."""
        boundary = self._host.requirements.last_boundary(valid)
        due = boundary + self._host.requirements.align_tokens + self._host.requirements.ahead_tokens
        for group in self._windows:
            self._collect_window(request, group, group.num_named(valid), is_last)
            due = min(due, (group.num_named(valid) + 1 + group.is_draft) * group.block_tokens)
        if any(request.trail.values()):
            self._supersede(request, boundary)
        if request.computed_tokens < request.known_tokens:
            return 0
        return NEVER if due > self._limited(request, NEVER) else due

    def _collect_window(self, request: OffloadRequest, group: HitGroup, end: int, is_last: bool) -> None:
        # A draft group's window of at most one block is never kept: blocks leave it before they have a name.
        ragged = div_ceil(request.ragged_tokens, group.block_tokens)
        first = max(request.next_position.get(group.group, 0), ragged)
        block_ids = request.block_ids.get(group.group, [])
        hashes = self._host.hashes(request.view, group.block_tokens) if first < end else ()
        end = min(end, len(block_ids), len(hashes) - group.is_draft)
        if first >= end:
            return
        request.next_position[group.group] = end
        wanted = request.worth_keeping(group, range(first, end))
        if not is_last:
            held = request.held(group)
            wanted = [at for at in wanted if any(at in part for part in held)]
        there = [at for at in wanted if block_ids[at]]
        if not there:
            return
        names = [hashes[at + group.is_draft] for at in there]
        states = self._host.index.states(group.group, names)
        absent = [at for at, state in zip(there, states, strict=True) if state is ContentState.ABSENT]
        taken = self._reserve(group, names, [block_ids[at] for at in there])
        if taken < len(absent):
            self._host.count("offload_rows_short")
        if taken:
            self._describe(group, [(request.view, hashes, absent[0], absent[taken - 1] + 1)])
        self._hold(request, group, names)
        for at in absent[:taken]:
            if at * group.block_tokens >= request.last_boundary:
                trail = request.trail.setdefault(group.group, deque())
                trail.append((at, hashes[at + group.is_draft]))

    def _reserve(self, group: HitGroup, names: Sequence[bytes], block_ids: Sequence[int]) -> int:
        """Take rows for absent contents; returns how many got one, from the first absent one on."""
        taken, rows = self._host.index.reserve(group.group, names)
        if taken:
            if len(taken) < len(names):
                by_name = dict(zip(names, block_ids, strict=True))
                block_ids = [by_name[name] for name in taken]
            batch = self._batches.setdefault(group.group, {})
            batch.update(zip(taken, zip(block_ids, rows, strict=True), strict=True))
        return len(taken)

    def _hold(self, request: OffloadRequest, group: HitGroup, names: Sequence[bytes]) -> None:
        """Pin contents of a request for its session, if a hint asked for that."""
        if request.pin is not None:
            self._host.pins.add(request.pin, (HOST, group.group), names)

    def _describe(self, group: HitGroup, parts: Iterable[Part]) -> None:
        """Note the origins of those blocks that the next orders store, if events are published."""
        if self._host.events is not None:
            self._host.events.describe(group, parts, self._batches.get(group.group, ()))

    def _supersede(self, request: OffloadRequest, boundary: int) -> None:
        """Drop windows and states of an answer that were kept for boundaries well before its end."""
        for group in self._host.requirements.partial:
            trail = request.trail.get(group.group)
            held = group.held(max(0, boundary - self._host.requirements.align_tokens))
            old = []
            while trail and not any(trail[0][0] in part for part in held):
                old.append(trail.popleft()[1])
            if old and request.pin is not None:
                self._host.pins.let_go(request.pin, (HOST, group.group), old)
            if old:
                self._host.index.drop_unused(group.group, old)
