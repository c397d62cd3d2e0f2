"""Driving two children through what is measured: an engine's limit, then the cases of a pair of workers.

Runs in the parent and only asks, compares and reports; every clock and every byte is in the children. One
thing that fails is shown and the rest goes on; the exit code tells.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.options import parse_environment
from benchmarks.report import Report
from benchmarks.transfer.cases import (
    CacheShape,
    EngineAddress,
    EngineLimit,
    PairCase,
    Round,
    RoundResult,
    WorkerAddress,
    WorkerSettings,
)
from benchmarks.transfer.options import Options
from benchmarks.transfer.process import ChildPair, StepFailed
from kvconnect.errors import ConfigError

if TYPE_CHECKING:
    from benchmarks.node.options import Options as NodeOptions

ENGINE_SIDE = "benchmarks.transfer.limit:EngineSide"
WORKER_SIDE = "benchmarks.transfer.side:WorkerSide"
SEEDS = (0xF11, 0xDEC)

Devices = tuple[str, str]


class EngineUnusable(StepFailed):
    """An engine could not be opened at all, so nothing can be measured with it."""


def devices_of(device: str) -> Devices:
    """Where prefill and decode live: on two GPUs if there are two.

    Raises:
        ConfigError: there is no GPU.
    """
    if device == "cpu":
        return "cpu", "cpu"
    import torch

    count = torch.cuda.device_count()
    if not count:
        raise ConfigError("device is 'cuda', but torch sees no CUDA device here; accepted: cpu")
    return "cuda:0", "cuda:1" if count > 1 else "cuda:0"


def measure_limit(options: Options, engine: str, devices: Devices) -> EngineLimit:
    """What an engine reaches with nothing above it.

    Raises:
        EngineUnusable: it cannot be opened here.
        StepFailed: it failed later.
    """
    with ChildPair(ENGINE_SIDE, parse_environment(options.environment), options.timeout_s) as pair:
        source: EngineAddress
        target: EngineAddress
        try:
            source, target = pair.both("open", *((options, engine, device) for device in devices))
        except StepFailed as error:
            raise EngineUnusable(str(error)) from error
        pair.prefill.ask("connect", target)
        batch_bytes = min(source.max_bytes, target.max_bytes)
        contiguous: float = pair.prefill.ask("contiguous", batch_bytes)
        peer_copy: float | None = None
        if options.device == "cuda":
            peer_copy = pair.prefill.ask("peer_copy", devices[1])
    return EngineLimit(source.engine, options.device, batch_bytes, contiguous, peer_copy)


def open_workers(
    pair: ChildPair,
    engine: str,
    protocol: str,
    devices: Devices,
    shapes: tuple[CacheShape, CacheShape],
    options: Options | NodeOptions,
) -> WorkerAddress:
    """Make both sides, the one that sends with random bytes in its cache. Returns where that one is.

    Raises:
        StepFailed: one cannot be made.
    """
    prefill, decode = (
        WorkerSettings(
            role, engine, protocol, device, shape, seed, options.timeout_s, dict(options.extra or {})
        )
        for role, device, shape, seed in zip(
            ("kv_producer", "kv_consumer"), devices, shapes, (SEEDS[0], None), strict=True
        )
    )
    source: WorkerAddress
    source, _ = pair.both("open", (prefill,), (decode,))
    return source


def compare_pages(pair: ChildPair, last_in_slot: Mapping[int, int], in_flight: int, tokens: int) -> None:
    """Compare every page of the requests that came to their slots last with where it came from.

    Raises:
        StepFailed: a page differs.
    """
    targets = sorted(last_in_slot)
    sources = [last_in_slot[slot] % in_flight for slot in targets]
    held, landed = pair.both("digests", (sources, tokens), (targets, tokens))
    if held.shape != landed.shape:
        raise StepFailed(f"{held.shape} pages were held, {landed.shape} have arrived")
    if wrong := int(np.count_nonzero(held != landed)):
        raise StepFailed(f"{wrong} of {held.size} pages do not hold the bytes that were sent")


class PairRounds:
    """One pair of workers, opened, and the rounds of requests that it is asked for."""

    def __init__(self, pair: ChildPair, options: Options, case: PairCase, devices: Devices) -> None:
        self._pair, self._options, self._case = pair, options, case
        self._numbers = itertools.count(1)
        shapes = options.shapes(case)
        self._source = open_workers(pair, case.engine, case.protocol, devices, shapes, options)
        self.bytes_per_block = shapes[0].total_bytes // shapes[0].num_blocks

    def draw(self, blocks: int, in_flight: int) -> None:
        """Choose blocks on both sides: of different ids, in different order."""
        both = zip((blocks, self._case.decode_blocks(blocks)), SEEDS, strict=True)
        self._pair.both("draw", *((in_flight, count, seed + in_flight * blocks) for count, seed in both))

    def round(self, blocks: int, requests: int, in_flight: int) -> RoundResult:
        """Hold, fetch, and wait until nothing is held any more."""
        asked = Round(f"round{next(self._numbers)}", requests, in_flight, self._case.tokens(blocks))
        self._pair.prefill.ask("hold", asked)
        result: RoundResult = self._pair.decode.ask("load", asked, self._source)
        self._pair.prefill.ask("drain", asked)
        return result

    def check(self, result: RoundResult, in_flight: int) -> None:
        """Compare every page that the requests of a round left behind with where it came from.

        Raises:
            StepFailed: a page differs.
        """
        compare_pages(self._pair, result.last_in_slot, in_flight, self._case.layouts.group_tokens)

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
        limit: EngineLimit | None,
    ) -> dict[str, Any]:
        """One measured case, beside what the engine alone reached.

        ``total_bytes`` are the bytes of ``requests`` requests, which ``seconds`` is the median time of, over
        ``samples`` measurements. With one request in flight a measurement is one request, so ``seconds`` is
        its latency. ``copies`` are per request. ``of_contiguous`` is the part of the engine's own rate.
        """
        case, lanes = self._case, results[0].bytes_by_lane
        shown = limit and limit.rounded()
        samples = [result.seconds for result in results]
        seconds = statistics.median(samples)
        latency_s = statistics.median(one for result in results for one in result.latencies_s)
        total_bytes = requests * blocks * self.bytes_per_block
        rate = round(total_bytes / seconds / 1e9, 3)
        return {
            "engine": self._source.engine,
            "protocol": case.protocol,
            # The one with most of the bytes first.
            "lane": "+".join(sorted(lanes, key=lambda lane: -lanes[lane])),
            "device": self._options.device,
            "layouts": str(case.layouts),
            "page_bytes": case.page_bytes,
            "blocks": blocks,
            "regions": self._options.regions,
            "requests": requests,
            "requests_in_flight": in_flight,
            "total_bytes": total_bytes,
            "seconds": round(seconds, 7),
            "best_seconds": round(min(samples), 7),
            "latency_ms": round(latency_s * 1e3, 4),
            "samples": len(samples),
            "gb_per_s": rate,
            "engine_contiguous_gb_per_s": shown and shown.contiguous_gb_per_s,
            "of_contiguous": limit and round(rate / limit.contiguous_gb_per_s, 3),
            "peer_copy_gb_per_s": shown and shown.peer_copy_gb_per_s,
            "copies": round(results[0].copies / requests),
            "verified": True,
        }


def measure_pairs(
    options: Options, cases: Sequence[PairCase], devices: Devices, limit: EngineLimit | None
) -> Iterator[dict[str, Any]]:
    """Every number of blocks and of requests in flight, over a pair of workers for each case.

    Their rounds take turns: what disturbs the machine meanwhile disturbs all of them.

    Raises:
        StepFailed: a child failed; what was measured before it has been yielded.
    """
    environment = parse_environment(options.environment)
    with contextlib.ExitStack() as stack:
        opened = [
            PairRounds(
                stack.enter_context(ChildPair(WORKER_SIDE, environment, options.timeout_s)),
                options,
                case,
                devices,
            )
            for case in cases
        ]
        for blocks in dict.fromkeys(options.used_blocks):
            for in_flight in dict.fromkeys(options.in_flight):
                requests = 1 if in_flight == 1 else max(options.requests, in_flight)
                rounds = options.repeat * (options.requests if in_flight == 1 else 1)
                results = _in_turn(opened, blocks, requests, in_flight, rounds, options.budget_s)
                for pair, found in zip(opened, results, strict=True):
                    yield pair.timing(blocks, requests, in_flight, found, limit)


def _in_turn(
    opened: Sequence[PairRounds], blocks: int, requests: int, in_flight: int, rounds: int, budget_s: float
) -> list[list[RoundResult]]:
    """The results of each pair's rounds."""
    for pair in opened:
        pair.begin(blocks, in_flight)
    results: list[list[RoundResult]] = [[] for _ in opened]
    until = time.monotonic() + budget_s * len(opened)
    while len(results[0]) < rounds and (not results[0] or time.monotonic() < until):
        for pair, found in zip(opened, results, strict=True):
            found.append(pair.round(blocks, requests, in_flight))
    return results


def bench_transfer(options: Options, report: Report) -> int:
    """Time the KV of requests between two workers, beside what the engine alone can do.

    Returns 0, or 1 if something could not be measured.

    Raises:
        ConfigError: the device is not there.
    """
    devices = devices_of(options.device)
    limits: set[str] = set()
    failures = 0

    def failed(error: StepFailed, engine: str, case: PairCase | None = None) -> None:
        nonlocal failures
        failures += 1
        where: dict[str, Any] = {"engine": engine}
        if case is not None:
            where.update(protocol=case.protocol, layouts=str(case.layouts), page_bytes=case.page_bytes)
        report.failed(error, **where)

    for asked in dict.fromkeys(options.engines):
        engine, limit = asked, None
        try:
            limit = measure_limit(options, asked, devices)
            if limit.engine in limits:
                # What auto stands for was asked for by name too.
                continue
            engine = limit.engine
            limits.add(engine)
            report.add(limit.rounded(), "engine")
        except EngineUnusable as error:
            failed(error, asked)
            continue
        except StepFailed as error:
            failed(error, asked)
        for cases in options.pairs_at_once(engine):
            try:
                for timing in measure_pairs(options, cases, devices, limit):
                    report.add(timing)
            except StepFailed as error:
                failed(error, engine, cases[0] if len(cases) == 1 else None)
    return 1 if failures else 0
