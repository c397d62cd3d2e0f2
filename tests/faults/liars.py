"""A prefill node whose every second answer is mutated on its way, and the decode node that listens to it."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

from kvconnect.node.children import BadAnswer
from tests.faults import frames
from tests.faults.attack import Tap
from tests.faults.hostile import Health, HostileReport
from tests.faults.load import Questions

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
        tap = Tap("127.0.0.1", stage.side_ports[stage.prefill.name], liars[number])
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
