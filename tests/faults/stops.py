"""SIGSTOP in the middle of transfers, for longer than every deadline, and SIGCONT.

What the process that goes on still writes must go nowhere.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.faults.kills import wait_in_flight
from tests.faults.load import SALVO, Questions, Traffic
from tests.faults.reports import HitReport, progress
from tests.faults.stage import Actor, Side, StageOptions, wait_until

_MOVED = "kvconnect_transfer_bytes_total"
_LATEST_STOP_S = 0.02
_REST_TIMEOUT_S = 30.0
_SERVING_TIMEOUT_S = 30.0


@dataclass
class StopReport(HitReport):
    """``beside`` are requests that used the same blocks when the stopped process went on.

    ``lanes`` are what carried bytes.
    """

    engine: str
    side: Side
    stops: int = 0
    beside: int = 0
    lanes: list[str] = field(default_factory=list)


def run_stops(questions: Questions, side: Side, stops: int, *, stop_s: float, seed: int = 0) -> StopReport:
    """Stop one side of a running stage ``stops`` times for ``stop_s`` seconds while it moves caches.

    Before it goes on, the decode node's blocks are in use again by requests that it computes itself, and the
    prefill node's by prompts that are prefilled anew: a late write or read would show in their tokens.

    Raises:
        KVConnectError: a node does not answer any more.
    """
    stage = questions.stage
    report = StopReport(stage.options.engine, side)
    with Traffic(questions, seed) as traffic:
        for _ in range(stops):
            _stop_once(traffic, stop_s, report)
            report.problems += stage.rest_problems(_REST_TIMEOUT_S, f"after {report.stops} stops: ")
            asked = len(traffic.tally.asked)
            progress(f"{report.stops} of {stops}: {report.hits} hit a transfer, {asked} requests")
    report.take(traffic.tally)
    moved = [dict(labels) for name, labels in stage.decode.metrics() if name == _MOVED]
    report.lanes = sorted({labels["lane"] for labels in moved})
    return report


def _stop_once(traffic: Traffic, stop_s: float, report: StopReport) -> None:
    stage = traffic.stage
    under_way = traffic.salvo()
    seen = wait_in_flight(stage.decode)
    time.sleep(traffic.rng.uniform(0.0, _LATEST_STOP_S))
    with stopped(stage.first(report.side)):
        report.stops += 1
        time.sleep(0.3)
        report.hits += bool(seen and not all(future.done() for future in under_way))
        time.sleep(stop_s)
        # The node that is not stopped uses the blocks that were given up.
        running = stage.decode if report.side == "prefill" else stage.prefill
        others = [traffic.ask(running.url, index) for index in range(2 * SALVO)]
        # They hold the blocks by now, and are not done.
        time.sleep(0.3)
    for future in [*under_way, *others]:
        future.result()
    report.beside += len(others)
    wait_until(traffic.questions.are_fetched, _SERVING_TIMEOUT_S, "a fetch after SIGCONT")


@contextmanager
def stopped(actor: Actor) -> Iterator[None]:
    """The process does not run within this block."""
    actor.send(signal.SIGSTOP)
    try:
        yield
    finally:
        actor.send(signal.SIGCONT)


def stop_stage(engine: str, policy: str, protocol: str, stop_s: float) -> StageOptions:
    """A pair with few blocks, so that they are soon in use again, and large batches, which may be late.

    Without a ``protocol`` it is the stage's; with ``auto`` bytes go through shared memory.
    """
    return StageOptions(
        engine,
        policy=policy,
        extra={"max_inflight_bytes": 64 << 20, **({"protocol": protocol} if protocol else {})},
        node=("--max-num-batched-tokens", "512"),
        num_blocks=420,
        max_tokens=48,
        deadline_s=25.0 + stop_s,
    )
