"""``reset_prefix_cache`` under load: running requests are preempted, and begin anew at once."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-vllm")

from tests.vllm_bench.model import MODELS
from tests.vllm_bench.pair import Engines, Setup
from tests.vllm_bench.reference import continuation
from tests.vllm_bench.settings import EngineSettings

pytestmark = pytest.mark.timeout(900)
NUM_TOKENS = 24


@pytest.fixture(scope="module", params=["full", "window+full", "aligned+full"])
def engines(request):
    made = Engines(Setup("offload", MODELS[request.param], ("LBNHC", "LBNHC"), 1 << 20))
    yield made
    made.close()


@pytest.mark.parametrize("external", [False, True])
@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize(("is_async", "is_v2"), [(False, False), (True, True)])
def test_what_is_kept_of_a_request_that_was_reset_is_right(engines, is_async, is_v2, num_drafts, external):
    """At every step of its answer; then others ask the same, and have nothing but what was kept."""
    (engine,) = engines.all
    settings = EngineSettings(is_async=is_async, is_v2=is_v2, num_drafts=num_drafts)
    for num_steps in range(1, NUM_TOKENS):
        prompt = list(range(15))
        expected = continuation(engine.model.sights, prompt, NUM_TOKENS)
        engine.begin(settings, random.Random(num_steps))
        engine.add("first", prompt, NUM_TOKENS)
        for _ in range(num_steps):
            engine.step()
        engine.reset(running=True, external=external)
        answer(engine, "first")
        engine.reset(running=False, external=False)
        engine.add("second", prompt, NUM_TOKENS)
        answer(engine, "second")
        assert engine.outputs == {"first": expected, "second": expected}
        assert not engine.leftovers()


def answer(engine, request_id):
    while engine.is_busy:
        engine.step()
    assert engine.ended[request_id][0] == "length"
