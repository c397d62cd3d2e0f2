"""Hostile traffic on every port of a running pair, and what it does to those who ask honestly meanwhile."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from kvconnect.errors import KVConnectError
from kvconnect.peer.keyring import new_secret
from tests.faults import frames
from tests.faults.attack import Attacker, Tap, Target, loris
from tests.faults.listeners import listeners
from tests.faults.load import ASK_FOR_KV, Clients, Questions, Tally, percentile
from tests.faults.reports import Report, progress
from tests.faults.stage import Stage, StageOptions
from tests.nursery import is_running

BATTERIES = ("insider", "keys", "http", "engine", "idle")
_MOST_GROWTH_BYTES = 128 << 20


@dataclass
class HostileReport(Report):
    """``frames`` are those that were sent, by port; ``served`` of them turned out to be valid requests.

    ``ratio`` is the honest rate under attack by the one without, medians of windows that take turns;
    ``p99_ratio`` the same of the honest requests' 99th percentile. ``grown_bytes`` is by how much each
    process grew.
    """

    battery: str
    engine: str
    frames: dict[str, int] = field(default_factory=dict)
    connections: int = 0
    frames_per_s: float = 0.0
    served: int = 0
    honest: int = 0
    ratio: float = 0.0
    p99_ratio: float = 0.0
    grown_bytes: dict[str, int] = field(default_factory=dict)


def record(questions: Questions) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
    """The messages of an honest fetch, to the prefill node and back; of a side channel without security.

    Raises:
        KVConnectError: it was not answered, or nothing was heard of it.
    """
    tap = Tap("127.0.0.1", questions.stage.side_ports[questions.stage.prefill.name])
    try:
        for index in range(len(questions)):
            questions.fetch_by_way_of(tap.port, index, f"recorded-{index}")
        time.sleep(0.2)
        asked = [message for stream in tap.to_server for message in frames.parse_messages(bytes(stream))]
        said = [message for stream in tap.to_client for message in frames.parse_messages(bytes(stream))]
    finally:
        tap.close()
    if not asked or not said:
        raise KVConnectError("no message of an honest fetch could be recorded")
    return tuple(asked), tuple(said)


def find_targets(
    questions: Questions, messages: tuple[bytes, ...], secrets: Mapping[str, str]
) -> list[Target]:
    """Every port that the processes of a stage listen on, and what honest traffic looks like there.

    ``secrets`` adds attackers of the side channels that have keys, by what they are called.
    """
    stage = questions.stage
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
            target = Target(name, kind, host, port, messages, bodies, params)
            targets.append(target)
            if kind == "side":
                targets += [
                    replace(target, name=f"{name}, {who}", kind="keyed", secret=secret)
                    for who, secret in secrets.items()
                ]
    return targets


class Health:
    """What must not change of the processes of a stage while they are attacked."""

    def __init__(self, questions: Questions) -> None:
        actors = [*questions.stage.nodes, *questions.stage.routers]
        self._questions = questions
        self._before = {actor: (actor.rss_bytes, actor.num_threads) for actor in actors}

    def ended(self) -> list[str]:
        """The processes that do not run any more."""
        return [actor.name for actor in self._before if not is_running(actor.pid)]

    def judge(self, report: HostileReport) -> None:
        """Whether all processes and threads live, remember nothing, have not grown, and still serve."""
        questions, stage = self._questions, self._questions.stage
        if ended := self.ended():
            report.problems.append(f"ended: {', '.join(ended)}")
            return
        for actor, (rss_bytes, threads) in self._before.items():
            grown = report.grown_bytes[actor.name] = actor.rss_bytes - rss_bytes
            if grown > _MOST_GROWTH_BYTES:
                report.problems.append(f"{actor.name} grew by {grown / 1e6:.0f} MB")
            if (now := actor.num_threads) < threads:
                report.problems.append(f"{actor.name} has {now} threads, it had {threads}")
        report.problems += stage.rest_problems()
        report.problems += questions.unserved("afterwards", range(len(questions)))
        report.problems += stage.own_errors()
        progress(f"{report.battery}: {len(report.problems)} problems")


def run_hostile(
    questions: Questions,
    battery: str,
    targets: Sequence[Target],
    *,
    frames_per_s: float,
    total: int,
    windows: int,
    seed: int,
) -> HostileReport:
    """Attack ``targets`` with ``total`` frames in all, in windows that alternate with quiet ones.

    ``frames_per_s`` 0 is as fast as the attacker can, and measures nothing.

    Raises:
        KVConnectError: a node does not answer any more.
    """
    report = HostileReport(battery, questions.stage.options.engine)
    tally, sent = Tally(), Counter[str]()
    router = questions.stage.routers[0].url
    _warm_up(questions)
    health = Health(questions)
    quiet: list[list[float]] = []
    attacked: list[list[float]] = []
    attack_s = 0.0
    for number in range(windows):
        with Clients(questions, [router], tally, clients=2, pause_s=0.02):
            share = total // windows
            window_s = min(share / frames_per_s, 10.0) if frames_per_s else 2.0
            time.sleep(0.3)
            quiet.append(_latencies(tally, window_s))
            with Attacker(targets, frames_per_s=frames_per_s, seed=seed + number) as attacker:
                while not attacker.sent:
                    time.sleep(0.01)
                begun = time.monotonic()
                attacked.append([])
                while attacker.sent < share and not health.ended():
                    attacked[-1] += _latencies(tally, min(1.0, window_s))
                # The rate is that of as long a window as without an attack.
                attacked[-1] = attacked[-1] or [0.0]
                lasted_s = time.monotonic() - begun
                done = attacker.stop()
            attack_s += lasted_s
            attacked[-1] = attacked[-1][: max(1, int(len(attacked[-1]) * window_s / lasted_s))]
            sent.update(done.frames)
            report.connections += done.connections
            report.served += done.served
        beside, without = len(attacked[-1]), len(quiet[-1])
        progress(f"window {number + 1} of {windows}: {beside} honest answers under attack, {without} without")
    report.frames, report.frames_per_s = dict(sent), sent.total() / attack_s
    report.honest = len(tally.asked)
    report.ratio = percentile([len(one) for one in attacked], 0.5) / max(
        1.0, percentile([len(one) for one in quiet], 0.5)
    )
    calm = percentile([value for one in quiet for value in one], 0.99)
    report.p99_ratio = percentile([value for one in attacked for value in one], 0.99) / calm if calm else 0.0
    report.problems += tally.problems()
    report.problems += [f"an honest request was refused: {text}" for text in tally.reasons()]
    health.judge(report)
    return report


def run_loris(questions: Questions, targets: Sequence[Target], count: int) -> HostileReport:
    """Hold ``count`` idle connections that never finish their first message, and ask meanwhile.

    Raises:
        KVConnectError: a node does not answer any more.
    """
    report = HostileReport("idle", questions.stage.options.engine)
    _warm_up(questions)
    health = Health(questions)
    with loris(targets, count) as report.connections:
        beside = f"beside {report.connections} idle connections"
        report.problems += questions.unserved(beside, range(len(questions)))
    health.judge(report)
    return report


def _warm_up(questions: Questions) -> None:
    for index in range(3 * len(questions)):
        questions.ask(questions.stage.routers[0].url, index)


def _latencies(tally: Tally, window_s: float) -> list[float]:
    start = len(tally.asked)
    time.sleep(window_s)
    return [one.seconds for one in tally.asked[start:] if one.verdict == "exact"]


def attacked_stage(engine: str, key: str = "") -> StageOptions:
    """A small pair. Without a key whoever comes is a peer, and what peers say can be read and rewritten."""
    return StageOptions(
        engine,
        policy="fail",
        num_blocks=400,
        extra={} if key else {"insecure": True},
        environment={"KVCONNECT_KEY": key} if key else {},
        flows=("sequential",),
        lengths=(100, 17, 200),
        max_tokens=4,
    )


def run_batteries(
    engine: str,
    *,
    frames_per_s: float,
    total: int,
    windows: int,
    idle: int,
    only: Collection[str] = BATTERIES,
    seed: int = 0,
) -> list[HostileReport]:
    """The batteries named in ``only``, each with ``total`` frames.

    ``insider`` speaks to a side channel without security; ``keys`` to one with keys: with none, with a wrong
    one and with the right one; ``http`` and ``engine`` attack the other ports, and ``idle`` connections never
    finish a message.

    Raises:
        KVConnectError: a process did not start, or does not answer any more.
    """
    reports = []
    attack = partial(run_hostile, frames_per_s=frames_per_s, total=total, windows=windows, seed=seed)
    asked: tuple[bytes, ...] = ()
    if {"insider", "keys"} & set(only):
        with Stage(attacked_stage(engine)) as stage:
            questions = Questions(stage, seed)
            asked, said = record(questions)
            targets = [one for one in find_targets(questions, asked + said, {}) if one.kind == "side"]
            if "insider" in only:
                reports.append(attack(questions, "insider", targets))
    key = new_secret()
    with Stage(attacked_stage(engine, key)) as stage:
        questions = Questions(stage, seed)
        targets = find_targets(questions, asked, {"wrong key": new_secret(), "right key": key})
        for battery, kinds in (("keys", ("side", "keyed")), ("http", ("http",)), ("engine", ("engine",))):
            if battery in only:
                chosen = [one for one in targets if one.kind in kinds]
                reports.append(attack(questions, battery, chosen))
        if idle and "idle" in only:
            reports.append(run_loris(questions, targets, idle))
    return reports
