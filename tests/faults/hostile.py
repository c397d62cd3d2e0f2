"""Hostile traffic on every port of a running pair, and what it does to those who ask honestly meanwhile.

The attacker is a process of its own that sends hostile frames at a given rate. A liar is a relay that mutates
every second answer of a prefill node on its way to the decode node that listens to it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import multiprocessing
import os
import random
import re
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from kvconnect.errors import KVConnectError
from kvconnect.node.children import BadAnswer
from kvconnect.peer.keyring import new_secret
from tests.faults import frames
from tests.faults.stage import (
    ASK_FOR_KV,
    MODEL,
    Clients,
    Questions,
    Report,
    Stage,
    StageOptions,
    Tally,
    percentile,
    progress,
)
from tests.nursery import is_running

_CONNECT_TIMEOUT_S = 2.0
_IDLE_CONNECT_TIMEOUT_S = 0.5
_READ_S = 0.002
_ANSWER_S = 0.2
_BURST = 40
_REQUESTS = 12
_THREADS = 6
_LARGEST = 1 << 20


@dataclass(frozen=True)
class Target:
    """A port, and what an honest client or peer would send there.

    ``side`` is spoken to without security; ``keyed`` is the same port, with the keys that come of ``secret``.
    ``messages`` are recorded side-channel messages, the greeting first; ``bodies`` are honest HTTP bodies and
    ``params`` transfer parameters that were handed out.
    """

    name: str
    kind: Literal["side", "keyed", "http", "engine"]
    host: str
    port: int
    messages: tuple[bytes, ...] = ()
    bodies: tuple[Any, ...] = ()
    params: tuple[Any, ...] = ()
    secret: str = ""


def compose(target: Target, rng: random.Random) -> list[bytes]:
    """What one connection sends, frame by frame; of ``keyed`` targets the payloads of the frames."""
    if target.kind == "keyed":
        return _payloads(target, rng)
    if target.kind == "side":
        if not target.messages or rng.random() < 0.3:
            return [frames.broken_framing(rng)]
        made = [frames.zmq_frame(payload) for payload in _payloads(target, rng)]
        return [frames.greeting() + frames.ready() + made[0], *made[1:]]
    if target.kind == "http":
        if not target.bodies or rng.random() < 0.3:
            return [frames.broken_http(rng)]
        return [_http_frame(target, rng) for _ in range(rng.randrange(1, _REQUESTS))]
    return [rng.randbytes(rng.choice((1, 8, 64, 500, 4096)))]


def _payloads(target: Target, rng: random.Random) -> list[bytes]:
    made = []
    if target.messages and rng.random() < 0.7:
        # Beyond the greeting a stranger is a peer, and more of what it says is listened to.
        made.append(target.messages[0])
    for _ in range(rng.randrange(1, _BURST)):
        chosen = rng.random()
        if chosen < 0.02:
            payload = frames.deep_message(rng.randrange(1, 5000))
        elif chosen < 0.025:
            payload = rng.randbytes(rng.randrange(_LARGEST))
        elif chosen < 0.1 or not target.messages:
            payload = rng.randbytes(rng.randrange(100))
        else:
            payload = frames.mutate_message(rng.choice(target.messages), rng)
        made.append(payload)
    return made


def _http_frame(target: Target, rng: random.Random) -> bytes:
    chosen = rng.random()
    body = rng.choice(target.bodies)
    if chosen < 0.1:
        made = frames.json_bomb(rng)
    elif chosen < 0.55:
        made = frames.mutate_body(body, rng)
    else:
        made = frames.mutate_params(body, target.params, rng)
    return frames.http_request(made)


def send_once(target: Target, made: Sequence[bytes]) -> tuple[int, int]:
    """Open a connection, send the frames and leave.

    Returns how many were sent before the peer closed it, and how many of them were answered as honest
    requests are.
    """
    if target.kind == "keyed":
        return _send_keyed(target, made), 0
    sent = served = 0
    with (
        contextlib.suppress(OSError),
        socket.create_connection((target.host, target.port), timeout=_CONNECT_TIMEOUT_S) as connection,
    ):
        connection.settimeout(_CONNECT_TIMEOUT_S)
        for frame in made:
            connection.sendall(frame)
            sent += 1
            if target.kind == "http":
                # The next request is only looked at once this one is answered.
                connection.settimeout(_ANSWER_S)
                answer = connection.recv(65536)
                if not answer:
                    break
                served += answer.startswith(b"HTTP/1.1 200 ")
        connection.settimeout(_READ_S)
        connection.recv(4096)
    return sent, served


def _send_keyed(target: Target, made: Sequence[bytes]) -> int:
    """The same over a connection with keys, which are the right ones or not."""
    from kvconnect.config import ExtraConfig
    from kvconnect.peer.allow_list import AllowList
    from kvconnect.peer.keyring import SharedKeys
    from kvconnect.peer.zmq_channel import ZmqChannel

    extra = ExtraConfig(peer_timeout_s=5.0)
    channel = ZmqChannel(extra, 0, SharedKeys(target.secret, "an attacker"), AllowList(()))
    try:
        channel.connect("victim", target.host, target.port)
        sent = sum(channel.send("victim", payload) for payload in made)
        deadline = time.monotonic() + _ANSWER_S
        while time.monotonic() < deadline:
            channel.wait(_ANSWER_S)
            if channel.receive():
                break
    finally:
        channel.close()
    return sent


@dataclass(frozen=True)
class Attacked:
    """What an attacker did: frames by target, and connections. ``served`` frames were valid requests."""

    frames: dict[str, int]
    connections: int
    served: int


class Attacker:
    """Attacks until told to stop. ``frames_per_s`` 0 is as fast as it can."""

    def __init__(self, targets: Sequence[Target], *, frames_per_s: float, seed: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._stop = context.Event()
        self._results: Any = context.Queue()
        self._sent = context.Value("q", 0)
        self._process = context.Process(
            target=_attack,
            args=(tuple(targets), frames_per_s, seed, self._stop, self._results, self._sent),
            daemon=True,
        )

    def __enter__(self) -> Attacker:
        self._process.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._process.join(10.0)
        if self._process.is_alive():
            self._process.kill()

    @property
    def sent(self) -> int:
        return int(self._sent.value)

    def stop(self) -> Attacked:
        """Stop, and say what was sent."""
        self._stop.set()
        attacked: Attacked = self._results.get(timeout=30.0)
        return attacked


def _attack(
    targets: Sequence[Target], frames_per_s: float, seed: int, stop: Any, results: Any, sent: Any
) -> None:
    counts = dict.fromkeys([target.name for target in targets], 0)
    lock = threading.Lock()
    connections, served, started = [0], [0], time.monotonic()

    def attack(number: int) -> None:
        rng = random.Random(seed * _THREADS + number)
        while not stop.is_set():
            # Frames, not connections, are spread evenly: who takes few of them is visited more often.
            some = rng.sample(list(targets), min(2, len(targets)))
            target = min(some, key=lambda target: counts[target.name])
            frames_sent, answered = send_once(target, compose(target, rng))
            with lock:
                counts[target.name] += frames_sent
                connections[0] += 1
                served[0] += answered
                sent.value += frames_sent
                total = sum(counts.values())
            ahead_s = total / frames_per_s - (time.monotonic() - started) if frames_per_s else 0.0
            if ahead_s > 0:
                stop.wait(ahead_s)

    threads = [threading.Thread(target=attack, args=(number,)) for number in range(_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results.put(Attacked(counts, connections[0], served[0]))


@contextlib.contextmanager
def loris(targets: Sequence[Target], count: int) -> Iterator[int]:
    """Connections that begin to say something and never end, open within the ``with`` block: how many."""
    full: set[str] = set()
    made = 0
    with contextlib.ExitStack() as opened:
        for number in range(count):
            target = targets[number % len(targets)]
            if target.name in full:
                continue
            begun = {"http": b"POST /v1/comp", "engine": b"\0"}.get(target.kind, frames.greeting()[:11])
            address = (target.host, target.port)
            try:
                one = socket.create_connection(address, timeout=_IDLE_CONNECT_TIMEOUT_S)
                opened.enter_context(one)
                made += 1
                one.sendall(begun)
            except OSError:
                # Its backlog is full: whoever listens there takes no more.
                full.add(target.name)
        yield made


class Tap:
    """A relay that writes down both directions of every connection, and may change what comes back.

    Args:
        change: is given each piece that flows to the client, and returns what is sent in its place.
    """

    def __init__(self, port: int, change: Callable[[bytes], bytes] | None = None) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self._target = ("127.0.0.1", port)
        self._change = change
        self.port = int(self._server.getsockname()[1])
        self.to_server: list[bytearray] = []
        self.to_client: list[bytearray] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._server.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._server.accept()
                server = socket.create_connection(self._target)
                up, down = bytearray(), bytearray()
                self.to_server.append(up)
                self.to_client.append(down)
                for source, target, record, change in (
                    (client, server, up, None),
                    (server, client, down, self._change),
                ):
                    threading.Thread(target=_pump, args=(source, target, record, change), daemon=True).start()


def _pump(
    source: socket.socket, target: socket.socket, record: bytearray, change: Callable[[bytes], bytes] | None
) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            record += data
            target.sendall(change(data) if change else data)
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


BATTERIES = ("insider", "keys", "http", "engine", "idle")
_MOST_GROWTH_BYTES = 128 << 20


# ---- where a process listens

_LISTENING = "0A"
_EVERYWHERE = (ipaddress.ip_address("0.0.0.0"), ipaddress.ip_address("::"))


def listeners(pid: int) -> list[tuple[str, int]]:
    """The TCP addresses of a process, those on all interfaces as loopback.

    Raises:
        OSError: there is no such process, or it is somebody else's.
    """
    descriptors = Path(f"/proc/{pid}/fd").iterdir()
    sockets = (re.fullmatch(r"socket:\[(\d+)\]", _link(descriptor)) for descriptor in descriptors)
    inodes = {matched[1] for matched in sockets if matched}
    found: list[tuple[str, int]] = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENING and fields[9] in inodes:
                address, _, port = fields[1].partition(":")
                found.append((_host(address), int(port, 16)))
    return found


def _link(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""  # it was closed meanwhile


def _host(text: str) -> str:
    """An address as the kernel writes it: words of 32 bits in the order of this machine, in hex."""
    words = struct.pack(f"={len(text) // 8}I", *(int(text[at : at + 8], 16) for at in range(0, len(text), 8)))
    address = ipaddress.ip_address(words)
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return "127.0.0.1" if address in _EVERYWHERE else str(address)


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
    tap = Tap(questions.stage.side_ports[questions.stage.prefill.name])
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
    body = {"model": MODEL, "prompt": [1, 2], "max_tokens": 1, "temperature": 0}
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


_GREETING_BYTES = 64
_AT_ONCE = 4


class Liar:
    """Rewrites the stream of one connection, frame by frame. ``lies`` counts what was changed."""

    def __init__(self, rng: random.Random, share: float = 0.5) -> None:
        self.lies = 0
        self._rng = rng
        self._share = share
        self._pending = b""
        self._greeting_bytes = _GREETING_BYTES

    def __call__(self, data: bytes) -> bytes:
        """What is sent on in place of the next piece of the stream."""
        # Each side waits for the first bytes of the other's greeting.
        passed, data = data[: self._greeting_bytes], data[self._greeting_bytes :]
        self._greeting_bytes -= len(passed)
        self._pending += data
        whole, self._pending = frames.split_frames(self._pending)
        for flags, body in whole:
            if flags & frames.COMMAND or self._rng.random() >= self._share:
                passed += frames.zmq_frame(body, command=bool(flags & frames.COMMAND))
            else:
                self.lies += 1
                passed += frames.zmq_frame(frames.mutate_message(body, self._rng))
        return passed


def run_liars(questions: Questions, requests: int, *, seed: int = 0) -> HostileReport:
    """Have ``requests`` fetched through relays that lie, each over a connection of its own.

    What a peer with a key says about its own data is believed, so these answers are not judged: that both
    nodes live, forget what was asked, and serve others rightly is.

    Raises:
        KVConnectError: a node does not answer any more.
    """
    stage = questions.stage
    report = HostileReport("liars", stage.options.engine)
    health = Health(questions)
    liars = [Liar(random.Random(seed + number)) for number in range(requests)]

    def one(number: int) -> None:
        tap = Tap(stage.side_ports[stage.prefill.name], liars[number])
        try:
            answer = questions.fetch_by_way_of(tap.port, number, f"lie-{seed}-{number}")
            if answer.verdict == "late":
                report.problems.append(f"an answer by way of a liar: {answer.text}")
        except BadAnswer as error:
            report.problems.append(f"the prefill node: {error}")
        finally:
            tap.close()

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(one, range(requests)))
    report.connections = requests
    report.frames = {"prefill-0 to decode-0": sum(liar.lies for liar in liars)}
    health.judge(report)
    return report
