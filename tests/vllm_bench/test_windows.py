"""The decode node computes the last token of a prompt again: what that token sees must be there."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-vllm")

from tests.vllm_bench.model import MODELS
from tests.vllm_bench.pair import Engines, Setup
from tests.vllm_bench.reference import continuation
from tests.vllm_bench.settings import EngineSettings


@pytest.mark.parametrize("kind", ["windows", "chunked+full", "latent+latent_window", "state+full"])
def test_a_prompt_of_any_length_is_handed_over_exactly(kind):
    """Of lengths whose window begins with a block, of whole chunks, and of all others."""
    model = MODELS[kind]
    engines = Engines(Setup("pd", model, ("LBNHC", "LBNHC")))
    try:
        prefill, decode = engines.all
        for engine in engines.all:
            engine.begin(EngineSettings(), random.Random(0))
        for length in range(1, 100):
            prompt = [length, *range(length - 1)]
            name = f"{length} tokens"
            prefill.add(name, prompt, 1, {"do_remote_decode": True, "do_remote_prefill": False})
            while name not in prefill.ended:
                prefill.step()
            params = prefill.ended[name][1]
            decode.add(name, prompt, 3, params)
            while decode.is_busy or prefill.is_busy:
                prefill.step()
                decode.step()
            assert decode.outputs[name] == continuation(model.sights, prompt, 3), name
            assert decode.ended[name][0] == "length"
    finally:
        engines.close()
