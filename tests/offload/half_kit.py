"""A serving stack and its worker ranks, which know at any time what every byte should be.

The scheduler is the node's, which is told late of what it launched, as vLLM is. A slot of a block holds a
digest of all tokens that its bytes would depend on, that of its first n tokens being its request's n-th name
of single tokens; a row holds what its block held. Whatever is stored, restored or computed from is compared
with what it should be. Ranks answer late, in any order, and fail; a row that somebody may write to is busy:
nobody may read it or be given it.

A router in miniature knows of tiers from events alone, which must be what these hold.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kvconnect.cache.retention import FULL, Chunked, Retention, Window
from kvconnect.cache.specs import AttentionSpec, KVCacheConfig, KVCacheGroup, StateSpec
from kvconnect.config import OffloadConfig
from kvconnect.halves.scheduler_half import SchedulerHalf
from kvconnect.node.block_manager import BlockManager, BlockPool, CacheHit, RequestBlocks
from kvconnect.node.node_options import NodeOptions
from kvconnect.node.request import Request, RequestState
from kvconnect.node.scheduler import Scheduler
from kvconnect.offload.index.tier_index import READY, TierIndex
from kvconnect.offload.scheduler.hit_requirements import HitRequirements
from kvconnect.offload.scheduler.host import KeptBlocks
from kvconnect.offload.scheduler.offload_scheduler import OffloadScheduler
from kvconnect.offload.tier import HOST
from kvconnect.offload.tier_events import TierEvents
from kvconnect.transfer.orders import OffloadReport, OrdersDraft, Results, TierChange
from kvconnect.transfer.stack import Step


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
        return {"token_ids": view.token_ids[first * size : (first + count) * size]}

    def stored(self, tier, group, runs):
        return [
            Stored(
                tier, group, names, parent, size, self.describe(view, first, len(names), size)["token_ids"]
            )
            for (first, view, parent, size), names in runs
        ]


class Replay:
    """What is heard of tiers. ``links`` has each name's last token, and the name of those before it."""

    def __init__(self, links=None) -> None:
        self.links: dict[bytes, tuple[bytes, int]] = {} if links is None else links
        self.held: dict[tuple[str, int], set[bytes]] = {}
        self.num_unknown = 0

    def learn(self, tokens, names, first=0) -> None:
        """``names`` are those of single tokens."""
        for at in range(first, len(names)):
            self.links[names[at]] = (names[at - 1] if at else b"", tokens[at])

    def back(self, name, count):
        """The name of what comes before the last ``count`` tokens, and these."""
        tokens = []
        for _ in range(count):
            name, token = self.links[name]
            tokens.insert(0, token)
        return name, tokens

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
            if not event.size:
                self.num_unknown += len(names)
                continue
            before, told = event.parent or b"", []
            for name in names:
                parent, tokens = self.back(name, event.size)
                assert parent == before, "the blocks do not follow one another"
                before, told = name, told + tokens
            assert told == list(event.tokens), "the tokens are not those of the blocks"

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


GARBAGE, BUSY = "garbage", "busy"


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

    def places(self, group, rows):
        return [(self.stack.half.host.plan.class_of[group], row) for row in rows]

    def order(self, kind, *job, fills=()) -> None:
        """Each rank has a job to do, which fills rows that nobody writes to by now."""
        for rows, todo in zip(self.rows, self.todo, strict=True):
            assert BUSY not in map(rows.get, fills)
            rows.update(dict.fromkeys(fills, BUSY))
            todo.append((kind, *job))

    def before_step(self, orders) -> None:
        self.cleared += orders.clear
        for lower in self.lower if orders.clear else ():
            lower.update({tier: {} for tier in self.tiers})
        for store in orders.stores:
            group, ids, rows = store.copies.group, store.copies.block_ids, store.copies.rows
            content = [self.stack.read(group, block_id) for block_id in ids]
            assert content == [self.stack.expected(group, name) for name in store.hashes]
            places = self.places(group, rows)
            parts = list(zip(store.hashes, places, content, strict=True))
            self.order("store", store, parts, self.cleared, fills=places)

    def start(self, orders) -> None:
        for restore in orders.restores:
            self.awaited[restore.request_id] = len(self.rows)
            if restore.refusal:
                self.failed[restore.request_id] = restore.refusal
            self.order("restore", restore)
        for fetch in orders.fetches:
            self.order("fetch", fetch, fills=self.places(fetch.group, fetch.rows))
        for seek in orders.seeks:
            self.order("seek", seek)

    def work(self, everything=False) -> Results:
        reports, self.received = [], []
        for rank in range(len(self.rows)):
            if rank in self.silent:
                continue
            self.ended, self.kept, self.changes = {}, [], []
            todo, self.todo[rank] = self.todo[rank], []
            self.rng.shuffle(todo)
            for kind, *job in todo:
                if not everything and self.rng.random() < self.lag:
                    self.todo[rank].append((kind, *job))
                    continue
                getattr(self, "_" + kind)(rank, *job)
            for tier in self.tiers if self.fail and self.rng.random() < 0.1 else ():
                if there := self.lower[rank][tier]:
                    group, name = self.rng.choice(sorted(there))
                    del there[group, name]
                    self.changes.append(TierChange(tier, group, (), (name,)))
            told = self.ended, tuple(self.kept), tuple(self.changes)
            reports.append(OffloadReport(rank, self.cleared, *told))
        self.rng.shuffle(reports)
        failed = {name: self.failed.pop(name) for name in self.received if name in self.failed}
        return Results(received=tuple(self.received), failed=failed, offload=tuple(r for r in reports if r))

    @property
    def is_idle(self) -> bool:
        return not any(self.todo) and not self.awaited

    def _breaks(self) -> bool:
        return self.rng.random() < self.fail

    def _store(self, rank, store, parts, cleared) -> None:
        rows, bad, good = self.rows[rank], [], []
        for part in parts:
            _, place, held = part
            assert rows[place] == BUSY
            broken = self._breaks()
            (bad if broken else good).append(part)
            # Out of use until the job was kept.
            rows[place] = held if not broken else BUSY if store.keep else GARBAGE
        self.ended[store.job] = tuple(name for name, _, _ in bad)
        if store.keep:
            self.todo[rank].append(("keep", store, bad, good, cleared))

    def _keep(self, rank, store, bad, good, cleared) -> None:
        """Unless all was cleared since the order."""
        for name, place, held in good if cleared == self.cleared else ():
            assert self.rows[rank][place] == held, "a row was reused while it was read"
            for tier in self.tiers if not self._breaks() else ():
                self.lower[rank][tier][store.copies.group, name] = held
                self.changes.append(TierChange(tier, store.copies.group, (name,)))
        for _, place, _ in bad:
            assert self.rows[rank][place] == BUSY
            self.rows[rank][place] = GARBAGE
        self.kept.append(store.job)

    def _fetch(self, rank, fetch) -> None:
        missing = []
        for name, place in zip(fetch.hashes, self.places(fetch.group, fetch.rows), strict=True):
            assert self.rows[rank][place] == BUSY
            held = self.lower[rank][fetch.tier].get((fetch.group, name))
            if fetch.tier == "store":
                # It keeps no index: what is seen there is announced, and what is missed taken back.
                seen = ((), (name,)) if held is None else ((name,), ())
                self.changes.append(TierChange(fetch.tier, fetch.group, *seen))
            if held is None or self._breaks():
                missing.append(name)
                held = GARBAGE
            self.rows[rank][place] = held
        self.ended[fetch.job] = tuple(missing)

    def _seek(self, rank, seek) -> None:
        kept = self.lower[rank][seek.tier]
        self.ended[seek.job] = tuple(n for n in seek.hashes if (seek.group, n) in kept)

    def _restore(self, rank, restore) -> None:
        request_id, breaks = restore.request_id, self._breaks()
        if breaks:
            self.failed.setdefault(request_id, "copy failed")
        for copies in restore.copies:
            for block_id, place in zip(copies.block_ids, self.places(copies.group, copies.rows), strict=True):
                held = self.rows[rank][place]
                assert held not in (BUSY, GARBAGE)
                if breaks or rank == 0:
                    self.stack.device[block_id] = copies.group, GARBAGE if breaks else held
        self.awaited[request_id] -= 1
        if not self.awaited[request_id]:
            del self.awaited[request_id]
            self.received.append(request_id)


CAP = 4096
ROW_BYTES = 64


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
        spec = AttentionSpec(self.tokens, 1, 1, torch.int8, retention=self.rule)
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


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Req(Request):
    """A request, and by admission before its first loss of blocks the tokens that it had here and got."""

    def __init__(self, request_id, tokens, max_new=1, params=None) -> None:
        super().__init__(request_id, list(tokens), max_new, lambda output: None, params)
        self.blocks = RequestBlocks([], [], [])
        self.hits: list[tuple[int, int]] = []

    def hashes(self, size: int) -> Sequence[bytes]:
        return self.blocks.content_hashes(self.token_ids, size)


class Late(SchedulerHalf):
    """Tells the offload of a step when the next one is scheduled; ``guessed`` tokens count as computed."""

    def __init__(self, offload) -> None:
        super().__init__(offload=offload)
        self.step, self.guessed = Step(), {}

    @property
    def due(self):
        return {name: due - self.guessed.get(name, 0) for name, due in super().due.items()}

    def launched(self, step) -> None:
        self.step = step._replace(
            computed=[
                one._replace(num_tokens=one.num_tokens + self.guessed.get(one.request_id, 0))
                for one in step.computed
            ]
        )

    def tell(self) -> None:
        super().launched(self.step)
        self.step = Step()

    def preempted(self, request_id) -> None:
        self.tell()
        super().preempted(request_id)

    def update_after_alloc(self, request, block_ids, num_external_tokens) -> None:
        if not request.loaded and not request.preemptions:
            request.hits.append((request.num_computed_tokens - num_external_tokens, num_external_tokens))
        super().update_after_alloc(request, block_ids, num_external_tokens)

    def request_finished(self, request, block_ids, *, delivered):
        """Of its last step only the states are told: its blocks are named here."""
        computed, states = self.step
        mine = [state for state in states if state.request_id == request.request_id]
        super().launched(Step(states=mine))
        others = [one for one in computed if one.request_id != request.request_id]
        self.step = Step(others, [state for state in states if state not in mine])
        return super().request_finished(request, block_ids, delivered=delivered)


class Blocks(BlockManager):
    """Frees also what lies between blocks that are seen, and reuses blocks of draft models too."""

    def __init__(self, kinds, align, *args, **settings) -> None:
        super().__init__(*args, **settings)
        self.kinds, self.align = kinds, align

    def find_hit(self, blocks, token_ids):
        """The longest one: a draft's block is known by the hash of the next one."""
        ahead = max((kind.tokens for kind in self.kinds if kind.is_draft), default=0)
        limit = (len(token_ids) - 1 - ahead) // self.align * self.align
        for boundary in range(limit, 0, -self.align) if self.reuses_prefixes else ():
            found = []
            for group, kind in enumerate(self.kinds):
                names = blocks.content_hashes(token_ids, kind.tokens)[kind.is_draft :]
                found.append(
                    tuple(
                        self.pool.find((group, names[at])) if kind.keeps(at, boundary) else 0
                        for at in range(boundary // kind.tokens)
                    )
                )
            if not any(None in ids for ids in found):
                return CacheHit(boundary, tuple(found))
        return CacheHit(0, tuple(() for _ in self.kinds))

    def remember(self, blocks, request, num_computed) -> None:
        for group, kind in enumerate(self.kinds if self.reuses_prefixes else ()):
            names = request.hashes(kind.tokens)[kind.is_draft : num_computed // kind.tokens]
            for at, name in enumerate(names):
                if block_id := blocks.ids[group][at]:
                    self.pool.remember((group, name), block_id)

    def grow(self, blocks, hit, num_computed, num_tokens, *, num_loaded=0):
        grown = super().grow(blocks, hit, num_computed, num_tokens, num_loaded=num_loaded)
        for group, kind in enumerate(self.kinds if grown is not None else ()):
            ids, new = blocks.ids[group], grown.new_ids[group]
            for at, block_id in enumerate(ids):
                if not kind.keeps(at, num_computed):
                    self.pool.release([block_id])
                    ids[at] = 0
            new[:] = ids[len(ids) - len(new) :]
        return grown


class Stack(Scheduler):
    """The node's scheduler over blocks whose content is known, which it computes from what they hold."""

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
        **settings,
    ) -> None:
        self.kinds, self.cancels, self.drafts = kinds, cancels, drafts
        self.rng, self.clock = random.Random(seed), Clock()
        # By block of one pool the group that wrote to it last, and what it holds.
        self.device: dict[int, tuple[int, object]] = {}
        self.done: list[Req] = []
        groups = tuple(kind.spec() for kind in kinds)
        config = OffloadConfig(
            cpu_bytes=ROW_BYTES * (rows or 2000) * len(kinds),
            shares=tuple(1 / len(kinds) for _ in kinds),
            disk_path="/d" if "disk" in tiers else "",
            store="s:1" if "store" in tiers else "",
            **settings,
        )
        drafted = [index for index, kind in enumerate(kinds) if kind.is_draft]
        kept = KeptBlocks(
            groups,
            HitRequirements.of(groups, range(len(kinds)), align, drafted),
            hashes=Req.hashes,
            row_bytes={index: kind.row_bytes for index, kind in enumerate(kinds)},
            num_ranks=num_ranks,
            clock=self.clock,
            events=TierEvents(Plain()),
        )
        self.half = OffloadScheduler(config, kept, OrdersDraft([]))
        manager = Blocks(
            kinds,
            align,
            KVCacheConfig(num_blocks, groups),
            BlockPool(num_blocks),
            budget + drafts,
            enable_prefix_caching=local,
        )
        options = NodeOptions(max_num_seqs=100, max_num_batched_tokens=budget)
        super().__init__(options, manager, Late(self.half), recompute_failed_loads=True)
        self._align = align
        self.router = Replay()
        self.ranks = Ranks(self, num_ranks, self.rng, tiers=tiers, lag=lag)

    def expected(self, group, name):
        """What the block of a name should hold: a digest for each token, or for the one after it."""
        kind, found = self.kinds[group], []
        if kind.is_state:
            return name
        name, _ = self.router.back(name, kind.tokens - 1 if kind.is_draft else 0)
        for _ in range(kind.tokens):
            found.insert(0, name)
            name, _ = self.router.links[name]
        return tuple(found)

    def read(self, group, block_id):
        owner, held = self.device.get(block_id, (group, GARBAGE))
        return GARBAGE if owner != group else tuple(held) if isinstance(held, list) else held

    def write(self, group, block_id, at, digest) -> None:
        """Write to a slot of a block, whose other slots mean nothing if this is the first one."""
        assert block_id
        owner, held = self.device.get(block_id, (group, GARBAGE))
        if not isinstance(held, list) or owner != group:
            goes_on = isinstance(held, tuple) and owner == group and at
            held = list(held) if goes_on else [GARBAGE] * self.kinds[group].tokens
            self.device[block_id] = group, held
        held[at] = digest

    # What the scheduler does

    def add(self, request_id, tokens, max_new=1, params=None) -> Req:
        request = Req(request_id, tokens, max_new, params)
        super().add(request)
        self.router.learn(request.token_ids, request.hashes(1))
        return request

    @property
    def loading(self):
        return [one for one in self.requests.values() if one.state is RequestState.WAITING_FOR_KV]

    def _ask_connector(self, request, hit):
        external = super()._ask_connector(request, hit)
        assert external == super()._ask_connector(request, hit)
        assert hit.num_tokens + (external or 0) < request.num_tokens
        if external and self.rng.random() < self.cancels:
            # The stack needs the tokens for something else.
            external = self.rng.randrange(0, external + 1)
        return external

    def _grow_running(self, request, count, step):
        guessed = 0
        if self.drafts and request.num_computed_tokens + count == request.num_tokens:
            guessed = self.rng.randrange(self.drafts + 1)
        self.hooks.guessed[request.request_id] = guessed
        return super()._grow_running(request, count + guessed, step)

    def _end(self, request, output, **how) -> None:
        super()._end(request, output, **how)
        self.done.append(request)

    # One step

    def step(self, everything=False) -> None:
        self.clock.now += 0.01
        step = self.schedule()
        self.hooks.tell()
        orders = self.half.build_orders()
        self.ranks.before_step(orders)
        self.ranks.start(orders)
        self.compute(step)
        self.update_results(self.ranks.work(everything))
        self.hear()

    def hear(self) -> None:
        """What a router knows after the step is what the tiers hold, with the tokens of all of it."""
        while self.half.host.events:
            self.router.apply(self.half.take_events())
        self.router.check(self.half)
        assert not self.router.num_unknown

    def compute(self, step) -> None:
        """Every slot that is read must be right."""
        sampled = {}
        for chunk in step.chunks:
            request, start = self.requests[chunk.request_id], chunk.start
            end = start + len(chunk.token_ids)
            tokens, digests = request.token_ids, request.hashes(1)
            if chunk.samples:
                sampled[request.request_id] = digests[-1][0] % 5, None
                tokens = [*tokens, digests[-1][0] % 5]
                digests = request.blocks.content_hashes(tokens, 1)
                self.router.learn(tokens, digests, end)
            for group, kind in enumerate(self.kinds):
                ids = request.blocks.ids[group]
                if kind.is_state:
                    assert not start or self.read(group, ids[-1]) == digests[start - 1], "a wrong state"
                    self.device[ids[-1]] = group, digests[end - 1]
                    continue
                for token in [token for token in range(start) if kind.sees(token, start)]:
                    held = self.read(group, ids[token // kind.tokens])
                    assert held[token % kind.tokens] == digests[token + kind.is_draft], "wrong KV"
                # What is guessed is wrong here: what it leaves behind is overwritten later.
                for token in range(start, end + self.hooks.guessed.get(request.request_id, 0)):
                    digest = digests[token + kind.is_draft] if token < end else GARBAGE
                    self.write(group, ids[token // kind.tokens], token % kind.tokens, digest)
        self.update(step, sampled)
        self.hooks.guessed.clear()

    # Whole runs

    def forget_device_cache(self) -> None:
        """The prefix cache is emptied; blocks in use stay."""
        self.manager.pool._block_of.clear()
        self.manager.pool._key_of.clear()

    def until(self, is_so, everything=True) -> None:
        for _ in range(3000):
            if is_so():
                return
            self.step(everything)
        raise AssertionError("it hangs")

    def end(self, request) -> None:
        """Until a request has ended, whatever is under way then."""
        self.until(lambda: request in self.done)

    def run(self, everything=False) -> None:
        """Until every request has ended."""
        self.until(lambda: not self.requests and not self.kept, everything)
        self.settle()

    def settle(self) -> None:
        """Until nothing is under way."""
        self.until(lambda: self.ranks.is_idle and not self.half.pending, everything=False)

    def check_idle(self) -> None:
        """Nothing is remembered, pinned or under way."""
        assert not any(self.half.state().values()), self.half.state()
        assert not self.manager.pool.num_held
        for counts in self.half.host.index.counts().values():
            assert counts.pinned == counts.pending == 0
        check_index(self.half.host.index)
