"""Hostile traffic on every port of a running pair, and what it does to those who ask honestly meanwhile."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from kvconnect.errors import KVConnectError
from kvconnect.peer.key_files import new_secret
from tests.faults import frames
from tests.faults.attack import Attacker, Loris, Tap, Target
from tests.faults.listeners import listeners
from tests.faults.load import ASK_FOR_KV, Clients, Questions, Tally, percentile
from tests.faults.nursery import is_running
from tests.faults.reports import Report, progress
from tests.faults.stage import Stage, StageOptions

BATTERIES = ("insider", "keys", "http", "engine", "idle")
_REST_TIMEOUT_S = 40.0
_MOST_GROWTH_BYTES = 128 << 20


@dataclass
class HostileReport(Report):
    """``frames`` are those that were sent, by port; ``served`` of them turned out to be valid requests.

    ``ratio`` is the honest rate under attack by the one without, medians of windows that take turns;
    ``p99_ratio`` the same of the honest requests' 99th percentile. ``grown_bytes`` is by how much each
    process grew.
    """

    engine: str
    frames: dict[str, int] = field(default_factory=dict)
    connections: int = 0
    frames_per_s: float = 0.0
    served: int = 0
    honest: int = 0
    ratio: float = 0.0
    p99_ratio: float = 0.0
    grown_bytes: dict[str, int] = field(default_factory=dict)


def record(stage: Stage, questions: Questions) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
    """The messages of an honest fetch, to the prefill node and back; of a side channel without security.

    Raises:
        KVConnectError: it was not answered, or nothing was heard of it.
    """
    tap = Tap("127.0.0.1", stage.side_ports[stage.prefill.name])
    try:
        for index in range(len(questions)):
            # Named by whoever asks, so that the decode node can be told to come by way of us.
            named = {"transfer_id": f"recorded-{index}"}
            questions.prefill(stage.prefill, index, {**ASK_FOR_KV, **named})
            found = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": tap.port, **named}
            questions.ask(stage.decode.url, index, found)
        time.sleep(0.2)
        asked = [message for stream in tap.to_server for message in frames.parse_messages(bytes(stream))]
        said = [message for stream in tap.to_client for message in frames.parse_messages(bytes(stream))]
    finally:
        tap.close()
    if not asked or not said:
        raise KVConnectError("no message of an honest fetch could be recorded")
    return tuple(asked), tuple(said)


def find_targets(
    stage: Stage,
    questions: Questions,
    messages: Sequence[bytes] = (),
    secrets: Mapping[str, str] | None = None,
) -> list[Target]:
    """Every port that the processes of a stage listen on, and what honest traffic looks like there.

    ``secrets`` adds attackers of the side channels that have keys, by what they are called.
    """
    body = {"model": questions.model, "prompt": [1, 2], "max_tokens": 1, "temperature": 0}
    # A token that there is not: what is only nearly right is refused. What is right computes, and is load as
    # honest work is: there is a little of it, since only that gets as far as a connector.
    refused = {**body, "prompt": [1, 1 << 20]}
    right = (body, {**body, "stream": True}, {**body, "kv_transfer_params": ASK_FOR_KV})
    bodies = (*[refused] * 10 * len(right), *right)
    # Used by somebody already, and not used by anybody yet.
    params = tuple(questions.prefill(stage.prefill, index) for index in range(2))
    questions.ask(stage.decode.url, 0, params[0])
    targets = []
    for actor in [*stage.nodes, *stage.routers]:
        http = int(actor.url.rpartition(":")[2])
        for host, port in listeners(actor.pid):
            kind: Literal["side", "http", "engine"] = "engine"
            name = f"{actor.name} engine {host}:{port}"
            if port == http:
                name, kind = f"{actor.name} HTTP", "http"
            elif port == stage.side_ports.get(actor.name):
                name, kind = f"{actor.name} side channel", "side"
            target = Target(name, kind, host, port, tuple(messages), bodies, params)
            targets.append(target)
            if kind == "side":
                targets += [
                    replace(target, name=f"{name}, {who}", kind="keyed", secret=secret)
                    for who, secret in (secrets or {}).items()
                ]
    return targets


@dataclass
class Health:
    """What must not change of the processes while they are attacked."""

    pids: dict[str, int]
    rss_bytes: dict[str, int]
    threads: dict[str, int]

    @classmethod
    def of(cls, stage: Stage) -> Health:
        actors = [*stage.nodes, *stage.routers]
        return cls(
            {actor.name: actor.pid for actor in actors},
            {actor.name: actor.rss_bytes for actor in actors},
            {actor.name: actor.num_threads for actor in actors},
        )


def judge_health(stage: Stage, questions: Questions, before: Health, report: HostileReport) -> None:
    """Whether all processes and threads live, remember nothing, have not grown, and still serve."""
    dead = [name for name, pid in before.pids.items() if not is_running(pid)]
    if dead:
        report.problems.append(f"ended: {', '.join(dead)}")
        return
    after = Health.of(stage)
    for name, threads in before.threads.items():
        if after.threads[name] < threads:
            report.problems.append(f"{name} has {after.threads[name]} threads, it had {threads}")
    if problem := stage.at_rest_problem(_REST_TIMEOUT_S):
        report.problems.append(problem)
    for router in stage.routers:
        for index in range(len(questions)):
            one = questions.ask(router.url, index)
            if one.verdict != "exact":
                report.problems.append(f"afterwards, through {router.name}: {one.verdict} {one.text}")
    for actor in stage.nodes:
        internal = actor.metrics().get(("kvconnect_failures_total", (("reason", "internal"),)), 0)
        if internal:
            report.problems.append(f"{actor.name} met {internal:.0f} errors of its own, see its log")
    for name, rss_bytes in before.rss_bytes.items():
        grown = after.rss_bytes[name] - rss_bytes
        report.grown_bytes[name] = grown
        if grown > _MOST_GROWTH_BYTES:
            report.problems.append(f"{name} grew by {grown / 1e6:.0f} MB")


def run_hostile(
    stage: Stage,
    questions: Questions,
    targets: Sequence[Target],
    *,
    frames_per_s: float,
    total: int,
    clients: int = 2,
    windows: int = 3,
    seed: int = 0,
) -> HostileReport:
    """Attack ``targets`` with ``total`` frames in all, in windows that alternate with quiet ones.

    ``frames_per_s`` 0 is as fast as the attacker can, and measures nothing.

    Raises:
        KVConnectError: a node does not answer any more.
    """
    report = HostileReport(stage.options.engine)
    tally = Tally()
    router = stage.routers[0].url
    _warm_up(stage, questions)
    health = Health.of(stage)
    quiet: list[list[float]] = []
    attacked: list[list[float]] = []
    attack_s = 0.0
    for number in range(windows):
        with Clients(questions, [router], clients=clients, tally=tally, pause_s=0.02):
            share = total // windows
            window_s = min(share / frames_per_s, 10.0) if frames_per_s else 2.0
            time.sleep(0.3)
            quiet.append(_latencies(tally, window_s))
            with Attacker(targets, frames_per_s=frames_per_s, seed=seed + number) as attacker:
                while not attacker.sent:
                    time.sleep(0.01)
                begun = time.monotonic()
                attacked.append([])
                while attacker.sent < share and all(is_running(pid) for pid in health.pids.values()):
                    attacked[-1] += _latencies(tally, min(1.0, window_s))
                # The rate is that of as long a window as without an attack.
                attacked[-1] = attacked[-1] or [0.0]
                lasted_s = time.monotonic() - begun
                done = attacker.stop()
            attack_s += lasted_s
            attacked[-1] = attacked[-1][: max(1, int(len(attacked[-1]) * window_s / lasted_s))]
            for name, count in done.frames.items():
                report.frames[name] = report.frames.get(name, 0) + count
            report.connections += done.connections
            report.served += done.served
        beside, without = len(attacked[-1]), len(quiet[-1])
        progress(f"window {number + 1} of {windows}: {beside} honest answers under attack, {without} without")
    report.frames_per_s = sum(report.frames.values()) / attack_s
    report.honest = len(tally.asked)
    report.ratio = percentile([len(one) for one in attacked], 0.5) / max(
        1.0, percentile([len(one) for one in quiet], 0.5)
    )
    calm = percentile([value for one in quiet for value in one], 0.99)
    report.p99_ratio = percentile([value for one in attacked for value in one], 0.99) / calm if calm else 0.0
    report.problems += tally.problems()
    report.problems += [f"an honest request was refused: {text}" for text in tally.reasons()]
    judge_health(stage, questions, health, report)
    return report


def run_loris(stage: Stage, questions: Questions, targets: Sequence[Target], count: int) -> HostileReport:
    """Hold ``count`` idle connections that never finish their first message, and ask meanwhile.

    Raises:
        KVConnectError: a node does not answer any more.
    """
    report = HostileReport(stage.options.engine)
    _warm_up(stage, questions)
    health = Health.of(stage)
    with Loris(targets, count) as loris:
        report.connections = len(loris)
        for router in stage.routers:
            for index in range(len(questions)):
                one = questions.ask(router.url, index)
                if one.verdict != "exact":
                    report.problems.append(f"beside {len(loris)} idle connections: {one.verdict} {one.text}")
    judge_health(stage, questions, health, report)
    return report


def _warm_up(stage: Stage, questions: Questions) -> None:
    for _ in range(3):
        for index in range(len(questions)):
            questions.ask(stage.routers[0].url, index)


def _latencies(tally: Tally, window_s: float) -> list[float]:
    start = len(tally.asked)
    time.sleep(window_s)
    return [one.seconds for one in tally.asked[start:] if one.verdict == "exact"]


def run_batteries(
    engine: str,
    *,
    frames_per_s: float,
    total: int,
    windows: int,
    idle: int,
    only: Collection[str] = BATTERIES,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """The batteries named in ``only``, each with ``total`` frames, as objects with a name.

    ``insider`` speaks to a side channel without security; ``keys`` to one with keys: with none, with a wrong
    one and with the right one; ``http`` and ``engine`` attack the other ports, and ``idle`` connections never
    finish a message.

    Raises:
        KVConnectError: a process did not start, or does not answer any more.
    """
    made = []

    def add(name: str, report: HostileReport) -> None:
        progress(f"{name}: {len(report.problems)} problems")
        made.append({"battery": name, **asdict(report)})

    common: dict[str, Any] = {
        "frames_per_s": frames_per_s,
        "total": total,
        "windows": windows,
        "seed": seed,
    }
    asked: tuple[bytes, ...] = ()
    if {"insider", "keys"} & set(only):
        insecure = StageOptions(engine, policy="fail", num_blocks=400, extra={"insecure": True})
        with Stage(insecure) as stage:
            questions = _questions(stage, seed)
            asked, said = record(stage, questions)
            stage.add_router()
            targets = [one for one in find_targets(stage, questions, (*asked, *said)) if one.kind == "side"]
            if "insider" in only:
                add("insider", run_hostile(stage, questions, targets, **common))
    key = new_secret()
    secure = StageOptions(engine, policy="fail", num_blocks=400, environment={"KVCONNECT_KEY": key})
    with Stage(secure) as stage:
        questions = _questions(stage, seed)
        stage.add_router()
        secrets = {"wrong key": new_secret(), "right key": key}
        targets = find_targets(stage, questions, asked, secrets)
        batteries = {"keys": ("side", "keyed"), "http": ("http",), "engine": ("engine",)}
        for name, kinds in batteries.items():
            if name not in only:
                continue
            chosen = [one for one in targets if one.kind in kinds]
            add(name, run_hostile(stage, questions, chosen, **common))
        if idle and "idle" in only:
            add("idle", run_loris(stage, questions, targets, idle))
    return made


def _questions(stage: Stage, seed: int) -> Questions:
    return Questions(stage, [100, 17, 200], max_tokens=4, deadline_s=30.0, seed=seed)
