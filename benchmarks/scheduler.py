"""What the scheduler half's hooks add to a serving stack's step, on one core and without a network.

Every step runs all hooks in the order in which a scheduler calls them. Steady decode is a step in which
nobody comes or goes; the other steps admit requests, or end them, on top of it. Requests and block ids
are made beforehand: only the hooks are timed.
"""

from __future__ import annotations

import functools
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.options import Options as BaseOptions
from benchmarks.options import option
from benchmarks.report import Report
from benchmarks.scheduler_offload import Keeping, Running
from benchmarks.scheduler_watched import Watched, watch_timings
from kvconnect.addresses import RankAddress
from kvconnect.cache.specs import FullAttentionSpec, KVCacheConfig, KVCacheGroup
from kvconnect.config import TransferConfig
from kvconnect.halves.building import Trust, build_scheduler_half
from kvconnect.halves.scheduler_half import SchedulerHalf
from kvconnect.peer.handles import Claims, Handles
from kvconnect.transfer.orders import Results
from kvconnect.transfer.stack import StackTraits

_WARM_UP = 0.1
_BLOCK_TOKENS = 16
_PROMPT_TOKENS = 2048
_NOTHING = Results()
_HANDLES = Handles(b"what the benchmark signs with")


@dataclass(frozen=True)
class Options(BaseOptions):
    """Who runs."""

    requests: int = option(256, "Requests that run.", least=1)
    steps: int = option(2000, "Steps of each kind; a tenth with offload.", least=10)
    turns: int = option(40, "Turns of 16 steps of each way to watch a step.", least=1)


@dataclass(frozen=True)
class StepTiming:
    """One kind of step. ``changed`` requests were admitted or ended in it, ``running`` ones were not."""

    step: str
    running: int
    changed: int
    best_us: float
    median_us: float


@dataclass
class _Request:
    request_id: str
    num_tokens: int
    kv_transfer_params: dict[str, Any] | None = None
    block_ids: tuple[list[int], ...] = field(default_factory=tuple)


def half_of(role: str, stack: StackTraits | None = None) -> SchedulerHalf:
    config = TransferConfig(kv_role=role, engine_id="bench")  # type: ignore[arg-type]
    group = KVCacheGroup(("layer",), FullAttentionSpec(_BLOCK_TOKENS, 1, 1, torch.int8))
    half = build_scheduler_half(
        config,
        KVCacheConfig(1 << 20, (group,)),
        stack,
        directory=(RankAddress(0, "10.0.0.1", 5600),),
        trust=Trust(_HANDLES),
    )
    half.build_orders()
    return half


def requests(prefix: str, count: int, params: Callable[[int], dict[str, Any]]) -> list[_Request]:
    blocks = _PROMPT_TOKENS // _BLOCK_TOKENS
    return [
        _Request(f"{prefix}{n}", _PROMPT_TOKENS, params(n), ([*range(1 + n, 1 + n + blocks)],))
        for n in range(count)
    ]


def told(n: int) -> dict[str, Any]:
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "P",
        "remote_host": "10.0.0.2",
        "remote_port": 5600,
        "remote_num_tokens": _PROMPT_TOKENS,
        "kvconnect_handle": _HANDLES.make(
            Claims("P", "epoch", f"request-{n}", _PROMPT_TOKENS, "10.0.0.2", 5600, expires_at=0)
        ),
    }


def asked(n: int) -> dict[str, Any]:
    return {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": f"transfer-{n}"}


def _steady(half: SchedulerHalf) -> None:
    """The hooks of a step in which nobody comes or goes: none of them is called per request."""
    half.build_orders()
    half.update_results(_NOTHING)


class _Decode:
    """D with ``running`` requests, of which ``changed`` come with every step and as many end."""

    def __init__(self, running: int, changed: int) -> None:
        self.half = half_of("kv_consumer")
        self.changed = changed
        self.serial = 0
        self.running = requests("running", running, told)
        for request in self.running:
            self._admit(request)
        self._load(self.running)

    def _admit(self, request: _Request) -> None:
        self.half.new_request(request)
        count, _ = self.half.matched_tokens(request, 0)
        assert count
        self.half.update_after_alloc(request, request.block_ids, count)

    def _load(self, requests: list[_Request]) -> None:
        self.half.build_orders()
        self.half.update_results(Results(received=tuple(request.request_id for request in requests)))
        for request in requests:
            # Promoted: admitted once more, now with all that it needs.
            self.half.update_after_alloc(request, request.block_ids, 0)

    def steady(self) -> float:
        """Seconds of a step without changes."""
        start = time.perf_counter()
        _steady(self.half)
        return time.perf_counter() - start

    def admission(self) -> float:
        """Seconds of a step that admits requests whose KV is loaded."""
        first, self.serial = self.serial, self.serial + self.changed
        coming = requests(f"new{first}-", self.changed, lambda n: told(-1 - first - n))
        start = time.perf_counter()
        for request in coming:
            self._admit(request)
        _steady(self.half)
        seconds = time.perf_counter() - start
        self._load(coming)
        self._end(coming)
        return seconds

    def ending(self) -> float:
        """Seconds of a step in which loads arrive and requests end."""
        first, self.serial = self.serial, self.serial + self.changed
        going = requests(f"end{first}-", self.changed, lambda n: told(-1 - first - n))
        for request in going:
            self._admit(request)
        start = time.perf_counter()
        self._load(going)
        self._end(going)
        seconds = time.perf_counter() - start
        _steady(self.half)
        return seconds

    def _end(self, requests: list[_Request]) -> None:
        for request in requests:
            self.half.request_finished(request, request.block_ids, delivered=True)


class _Prefill:
    """P with ``running`` requests, of which ``changed`` come with every step and as many are held."""

    def __init__(self, running: int, changed: int) -> None:
        self.half = half_of("kv_producer")
        self.changed = changed
        self.serial = 0
        for request in requests("running", running, asked):
            self._admit(request)
        self.half.build_orders()

    def _admit(self, request: _Request) -> None:
        self.half.new_request(request)
        self.half.prefill_tokens(request)
        self.half.matched_tokens(request, 0)
        self.half.update_after_alloc(request, request.block_ids, 0)

    def turnover(self) -> float:
        """Seconds of a step that admits requests, holds them, and hears that they were sent."""
        first, self.serial = self.serial, self.serial + self.changed
        coming = requests(f"new{first}-", self.changed, lambda n: asked(-1 - first - n))
        sent = Results(sent=tuple(request.request_id for request in coming))
        start = time.perf_counter()
        for request in coming:
            self._admit(request)
        for request in coming:
            self.half.request_finished(request, request.block_ids, delivered=True)
        self.half.build_orders()
        self.half.update_results(sent)
        return time.perf_counter() - start


def _timed(name: str, running: int, changed: int, step: Callable[[], float], steps: int) -> StepTiming:
    gc.collect()
    first = int(_WARM_UP * steps)
    times = [step() * 1e6 for _ in range(first + steps)][first:]
    return StepTiming(name, running, changed, round(min(times), 2), round(statistics.median(times), 2))


def _watched(options: Options, watches: tuple[str, ...]) -> Watched:
    half = half_of("kv_consumer", StackTraits(clock=time.monotonic if "timeline" in watches else None))

    def loaded(number: int) -> Running:
        # Nothing of it is kept, as that would be another step than one of decoding requests.
        params = {**told(number), "max_offload_tokens": 0}
        ids = [*range(1, 1 + _PROMPT_TOKENS // _BLOCK_TOKENS)]
        return Running(f"loaded{number}", _PROMPT_TOKENS, [], ids, params)

    return Watched(options.requests, watches, half, loaded, options.turns)


def bench_scheduler(options: Options, report: Report) -> None:
    """Time steps of a node with so many requests that run: microseconds per step, best and median."""
    requests = options.requests
    decode, prefill = _Decode(requests, 1), _Prefill(requests, 1)
    crowd = max(1, requests // 16)
    many_decode, many_prefill = _Decode(requests, crowd), _Prefill(requests, crowd)
    keeping, many_keeping = Keeping(requests, 1), Keeping(requests, crowd)
    telling, many_telling = Keeping(requests, 1, has_events=True), Keeping(requests, crowd, has_events=True)
    for name, changed, step, steps in (
        ("steady decode", 0, decode.steady, options.steps),
        ("decode, admits with a load", 1, decode.admission, options.steps),
        ("decode, load arrives and ends", 1, decode.ending, options.steps),
        ("prefill, admits and holds", 1, prefill.turnover, options.steps),
        ("decode, admits with a load", crowd, many_decode.admission, options.steps),
        ("decode, load arrives and ends", crowd, many_decode.ending, options.steps),
        ("prefill, admits and holds", crowd, many_prefill.turnover, options.steps),
        ("offload, all decode", 0, keeping.decode, options.steps // 10),
        ("offload, admits a hit", 1, keeping.returning, options.steps // 10),
        ("offload, admits and stores", 1, keeping.fresh, options.steps // 10),
        ("offload, admits a hit", crowd, many_keeping.returning, options.steps // 10),
        ("offload, admits and stores", crowd, many_keeping.fresh, options.steps // 10),
        ("offload with events, all decode", 0, telling.decode, options.steps // 10),
        ("offload with events, admits a hit", 1, telling.returning, options.steps // 10),
        ("offload with events, admits and stores", 1, telling.fresh, options.steps // 10),
        ("offload with events, admits and stores", crowd, many_telling.fresh, options.steps // 10),
    ):
        report.add(_timed(name, requests, changed, step, steps))
    for timing in watch_timings(functools.partial(_watched, options), options.turns):
        report.add(timing, "what watching a step adds")
