"""What receiving KV costs a decode that runs, or sending it a prefill.

Two child processes hold a worker each, as in ``transfer``; one of them computes as well. The parent only
asks, compares and reports: windows without and with transfers take turns, then what arrived is looked at.
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
from typing import Any

from benchmarks.cache import CacheShape, Layouts
from benchmarks.harness import DEVICES, PairOptions, Report, carrying_protocol, note, option
from benchmarks.harness import Options as BaseOptions
from benchmarks.loops import (
    DecodeLoop,
    PromptLoop,
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
    Receiver,
    Round,
    WorkerAddress,
    WorkerSide,
    compare_pages,
    open_workers,
)
from kvconnect.cache.specs import div_ceil
from kvconnect.config import ExtraConfig, parse_kv_transfer_config
from kvconnect.pack.arena import auto_slot_bytes
from kvconnect.packages import check_engine

NODE_SIDE = f"{__name__}:NodeSide"
# The part of the asked rate that counts as all of it.
_NEARLY = 0.95
_RAMP_S = 0.5
# How much longer the side that receives goes on than the one that computes, so that it covers it.
_TAIL_S = 0.25
_NAP_S = 0.0005


@dataclass(frozen=True)
class ModelOptions(BaseOptions):
    """A run with one of the models of serving size."""

    device: str = option("cpu", "cpu or cuda.", accepted=DEVICES)
    model: str = option(
        "", "8b or tiny, with random weights.", accepted=tuple(MODEL_SIZES), cpu="tiny", cuda="8b"
    )

    @property
    def size(self) -> ModelSize:
        """The model's widths."""
        return MODEL_SIZES[self.model]


@dataclass(frozen=True)
class Options(ModelOptions, PairOptions):
    """A run."""

    device: str = option(
        "cpu", "cpu, or cuda: one GPU for each side if there are two, else one for both.", accepted=DEVICES
    )
    side: str = option(
        "decode",
        "Who computes: decode, which receives, or prefill, which computes prompts and sends.",
        accepted=("decode", "prefill"),
    )
    engine: str = option("nixl", "Engine of both workers.")
    protocol: str = option(
        "", "Its protocol; default: on a CPU UCX or tcp, else auto. Between CPUs auto is shared memory."
    )
    batch: int = option(0, "Requests that decode.", least=0, cpu=4, cuda=32)
    context: int = option(0, "Tokens of each.", least=0, cpu=64, cuda=4096)
    prompt: int = option(0, "Tokens of a prompt that is computed.", least=0, cpu=64, cuda=2048)
    request_mb: float = option(0.0, "MiB of KV of a received request.", least=0, cpu=0.25, cuda=256.0)
    gb_per_s: float = option(
        0.0,
        "GB/s at which requests are ordered.",
        flag="receive-gb-per-s",
        least=0,
        cpu=0.01,
        cuda=25.0,
    )
    in_flight: int = option(8, "Most requests under way at a time.", least=1)
    layouts: Layouts = option(  # noqa: RUF009
        Layouts.parse("nhd16:nhd16"),
        "PREFILL:DECODE, nhd or hnd with tokens per block.",
        parse=Layouts.parse,
    )
    rounds: int = option(3, "How often without and with alternate.", least=1)
    seconds: float = option(2.0, "Seconds of each.", above=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_engine(self.engine)
        self.worker_config()

    @property
    def used_protocol(self) -> str:
        """The engine's protocol."""
        return self.protocol or carrying_protocol(self.engine, self.device)

    @property
    def computed(self) -> tuple[int, int]:
        """Requests that are computed, and the tokens of each; prompts take turns in the blocks of two."""
        return (self.batch, self.context) if self.side == "decode" else (2, self.prompt)

    @property
    def request_tokens(self) -> int:
        """Tokens of a received request: whole blocks of both sides, and at least one."""
        group = self.layouts.group_tokens
        return max(1, round(self.request_mb * 2**20 / self.size.token_bytes / group)) * group

    @property
    def request_bytes(self) -> int:
        """Bytes of KV of a received request."""
        return self.request_tokens * self.size.token_bytes

    def request_blocks(self) -> tuple[int, int]:
        """Blocks of a received request, on the prefill and on the decode side."""
        layouts, tokens = self.layouts, self.request_tokens
        return tokens // layouts.prefill.block_tokens, tokens // layouts.decode.block_tokens

    def shapes(self) -> tuple[CacheShape, CacheShape]:
        """The caches of both sides: the requests that are under way, and what the one side computes with."""
        made = []
        for side, blocks in zip(("prefill", "decode"), self.request_blocks(), strict=True):
            layout = getattr(self.layouts, side)
            batch, tokens = self.computed if side == self.side else (0, 0)
            # One more for the null block.
            needed = 1 + self.in_flight * blocks + batch * div_ceil(tokens, layout.block_tokens)
            made.append(self.size.shape(needed, layout))
        return made[0], made[1]

    def worker_config(self) -> ExtraConfig:
        """What these settings are.

        Raises:
            ConfigError: one of them is not accepted.
        """
        extra = {"engine": self.engine, "protocol": self.used_protocol, **(self.extra or {})}
        return parse_kv_transfer_config({"kv_role": "kv_both", "kv_connector_extra_config": extra}).extra


# ---- in a child


@dataclass(frozen=True)
class Window:
    """A time to measure in. What happens in the first ``ramp_s`` and the last ``tail_s`` does not count."""

    ramp_s: float
    seconds: float
    tail_s: float = 0.0


@dataclass(frozen=True)
class Flow:
    """What is received meanwhile: requests that ``source`` holds, at a rate."""

    requests: Round
    request_bytes: int
    bytes_per_s: float
    source: WorkerAddress


@dataclass(frozen=True)
class WindowResult:
    """What one side did in a window.

    ``seconds`` are those of the steps, or without steps the window's. ``last_in_slot`` says which request
    came to which blocks last, in and after the window.
    """

    seconds: float
    steps: StepTimes
    tokens: int
    received: int
    last_in_slot: Mapping[int, int]
    bytes_by_lane: Mapping[str, int]


class NodeSide(WorkerSide):
    """A worker that may compute. ``build`` comes after ``draw``, which says what is received where.

    The steps, the orders and the results are of one thread, as in a node; the worker's own thread moves. So
    the interpreter is shared as it is there.
    """

    _loop: DecodeLoop | PromptLoop | None = None

    def build(self, options: Options) -> None:
        """Make the model, give it blocks that no request is received into, and capture its step."""
        cache = self.cache
        batch, tokens = options.computed
        model = BenchModel(options.size, cache.shape.layout, cache.device)
        taken = {block for slot in cache.slots for block in slot}
        free = [block for block in range(1, cache.shape.num_blocks) if block not in taken]
        random.Random(options.model).shuffle(free)
        each = div_ceil(tokens, cache.shape.layout.block_tokens)
        blocks = [free[row * each : (row + 1) * each] for row in range(batch)]
        shared = SharedCache(model, cache, batch, tokens)
        fill_blocks(shared, blocks)
        make = DecodeLoop if options.side == "decode" else PromptLoop
        self._loop = make(model, shared, blocks, tokens)

    def auto_slot_bytes(self) -> int:
        """The size of slots where nobody says."""
        return auto_slot_bytes(self.cache.device)

    def measure(self, window: Window, flow: Flow | None) -> WindowResult:
        """Compute, receive, or both, and time it. Returns when nothing is under way to this side."""
        receiver = None
        if flow is not None:
            receiver = self._receiver(flow.requests, flow.source, flow.request_bytes, flow.bytes_per_s)
        self._counted()
        began = time.perf_counter()
        until = began + window.ramp_s + window.seconds
        steps: list[StepTime] = []

        def exchange() -> None:
            # Once a step is launched, as a serving stack does: its own host work comes first.
            if receiver is not None:
                now = time.perf_counter()
                receiver.take(self.connector.results(), now)
                self.connector.start(receiver.orders(now))

        while time.perf_counter() < until + window.tail_s:
            if self._loop is not None:
                steps.append(self._loop.step(exchange))
            else:
                self._woken.wait(_NAP_S)
                self._woken.clear()
                exchange()
        deadline = time.monotonic() + self._timeout_s
        while receiver is not None and receiver.in_flight:
            results = self._next_results(deadline, f"{receiver.in_flight} requests have not arrived")
            receiver.take(results, time.perf_counter())
        return self._result(steps, receiver, began + window.ramp_s, until)

    def _result(
        self, steps: list[StepTime], receiver: Receiver | None, counted_from: float, until: float
    ) -> WindowResult:
        """Of the window alone: steps and arrivals that ended in it.

        Raises:
            StepFailed: no two steps ended in it.
        """
        counted = StepTimes.within(steps, counted_from, until)
        if self._loop is not None and not counted.step_s:
            raise StepFailed(
                f"{len(steps)} steps ended within {until - counted_from:g} s: set seconds higher"
            )
        arrivals = receiver.arrivals if receiver else ()
        lanes, _ = self._counted()
        return WindowResult(
            seconds=sum(counted.step_s) or until - counted_from,
            steps=counted,
            tokens=len(counted.step_s) * (self._loop.tokens_per_step if self._loop else 0),
            received=sum(counted_from < arrival <= until for arrival in arrivals),
            last_in_slot=receiver.last_in_slot if receiver else {},
            bytes_by_lane=lanes,
        )


# ---- in the parent


class NodePair:
    """A node with its peer, opened, and the windows that it is asked for."""

    def __init__(self, pair: ChildPair, options: Options) -> None:
        self._pair, self._options = pair, options
        self._numbers = itertools.count(1)
        self._landed: dict[int, int] = {}
        self._window = Window(_RAMP_S, options.seconds)
        whole_s = _RAMP_S + options.seconds + _TAIL_S
        # As many as the rate asks for, and those that make up for a pause.
        self._held = math.ceil(whole_s * options.gb_per_s * 1e9 / options.request_bytes) + options.in_flight
        self._source = open_workers(pair, options.engine, options.used_protocol, options.shapes(), options)
        self.engine = self._source.engine
        blocks = zip(options.request_blocks(), SEEDS, strict=True)
        pair.both("draw", *((options.in_flight, count, seed) for count, seed in blocks))
        self._node = pair.decode if options.side == "decode" else pair.prefill
        self._node.ask("build", options)
        self.slot_bytes: int = pair.decode.ask("auto_slot_bytes")

    def meet(self) -> None:
        """A round that does not count: it meets the peer, maps memory and compiles kernels."""
        asked = self._round(2 * self._options.in_flight)
        self._pair.prefill.ask("hold", asked)
        self._pair.decode.ask("load", asked, self._source)
        self._pair.prefill.ask("drain", asked)
        self._pair.decode.ask("clear")

    def without(self) -> WindowResult:
        """A window in which nothing is under way."""
        result: WindowResult = self._node.ask("measure", self._window, None)
        return result

    def with_transfers(self) -> tuple[WindowResult, WindowResult]:
        """A window in which requests are received: what the node did, and what the receiver did."""
        options, pair = self._options, self._pair
        asked = self._round(self._held)
        pair.prefill.ask("hold", asked)
        flow = Flow(asked, options.request_bytes, options.gb_per_s * 1e9, self._source)
        sender: WindowResult
        receiver: WindowResult
        if self._node is pair.decode:
            sender = receiver = pair.decode.ask("measure", self._window, flow)
        else:
            longer = Window(_RAMP_S, options.seconds, _TAIL_S)
            sender, receiver = pair.both("measure", (self._window, None), (longer, flow))
        self._landed.update(receiver.last_in_slot)
        return sender, receiver

    def check(self) -> int:
        """Compare every page of the requests that came to their blocks last with where it came from.

        Returns how many requests that were.

        Raises:
            StepFailed: a page differs, or nothing was received.
        """
        if not self._landed:
            raise StepFailed("no request was received: set seconds higher, or request_mb lower")
        options = self._options
        compare_pages(self._pair, self._landed, options.in_flight, options.layouts.group_tokens)
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
        computed: list[WindowResult] = []
        received: list[WindowResult] = []
        for _ in range(options.rounds):
            without.append(node.without())
            result, receiver = node.with_transfers()
            computed.append(result)
            received.append(receiver)
        verified = node.check()
        return {**_timing(options, node, without, computed, received), "verified": verified}


def _timing(
    options: Options,
    node: NodePair,
    without: Sequence[WindowResult],
    computed: Sequence[WindowResult],
    received: Sequence[WindowResult],
) -> dict[str, Any]:
    """One measured setting of the transfer threads.

    Rates are medians of the windows, ``tokens_per_s_windows`` by window in order, ``ratio`` that of the
    medians. Times of steps are those of all windows of a kind: the whole step, what the host did until it
    was launched, and what the GPU worked. ``verified`` counts the requests whose bytes were compared.
    """
    config = options.worker_config()
    rates = [one.received * options.request_bytes / options.seconds / 1e9 for one in received]
    before, after = ([one.tokens / one.seconds for one in windows] for windows in (without, computed))
    lanes: Counter[str] = Counter()
    for one in received:
        lanes.update(one.bytes_by_lane)
    batch, context = options.computed
    return {
        "side": options.side,
        "engine": node.engine,
        "protocol": options.used_protocol,
        "lane": "+".join(lane for lane, _ in lanes.most_common()),
        "device": options.device,
        "shared_gpu": options.device == "cuda" and options.devices[0] == options.devices[1],
        "model": options.model,
        "batch": batch,
        "context": context,
        "layouts": str(options.layouts),
        "slot_bytes": config.slot_bytes or node.slot_bytes,
        "num_slots": config.num_slots,
        "request_bytes": options.request_bytes,
        "requests_in_flight": options.in_flight,
        "asked_gb_per_s": options.gb_per_s,
        "gb_per_s": statistics.median(rates),
        "gb_per_s_windows": rates,
        "tokens_per_s_without": statistics.median(before),
        "tokens_per_s_with": statistics.median(after),
        "ratio": statistics.median(after) / statistics.median(before),
        "tokens_per_s_windows_without": before,
        "tokens_per_s_windows_with": after,
        "steps_without": sum(len(one.steps.step_s) for one in without),
        "steps_with": sum(len(one.steps.step_s) for one in computed),
        **step_percentiles([one.steps for one in without], [one.steps for one in computed]),
    }


def bench_node(options: Options, report: Report) -> int:
    """Time a node's steps while KV is received without pause, beside those while it is not.

    Returns 0, or 1 if it could not be measured, which is shown.

    Raises:
        ConfigError: the device is not there.
    """
    try:
        found = measure_node(options)
    except StepFailed as error:
        report.failed(error)
        return 1
    report.add(found)
    if found["shared_gpu"]:
        note("both sides are on one GPU: the peer's kernels take from the node too")
    if found["gb_per_s"] < _NEARLY * options.gb_per_s:
        note(f"{found['gb_per_s']:.4g} GB/s arrived of the {options.gb_per_s:.4g} that were asked for")
    return 0
