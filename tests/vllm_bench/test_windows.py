"""The decode node computes the last token of a prompt again: what that token sees must be there."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-vllm")

from tests.vllm_bench.engine import Engine
from tests.vllm_bench.links import Links
from tests.vllm_bench.model import MODELS, Group, Model
from tests.vllm_bench.pair import _EXTRA, CAPACITY, Engines, Setup
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


# The window begins in the block that the request goes on with, which is cached once it is full.
NARROW = Model("narrow", (Group("full"), Group("window", sees=5)))


@pytest.mark.parametrize("model", [MODELS["windows"], MODELS["chunked+full"], NARROW], ids=lambda it: it.name)
@pytest.mark.parametrize("is_async", [False, True])
def test_no_other_prompt_gets_a_block_of_a_window_that_a_peer_filled_in_part(model, is_async):
    """The prefill node has blocks half as long: of one that a window begins in it may lack a part."""
    shorter = replace(model, groups=tuple(replace(group, block_size=8) for group in model.groups))
    links, extra = Links(), dict(_EXTRA)
    more = {"capacity": CAPACITY, "layout": "LBNHC", "extra": extra, "links": links}
    prefill = Engine("prefill", shorter, role="kv_producer", **more)
    decode = Engine("decode", model, role="kv_consumer", **more)
    try:
        for engine in (prefill, decode):
            engine.begin(EngineSettings(is_async=is_async), random.Random(0))
        for length in range(40, 140, 9):
            # No earlier prompt begins like this one.
            prompt = [length, *range(length - 1)]
            name = f"{length} tokens"
            prefill.add(name, prompt, 1, {"do_remote_decode": True, "do_remote_prefill": False})
            while name not in prefill.ended:
                prefill.step()
            decode.add(name, prompt, 40, prefill.ended[name][1])
            while decode.is_busy or prefill.is_busy:
                prefill.step()
                decode.step()
            answer = continuation(model.sights, prompt, 40)
            assert decode.outputs[name] == answer, name
            whole = [*prompt, *answer]
            for end in range(17, len(whole), 5):
                turn = [*whole[:end], 249]
                decode.add(f"{name}, {end}", turn, 2)
                while decode.is_busy:
                    decode.step()
                assert decode.outputs[f"{name}, {end}"] == continuation(model.sights, turn, 2), (name, end)
    finally:
        prefill.close()
        decode.close()
