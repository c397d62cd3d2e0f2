"""How fast the KV of requests moves between two workers, beside what the engine alone can do.

Two child processes hold one side each: ``WorkerSide`` a worker with its cache, ``EngineSide`` an engine with
nothing above it. The parent only asks, compares and reports; every clock and every byte is in the children.
An engine that fails is reported and the rest goes on; then the exit code is 1.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, ClassVar

import torch

from benchmarks.cache import BLOCK_TOKENS, VALUE_BYTES, CacheShape
from benchmarks.device import check_device, use_device, wait_for_device
from benchmarks.harness import Options as BaseOptions
from benchmarks.harness import note, report
from benchmarks.process import ChildPair, Side, StepFailed
from benchmarks.worker import Round, RoundResult, WorkerAddress
from kvconnect.config import parse_kv_transfer_config
from kvconnect.engine.base import Batch, Engine, Span
from kvconnect.engine.registry import create_engine
from kvconnect.errors import ConfigError
from kvconnect.node.pair_demo import PROTOCOLS
from kvconnect.pack.arena import Arena
from kvconnect.packages import engine_mistakes
from kvconnect.reading import json_object, refuse

ENGINE_SIDE = f"{__name__}:EngineSide"
WORKER_SIDE = "benchmarks.worker:WorkerSide"
_ROW_BYTES = 512
_SEEDS = (0xF11, 0xDEC)
_BATCHES_IN_BUFFER = 4
_BATCHES_PER_SAMPLE = 8
_PEER = "target"


@dataclass(frozen=True)
class PairCase:
    """What one pair of workers is made for."""

    engine: str
    protocol: str
    page_bytes: int

    def shape(self, regions: int, blocks: int, in_flight: int) -> CacheShape:
        """The cache of a side, with room for so many requests and a quarter more."""
        token_bytes = self.page_bytes // BLOCK_TOKENS
        # Heads of 128 values where that fits.
        heads = token_bytes // _ROW_BYTES if token_bytes % _ROW_BYTES == 0 else 1
        head_size = token_bytes // heads // (2 * VALUE_BYTES)
        # One more for the null block, and at least one that no request has.
        return CacheShape(regions, blocks * in_flight * 5 // 4 + 2, heads, head_size)


@dataclass(frozen=True)
class Options(BaseOptions):
    """A run with two workers in processes of their own: several values of an option are measured in turn."""

    SUITED: ClassVar = {"blocks": ([16, 64], [256, 1024]), "batch_bytes": (64 << 20, 256 << 20)}

    device: Annotated[str, "cpu, or cuda: one GPU for each side if there are two, else one for both."] = "cpu"
    timeout_s: Annotated[float, "Seconds that one step of a child may take."] = 120.0
    extra: Annotated[str, "Further settings of kv_connector_extra_config, a JSON object."] = "{}"
    engine: Annotated[list[str], "Engine to measure (repeatable)."] = field(default_factory=lambda: ["auto"])
    protocol: Annotated[
        list[str],
        "Protocol of the engine (repeatable); default: on a CPU UCX or tcp, else auto. Between CPUs auto "
        "measures shared memory.",
    ] = field(default_factory=list)
    page_bytes: Annotated[list[int], "Bytes of a page (repeatable)."] = field(
        default_factory=lambda: [4096, 16384]
    )
    blocks: Annotated[
        list[int], "Blocks of a request (repeatable); default: 256 and 1024, on a CPU 16 and 64."
    ] = field(default_factory=list)
    regions: Annotated[int, "Layers, each in its own allocation."] = 64
    requests: Annotated[int, "Requests per measurement."] = 16
    in_flight: Annotated[list[int], "Requests at a time (repeatable); the time of 1 is a latency."] = field(
        default_factory=lambda: [1, 8]
    )
    repeat: Annotated[int, "Measurements per case."] = 5
    budget_s: Annotated[float, "Seconds after which a case is not repeated."] = 10.0
    batch_bytes: Annotated[
        int, "Bytes of the engine's own contiguous copies; default: 256 MiB, on a CPU 64."
    ] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse([mistake for engine in self.engine for mistake in engine_mistakes(engine, "engine")])
        # Mistakes of every pair are reported before the first one is started.
        parse_kv_transfer_config({"kv_role": "kv_both", "kv_connector_extra_config": self.settings})
        # Keys and values of two bfloat16 values each, the least that a token has here.
        unit = BLOCK_TOKENS * 2 * 2 * VALUE_BYTES
        for page_bytes in self.page_bytes:
            if page_bytes % unit:
                raise ConfigError(f"page_bytes is {page_bytes}; accepted: multiples of {unit}")

    @property
    def settings(self) -> Mapping[str, Any]:
        """The further settings. Raises ``ConfigError`` if they are no JSON object."""
        return json_object(self.extra, "extra")

    @property
    def devices(self) -> tuple[str, str]:
        """The devices of prefill and decode. Raises ``ConfigError``: there is no GPU."""
        if self.device == "cpu":
            return "cpu", "cpu"
        check_device(self.device)
        return "cuda:0", "cuda:1" if torch.cuda.device_count() > 1 else "cuda:0"

    def protocols_of(self, engine: str) -> list[str]:
        """The protocols to measure an engine with: with auto, CPU caches of one machine share memory."""
        return self.protocol or [PROTOCOLS.get(engine, "auto") if self.device == "cpu" else "auto"]

    def cases(self, engine: str) -> list[PairCase]:
        """The pairs of workers to measure with an engine."""
        choices = itertools.product(self.page_bytes, self.protocols_of(engine))
        return [PairCase(engine, protocol, page_bytes) for page_bytes, protocol in choices]


# ---- an engine alone


@dataclass(frozen=True)
class EngineAddress:
    """What the other side must know of an opened engine. ``max_bytes`` is the most that a batch holds."""

    engine: str
    card: bytes
    address: int
    max_bytes: int


@dataclass(frozen=True)
class EngineLimit:
    """What an engine alone reaches between the two devices.

    ``contiguous`` is one copy per batch of ``batch_bytes``, ``peer_copy`` a plain copy of a tensor between
    the devices (None without a GPU).
    """

    engine: str
    device: str
    batch_bytes: int
    contiguous_gb_per_s: float
    peer_copy_gb_per_s: float | None


class EngineSide(Side):
    """An engine and one registered buffer. ``open`` comes first; ``connect`` before anything is sent."""

    def open(self, options: Options, engine: str, device: str) -> EngineAddress:
        """Make the engine and register a buffer of a few batches."""
        use_device(device)
        self._options, self._device = options, device
        self._batch_ids = itertools.count(1)
        self.engine = _make_engine(options, engine)
        self.ends.callback(self.engine.close)
        # Such memory as workers have: an engine is faster with huge pages.
        arena = Arena(device, options.batch_bytes, _BATCHES_IN_BUFFER)
        self._buffer = arena.view(arena.address, arena.length_bytes).zero_()
        wait_for_device(device)
        self.engine.register([Span(self._buffer.data_ptr(), self._buffer.numel(), device)])
        bounds = self.engine.capabilities
        if bounds.target_must_poll:
            self.idle_pause_s = 0.0
        most = min(options.batch_bytes, bounds.max_bytes)
        return EngineAddress(bounds.name, self.engine.card(), self._buffer.data_ptr(), most)

    def connect(self, target: EngineAddress) -> None:
        """Know the other side."""
        self.engine.connect(_PEER, target.card)
        self._target = target.address

    def contiguous(self, batch_bytes: int) -> float:
        """GB/s with one copy per batch, several batches in flight if the engine allows it."""
        return self._median_rate(lambda: self._send(batch_bytes), _BATCHES_PER_SAMPLE * batch_bytes)

    def peer_copy(self, device: str) -> float:
        """GB/s of copying one tensor from this side's device to another."""
        source = self._buffer[: self._options.batch_bytes]
        target = torch.zeros_like(source, device=device)

        def copy() -> None:
            for _ in range(_BATCHES_PER_SAMPLE):
                target.copy_(source, non_blocking=True)
            wait_for_device(self._device)
            wait_for_device(device)

        return self._median_rate(copy, _BATCHES_PER_SAMPLE * source.numel())

    def idle(self) -> None:
        """Advance what the other side has in flight to us."""
        self.engine.poll()

    def _median_rate(self, run: Callable[[], None], total_bytes: int) -> float:
        """GB/s, from the median of a few runs after one that does not count."""
        until = time.monotonic() + self._options.budget_s
        samples: list[float] = []
        while len(samples) < 2 or (len(samples) <= self._options.repeat and time.monotonic() < until):
            began = time.perf_counter()
            run()
            samples.append(time.perf_counter() - began)
        return total_bytes / statistics.median(samples[1:]) / 1e9

    def _send(self, batch_bytes: int) -> None:
        """From the first post to the last completion.

        Raises:
            StepFailed: the engine failed one, or did not answer in time.
        """
        engine, timeout_s = self.engine, self._options.timeout_s
        room = engine.capabilities.max_batches_per_peer
        deadline = time.monotonic() + timeout_s
        posted = in_flight = 0
        while posted < _BATCHES_PER_SAMPLE or in_flight:
            while posted < _BATCHES_PER_SAMPLE and in_flight < room:
                offset = posted % _BATCHES_IN_BUFFER * batch_bytes
                source, target = self._buffer.data_ptr() + offset, self._target + offset
                engine.submit(Batch(next(self._batch_ids), _PEER, source, target, batch_bytes, timeout_s))
                posted, in_flight = posted + 1, in_flight + 1
            for completion in engine.poll():
                in_flight -= 1
                if not completion.ok:
                    raise StepFailed(f"the engine failed a batch: {completion.error}")
            if time.monotonic() > deadline:
                raise StepFailed(f"{in_flight} batches were not answered within {timeout_s:g} s")


def _make_engine(options: Options, engine: str) -> Engine:
    """The engine that a worker so configured takes, with batches as large as asked if it lets us."""
    asked = {"engine": engine, "protocol": options.protocols_of(engine)[0], **options.settings}
    extra = parse_kv_transfer_config({"kv_role": "kv_both", "kv_connector_extra_config": asked}).extra
    given = extra.all_engine_options
    try:
        sized = {"max_bytes": options.batch_bytes, **given}
        return create_engine(extra.engine, host=extra.host, protocol=extra.protocol, options=sized)
    except ConfigError:
        return create_engine(extra.engine, host=extra.host, protocol=extra.protocol, options=given)


def measure_limit(options: Options, engine: str) -> EngineLimit:
    """The rates of an engine with nothing above it. Raises ``StepFailed``: it cannot be opened, or failed."""
    with ChildPair(ENGINE_SIDE, options.timeout_s) as pair:
        source: EngineAddress
        target: EngineAddress
        source, target = pair.both("open", *((options, engine, device) for device in options.devices))
        pair.prefill.ask("connect", target)
        batch_bytes = min(source.max_bytes, target.max_bytes)
        contiguous: float = pair.prefill.ask("contiguous", batch_bytes)
        peer_copy = pair.prefill.ask("peer_copy", options.devices[1]) if options.device == "cuda" else None
    return EngineLimit(source.engine, options.device, batch_bytes, contiguous, peer_copy)


# ---- pairs of workers


class PairRounds:
    """One pair of workers, opened, and the rounds of requests that it is asked for."""

    def __init__(self, pair: ChildPair, options: Options, case: PairCase) -> None:
        self._pair, self._options, self._case = pair, options, case
        self._numbers = itertools.count(1)
        shape = case.shape(options.regions, max(options.blocks), max(options.in_flight))
        settings = {"engine": case.engine, "protocol": case.protocol, **options.settings}
        # Random bytes where they come from, none where they land.
        sides = zip(("kv_producer", "kv_consumer"), options.devices, (_SEEDS[0], None), strict=True)
        self._source: WorkerAddress
        self._source, _ = pair.both(
            "open",
            *(
                ({"kv_role": role}, device, shape, seed, options.timeout_s, settings)
                for role, device, seed in sides
            ),
        )
        self.bytes_per_block = shape.block_bytes

    def draw(self, blocks: int, in_flight: int) -> None:
        """Choose blocks on both sides: of different ids, in different order."""
        self._pair.both("draw", *((in_flight, blocks, seed + in_flight * blocks) for seed in _SEEDS))

    def round(self, blocks: int, requests: int, in_flight: int) -> RoundResult:
        """Hold, fetch, and wait until nothing is held any more."""
        asked = Round(f"round{next(self._numbers)}", requests, in_flight, blocks * BLOCK_TOKENS)
        self._pair.prefill.ask("hold", asked)
        result: RoundResult = self._pair.decode.ask("load", asked, self._source)
        self._pair.prefill.ask("drain", asked)
        return result

    def check(self, result: RoundResult, in_flight: int) -> None:
        """Compare every page that a round left behind with where it came from; raises ``StepFailed``."""
        targets = sorted(result.last_in_slot)
        sources = [result.last_in_slot[slot] % in_flight for slot in targets]
        held, landed = self._pair.both("digests", (sources,), (targets,))
        if wrong := int((held != landed).sum()):
            raise StepFailed(f"{wrong} of {held.size} pages do not hold the bytes that were sent")

    def begin(self, blocks: int, in_flight: int) -> None:
        """Make a case ready, and check what its first round leaves behind."""
        self.draw(blocks, in_flight)
        # The first one meets the peer, and maps memory: it does not count.
        self.round(blocks, in_flight, in_flight)
        self._pair.decode.ask("clear")
        self.check(self.round(blocks, in_flight, in_flight), in_flight)

    def timing(
        self,
        blocks: int,
        requests: int,
        in_flight: int,
        results: Sequence[RoundResult],
        limit: EngineLimit,
    ) -> dict[str, Any]:
        """One measured case, beside what the engine alone reached.

        ``total_bytes`` are the bytes of ``requests`` requests, which ``seconds`` is the median time of, over
        ``samples`` measurements. With one request in flight a measurement is one request, so ``seconds`` is
        its latency. ``copies`` are per request. ``of_contiguous`` is the part of the engine's own rate.
        """
        case, lanes = self._case, results[0].bytes_by_lane
        samples = [result.seconds for result in results]
        seconds = statistics.median(samples)
        total_bytes = requests * blocks * self.bytes_per_block
        rate = total_bytes / seconds / 1e9
        return {
            "engine": self._source.engine,
            "protocol": case.protocol,
            # The one with most of the bytes first.
            "lane": "+".join(sorted(lanes, key=lambda lane: -lanes[lane])),
            "device": self._options.device,
            "page_bytes": case.page_bytes,
            "blocks": blocks,
            "regions": self._options.regions,
            "requests": requests,
            "requests_in_flight": in_flight,
            "total_bytes": total_bytes,
            "seconds": seconds,
            "best_seconds": min(samples),
            "latency_ms": statistics.median(one for result in results for one in result.latencies_s) * 1e3,
            "samples": len(samples),
            "gb_per_s": rate,
            "engine_contiguous_gb_per_s": limit.contiguous_gb_per_s,
            "of_contiguous": rate / limit.contiguous_gb_per_s,
            "peer_copy_gb_per_s": limit.peer_copy_gb_per_s,
            "copies": round(results[0].copies / requests),
            "verified": True,
        }


def measure_pairs(options: Options, case: PairCase, limit: EngineLimit) -> Iterator[dict[str, Any]]:
    """Every number of blocks and of requests in flight, over one pair of workers.

    Raises:
        StepFailed: a child failed; what was measured before it has been yielded.
    """
    with ChildPair(WORKER_SIDE, options.timeout_s) as pair:
        opened = PairRounds(pair, options, case)
        for blocks, in_flight in itertools.product(options.blocks, options.in_flight):
            requests = 1 if in_flight == 1 else max(options.requests, in_flight)
            rounds = options.repeat * (options.requests if in_flight == 1 else 1)
            opened.begin(blocks, in_flight)
            results: list[RoundResult] = []
            until = time.monotonic() + options.budget_s
            while len(results) < rounds and (not results or time.monotonic() < until):
                results.append(opened.round(blocks, requests, in_flight))
            yield opened.timing(blocks, requests, in_flight, results, limit)


def bench_transfer(options: Options) -> int:
    """Time the KV of requests between two workers, beside what the engine alone can do.

    Returns 0, or 1 if something could not be measured: it is reported with the reason, and the rest goes on.

    Raises:
        ConfigError: the device is not there.
    """
    failures = 0
    for engine in options.engine:
        where: dict[str, Any] = {"engine": engine}
        try:
            limit = measure_limit(options, engine)
            report("engine", limit)
            for case in options.cases(limit.engine):
                where = asdict(case)
                for timing in measure_pairs(options, case, limit):
                    report("transfer", timing)
        except StepFailed as error:
            failures += 1
            report("transfer", {**where, "error": str(error)})
            note(f"not measured: {where}: {error}")
    return 1 if failures else 0
