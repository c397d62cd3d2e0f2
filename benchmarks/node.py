"""What receiving KV costs a decode that runs.

Two child processes hold a worker each, as in ``transfer``; the one that receives computes as well.
The parent only asks, compares and reports: windows without and with transfers take turns, then what arrived
is looked at.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from benchmarks.cache import CacheShape, Layout
from benchmarks.harness import Options as BaseOptions
from benchmarks.harness import PairOptions, carrying_protocol, note, report
from benchmarks.loops import (
    DecodeLoop,
    SharedCache,
    StepTime,
    StepTimes,
    fill_blocks,
    step_percentiles,
)
from benchmarks.model import MODEL_SIZES, BenchModel, ModelSize
from benchmarks.process import ChildPair, StepFailed
from benchmarks.worker import (
    SEEDS,
    Round,
    WorkerAddress,
    WorkerSide,
    compare_pages,
    open_workers,
)
from kvconnect.cache.specs import div_ceil
from kvconnect.config import ExtraConfig, parse_kv_transfer_config
from kvconnect.errors import ConfigError
from kvconnect.pack.arena import auto_slot_bytes
from kvconnect.packages import engine_mistakes
from kvconnect.reading import refuse

NODE_SIDE = f"{__name__}:NodeSide"
# The part of the asked rate that counts as all of it.
_NEARLY = 0.95
_RAMP_S = 0.5
_LAYOUT = Layout("nhd", 16)


@dataclass(frozen=True)
class ModelOptions(BaseOptions):
    """A run with one of the models of serving size."""

    SUITED: ClassVar = {"model": ("tiny", "8b")}

    device: Annotated[str, "cpu or cuda."] = "cpu"
    model: Annotated[str, "8b or tiny, with random weights; default: 8b, on a CPU tiny."] = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model not in MODEL_SIZES:
            raise ConfigError(f"model is {self.model!r}; accepted: {', '.join(MODEL_SIZES)}")

    @property
    def size(self) -> ModelSize:
        """The model's widths."""
        return MODEL_SIZES[self.model]


@dataclass(frozen=True)
class Options(ModelOptions, PairOptions):
    """A run."""

    SUITED: ClassVar = {
        **ModelOptions.SUITED,
        "batch": (4, 32),
        "context": (64, 4096),
        "request_mb": (0.25, 256.0),
        "receive_gb_per_s": (0.01, 25.0),
    }

    device: Annotated[str, "cpu, or cuda: one GPU for each side if there are two, else one for both."] = "cpu"
    engine: Annotated[str, "Engine of both workers."] = "nixl"
    protocol: Annotated[
        str, "Its protocol; default: on a CPU UCX or tcp, else auto. Between CPUs auto is shared memory."
    ] = ""
    batch: Annotated[int, "Requests that decode; default: 32, on a CPU 4."] = 0
    context: Annotated[int, "Tokens of each; default: 4096, on a CPU 64."] = 0
    request_mb: Annotated[float, "MiB of KV of a received request; default: 256, on a CPU 0.25."] = 0.0
    receive_gb_per_s: Annotated[float, "GB/s of ordered requests; default: 25, on a CPU 0.01."] = 0.0
    in_flight: Annotated[int, "Most requests under way at a time."] = 8
    rounds: Annotated[int, "How often without and with alternate."] = 3
    seconds: Annotated[float, "Seconds of each."] = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse([*engine_mistakes(self.engine, "engine")])
        self.worker_config()

    @property
    def used_protocol(self) -> str:
        """The engine's protocol."""
        return self.protocol or carrying_protocol(self.engine, self.device)

    @property
    def request_blocks(self) -> int:
        """Blocks of a received request, at least one."""
        block_bytes = self.size.token_bytes * _LAYOUT.block_tokens
        return max(1, round(self.request_mb * 2**20 / block_bytes))

    @property
    def request_tokens(self) -> int:
        """Tokens of a received request."""
        return self.request_blocks * _LAYOUT.block_tokens

    @property
    def request_bytes(self) -> int:
        """Bytes of KV of a received request."""
        return self.request_tokens * self.size.token_bytes

    def shapes(self) -> tuple[CacheShape, CacheShape]:
        """The caches of both sides: the requests that are under way, and what the decode node computes."""
        # One more for the null block.
        needed = 1 + self.in_flight * self.request_blocks
        computed = self.batch * div_ceil(self.context, _LAYOUT.block_tokens)
        return self.size.shape(needed, _LAYOUT), self.size.shape(needed + computed, _LAYOUT)

    def worker_config(self) -> ExtraConfig:
        """What these settings are.

        Raises:
            ConfigError: one of them is not accepted.
        """
        extra = {"engine": self.engine, "protocol": self.used_protocol, **self.settings}
        return parse_kv_transfer_config({"kv_role": "kv_both", "kv_connector_extra_config": extra}).extra


# ---- in a child


@dataclass(frozen=True)
class Flow:
    """What is received meanwhile: requests that ``source`` holds, at a rate."""

    requests: Round
    request_bytes: int
    bytes_per_s: float
    source: WorkerAddress


@dataclass(frozen=True)
class WindowResult:
    """What the decode node did in a window.

    ``seconds`` are those of the steps. ``last_in_slot`` has the request that came to each slot last, in and
    after the window.
    """

    seconds: float
    steps: StepTimes
    tokens: int
    received: int
    last_in_slot: Mapping[int, int]
    bytes_by_lane: Mapping[str, int]


class NodeSide(WorkerSide):
    """A worker that computes. ``build`` comes after ``draw``, which chooses what is received where.

    The steps, the orders and the results are of one thread, as in a node; the worker's own thread moves. So
    the interpreter is shared as it is there.
    """

    def build(self, options: Options) -> None:
        """Make the model, give it blocks that no request is received into, and capture its step."""
        cache = self.cache
        model = BenchModel(options.size, cache.shape.layout, cache.device)
        taken = {block for slot in cache.slots for block in slot}
        free = [block for block in range(1, cache.shape.num_blocks) if block not in taken]
        random.Random(options.model).shuffle(free)
        each = div_ceil(options.context, cache.shape.layout.block_tokens)
        blocks = [free[row * each : (row + 1) * each] for row in range(options.batch)]
        shared = SharedCache(model, cache, options.batch, options.context)
        fill_blocks(shared, blocks)
        self._loop = DecodeLoop(model, shared, blocks, options.context)

    def auto_slot_bytes(self) -> int:
        """The size of slots where the configuration has none."""
        return auto_slot_bytes(self.cache.device)

    def measure(self, ramp_s: float, window_s: float, flow: Flow | None) -> WindowResult:
        """Compute, receive if there is a flow, and time it; of the first ``ramp_s`` nothing counts.

        Returns when nothing is under way to this side.

        Raises:
            StepFailed: no two steps ended in the window, or a request did not arrive.
        """
        receiver = None
        if flow is not None:
            receiver = self._receiver(flow.requests, flow.source, flow.request_bytes, flow.bytes_per_s)
        self._counted()
        counted_from = time.perf_counter() + ramp_s
        until = counted_from + window_s
        steps: list[StepTime] = []

        def exchange() -> None:
            # Once a step is launched, as a serving stack does: its own host work comes first.
            if receiver is not None:
                now = time.perf_counter()
                receiver.take(self.connector.results(), now)
                self.connector.start(receiver.orders(now))

        while time.perf_counter() < until:
            steps.append(self._loop.step(exchange))
        deadline = time.monotonic() + self._timeout_s
        while receiver is not None and receiver.in_flight:
            results = self._next_results(deadline, f"{receiver.in_flight} requests have not arrived")
            receiver.take(results, time.perf_counter())
        counted = StepTimes.within(steps, counted_from, until)
        if not counted.step_s:
            raise StepFailed(f"{len(steps)} steps ended within {window_s:g} s: set seconds higher")
        arrivals = receiver.arrivals if receiver else ()
        return WindowResult(
            seconds=sum(counted.step_s),
            steps=counted,
            tokens=len(counted.step_s) * self._loop.tokens_per_step,
            received=sum(counted_from < arrival <= until for arrival in arrivals),
            last_in_slot=receiver.last_in_slot if receiver else {},
            bytes_by_lane=self._counted()[0],
        )


# ---- in the parent


class NodePair:
    """A node with its peer, opened, and the windows that it is asked for."""

    def __init__(self, pair: ChildPair, options: Options) -> None:
        self._pair, self._options = pair, options
        self._numbers = itertools.count(1)
        self._landed: dict[int, int] = {}
        whole_s = _RAMP_S + options.seconds
        # As many as the rate asks for, and those that make up for a pause.
        self._held = (
            math.ceil(whole_s * options.receive_gb_per_s * 1e9 / options.request_bytes) + options.in_flight
        )
        self._source = open_workers(pair, options.engine, options.used_protocol, options.shapes(), options)
        self.engine = self._source.engine
        pair.both("draw", *((options.in_flight, options.request_blocks, seed) for seed in SEEDS))
        pair.decode.ask("build", options)
        self.slot_bytes: int = pair.decode.ask("auto_slot_bytes")

    def meet(self) -> None:
        """A round that does not count: it meets the peer, maps memory and compiles kernels."""
        asked = self._round(2 * self._options.in_flight)
        self._pair.prefill.ask("hold", asked)
        self._pair.decode.ask("load", asked, self._source)
        self._pair.prefill.ask("drain", asked)
        self._pair.decode.ask("clear")

    def window(self, *, has_transfers: bool) -> WindowResult:
        """A window in which requests are received, or nothing is under way."""
        options, flow = self._options, None
        if has_transfers:
            asked = self._round(self._held)
            self._pair.prefill.ask("hold", asked)
            flow = Flow(asked, options.request_bytes, options.receive_gb_per_s * 1e9, self._source)
        result: WindowResult = self._pair.decode.ask("measure", _RAMP_S, options.seconds, flow)
        self._landed.update(result.last_in_slot)
        return result

    def check(self) -> int:
        """Compare every page of the requests that came to their blocks last with where it came from.

        Returns how many requests that were.

        Raises:
            StepFailed: a page differs, or nothing was received.
        """
        if not self._landed:
            raise StepFailed("no request was received: set seconds higher, or request_mb lower")
        options = self._options
        compare_pages(self._pair, self._landed, options.in_flight, _LAYOUT.block_tokens)
        return len(self._landed)

    def _round(self, requests: int) -> Round:
        options = self._options
        return Round(f"round{next(self._numbers)}", requests, options.in_flight, options.request_tokens)


def measure_node(options: Options) -> dict[str, Any]:
    """Alternate windows without and with transfers.

    Raises:
        StepFailed: a child failed, or bytes are wrong.
    """
    with ChildPair(NODE_SIDE, options.variables, options.timeout_s) as pair:
        node = NodePair(pair, options)
        node.meet()
        without: list[WindowResult] = []
        having: list[WindowResult] = []
        for _ in range(options.rounds):
            without.append(node.window(has_transfers=False))
            having.append(node.window(has_transfers=True))
        verified = node.check()
        return {**_timing(options, node, without, having), "verified": verified}


def _timing(
    options: Options,
    node: NodePair,
    without: Sequence[WindowResult],
    having: Sequence[WindowResult],
) -> dict[str, Any]:
    """One measured setting of the transfer threads.

    Rates are medians of the windows, ``tokens_per_s_windows`` by window in order, ``ratio`` that of the
    medians. Times of steps are those of all windows of a kind: the whole step, what the host did until it
    was launched, and what the GPU worked. ``verified`` counts the requests whose bytes were compared.
    """
    config = options.worker_config()
    rates = [one.received * options.request_bytes / options.seconds / 1e9 for one in having]
    before, after = ([one.tokens / one.seconds for one in windows] for windows in (without, having))
    lanes: Counter[str] = Counter()
    for one in having:
        lanes.update(one.bytes_by_lane)
    return {
        "engine": node.engine,
        "protocol": options.used_protocol,
        "lane": "+".join(lane for lane, _ in lanes.most_common()),
        "device": options.device,
        "shared_gpu": options.device == "cuda" and options.devices[0] == options.devices[1],
        "model": options.model,
        "batch": options.batch,
        "context": options.context,
        "slot_bytes": config.slot_bytes or node.slot_bytes,
        "num_slots": config.num_slots,
        "request_bytes": options.request_bytes,
        "requests_in_flight": options.in_flight,
        "asked_gb_per_s": options.receive_gb_per_s,
        "gb_per_s": statistics.median(rates),
        "gb_per_s_windows": rates,
        "tokens_per_s_without": statistics.median(before),
        "tokens_per_s_with": statistics.median(after),
        "ratio": statistics.median(after) / statistics.median(before),
        "tokens_per_s_windows_without": before,
        "tokens_per_s_windows_with": after,
        "steps_without": sum(len(one.steps.step_s) for one in without),
        "steps_with": sum(len(one.steps.step_s) for one in having),
        **step_percentiles([one.steps for one in without], [one.steps for one in having]),
    }


def bench_node(options: Options) -> None:
    """Time a node's steps while KV is received without pause, beside those while it is not.

    Raises:
        ConfigError: the device is not there.
        StepFailed: a child failed, or bytes are wrong.
    """
    found = measure_node(options)
    report("node", found)
    if found["shared_gpu"]:
        note("both sides are on one GPU: the peer's kernels take from the node too")
    if found["gb_per_s"] < _NEARLY * options.receive_gb_per_s:
        note(
            f"{found['gb_per_s']:.4g} GB/s arrived of the {options.receive_gb_per_s:.4g} that were asked for"
        )
