"""Minutes of load with random faults, and what is left whenever everybody pauses.

Of two pairs behind one router the first is killed now and then; the second is only stopped and left by its
clients, so that its memory tells whether anything is kept.
"""

from __future__ import annotations

import http.client
import json
import random
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from tests.faults.load import Asked, Clients, Questions, Tally
from tests.faults.reports import ServedReport, progress
from tests.faults.stage import Actor, Place, Stage, StageOptions
from tests.faults.stops import stopped

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
            body = {"model": questions.model, "prompt": prompt, "max_tokens": 64, "stream": True}
            parts = urlsplit(rng.choice(self._urls))
            connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=5.0)
            with suppress(OSError, http.client.HTTPException):
                connection.request(
                    "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
                )
                self._stop.wait(rng.uniform(0.0, 0.5))
                self._tally.add(Asked(0.0, "left"))
            connection.close()
