"""Minutes of load with random faults, and what is left whenever everybody pauses.

Of two pairs behind one router the first is killed now and then; the second is only stopped and left by its
clients, so that its memory tells whether anything is kept.
"""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from tests.faults.load import Clients, Questions, Tally
from tests.faults.reports import ServedReport, progress
from tests.faults.stage import Actor, Place, Stage, StageOptions
from tests.faults.stops import stopped

_LOAD_S = 30.0
_REST_TIMEOUT_S = 60.0
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


def soak_stage(engine: str, policy: str = "recompute") -> StageOptions:
    """Two pairs of nodes."""
    two = (Place(), Place())
    extra = {"max_inflight_bytes": 4 << 20, "stream_min_tokens": 512}
    return StageOptions(
        engine,
        policy=policy,
        extra=extra,
        prefills=two,
        decodes=two,
        num_blocks=800,
        router=("--prefill-timeout-s", "25", "--decode-timeout-s", "40", "--connect-timeout-s", "2"),
    )


def run_soak(
    stage: Stage,
    questions: Questions,
    seconds: float,
    *,
    seed: int = 0,
    clients: int = 3,
) -> SoakReport:
    """Load and faults for ``seconds``, with a pause after each half minute in which nothing may be left.

    Raises:
        KVConnectError: a process could not be started again.
    """
    report = SoakReport(stage.options.engine)
    rng = random.Random(seed)
    tally, faults = Tally(), Counter[str]()
    started = time.monotonic()
    kept = [stage.prefills[1], stage.decodes[1], *stage.routers]
    while time.monotonic() - started < seconds:
        urls = [router.url for router in stage.routers]
        with Clients(questions, urls, clients=clients, tally=tally), _Leaving(questions, urls) as leaving:
            until = time.monotonic() + min(_LOAD_S, seconds)
            while time.monotonic() < until:
                name = _inject(stage, rng)
                faults[name] += 1
                time.sleep(rng.uniform(0.5, 3.0))
        report.left += leaving.count
        for node in stage.nodes:
            node.wait_ready()
        if problem := stage.at_rest_problem(_REST_TIMEOUT_S):
            report.problems.append(f"at {time.monotonic() - started:.0f} s: {problem}")
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
    report.take(tally)
    _judge(stage, report)
    return report


def _judge(stage: Stage, report: SoakReport) -> None:
    for name, values in report.rss_mb.items():
        # In the first pauses caches of libraries still fill.
        settled = values[len(values) // 4 :]
        if settled and (settled[-1] - settled[0]) << 20 > _MOST_GROWTH_BYTES:
            report.problems.append(f"{name} grew from {settled[0]} to {settled[-1]} MB")
    for node in stage.nodes:
        internal = node.metrics().get(("kvconnect_failures_total", (("reason", "internal"),)), 0)
        if internal:
            report.problems.append(f"{node.name} met {internal:.0f} errors of its own, see its log")


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
    if not victim.url:
        victim.wait_ready()
    victim.kill()
    victim.start()
    victim.wait_ready()
    return f"kill of {victim.name}"


class _Leaving:
    """A client that leaves before its answers are whole, again and again."""

    def __init__(self, questions: Questions, urls: list[str]) -> None:
        self.count = 0
        self._questions = questions
        self._urls = urls
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> _Leaving:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        rng = random.Random(0)
        while not self._stop.wait(rng.uniform(0.1, 0.6)):
            prompt = rng.choice(self._questions.prompts)
            body = {"model": self._questions.model, "prompt": prompt, "max_tokens": 64, "stream": True}
            parts = urlsplit(rng.choice(self._urls))
            connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=5.0)
            with suppress(OSError, http.client.HTTPException):
                connection.request(
                    "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
                )
                self._stop.wait(rng.uniform(0.0, 0.5))
                self.count += 1
            connection.close()
