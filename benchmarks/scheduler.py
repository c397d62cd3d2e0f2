"""What a step of a decode node's scheduler half takes, and what of it is for those that watch it.

In each step every request gets a token, a 16th of them fill a block, which is stored where an old one makes
room, one request comes whose KV is loaded, and one ends. Nodes that differ in what watches them (KV events,
the timeline, metrics) take turns, so that whatever else the machine does disturbs all of them: what counts is
the median of the differences of steps that follow one another. A node that nothing watches either shows how
far that can be trusted. On one core and without a network; requests and block ids are made beforehand.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from prometheus_client import CollectorRegistry

from benchmarks.harness import Options as BaseOptions
from benchmarks.harness import Report, option
from kvconnect.addresses import RankAddress
from kvconnect.cache.specs import FullAttentionSpec, KVCacheConfig, KVCacheGroup
from kvconnect.config import OffloadConfig, TransferConfig
from kvconnect.halves.building import Trust, build_scheduler_half
from kvconnect.halves.scheduler_half import SchedulerHalf
from kvconnect.metrics import Metrics, OffloadMetrics, merge_changes
from kvconnect.node.kv_events import BlockRemoved, BlockStored
from kvconnect.offload.scheduler.hit_requirements import HitRequirements
from kvconnect.offload.scheduler.offload_scheduler import OffloadScheduler
from kvconnect.offload.tier_events import Described, EventMaker, TierEvents
from kvconnect.peer.handles import Claims, Handles
from kvconnect.transfer.orders import OffloadReport, Orders, Results
from kvconnect.transfer.stack import Computed, StackTraits, Step

BLOCK_TOKENS = 16
PROMPT_TOKENS = 2048
_GROUPS = (KVCacheGroup(("layer",), FullAttentionSpec(BLOCK_TOKENS, 1, 1, torch.int8)),)
_HANDLES = Handles(b"what the benchmark signs with")
_ROW_BYTES = 64
_MOVED_BYTES = 1 << 20
# Everybody's, and longer than any request becomes.
_TOKENS = [*range(1 << 14)]
_WARM_UP_TURNS = 2
_STEPS = 16
"""Of a turn: as many as a block has tokens."""
_NODES: dict[str, tuple[str, ...]] = {
    "": (),
    "nothing": (),
    "events": ("events",),
    "timeline": ("timeline",),
    "metrics": ("metrics",),
    "all three": ("events", "timeline", "metrics"),
}


@dataclass(frozen=True)
class Options(BaseOptions):
    """Who runs."""

    requests: int = option(256, "Requests that run.", least=1)
    turns: int = option(40, "Turns of 16 steps of each way to watch a step.", least=1)


@dataclass(frozen=True)
class WatchTiming:
    """What a step takes, and what of it is for those that watch it."""

    watched_by: str
    added_us: float
    step_us: float


@dataclass
class Running:
    """A request, as a serving stack has it. ``names`` are those of its full blocks."""

    request_id: str
    num_tokens: int
    block_ids: list[int]
    kv_transfer_params: dict[str, Any] | None = None
    names: list[bytes] = field(default_factory=list)


def half_of(role: str, stack: StackTraits | None = None) -> SchedulerHalf:
    """A scheduler half of this role, whose directory has been ordered."""
    half = build_scheduler_half(
        TransferConfig(kv_role=role, engine_id="bench"),  # type: ignore[arg-type]
        KVCacheConfig(1 << 20, _GROUPS),
        stack,
        directory=(RankAddress(0, "10.0.0.1", 5600),),
        trust=Trust(_HANDLES),
    )
    half.build_orders()
    return half


def request_of(name: str, params: dict[str, Any]) -> Running:
    """A request with blocks of its own for its prompt."""
    return Running(name, PROMPT_TOKENS, [*range(1, 1 + PROMPT_TOKENS // BLOCK_TOKENS)], params)


def told(n: int) -> dict[str, Any]:
    """What D is told of a prompt that P holds."""
    claims = Claims("P", "epoch", f"request-{n}", PROMPT_TOKENS, "10.0.0.2", 5600, expires_at=0)
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "P",
        "remote_host": "10.0.0.2",
        "remote_port": 5600,
        "remote_num_tokens": PROMPT_TOKENS,
        "kvconnect_handle": _HANDLES.make(claims),
    }


def asked(n: int) -> dict[str, Any]:
    """What P is asked for."""
    return {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": f"transfer-{n}"}


def _describe(request: Any, first: int, count: int, size: int) -> Described:
    return {"token_ids": _TOKENS[first * size : (first + count) * size]}


def _hashes(request: Any, block_tokens: int) -> Sequence[bytes]:
    names: list[bytes] = request.names
    return names


class Watched:
    """A node with ``running`` requests; ``watches`` are which of events, timeline and metrics are on.

    There are old blocks, which make room, for so many turns.
    """

    def __init__(self, running: int, watches: tuple[str, ...], turns: int) -> None:
        self._watches = watches
        self._serial = 0
        known = (_WARM_UP_TURNS + turns) * _STEPS * running // PROMPT_TOKENS + 1
        num_rows = (known + running) * PROMPT_TOKENS // BLOCK_TOKENS
        offload = OffloadScheduler(
            OffloadConfig(cpu_bytes=num_rows * _ROW_BYTES),
            list(_GROUPS),
            HitRequirements.of(_GROUPS, [0], BLOCK_TOKENS),
            hashes=_hashes,
            row_bytes={0: _ROW_BYTES},
            clock=time.monotonic,
        )
        if "events" in watches:
            facts = {"kv_cache_spec_kind": "full_attention"}
            offload.announce(TierEvents(EventMaker(BlockStored, BlockRemoved, [facts], _describe)))
        made = half_of("kv_consumer", StackTraits(clock=time.monotonic if "timeline" in watches else None))
        self.half = SchedulerHalf(made.draft, made.prefill, made.decode, made.pulls, offload)
        # The exporter of the process has nothing to show of a benchmark.
        self._metrics = Metrics(CollectorRegistry())
        self._kept_metrics = OffloadMetrics(CollectorRegistry())
        old = [self._made(PROMPT_TOKENS) for _ in range(known)]
        # Not all of them fill a block in the same step.
        self.running = [self._made(PROMPT_TOKENS + n % BLOCK_TOKENS) for n in range(running)]
        for requests in (old, self.running):
            for request in requests:
                self._admit(request)
                self.half.launched(
                    Step([Computed(request.request_id, request.num_tokens, (request.block_ids,))])
                )
            self._settle()
        for request in old:
            self._end(request)
        self._settle()

    def step(self) -> float:
        """Seconds of a step, and of what a worker notes of it."""
        news = self._grow()
        # Nothing of it is kept, as that would be another step than one of decoding requests.
        coming = request_of(f"loaded{self._serial}", {**told(self._serial), "max_offload_tokens": 0})
        self._serial += 1
        due = self.half.due
        start = time.perf_counter()
        self._admit(coming)
        self.half.launched(
            Step(
                [
                    Computed(request.request_id, request.num_tokens - 1, new_ids)
                    for request, new_ids in news
                    if new_ids is not None or request.num_tokens >= due[request.request_id]
                ]
            )
        )
        orders = self.half.build_orders()
        self.half.update_results(Results(received=(coming.request_id,), offload=_stored(orders)))
        self.half.update_after_alloc(coming, (coming.block_ids,), 0)
        coming.num_tokens += 1
        self._end(coming)
        self.half.take_events()
        if "timeline" in self._watches:
            self._metrics.timeline.take(orders.notes)
        if "metrics" in self._watches:
            self._count(sum(len(store.hashes) for store in orders.offload.stores))
        return time.perf_counter() - start

    def _made(self, num_tokens: int) -> Running:
        self._serial += 1
        count = num_tokens // BLOCK_TOKENS
        names = [b"%07d-%07d" % (self._serial, position) for position in range(count)]
        return Running(f"r{self._serial}", num_tokens, list(range(1, 2 + count)), names=names)

    def _admit(self, request: Running) -> None:
        self.half.new_request(request)
        count, _ = self.half.matched_tokens(request, 0)
        self.half.update_after_alloc(request, (request.block_ids,), count or 0)

    def _grow(self) -> list[tuple[Running, tuple[list[int]] | None]]:
        news: list[tuple[Running, tuple[list[int]] | None]] = []
        for request in self.running:
            request.num_tokens += 1
            new_ids = None
            if request.num_tokens % BLOCK_TOKENS == 0:
                position = len(request.names)
                request.names.append(b"%s+%05d" % (request.request_id.encode(), position))
                new_ids = ([position + 1],)
            news.append((request, new_ids))
        return news

    def _settle(self) -> None:
        self.half.update_results(Results(offload=_stored(self.half.build_orders())))
        self.half.take_events()

    def _end(self, request: Running) -> None:
        self.half.request_finished(request, (request.block_ids,), delivered=True)

    def _count(self, num_stored: int) -> None:
        """What the threads of a worker count of such a step, and what the one of its steps asks of that."""
        kept, moved = self._kept_metrics, self._metrics
        for is_open in (1, 0):
            for kind, number in kept.open.items():
                number.set(is_open if kind == "store" else 0)
            kept.held_rows.set(0)
            kept.taken["host"].set(self._serial * _MOVED_BYTES)
            kept.limit["host"].set(1 << 40)
        kept.wait_seconds.labels("staging").inc(1e-6)
        kept.moved("store", "host", num_stored, num_stored * _MOVED_BYTES, 1e-3)
        for is_open in (1, 0):
            moved.loads.set(is_open)
            moved.loads_waiting.set(0)
            moved.quarantined.set(0)
            moved.slots_landing.set(is_open)
        moved.transfers.labels("received", "ok").inc()
        moved.transfer_bytes.labels("received", "nvlink").inc(_MOVED_BYTES)
        moved.copies.labels("received").inc()
        moved.transfer_seconds.labels("received").inc(1e-3)
        moved.load_seconds.observe(1e-3)
        merge_changes(moved.changes(), kept.changes())


def _stored(orders: Orders) -> tuple[OffloadReport, ...]:
    """What workers report that have done everything at once."""
    stored: dict[int, tuple[bytes, ...]] = {store.job: () for store in orders.offload.stores}
    return (OffloadReport(0, stored=stored),) if stored else ()


def bench_scheduler(options: Options, report: Report) -> None:
    """Time the steps of nodes by what watches them, in microseconds."""
    nodes = {name: Watched(options.requests, watches, options.turns) for name, watches in _NODES.items()}
    gc.collect()
    best: dict[str, list[float]] = {name: [] for name in nodes}
    for _ in range(_WARM_UP_TURNS + options.turns):
        for name, node in nodes.items():
            best[name].append(min(node.step() for _ in range(_STEPS)) * 1e6)
    bare = best.pop("")
    for name, steps in best.items():
        added = [step - without for step, without in zip(steps, bare, strict=True)][_WARM_UP_TURNS:]
        step_us = statistics.median(steps[_WARM_UP_TURNS:])
        report.add(WatchTiming(name, statistics.median(added), step_us))
