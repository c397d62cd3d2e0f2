"""SIGKILL in the middle of transfers, again and again, of either side of a pair."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from kvconnect.demo.http import BadAnswer, answers
from tests.faults.load import SALVO, Asked, Clients, Questions, Tally, salvo
from tests.faults.reports import HitReport, progress
from tests.faults.stage import DEADLINES, Actor, Stage, StageOptions, wait_until

Side = Literal["prefill", "decode"]

_IN_FLIGHT_WAIT_S = 1.0
_LATEST_KILL_S = 0.03
_USABLE_TIMEOUT_S = 40.0
_REST_TIMEOUT_S = 30.0
CLIENT_DEADLINE_S = DEADLINES["load_timeout_s"] + 20.0
"""A load's deadline, and what a small machine that also starts processes takes for the rest."""


@dataclass
class KillReport(HitReport):
    """``usable_s`` are the seconds from each kill until the next request was fetched from or by the process
    that took its place.
    """

    engine: str
    side: Side
    policy: str
    kills: int = 0
    failed_loads: int = 0
    usable_s: list[float] = field(default_factory=list)


def run_kills(
    stage: Stage,
    questions: Questions,
    side: Side,
    kills: int,
    *,
    seed: int = 0,
    clients: int = 1,
    rest_every: int = 25,
) -> KillReport:
    """Kill one side of a running stage ``kills`` times while it serves.

    Before each kill several prefilled prompts are fetched at once, and the kill comes at a random moment
    after the first of them is seen under way; ``clients`` ask through the routers meanwhile. After every
    ``rest_every`` kills everybody stops asking, and nothing may be left.

    Raises:
        KVConnectError: a process could not be started again.
    """
    options = stage.options
    report = KillReport(options.engine, side, options.policy)
    rng = random.Random(seed)
    tally = Tally()
    routers = [router.url for router in stage.routers]
    with ThreadPoolExecutor(SALVO) as pool:
        while report.kills < kills:
            with Clients(questions, routers, clients=clients, tally=tally, pause_s=0.05):
                for _ in range(min(rest_every, kills - report.kills)):
                    _kill_once(stage, questions, side, report, tally, pool, rng)
            _settle(stage, questions, report)
            progress(f"{report.kills} of {kills}: {report.hits} hit a transfer, {len(tally.asked)} requests")
    report.take(tally)
    return report


def _kill_once(
    stage: Stage,
    questions: Questions,
    side: Side,
    report: KillReport,
    tally: Tally,
    pool: ThreadPoolExecutor,
    rng: random.Random,
) -> None:
    victim = stage.prefill if side == "prefill" else stage.decode
    failed_before = _failed_loads(stage.decode)
    under_way = salvo(questions, pool, tally, stage.prefill, stage.decode)
    seen = wait_in_flight(stage.decode)
    time.sleep(rng.uniform(0.0, _LATEST_KILL_S))
    # Asked for in the last moment: what is not under way any more was not hit.
    at_kill = sum(not future.done() for future in under_way)
    victim.kill()
    report.kills += 1
    killed = time.monotonic()
    victim.start()
    ended: list[Asked] = [future.result() for future in under_way]
    if side == "prefill":
        failed = _failed_loads(stage.decode) - failed_before
        report.failed_loads += failed
        report.hits += bool(failed)
    else:
        report.hits += bool(seen and at_kill and any(one.verdict == "refused" for one in ended))
    victim.wait_ready()
    try:
        wait_until(questions.are_fetched, _USABLE_TIMEOUT_S, "a fetch after the restart")
    finally:
        report.usable_s.append(time.monotonic() - killed)


def wait_in_flight(decode: Actor) -> bool:
    """Wait until a decode node says that it fetches something."""
    deadline = time.monotonic() + _IN_FLIGHT_WAIT_S
    while time.monotonic() < deadline:
        if _state(decode).get("loads"):
            return True
    return False


def _state(node: Actor) -> dict[str, Any]:
    try:
        found: dict[str, Any] = node.state()["connector"]
    except BadAnswer:
        return {}
    return found


def _failed_loads(decode: Actor) -> int:
    samples = decode.metrics()
    labels = (("direction", "received"), ("outcome", "failed"))
    return int(samples.get(("kvconnect_transfers_total", labels), 0))


def _settle(stage: Stage, questions: Questions, report: KillReport) -> None:
    """Nobody asks: look for what is left, and whether the pair still serves."""
    problem = stage.at_rest_problem(_REST_TIMEOUT_S)
    if problem:
        report.problems.append(f"after {report.kills} kills: {problem}")
    for router in stage.routers:
        # A node that was ejected is looked at again after some seconds.
        wait_until(partial(answers, router.url + "/ready?all"), _USABLE_TIMEOUT_S, "the router")
        one = questions.ask(router.url, len(questions) - 1)
        if one.verdict != "exact":
            report.problems.append(
                f"after {report.kills} kills, through {router.name}: {one.verdict} {one.text}"
            )


def kill_stage(engine: str, policy: str) -> StageOptions:
    """A pair whose transfers last long enough to be hit: wide pages, in many small batches."""
    extra = {"max_inflight_bytes": 4 << 20, "stream_min_tokens": 512}
    return StageOptions(
        engine,
        policy=policy,
        extra=extra,
        node=("--max-num-batched-tokens", "256"),
        router=("--prefill-timeout-s", "10", "--decode-timeout-s", "20", "--connect-timeout-s", "2"),
    )
