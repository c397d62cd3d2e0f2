"""A peer whose answers are mutated on their way."""

from __future__ import annotations

import random

import pytest

from kvconnect.demo.faults import frames
from kvconnect.demo.faults.liars import Liar, run_liars
from kvconnect.demo.faults.load import Questions
from kvconnect.demo.faults.stage import Stage, StageOptions


@pytest.mark.parametrize("piece", [1, 7, 100, 5000])
def test_a_liar_changes_messages_and_nothing_else(piece):
    messages = [bytes([number]) * (number * 3) for number in range(1, 120)]
    stream = frames.greeting() + frames.ready() + b"".join(map(frames.zmq_frame, messages))
    for share, differ in ((0.0, 0), (1.0, 60)):
        liar = Liar(random.Random(0), share)
        made = b"".join(liar(stream[at : at + piece]) for at in range(0, len(stream), piece))
        heard = frames.parse_messages(made)
        assert made.startswith(frames.greeting() + frames.ready())
        assert len(heard) == len(messages)
        assert liar.lies == share * len(messages)
        assert sum(a != b for a, b in zip(heard, messages, strict=True)) >= differ
        assert differ or heard == messages


@pytest.mark.parametrize(
    "requests", [pytest.param(6, id="6"), pytest.param(500, id="500", marks=pytest.mark.full)]
)
@pytest.mark.timeout(1200)
def test_a_decode_node_outlives_lies(requests):
    options = StageOptions("nixl", policy="fail", num_blocks=400, extra={"insecure": True})
    with Stage(options) as stage:
        questions = Questions(stage, [100, 17, 200], max_tokens=4, deadline_s=30.0, seed=1)
        stage.add_router()
        report = run_liars(stage, questions, requests)
        assert report.problems == [], stage.tails()
    assert report.frames["prefill-0 to decode-0"] > requests / 2
