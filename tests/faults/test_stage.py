"""Batteries judge what they see: wrong and late answers, what is left over, and attacks that are none."""

from __future__ import annotations

import random

import msgspec

from tests.faults import frames
from tests.faults.stage import Asked, Tally, left_over

MESSAGE = msgspec.msgpack.encode(["fetch", 1, "handle", 200, [[0, 0, [1, 2, 3]]], 1, 5.0])


def test_a_wrong_or_late_answer_is_a_problem_and_a_refusal_is_not():
    tally = Tally([Asked(1, "exact"), Asked(2, "refused", "no"), Asked(9, "late", "x")])
    tally.add(Asked(1, "wrong", "y"))
    assert tally.problems() == ["late after 9.00 s: x", "wrong after 1.00 s: y"]
    assert (tally.reasons(), tally.slowest_s) == ({"no": 1}, 9)


def test_whatever_is_held_is_left_over():
    at_rest = {
        "blocks": {"held": 0, "free": 9, "total": 9},
        "connector": {"engine": "nixl", "leases": 0, "peers": 3, "inbound_peers": 1},
    }
    assert left_over(at_rest) == {}
    assert left_over({**at_rest, "connector": {"leases": 2, "new": 1}}) == {"leases": 2, "new": 1}
    assert "blocks" in left_over({**at_rest, "blocks": {"held": 0, "free": 8, "total": 9}})
    assert "blocks" in left_over({**at_rest, "blocks": {"held": 1, "free": 8, "total": 9}})


def test_mutations_differ_and_can_be_read():
    rng = random.Random(1)
    made = [frames.mutate_message(MESSAGE, rng) for _ in range(300)]
    assert len(set(made)) > 200
    readable = 0
    for one in made:
        try:
            msgspec.msgpack.decode(one)
            readable += one != MESSAGE
        except (msgspec.MsgspecError, ValueError):
            pass
    assert readable > 50, "most of them must get past the first look"
    stream = frames.greeting() + frames.ready() + b"".join(map(frames.zmq_frame, made))
    assert frames.parse_messages(stream) == made
