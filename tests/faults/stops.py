"""SIGSTOP in the middle of transfers, for longer than every deadline, and SIGCONT.

What the process that goes on still writes must go nowhere.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from tests.faults.kills import Side, wait_in_flight
from tests.faults.load import SALVO, Asked, Questions, Tally, salvo, submit
from tests.faults.reports import HitReport, progress
from tests.faults.stage import Actor, Stage, StageOptions, wait_until

_LATEST_STOP_S = 0.02
_REST_TIMEOUT_S = 30.0
_SERVING_TIMEOUT_S = 30.0


@dataclass
class StopReport(HitReport):
    """``beside`` are requests that used the same blocks when the stopped process went on."""

    engine: str
    side: Side
    stops: int = 0
    beside: int = 0


def run_stops(
    stage: Stage,
    questions: Questions,
    side: Side,
    stops: int,
    *,
    stop_s: float,
    seed: int = 0,
) -> StopReport:
    """Stop one side of a running stage ``stops`` times for ``stop_s`` seconds while it moves caches.

    Before it goes on, the decode node's blocks are in use again by requests that it computes itself, and the
    prefill node's by prompts that are prefilled anew: a late write or read would show in their tokens.

    Raises:
        KVConnectError: a node does not answer any more.
    """
    report = StopReport(stage.options.engine, side)
    rng = random.Random(seed)
    tally = Tally()
    with ThreadPoolExecutor(3 * SALVO) as pool:
        for _ in range(stops):
            _stop_once(stage, questions, side, stop_s, report, tally, pool, rng)
            if problem := stage.at_rest_problem(_REST_TIMEOUT_S):
                report.problems.append(f"after {report.stops} stops: {problem}")
            progress(f"{report.stops} of {stops}: {report.hits} hit a transfer, {len(tally.asked)} requests")
    report.take(tally)
    return report


def _stop_once(
    stage: Stage,
    questions: Questions,
    side: Side,
    stop_s: float,
    report: StopReport,
    tally: Tally,
    pool: ThreadPoolExecutor,
    rng: random.Random,
) -> None:
    victim = stage.prefill if side == "prefill" else stage.decode
    under_way = salvo(questions, pool, tally, stage.prefill, stage.decode)
    seen = wait_in_flight(stage.decode)
    time.sleep(rng.uniform(0.0, _LATEST_STOP_S))
    with stopped(victim):
        report.stops += 1
        time.sleep(0.3)
        report.hits += bool(seen and not all(future.done() for future in under_way))
        time.sleep(stop_s)
        others = _use_blocks(stage, questions, side, tally, pool)
        # They hold the blocks by now, and are not done.
        time.sleep(0.3)
    for future in [*under_way, *others]:
        future.result()
    report.beside += len(others)
    wait_until(questions.are_fetched, _SERVING_TIMEOUT_S, "a fetch after SIGCONT")


def _use_blocks(
    stage: Stage, questions: Questions, side: Side, tally: Tally, pool: ThreadPoolExecutor
) -> list[Future[Asked]]:
    """Have the node that is not stopped use the blocks that were given up."""
    url = stage.decode.url if side == "prefill" else stage.prefill.url
    numbers = [index % len(questions) for index in range(2 * SALVO)]
    return [submit(questions, pool, tally, url, index) for index in numbers]


@contextmanager
def stopped(actor: Actor) -> Iterator[None]:
    """The process does not run within this block."""
    actor.send(signal.SIGSTOP)
    try:
        yield
    finally:
        actor.send(signal.SIGCONT)


def stop_stage(engine: str, policy: str, path: str) -> StageOptions:
    """A pair with few blocks, so that they are soon in use again, and large batches, which may be late."""
    extra = {"max_inflight_bytes": 64 << 20, "path": path}
    node = ("--max-num-batched-tokens", "512")
    return StageOptions(engine, policy=policy, extra=extra, num_blocks=420, node=node)
