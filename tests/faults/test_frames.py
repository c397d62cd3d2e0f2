"""What the attacker sends: seeded, and really different from what it was made of."""

from __future__ import annotations

import json
import os
import random
import socket

import msgspec
import pytest

from tests.faults import frames
from tests.faults.attack import Target, compose
from tests.faults.listeners import listeners
from tests.faults.load import Asked, Tally, percentile
from tests.faults.stage import left_over

MESSAGE = msgspec.msgpack.encode(["fetch", 1, "handle", 200, [[0, 0, [1, 2, 3]]], 1, 5.0])


@pytest.mark.parametrize("size", [0, 1, 255, 256, 70_000])
def test_frames_are_read_back(size):
    payload = bytes(size)
    stream = frames.greeting() + frames.ready() + frames.zmq_frame(payload) + frames.zmq_frame(b"x")
    assert frames.parse_messages(stream) == [payload, b"x"]
    assert frames.parse_messages(stream[:-1]) == [payload]


def test_mutations_are_seeded_and_differ():
    def made(seed):
        rng = random.Random(seed)
        return [frames.mutate_message(MESSAGE, rng) for _ in range(300)]

    assert made(1) == made(1)
    assert made(1) != made(2)
    assert len(set(made(1))) > 200
    readable = 0
    for one in made(1):
        try:
            msgspec.msgpack.decode(one)
            readable += one != MESSAGE
        except (msgspec.MsgspecError, ValueError):
            pass
    assert readable > 50, "most of them must get past the first look"


def test_bodies_are_json_unless_they_are_bombs():
    rng = random.Random(0)
    body = {"prompt": [1, 2], "max_tokens": 1}
    for _ in range(200):
        json.loads(frames.mutate_body(body, rng))
        changed = json.loads(frames.mutate_params(body, [{"remote_port": 1, "deep": {"a": [1]}}], rng))
        assert changed["prompt"] == [1, 2]
        assert frames.json_bomb(rng)
        assert frames.broken_http(rng)
        assert frames.broken_framing(rng)


@pytest.mark.parametrize("kind", ["side", "keyed", "http", "engine"])
def test_every_connection_says_something(kind):
    target = Target("x", kind, "127.0.0.1", 1, (MESSAGE,), ({"prompt": [1]},), ({"remote_port": 1},))
    rng = random.Random(3)
    assert all(all(compose(target, rng)) or kind == "keyed" for _ in range(200))


def test_a_wrong_or_late_answer_is_a_problem_and_a_refusal_is_not():
    tally = Tally([Asked(1, "exact"), Asked(2, "refused", "no"), Asked(9, "late", "x")])
    tally.add(Asked(1, "wrong", "y"))
    assert tally.problems() == ["late after 9.00 s: x", "wrong after 1.00 s: y"]
    assert (tally.reasons(), tally.slowest_s) == ({"no": 1}, 9)
    assert percentile([3, 1, 2], 0.5) == 2
    assert percentile([], 0.5) == 0


def test_whatever_is_held_is_left_over():
    at_rest = {
        "blocks": {"held": 0, "free": 9, "total": 9},
        "connector": {"engine": "nixl", "leases": 0, "peers": 3, "inbound_peers": 1},
    }
    assert left_over(at_rest) == {}
    assert left_over({**at_rest, "connector": {"leases": 2, "new": 1}}) == {"leases": 2, "new": 1}
    assert "blocks" in left_over({**at_rest, "blocks": {"held": 0, "free": 8, "total": 9}})
    assert "blocks" in left_over({**at_rest, "blocks": {"held": 1, "free": 8, "total": 9}})


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "0.0.0.0", "::1", "::"])
def test_listeners_are_found_by_their_process(host):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    before = listeners(os.getpid())
    with socket.socket(family) as listener:
        try:
            listener.bind((host, 0))
        except OSError:
            pytest.skip(f"nothing can listen on {host} here")
        assert listeners(os.getpid()) == before, "it does not listen yet"
        listener.listen()
        (found,) = set(listeners(os.getpid())) - set(before)
        assert found == ("127.0.0.1" if host in ("0.0.0.0", "::") else host, listener.getsockname()[1])
