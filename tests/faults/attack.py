"""The attacker: a process of its own that sends hostile frames at a given rate to the ports of a stage."""

from __future__ import annotations

import contextlib
import multiprocessing
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from tests.faults import frames

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


class Sent(NamedTuple):
    """What one connection took: ``frames``, and how many of them were answered as honest requests are."""

    frames: int
    served: int = 0


def send_once(target: Target, made: Sequence[bytes]) -> Sent:
    """Open a connection, send the frames and leave. Returns how many were sent before the peer closed it."""
    if target.kind == "keyed":
        return Sent(_send_keyed(target, made))
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
    return Sent(sent, served)


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
        """Frames so far."""
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
            done = send_once(target, compose(target, rng))
            with lock:
                counts[target.name] += done.frames
                connections[0] += 1
                served[0] += done.served
                sent.value += done.frames
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

    def __init__(self, host: str, port: int, change: Callable[[bytes], bytes] | None = None) -> None:
        self._server = socket.create_server((host, 0))
        self._target = (host, port)
        self._change = change
        self.port = int(self._server.getsockname()[1])
        self.to_server: list[bytearray] = []
        self.to_client: list[bytearray] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
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
