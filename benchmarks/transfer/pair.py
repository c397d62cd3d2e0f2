"""Driving two children through what is to be measured: an engine's limit, or the cases of a pair of workers.

Runs in the parent and only asks and compares; every clock and every byte is in the children.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.options import parse_environment
from benchmarks.transfer.cases import (
    CacheShape,
    EngineLimit,
    PairCase,
    Round,
    RoundResult,
    TransferTiming,
)
from benchmarks.transfer.options import Options
from benchmarks.transfer.process import ChildPair, StepFailed
from benchmarks.transfer.settings import EngineAddress, EngineSettings, WorkerAddress, WorkerSettings

if TYPE_CHECKING:
    from benchmarks.node.options import Options as NodeOptions

ENGINE_SIDE = "benchmarks.transfer.limit:EngineSide"
WORKER_SIDE = "benchmarks.transfer.side:WorkerSide"
SEEDS = (0xF11, 0xDEC)

Devices = tuple[str, str]


class EngineUnusable(StepFailed):
    """An engine could not be opened at all, so nothing can be measured with it."""


def measure_limit(options: Options, engine: str, devices: Devices) -> EngineLimit:
    """What an engine reaches with nothing above it.

    Raises:
        EngineUnusable: it cannot be opened here.
        StepFailed: it failed later.
    """
    settings = EngineSettings(
        engine,
        devices[0],
        options.used_batch_bytes,
        options.timeout_s,
        options.repeat,
        options.budget_s,
        dict(options.extra or {}),
    )
    with ChildPair(ENGINE_SIDE, parse_environment(options.environment), options.timeout_s) as pair:
        source: EngineAddress
        target: EngineAddress
        try:
            source, target = pair.both("open", (settings,), (replace(settings, device=devices[1]),))
        except StepFailed as error:
            raise EngineUnusable(str(error)) from error
        pair.prefill.ask("connect", target)
        batch_bytes = min(source.max_bytes, target.max_bytes)
        contiguous: float = pair.prefill.ask("contiguous", batch_bytes)
        pages: dict[int, float] = {
            page_bytes: pair.prefill.ask("pages", page_bytes)
            for page_bytes in dict.fromkeys(options.page_bytes)
        }
        peer_copy: float | None = None
        if options.device == "cuda":
            peer_copy = pair.prefill.ask("peer_copy", devices[1])
    return EngineLimit(source.engine, batch_bytes, contiguous, pages, peer_copy)


def open_workers(
    pair: ChildPair,
    engine: str,
    path: str,
    devices: Devices,
    shapes: tuple[CacheShape, CacheShape],
    options: Options | NodeOptions,
) -> WorkerAddress:
    """Make both sides, the one that sends with random bytes in its cache. Returns where that one is.

    Raises:
        StepFailed: one cannot be made.
    """
    prefill, decode = (
        WorkerSettings(role, engine, path, device, shape, seed, options.timeout_s, dict(options.extra or {}))
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
        self._source = open_workers(pair, case.engine, case.path, devices, shapes, options)
        self.bytes_per_block = shapes[0].total_bytes // shapes[0].num_blocks

    @property
    def engine(self) -> str:
        """The engine that the workers took."""
        return self._source.engine

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


def measure_pairs(
    options: Options, cases: Sequence[PairCase], devices: Devices, limit: EngineLimit | None
) -> Iterator[TransferTiming]:
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
                for measured, rounds_of, case in zip(opened, results, cases, strict=True):
                    request_bytes = blocks * measured.bytes_per_block
                    timing = _timing(options, case, blocks, in_flight, rounds_of, requests, request_bytes)
                    yield _beside(replace(timing, engine=measured.engine), limit)


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


def _timing(
    options: Options,
    case: PairCase,
    blocks: int,
    in_flight: int,
    results: list[RoundResult],
    requests: int,
    request_bytes: int,
) -> TransferTiming:
    samples = [result.seconds for result in results]
    seconds = statistics.median(samples)
    latency_s = statistics.median(one for result in results for one in result.latencies_s)
    total_bytes = requests * request_bytes
    return TransferTiming(
        engine=case.engine,
        path=case.path,
        path_used=_main_path(results[0].bytes_by_path),
        device=options.device,
        layouts=str(case.layouts),
        page_bytes=case.page_bytes,
        blocks=blocks,
        regions=options.regions,
        requests=requests,
        requests_in_flight=in_flight,
        total_bytes=total_bytes,
        seconds=round(seconds, 7),
        best_seconds=round(min(samples), 7),
        latency_ms=round(latency_s * 1e3, 4),
        samples=len(samples),
        gb_per_s=round(total_bytes / seconds / 1e9, 3),
        engine_contiguous_gb_per_s=None,
        of_contiguous=None,
        engine_pages_gb_per_s=None,
        peer_copy_gb_per_s=None,
        direct_gb_per_s=None,
        over_direct=None,
        copies=round(results[0].copies / requests),
        verified=True,
    )


def _main_path(bytes_by_path: Mapping[str, int]) -> str:
    """The paths that bytes took, the one with most of them first."""
    return "+".join(sorted(bytes_by_path, key=lambda path: -bytes_by_path[path]))


def _beside(timing: TransferTiming, limit: EngineLimit | None) -> TransferTiming:
    """With what the engine alone reached."""
    if limit is None:
        return timing
    return replace(
        timing,
        engine_contiguous_gb_per_s=round(limit.contiguous, 3),
        of_contiguous=round(timing.gb_per_s / limit.contiguous, 3),
        engine_pages_gb_per_s=round(limit.pages[timing.page_bytes], 3),
        peer_copy_gb_per_s=None if limit.peer_copy is None else round(limit.peer_copy, 3),
    )


def over_direct(timing: TransferTiming, measured: Sequence[TransferTiming]) -> TransferTiming:
    """With the rate of the same case on the direct path, if that was measured."""

    def case(one: TransferTiming) -> tuple[object, ...]:
        return one.engine, one.layouts, one.page_bytes, one.blocks, one.requests_in_flight

    for one in measured:
        if one.path == "direct" and case(one) == case(timing):
            ratio = round(timing.gb_per_s / one.gb_per_s, 2)
            return replace(timing, direct_gb_per_s=one.gb_per_s, over_direct=ratio)
    return timing
