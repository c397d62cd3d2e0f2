"""The measurement of clients that leave, as far as it goes without a server: its loop and its sums."""

from __future__ import annotations

import threading

import pytest

transformers = pytest.importorskip("transformers")

from kvconnect.node.children import BadAnswer  # noqa: E402
from tests.vllm import measure_leavers  # noqa: E402
from tests.vllm.measure_gpu import Answer  # noqa: E402
from tests.vllm.measure_leavers import Accepted, Load, Outcome, measured, parsed  # noqa: E402
from tests.vllm.pairs import Pair, Variant, named_variant  # noqa: E402

PROMPTS = [[index] * 5 for index in range(3)]


class FakeServer:
    """Answers a prompt with its own tokens, unless told otherwise; counts who leaves."""

    def __init__(self, name, busy=0):
        self.name, self.lock = name, threading.Lock()
        self.left, self.busy, self.computed = [], busy, 0.0

    def prefilled(self, prompt):
        return {"of": prompt[0]}

    def abandon(self, prompt, after_s, *, kv_transfer_params):
        with self.lock:
            self.left.append(after_s)

    def tokens(self, prompt, **more):
        self.busy -= self.busy > 0
        return [0]

    def metrics(self, **labels):
        if labels:
            return {"vllm:prompt_tokens_by_source_total": self.computed}
        return {"vllm:kvconnect_slots_send": float(self.busy)}

    def used_blocks(self):
        return 0.0

    def fetch(self, path):
        return b'vllm:kvconnect_failures_total{engine="0",reason="load_timeout"} 2.0\n'


@pytest.fixture
def given():
    return parsed(
        ["--cpu", "--requests", "40", "--in-flight", "4", "--leave-within-ms", "50", "--limit-s", "9"]
    )


@pytest.fixture
def pair(monkeypatch):
    made = Pair(Variant("ours", {}), FakeServer("p"), FakeServer("d", busy=3))
    made.wrong, made.broken = set(), set()

    def ask(server, prompt, *, kv_transfer_params, max_tokens):
        assert kv_transfer_params == {"of": prompt[0]}
        if prompt[0] in made.broken:
            raise BadAnswer("no")
        server.computed += 1025 if prompt[0] in made.wrong else 1
        return Answer(0.01, [9 if prompt[0] in made.wrong else prompt[0], 1])

    monkeypatch.setattr(measure_leavers, "ask", ask)
    return made


def accepted():
    found = Accepted()
    for index in range(3):
        found.add(Outcome(index, False, tokens=(index, 1)))
    found.add(Outcome(0, False, tokens=(0, 2)))
    found.add(Outcome(1, False, error="no answer", tokens=(7, 7)))
    return found


def test_all_is_well(pair, given):
    told = measured(pair, Load(pair, PROMPTS, given), accepted(), given)
    assert (told["requests"], told["left"], told["others"]) == (40, 10, 30)
    assert len(pair.decode.left) == 10
    assert all(0 <= after_s <= 0.05 for after_s in pair.decode.left)
    assert len(set(pair.decode.left)) == 10
    for name in ("others_failed", "others_recomputed", "others_wrong", "others_wrong_first_token"):
        assert told[name] == 0, name
    assert told["first_token_p99_ratio"] == 1
    assert told["not_idle"] == {}
    assert told["idle_after_s"] < 5
    assert told["errors"] == told["wrong"] == []


def test_what_went_wrong_is_counted(pair, given):
    pair.wrong, pair.broken = {1}, {2}
    told = measured(pair, Load(pair, PROMPTS, given), accepted(), given)
    assert told["others_failed"] > 0
    assert told["others_wrong"] == told["others_wrong_first_token"] == told["others_recomputed"] > 0
    assert "no" in told["errors"][0]
    assert told["wrong"][0]["tokens"] == (9, 1)


def test_slots_that_do_not_come_back_are_named(pair, given):
    pair.decode.busy, given.idle_within_s = 10**9, 0.1
    told = measured(pair, Load(pair, PROMPTS, given), accepted(), given)
    assert told["idle_after_s"] is None
    assert list(told["not_idle"]) == ["d: slots_send"]


def test_every_answer_of_the_reference_counts():
    found = accepted()
    assert found.has(Outcome(0, False, tokens=(0, 2)))
    assert not found.has(Outcome(1, False, tokens=(7, 7)))
    assert found.has_first(Outcome(0, False, tokens=(0, 8)))
    assert not found.has_first(Outcome(0, False, tokens=(1, 1)))


def test_an_engine_may_have_a_protocol():
    variant = named_variant("mooncake:nvlink", {"num_slots": 4})
    assert variant.name == "kvconnect-mooncake-nvlink"
    extra = variant.config("producer")["kv_connector_extra_config"]
    assert extra.items() >= {"engine": "mooncake", "protocol": "nvlink", "num_slots": 4}.items()
