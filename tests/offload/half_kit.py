"""A serving stack and its worker ranks in miniature, which know at any time what every byte should be.

A slot of a block holds a digest of all tokens that its bytes would depend on; so does a row. Whatever is
stored, restored or computed from is compared with what it should be. ``chain[n]`` of a request is a digest of
its first ``n`` tokens. Ranks answer late, in any order, and fail; a row that somebody may write to is busy:
nobody may read it or be given it.

A router in miniature knows of tiers from events alone, which must be what these hold.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from kvconnect.cache.retention import FULL, Chunked, Retention, Window
from kvconnect.cache.specs import FullAttentionSpec, KVCacheGroup, StateSpec
from kvconnect.config import OffloadConfig
from kvconnect.offload.index.tier_index import READY, TierIndex
from kvconnect.offload.scheduler.hit_requirements import HitRequirements
from kvconnect.offload.scheduler.host import KeptBlocks
from kvconnect.offload.scheduler.offload_scheduler import OffloadScheduler
from kvconnect.offload.tier import HOST
from kvconnect.offload.tier_events import TierEvents
from kvconnect.transfer.orders import OffloadReport, OrdersDraft, Results, TierChange
from kvconnect.transfer.stack import Computed, StateBlock, Step


class Stored(NamedTuple):
    """A tier has got blocks of ``size`` tokens that follow one another, and that of the hash ``parent``."""

    tier: str
    group: int
    hashes: Sequence[bytes]
    parent: bytes | None
    size: int
    tokens: Sequence[int]


class Removed(NamedTuple):
    """A tier has these contents no more."""

    tier: str
    group: int
    hashes: Sequence[bytes]


class Plain:
    """Stands for an ``EventMaker``: events are what it is given. Requests have tokens alone."""

    removed = Removed

    def describe(self, view, first, count, size):
        if isinstance(view, dict):
            return view
        tokens = view.token_ids if hasattr(view, "token_ids") else view.tokens
        return {"token_ids": tokens[first * size : (first + count) * size]}

    def stored(self, tier, group, runs):
        return [
            Stored(
                tier, group, names, parent, size, self.describe(view, first, len(names), size)["token_ids"]
            )
            for (first, view, parent, size), names in runs
        ]


class Replay:
    """``chain`` extends a hash by the tokens of one block; ``roots`` is the hash before the first."""

    def __init__(self, chain, root) -> None:
        self.chain, self.root = chain, root
        self.held: dict[tuple[str, int], set[bytes]] = {}
        self.num_unknown = 0

    def apply(self, events) -> None:
        for event in events:
            if isinstance(event, Removed):
                held = self.held[event.tier, event.group]
                assert held.issuperset(event.hashes), "what was never announced is taken back"
                assert len(set(event.hashes)) == len(event.hashes)
                held.difference_update(event.hashes)
                continue
            assert isinstance(event, Stored)
            held, names = self.held.setdefault((event.tier, event.group), set()), event.hashes
            assert names
            assert len(set(names)) == len(names)
            assert held.isdisjoint(names), "announced twice"
            held.update(names)
            self._check(event, names)

    def _check(self, event, names) -> None:
        size, before = event.size, event.parent
        if not size:
            self.num_unknown += len(names)
            return
        for at, name in enumerate(names):
            tokens = event.tokens[at * size : (at + 1) * size]
            assert len(tokens) == size
            before = self.chain(self.root if before is None else before, tokens)
            assert before == name, "the tokens are not those of the block"

    def check(self, half) -> None:
        """What was heard is what the scheduler half knows to be there."""
        index, lower = half.host.index, half.host.lower
        there = {(HOST, group): set() for group in half.host.plan.groups}
        for rows in index.classes:
            for group, names in rows.row_of.items():
                there[HOST, group] = {name for name, row in names.items() if rows.state[row] == READY}
        for (tier, group), ranks in lower._ranks.items():
            there[tier, group] = {name for name, bits in ranks.items() if bits & 1}
        for key in {*there, *self.held}:
            assert self.held.get(key, set()) == there.get(key, set()), key


def check_index(index: TierIndex) -> None:
    """Rows are each free or held once, contents are found where they are, and ages are of what may go."""
    for rows in index.classes:
        held = [row for row, state in enumerate(rows.state) if state]
        assert sorted([*rows.free, *held]) == list(range(rows.num_rows))
        for row in held:
            group, name = rows.content[row]
            assert rows.row_of[group].get(name) == row
        assert min(rows.pins) == 0
        assert all(rows.state[row] for row, pins in enumerate(rows.pins) if pins)
        aging = [row for row in held if rows.state[row] == READY and not rows.pins[row]]
        assert sorted(rows.ages) == aging
        assert all(len(row_of) <= rows.num_rows for row_of in rows.row_of.values())


def num_ready(index: TierIndex, group, names) -> int:
    """How many of these contents are ready, from the first on."""
    states = index.states(group, names)
    return next((at for at, state in enumerate(states) if state != READY), len(states))


GARBAGE = "garbage"


class Ranks:
    """Worker ranks that carry out orders when ``work`` is called, in any order, and fail now and then."""

    def __init__(self, stack, num_ranks, rng, *, tiers=(), lag=0.5) -> None:
        self.stack, self.rng, self.tiers, self.lag = stack, rng, tiers, lag
        self.fail = 0.0
        self.rows = [{} for _ in range(num_ranks)]
        self.lower = [{tier: {} for tier in tiers} for _ in range(num_ranks)]
        self.todo = [[] for _ in range(num_ranks)]
        self.awaited: dict[str, int] = {}
        self.failed: dict[str, str] = {}
        self.cleared = 0
        self.silent: set[int] = set()

    def place(self, group, row):
        return (self.stack.half.host.plan.class_of[group], row)

    def before_step(self, orders) -> None:
        self.cleared += orders.clear
        if orders.clear:
            for lower in self.lower:
                for kept in lower.values():
                    kept.clear()
        for store in orders.stores:
            group, ids, rows = store.copies.group, store.copies.block_ids, store.copies.rows
            content = []
            for block_id, name in zip(ids, store.hashes, strict=True):
                held = self.stack.read(group, block_id)
                assert held == self.stack.expected[group, name], (group, block_id, held)
                content.append(held)
            for rank in range(len(self.rows)):
                for row in rows:
                    assert self.rows[rank].get(self.place(group, row)) != "busy"
                    self.rows[rank][self.place(group, row)] = "busy"
                self.todo[rank].append(("store", store, tuple(content), self.cleared))

    def start(self, orders) -> None:
        for restore in orders.restores:
            self.awaited[restore.request_id] = len(self.rows)
            if restore.refusal:
                self.failed[restore.request_id] = restore.refusal
        for rank in range(len(self.rows)):
            for restore in orders.restores:
                self.todo[rank].append(("restore", restore))
            for fetch in orders.fetches:
                for row in fetch.rows:
                    assert self.rows[rank].get(self.place(fetch.group, row)) != "busy"
                    self.rows[rank][self.place(fetch.group, row)] = "busy"
                self.todo[rank].append(("fetch", fetch))
            for seek in orders.seeks:
                self.todo[rank].append(("seek", seek))

    def work(self, everything=False) -> Results:
        reports, self.received = [], []
        for rank in range(len(self.rows)):
            if rank in self.silent:
                continue
            told = {"stored": {}, "kept": [], "fetched": {}, "found": {}}
            changes = []
            todo, self.todo[rank] = self.todo[rank], []
            self.rng.shuffle(todo)
            for kind, *job in todo:
                if not everything and self.rng.random() < self.lag:
                    self.todo[rank].append((kind, *job))
                    continue
                getattr(self, "_" + kind)(rank, told, changes, *job)
            if self.fail and self.rng.random() < 0.1:
                for tier in self.tiers:
                    kept = self.lower[rank][tier]
                    if kept:
                        gone = self.rng.choice(sorted(kept))
                        del kept[gone]
                        changes.append(TierChange(tier, gone[0], (), (gone[1],)))
            told["kept"] = tuple(told["kept"])
            reports.append(OffloadReport(rank, self.cleared, **told, changes=tuple(changes)))
        self.rng.shuffle(reports)
        failed = {name: self.failed.pop(name) for name in self.received if name in self.failed}
        return Results(received=tuple(self.received), failed=failed, offload=tuple(r for r in reports if r))

    @property
    def is_idle(self) -> bool:
        return not any(self.todo) and not self.awaited

    def _breaks(self) -> bool:
        return self.rng.random() < self.fail

    def _store(self, rank, told, changes, store, content, cleared) -> None:
        bad, good = [], []
        for row, name, held in zip(store.copies.rows, store.hashes, content, strict=True):
            place = self.place(store.copies.group, row)
            assert self.rows[rank][place] == "busy"
            if self._breaks():
                bad.append(name)
                # Out of use until the job was kept.
                self.rows[rank][place] = "busy" if store.keep else GARBAGE
            else:
                self.rows[rank][place] = held
                good.append((name, place, held))
        told["stored"][store.job] = tuple(bad)
        if store.keep:
            broken = [
                self.place(store.copies.group, row)
                for row, name in zip(store.copies.rows, store.hashes, strict=True)
                if name in bad
            ]
            self.todo[rank].append(("keep", store, broken, good, cleared))

    def _keep(self, rank, told, changes, store, broken, good, cleared) -> None:
        """Unless all was cleared since the order."""
        for name, place, held in good if cleared == self.cleared else ():
            assert self.rows[rank][place] == held, "a row was reused while it was read"
            if self._breaks():
                continue
            for tier in self.tiers:
                self.lower[rank][tier][store.copies.group, name] = held
                changes.append(TierChange(tier, store.copies.group, (name,)))
        for place in broken:
            assert self.rows[rank][place] == "busy"
            self.rows[rank][place] = GARBAGE
        told["kept"].append(store.job)

    def _fetch(self, rank, told, changes, fetch) -> None:
        missing = []
        for row, name in zip(fetch.rows, fetch.hashes, strict=True):
            place = self.place(fetch.group, row)
            assert self.rows[rank][place] == "busy"
            held = self.lower[rank][fetch.tier].get((fetch.group, name))
            if fetch.tier == "store":
                # It keeps no index: what is seen there is announced, and what is missed taken back.
                seen = ((), (name,)) if held is None else ((name,), ())
                changes.append(TierChange(fetch.tier, fetch.group, *seen))
            if held is None or self._breaks():
                missing.append(name)
                self.rows[rank][place] = GARBAGE
            else:
                self.rows[rank][place] = held
        told["fetched"][fetch.job] = tuple(missing)

    def _seek(self, rank, told, changes, seek) -> None:
        kept = self.lower[rank][seek.tier]
        told["found"][seek.job] = tuple(n for n in seek.hashes if (seek.group, n) in kept)

    def _restore(self, rank, told, changes, restore) -> None:
        for copies in restore.copies:
            for block_id, row in zip(copies.block_ids, copies.rows, strict=True):
                held = self.rows[rank][self.place(copies.group, row)]
                assert held not in ("busy", GARBAGE)
                if rank == 0:
                    self.stack.device[copies.group, block_id] = held
        if self._breaks() and restore.request_id not in self.failed:
            self.failed[restore.request_id] = "copy failed"
            for copies in restore.copies:
                for block_id in copies.block_ids:
                    self.stack.device[copies.group, block_id] = GARBAGE
        self.awaited[restore.request_id] -= 1
        if not self.awaited[restore.request_id]:
            del self.awaited[restore.request_id]
            self.received.append(restore.request_id)


CAP = 4096
ROW_BYTES = 64
ROOT = 17
"""The digest of no tokens."""


@dataclass(frozen=True)
class Kind:
    """A cache group: ``tokens`` per block, what it sees, and whether it is a draft model's."""

    tokens: int
    window: int | None = None
    is_state: bool = False
    is_draft: bool = False
    row_bytes: int = ROW_BYTES
    chunk: int | None = None

    def spec(self) -> KVCacheGroup:
        spec = FullAttentionSpec(self.tokens, 1, 1, torch.int8, retention=self.rule)
        if self.is_state:
            spec = StateSpec(CAP, ((1,),), (torch.int8,))
        return KVCacheGroup((f"{id(self)}",), spec)

    @property
    def rule(self) -> Retention:
        if self.chunk is not None:
            return Chunked(self.chunk)
        return FULL if self.window is None else Window(self.window)

    def sees(self, earlier: int, token: int) -> bool:
        """Whether computing ``token`` reads an earlier one."""
        if self.chunk is not None:
            return earlier >= token - token % self.chunk
        return self.window is None or token - earlier < self.window

    def keeps(self, position: int, token: int) -> bool:
        """Whether computing ``token`` reads or writes this block."""
        block = range(position * self.tokens, (position + 1) * self.tokens)
        return self.is_state or block.stop > token or any(self.sees(one, token) for one in block)


class Device:
    """Blocks of one pool, which groups use in turn: what one of them writes, another one has lost."""

    def __init__(self) -> None:
        self._held: dict = {}

    def get(self, key, default=GARBAGE):
        group, held = self._held.get(key[1], (key[0], default))
        return held if group == key[0] else GARBAGE

    def __getitem__(self, key):
        return self.get(key)

    def __setitem__(self, key, held) -> None:
        self._held[key[1]] = key[0], held


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass(eq=False)
class Req:
    """A request. ``chain[n]`` is the digest of its first ``n`` tokens."""

    request_id: str
    tokens: list[int]
    max_new: int
    kv_transfer_params: dict | None = None
    chain: list[int] = field(default_factory=lambda: [ROOT])
    state: str = "waiting"
    computed: int = 0
    loaded: bool = False
    ids: list[list[int]] = field(default_factory=list)
    told: int = 0
    hits: list[tuple[int, int]] = field(default_factory=list)
    guessed: int = 0
    names: dict[int, list[bytes]] = field(default_factory=dict)
    noted: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.prompt = len(self.tokens)
        self.extend(())

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def extend(self, tokens) -> None:
        self.tokens.extend(tokens)
        while len(self.chain) <= len(self.tokens):
            self.chain.append(hash((self.chain[-1], self.tokens[len(self.chain) - 1])))

    def hashes(self, size: int) -> list[bytes]:
        names = self.names.setdefault(size, [])
        for end in range(size * (len(names) + 1), len(self.tokens) + 1, size):
            names.append(name_of(self.chain[end]))
        return names

    def slots(self, kind: Kind, position: int):
        """What a whole block should hold."""
        if kind.is_state:
            return self.chain[(position + 1) * kind.tokens]
        first = position * kind.tokens + 1 + kind.is_draft
        return tuple(self.chain[first : first + kind.tokens])


def chained(before: bytes, tokens: list[int]) -> bytes:
    """The name after a few tokens more."""
    digest = int.from_bytes(before, "little", signed=True)
    for token in tokens:
        digest = hash((digest, token))
    return name_of(digest)


def name_of(digest: int) -> bytes:
    return (digest & (1 << 64) - 1).to_bytes(8, "little")


class Stack:
    """A request scheduler with a pool of blocks, a prefix cache of its own, and a model."""

    def __init__(
        self,
        kinds,
        align,
        *,
        num_blocks=64,
        rows=None,
        seed=0,
        num_ranks=1,
        tiers=(),
        lag=0.5,
        budget=16,
        local=True,
        cancels=0.05,
        drafts=0,
        reuses_at_once=False,
        **settings,
    ) -> None:
        self.kinds, self.align, self.budget, self.local = kinds, align, budget, local
        self.cancels, self.drafts, self.reuses_at_once = cancels, drafts, reuses_at_once
        self.rng = random.Random(seed)
        self.clock = Clock()
        self.device = Device()
        self.expected: dict = {}
        self.free = list(range(1, num_blocks))
        self.holders: dict[int, int] = {}
        self.cached: dict = {}
        self.cached_as: dict = {}
        self.requests: dict[str, Req] = {}
        self.waiting: list[Req] = []
        self.running: list[Req] = []
        self.loading: dict[str, Req] = {}
        self.done: list[Req] = []
        self.scheduled: list[tuple[Req, int, int, object]] = []
        self.last: list = []
        self.preempted: list[str] = []
        self.preempts_next = False
        size = ROW_BYTES * (rows or 2000) * len(kinds)
        config = OffloadConfig(
            cpu_bytes=size,
            shares=tuple(1 / len(kinds) for _ in kinds),
            disk_path="/d" if "disk" in tiers else "",
            store="s:1" if "store" in tiers else "",
            **settings,
        )
        groups = [kind.spec() for kind in kinds]
        drafts_at = [index for index, kind in enumerate(kinds) if kind.is_draft]
        kept = KeptBlocks(
            groups,
            HitRequirements.of(groups, range(len(kinds)), align, drafts_at),
            hashes=self.hashes,
            row_bytes={index: kind.row_bytes for index, kind in enumerate(kinds)},
            num_ranks=num_ranks,
            clock=self.clock,
            events=TierEvents(Plain()),
        )
        self.half = OffloadScheduler(config, kept, OrdersDraft([]))
        self.router = Replay(chained, name_of(ROOT))
        self.ranks = Ranks(self, num_ranks, self.rng, tiers=tiers, lag=lag)

    # What the half asks

    def hashes(self, view: Req, size: int) -> list[bytes]:
        names = view.hashes(size)
        if view.noted.get(size) == len(names):
            return names
        view.noted[size] = len(names)
        for group, kind in enumerate(self.kinds):
            if size == (self.align if kind.is_state else kind.tokens):
                for position in range(len(names) - kind.is_draft):
                    self.expected[group, names[position + kind.is_draft]] = view.slots(kind, position)
        return names

    def read(self, group, block_id):
        held = self.device.get((group, block_id), GARBAGE)
        return tuple(held) if isinstance(held, list) else held

    # Coming and going

    def add(self, request_id, tokens, max_new=1, params=None) -> Req:
        request = Req(request_id, list(tokens), max_new, params)
        request.ids = [[] for _ in self.kinds]
        self.requests[request_id] = request
        self.half.new_request(request)
        self.waiting.append(request)
        return request

    def abort(self, request_id) -> None:
        request = self.requests[request_id]
        self._finish(request)

    def _finish(self, request) -> None:
        clipped = tuple(list(ids) for ids in request.ids)
        self.half.request_finished(request, clipped)
        for queue in (self.waiting, self.running):
            if request in queue:
                queue.remove(request)
        self.scheduled = [entry for entry in self.scheduled if entry[0] is not request]
        self.last = [entry for entry in self.last if entry[0] is not request]
        del self.requests[request.request_id]
        if request.state == "loading":
            request.state = "abandoned"
            return
        request.state = "done"
        self.done.append(request)
        self._release(request)

    def _release(self, request) -> None:
        for ids in request.ids:
            for block_id in ids:
                self._let_go(block_id)
        request.ids = [[] for _ in self.kinds]

    def _let_go(self, block_id) -> None:
        if block_id:
            self.holders[block_id] -= 1
            if not self.holders[block_id]:
                self.free.append(block_id)

    def _allocate(self, count):
        if self.reuses_at_once:
            self.free.reverse()
        taken, self.free = self.free[:count], self.free[count:]
        if self.reuses_at_once:
            self.free.reverse()
        for block_id in taken:
            self.holders[block_id] = 1
            if (key := self.cached_as.pop(block_id, None)) is not None:
                del self.cached[key]
        return taken

    # One step

    def step(self, everything=False) -> None:
        self.clock.now += 0.01
        self._schedule()
        self._tell()
        orders = self.half.build_orders()
        self.ranks.before_step(orders)
        self.ranks.start(orders)
        self._execute()
        self._settle(self.ranks.work(everything))
        self.hear()

    def hear(self) -> None:
        """What a router knows after the step is what the tiers hold, with the tokens of all of it."""
        while self.half.host.events:
            self.router.apply(self.half.take_events())
        self.router.check(self.half)
        assert not self.router.num_unknown

    def _schedule(self) -> None:
        budget = self.budget
        preempted, self.preempts_next = self.preempts_next and bool(self.running), False
        if preempted:
            self._preempt(self.running[-1])
        for request in list(self.running):
            if request not in self.running or budget <= 0:
                continue
            count = self._chunk(request, budget)
            request.guessed = 0
            if self.drafts and request.computed + count == request.num_tokens:
                request.guessed = self.rng.randrange(self.drafts + 1)
            room = request.computed + count + request.guessed
            while (grown := self._grow(request, request.computed, room)) is None:
                victim = self.running[-1]
                self._preempt(victim)
                preempted = True
                if victim is request:
                    break
            if grown is None:
                break
            self.scheduled.append((request, request.computed, request.computed + count, grown))
            budget -= count
        blocked = False
        for request in list(self.waiting) if not preempted else ():
            # Only what has its blocks already may overtake one that does not fit.
            if budget > 0 and (request.loaded or not blocked):
                taken = self._admit(request, budget)
                blocked = blocked or taken is None
                budget -= taken or 0

    def _chunk(self, request, budget) -> int:
        end = min(request.num_tokens, request.computed + budget)
        if any(kind.is_state for kind in self.kinds):
            for checkpoint in self.half.checkpoints(request):
                if request.computed < checkpoint < end:
                    end = checkpoint
                    break
        return end - request.computed

    def _admit(self, request, budget):
        if request.loaded:
            # Its blocks are there, and it has room for all of its tokens.
            self.half.update_after_alloc(request, self._snapshot(request), 0)
            external = 0
            count = self._chunk(request, budget)
            request.guessed = 0
            if self._grow(request, request.computed, request.computed + count) is None:
                return None
        else:
            request.guessed = 0
            start, blocks = self._local_hit(request)
            external, in_background = self.half.matched_tokens(request, start)
            again = self.half.matched_tokens(request, start)
            assert again == (external, in_background)
            if external is None:
                return 0
            assert start + external <= request.num_tokens - 1
            assert bool(external) is in_background
            if external and self.rng.random() < self.cancels:
                # The stack needs the tokens for something else.
                external = self.rng.randrange(0, external + 1)
            computed = start + external
            whole = (
                max(request.num_tokens, computed)
                if external
                else computed + min(budget, request.num_tokens - computed)
            )
            for group, ids in enumerate(blocks):
                request.ids[group] = list(ids)
                for block_id in ids:
                    if block_id:
                        if self.holders.get(block_id, 0) == 0:
                            self.free.remove(block_id)
                            self.holders[block_id] = 0
                        self.holders[block_id] += 1
            request.computed = computed
            room = sum(
                kind.keeps(position, computed)
                for kind in self.kinds
                for position in range(1 if kind.is_state else -(-request.num_tokens // kind.tokens))
            )
            if room > len(self.free) + sum(bool(block_id) for ids in blocks for block_id in ids) or (
                self._grow(request, computed, whole) is None
            ):
                self._release(request)
                request.computed = 0
                return None
            if request.told == 0:
                request.hits.append((start, external))
            self.half.update_after_alloc(request, self._snapshot(request), external)
            if external:
                request.state = "loading"
                self.waiting.remove(request)
                self.loading[request.request_id] = request
                return 0
            count = self._chunk(request, budget)
        self.waiting.remove(request)
        self.running.append(request)
        request.state = "running"
        self.scheduled.append((request, request.computed, request.computed + count, self._snapshot(request)))
        return count

    def _snapshot(self, request):
        return tuple(list(ids) for ids in request.ids)

    def _local_hit(self, request):
        nothing = 0, [[] for _ in self.kinds]
        if not self.local or any(kind.is_state for kind in self.kinds):
            return nothing
        ahead = max((kind.tokens for kind in self.kinds if kind.is_draft), default=0)
        for boundary in range((request.num_tokens - 1 - ahead) // self.align * self.align, 0, -self.align):
            found = []
            for group, kind in enumerate(self.kinds):
                names = request.hashes(kind.tokens)
                ids = []
                for position in range(boundary // kind.tokens):
                    needed = kind.keeps(position, boundary)
                    block = self.cached.get((group, names[position + kind.is_draft])) if needed else 0
                    ids.append(block)
                found.append(ids)
            if not any(None in ids for ids in found):
                return boundary, found
        return nothing

    def _grow(self, request, computed, num_tokens):
        """Give blocks for ``num_tokens``; those that ``computed`` does not read any more are freed first."""
        wanted = []
        for kind, ids in zip(self.kinds, request.ids, strict=True):
            for position, block_id in enumerate(ids):
                if not kind.keeps(position, computed):
                    self._let_go(block_id)
                    ids[position] = 0
            end = 1 if kind.is_state else -(-num_tokens // kind.tokens)
            wanted.append([kind.keeps(position, computed) for position in range(len(ids), end)])
        if sum(map(sum, wanted)) > len(self.free):
            return None
        grown = []
        for ids, wants in zip(request.ids, wanted, strict=True):
            given = iter(self._allocate(sum(wants)))
            grown.append([next(given) if is_wanted else 0 for is_wanted in wants])
            ids.extend(grown[-1])
        return grown

    def _preempt(self, request) -> None:
        self.running.remove(request)
        self.preempted.append(request.request_id)
        self.scheduled = [entry for entry in self.scheduled if entry[0] is not request]
        self._begin_anew(request)

    def _begin_anew(self, request) -> None:
        self._release(request)
        request.computed, request.loaded, request.state = 0, False, "waiting"
        self.waiting.insert(0, request)

    def _tell(self) -> None:
        """The step before this one was launched; now its part of the contract is told."""
        states, computed = [], []
        for request, told, end, new_ids in self.last:
            for group, kind in enumerate(self.kinds):
                if kind.is_state and end % self.align == 0:
                    states.append(StateBlock(request.request_id, group, end, new_ids[1][group][-1]))
            due = self.half.due[request.request_id]
            if any(map(any, new_ids[0])) or told >= due:
                new = new_ids[0] if any(new_ids[0]) else None
                computed.append(Computed(request.request_id, told, new))
            request.told = end
        self.last = []
        self.half.launched(Step(computed, states))
        for request_id in self.preempted:
            if request_id in self.requests:
                self.half.preempted(request_id)
        self.preempted = []

    def _execute(self) -> None:
        """Compute: every slot that is read must be right."""
        batch, self.scheduled = self.scheduled, []
        finished = []
        for request, start, end, _ in batch:
            for group, kind in enumerate(self.kinds):
                ids = request.ids[group]
                if kind.is_state:
                    if start:
                        assert self.device[group, ids[-1]] == request.chain[start], "a wrong state"
                    self.device[group, ids[-1]] = request.chain[end]
                    continue
                for token in [token for token in range(start) if kind.sees(token, start)]:
                    held = self.device[group, ids[token // kind.tokens]]
                    assert held[token % kind.tokens] == request.chain[token + 1 + kind.is_draft], "wrong KV"
            if end == request.num_tokens:
                request.extend([abs(request.chain[-1]) % 5])
            for group, kind in enumerate(self.kinds):
                if kind.is_state:
                    continue
                for token in range(start, end):
                    key = group, request.ids[group][token // kind.tokens]
                    if key[1] == 0:
                        continue
                    held = self.device.get(key)
                    if not isinstance(held, list):
                        fits = isinstance(held, tuple) and token % kind.tokens
                        held = self.device[key] = list(held) if fits else [GARBAGE] * kind.tokens
                    held[token % kind.tokens] = request.chain[token + 1 + kind.is_draft]
                for token in range(end, end + request.guessed):
                    # Tokens that were guessed, and were wrong: what they left behind is overwritten later.
                    key = group, request.ids[group][token // kind.tokens]
                    if key[1] and not isinstance(self.device.get(key), list):
                        self.device[key] = [GARBAGE] * kind.tokens
                    if key[1]:
                        self.device[key][token % kind.tokens] = GARBAGE
            request.computed = end
            if self.local:
                self._remember(request)
            if end < request.num_tokens and request.num_tokens - request.prompt >= request.max_new:
                finished.append(request)
        self.last = [
            (request, end + request.guessed, end, (new, self._snapshot(request)))
            for request, _, end, new in batch
        ]
        for request in finished:
            for group, kind in enumerate(self.kinds):
                if kind.is_state and request.computed % self.align == 0:
                    block_id = request.ids[group][-1]
                    state = StateBlock(request.request_id, group, request.computed, block_id)
                    self.half.launched(Step(states=(state,)))
            self._finish(request)

    def _remember(self, request) -> None:
        for group, kind in enumerate(self.kinds):
            if kind.is_state:
                continue
            names = request.hashes(kind.tokens)
            for position in range(max(0, request.computed // kind.tokens - kind.is_draft)):
                block_id = request.ids[group][position]
                if position + kind.is_draft < len(names) and block_id and block_id not in self.cached_as:
                    key = group, names[position + kind.is_draft]
                    if key not in self.cached:
                        self.cached[key] = block_id
                        self.cached_as[block_id] = key

    def _settle(self, results) -> None:
        self.half.update_results(results)
        for request_id in results.received:
            request = self.loading.pop(request_id)
            if request.state == "abandoned":
                self._release(request)
            elif request_id in results.failed:
                self._begin_anew(request)
                self.half.preempted(request_id)
            else:
                request.loaded, request.state = True, "waiting"
                self.waiting.insert(0, request)
                if request.hits and request.computed != sum(request.hits[-1]):
                    request.hits[-1] = (request.hits[-1][0], request.computed - request.hits[-1][0])

    # Whole runs

    def forget_device_cache(self) -> None:
        """The prefix cache is emptied; blocks in use stay."""
        self.cached.clear()
        self.cached_as.clear()

    def run(self, most_steps=3000, everything=False) -> None:
        """Until every request has ended."""
        steps = 0
        while self.requests or self.loading:
            self.step(everything)
            steps += 1
            assert steps < most_steps, "it hangs"
        self.settle()

    def settle(self, most_steps=2000) -> None:
        """Until nothing is under way."""
        steps = 0
        while not self.ranks.is_idle or self.half.pending:
            self.step()
            steps += 1
            assert steps < most_steps, "it hangs"

    def check_idle(self) -> None:
        """Nothing is remembered, pinned or under way."""
        assert not any(self.half.state().values()), self.half.state()
        for counts in self.half.host.index.counts().values():
            assert counts.pinned == counts.pending == 0
        check_index(self.half.host.index)
