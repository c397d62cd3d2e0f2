"""SIGKILL and SIGSTOP in the middle of transfers, again and again, and minutes of load with both.

What a process that goes on after SIGCONT still writes must go nowhere. Whoever does not need the node that is
stopped must not notice. Whenever everybody pauses, nothing may be left.
"""

from __future__ import annotations

import http.client
import json
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from urllib.parse import urlsplit

from kvconnect.node.children import BadAnswer, answers
from tests.faults.stage import (
    DEADLINES,
    MODEL,
    SALVO,
    Actor,
    Asked,
    Clients,
    HitReport,
    Place,
    Questions,
    Report,
    ServedReport,
    Side,
    Stage,
    StageOptions,
    Tally,
    Traffic,
    percentile,
    progress,
    wait_until,
)

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
    failed_before = decode.loads("failed")
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
        failed = int(decode.loads("failed") - failed_before)
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


_MOVED = "kvconnect_transfer_bytes_total"
_LATEST_STOP_S = 0.02
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


@dataclass
class NeighbourReport(Report):
    """What a fault at one node did to requests that do not need it.

    ``ratio`` is the 99th percentile of the healthy requests' seconds beside the fault by that without it,
    both over all windows.
    """

    engine: str
    fault: str
    requests: int = 0
    hanging: int = 0
    p99_s: float = 0.0
    ratio: float = 0.0


def neighbour_stage(engine: str, side: Side) -> StageOptions:
    """Two nodes of the side that one of is stopped, and one of the other."""
    places = {"prefill": (Place(),), "decode": (Place(),), side: (Place(), Place())}
    return StageOptions(
        engine,
        policy="fail",
        extra={"max_inflight_bytes": 16 << 20},
        num_blocks=500,
        prefills=places["prefill"],
        decodes=places["decode"],
        lengths=(1024, 777, 300, 64),
        max_tokens=4,
        deadline_s=40.0,
    )


def run_stopped_neighbour(
    questions: Questions, side: Side, *, windows: int, window_s: float
) -> NeighbourReport:
    """Stop the first node of ``side``, and time requests that need the second.

    Both sides of each comparison are windows of ``window_s`` seconds that take turns. Requests to the first
    nodes are under way when one of these is stopped, and are asked anew within the window.

    Raises:
        KVConnectError: a node does not answer any more.
    """
    stage = questions.stage
    report = NeighbourReport(stage.options.engine, f"SIGSTOP of another {side} node")
    tally = Tally()
    router = stage.add_router(prefills=stage.prefills[-1:], decodes=stage.decodes[-1:]).url
    values: dict[bool, list[float]] = {False: [], True: []}
    with Traffic(questions) as hanging:
        for number in range(2 * windows):
            with_fault = number % 2 == 1
            under_way: list[Future[Asked]] = []
            with ExitStack() as fault:
                if with_fault:
                    handed = hanging.prefilled(2)
                    under_way = hanging.salvo()
                    wait_in_flight(stage.decode)
                    fault.enter_context(stopped(stage.first(side)))
                    under_way += hanging.fetch(handed)
                start = len(tally.asked)
                with Clients(questions, [router], tally, clients=1):
                    time.sleep(window_s)
            values[with_fault] += [one.seconds for one in tally.asked[start:]]
            for future in under_way:
                future.result()
            report.problems += stage.rest_problems()
    report.requests, report.hanging = len(tally.asked), len(hanging.tally.asked)
    report.p99_s = round(percentile(values[True], 0.99), 4)
    report.ratio = round(report.p99_s / max(1e-9, percentile(values[False], 0.99)), 3)
    report.problems += tally.problems() + hanging.tally.problems()
    report.problems += [f"a healthy request was refused: {text}" for text in tally.reasons()]
    return report


_LOAD_S = 30.0
_MOST_GROWTH_BYTES = 64 << 20
_LONGEST_STOP_S = 9.0
_ROUTER_REST_S = 7.0
"""After that a router has looked again at nodes that it had ejected."""


@dataclass
class SoakReport(ServedReport):
    """``rss_mb`` are the memories of the nodes that were never killed, and of the router, at every pause."""

    engine: str
    seconds: float = 0.0
    pauses: int = 0
    left: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    rss_mb: dict[str, list[int]] = field(default_factory=dict)


def soak_stage(engine: str, policy: str) -> StageOptions:
    """Two pairs of nodes."""
    two = (Place(), Place())
    return StageOptions(
        engine,
        policy=policy,
        extra={"max_inflight_bytes": 4 << 20, "stream_min_tokens": 512},
        prefills=two,
        decodes=two,
        num_blocks=800,
        router=("--prefill-timeout-s", "25", "--decode-timeout-s", "40", "--connect-timeout-s", "2"),
        flows=("sequential", "parallel"),
        lengths=(1024, 777, 600, 300, 40, 17),
        deadline_s=60.0,
    )


def run_soak(questions: Questions, seconds: float, *, seed: int = 0) -> SoakReport:
    """Load and faults for ``seconds``, with a pause after each half minute in which nothing may be left.

    Raises:
        KVConnectError: a process could not be started again.
    """
    stage = questions.stage
    report = SoakReport(stage.options.engine)
    rng = random.Random(seed)
    tally, faults = Tally(), Counter[str]()
    started = time.monotonic()
    kept = [stage.prefills[1], stage.decodes[1], *stage.routers]
    urls = [router.url for router in stage.routers]
    while time.monotonic() - started < seconds:
        with Clients(questions, urls, tally, clients=3), _Leaving(questions, urls, tally, clients=1):
            until = time.monotonic() + min(_LOAD_S, seconds)
            while time.monotonic() < until:
                faults[_inject(stage, rng)] += 1
                time.sleep(rng.uniform(0.5, 3.0))
        for node in stage.nodes:
            node.wait_ready()
        report.problems += stage.rest_problems(60.0, f"at {time.monotonic() - started:.0f} s: ")
        time.sleep(_ROUTER_REST_S)
        for router in stage.routers:
            one = tally.add(questions.ask(router.url, rng.randrange(len(questions))))
            if one.verdict == "refused":
                report.problems.append(f"at {time.monotonic() - started:.0f} s nothing is wrong: {one.text}")
        for actor in kept:
            report.rss_mb.setdefault(actor.name, []).append(actor.rss_bytes >> 20)
        report.pauses += 1
        memory = {name: values[-1] for name, values in report.rss_mb.items()}
        progress(
            f"{time.monotonic() - started:.0f} s: {len(tally.asked)} requests, {dict(faults)}, MB {memory}"
        )
    report.seconds = round(time.monotonic() - started, 1)
    report.faults = dict(faults)
    report.left = tally.count("left")
    report.take(tally)
    report.problems += stage.own_errors()
    for name, values in report.rss_mb.items():
        # In the first pauses caches of libraries still fill.
        settled = values[len(values) // 4 :]
        if settled and (settled[-1] - settled[0]) << 20 > _MOST_GROWTH_BYTES:
            report.problems.append(f"{name} grew from {settled[0]} to {settled[-1]} MB")
    return report


def _inject(stage: Stage, rng: random.Random) -> str:
    """One fault. Returns its name."""
    chosen = rng.random()
    if chosen < 0.25:
        return _kill(stage.prefills[0])
    if chosen < 0.5:
        return _kill(stage.decodes[0])
    victim = rng.choice(stage.nodes)
    long = chosen < 0.65
    with stopped(victim):
        time.sleep(rng.uniform(4.0, _LONGEST_STOP_S) if long else rng.uniform(0.05, 1.0))
    return f"{'long' if long else 'short'} stop of {victim.name}"


def _kill(victim: Actor) -> str:
    victim.kill()
    victim.start()
    victim.wait_ready()
    return f"kill of {victim.name}"


class _Leaving(Clients):
    """Clients that leave before their answers are whole, again and again."""

    def _run(self, number: int) -> None:
        rng, questions = random.Random(number), self._questions
        while not self._stop.wait(rng.uniform(0.1, 0.6)):
            prompt = rng.choice(questions.prompts)
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 64, "stream": True}
            parts = urlsplit(rng.choice(self._urls))
            connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=5.0)
            with suppress(OSError, http.client.HTTPException):
                connection.request(
                    "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
                )
                self._stop.wait(rng.uniform(0.0, 0.5))
                self._tally.add(Asked(0.0, "left"))
            connection.close()
