"""SIGKILL in the middle of transfers, again and again, of either side of a pair."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from kvconnect.node.children import BadAnswer, answers
from tests.faults.load import Clients, Questions, Traffic
from tests.faults.reports import HitReport, progress
from tests.faults.stage import DEADLINES, Actor, Side, StageOptions, wait_until

_IN_FLIGHT_WAIT_S = 1.0
_LATEST_KILL_S = 0.03
_USABLE_TIMEOUT_S = 40.0
_REST_TIMEOUT_S = 30.0
_REST_EVERY = 25


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


def run_kills(questions: Questions, side: Side, kills: int, *, seed: int = 0) -> KillReport:
    """Kill one side of a running stage ``kills`` times while it serves.

    Before each kill several prefilled prompts are fetched at once, and the kill comes at a random moment
    after the first of them is seen under way; a client asks through the routers meanwhile. Now and then
    everybody stops asking, and nothing may be left.

    Raises:
        KVConnectError: a process could not be started again.
    """
    stage = questions.stage
    report = KillReport(stage.options.engine, side, stage.options.policy)
    routers = [router.url for router in stage.routers]
    with Traffic(questions, seed) as traffic:
        while report.kills < kills:
            with Clients(questions, routers, traffic.tally, clients=1, pause_s=0.05):
                for _ in range(min(_REST_EVERY, kills - report.kills)):
                    _kill_once(traffic, report)
            _settle(questions, report)
            asked = len(traffic.tally.asked)
            progress(f"{report.kills} of {kills}: {report.hits} hit a transfer, {asked} requests")
    report.take(traffic.tally)
    return report


def _kill_once(traffic: Traffic, report: KillReport) -> None:
    victim, decode = traffic.stage.first(report.side), traffic.stage.decode
    failed_before = _failed_loads(decode)
    under_way = traffic.salvo()
    seen = wait_in_flight(decode)
    time.sleep(traffic.rng.uniform(0.0, _LATEST_KILL_S))
    # Asked for in the last moment: what is not under way any more was not hit.
    at_kill = sum(not future.done() for future in under_way)
    victim.kill()
    report.kills += 1
    killed = time.monotonic()
    victim.start()
    ended = [future.result() for future in under_way]
    if report.side == "prefill":
        failed = _failed_loads(decode) - failed_before
        report.failed_loads += failed
        report.hits += bool(failed)
    else:
        report.hits += bool(seen and at_kill and any(one.verdict == "refused" for one in ended))
    victim.wait_ready()
    try:
        wait_until(traffic.questions.are_fetched, _USABLE_TIMEOUT_S, "a fetch after the restart")
    finally:
        report.usable_s.append(time.monotonic() - killed)


def wait_in_flight(decode: Actor) -> bool:
    """Wait until a decode node says that it fetches something."""
    deadline = time.monotonic() + _IN_FLIGHT_WAIT_S
    while time.monotonic() < deadline:
        with suppress(BadAnswer):
            if decode.state()["connector"].get("loads"):
                return True
    return False


def _failed_loads(decode: Actor) -> int:
    samples = decode.metrics()
    labels = (("direction", "received"), ("outcome", "failed"))
    return int(samples.get(("kvconnect_transfers_total", labels), 0))


def _settle(questions: Questions, report: KillReport) -> None:
    """Nobody asks: look for what is left, and whether the pair still serves."""
    when = f"after {report.kills} kills"
    report.problems += questions.stage.rest_problems(_REST_TIMEOUT_S, f"{when}: ")
    for router in questions.stage.routers:
        # A node that was ejected is looked at again after some seconds.
        wait_until(partial(answers, router.url + "/ready?all"), _USABLE_TIMEOUT_S, "the router")
    report.problems += questions.unserved(when, [len(questions) - 1])


def kill_stage(engine: str, policy: str) -> StageOptions:
    """A pair whose transfers last long enough to be hit: wide pages, in many small batches."""
    return StageOptions(
        engine,
        policy=policy,
        extra={"max_inflight_bytes": 4 << 20, "stream_min_tokens": 512},
        node=("--max-num-batched-tokens", "256"),
        router=("--prefill-timeout-s", "10", "--decode-timeout-s", "20", "--connect-timeout-s", "2"),
        flows=("sequential", "parallel"),
        lengths=(1024, 777, 1024, 1000, 300, 40),
        # A load's deadline, and what a small machine that also starts processes takes for the rest.
        deadline_s=DEADLINES["load_timeout_s"] + 20.0,
    )
