"""What one engine's prefix cache has is fetched by name by another one, under vLLM's own scheduler."""

from __future__ import annotations

import random
import time
from contextlib import ExitStack

import msgspec
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-vllm")

from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from tests.vllm_bench.engine import Engine
from tests.vllm_bench.links import Links
from tests.vllm_bench.model import MODELS
from tests.vllm_bench.pair import CAPACITY, EXTRA
from tests.vllm_bench.reference import continuation
from tests.vllm_bench.settings import EngineSettings

pytestmark = pytest.mark.timeout(900)
SHARED = ("full", "latent", "windows", "chunked+full")
_FIND_S = 5.0


@pytest.fixture
def begun():
    """Makes engines that share what they have, by model and settings; the last one asks the others."""
    with ExitStack() as stack:

        def make(model, *settings, **extra):
            links, made, sources = Links(), [], []
            for number, one in enumerate(settings):
                given = {**EXTRA, "share_prefix_cache": True, "sources": tuple(sources), **extra}
                engine = Engine(
                    f"e{number}",
                    MODELS[model],
                    role="kv_both",
                    capacity=CAPACITY,
                    layout="LBNHC",
                    extra=given,
                    links=links,
                )
                stack.callback(engine.close)
                address = engine.worker.get_handshake_metadata().address
                sources.append(f"{address.host}:{address.port}")
                engine.begin(one, random.Random(number))
                # Other tests use the machine: a late answer is waited for, and a slow load pays.
                engine.half.pulls._find_s = _FIND_S
                engine.half.pulls._rate.measured(1000, 100.0)
                engine.half.pulls._rate.measured = lambda num_tokens, seconds: None
                finds = engine.worker._worker.transfer.decode.finds
                finds._config = msgspec.structs.replace(finds._config, find_s=_FIND_S)
                made.append(engine)
            return made

        yield make


def ask(engine, name, prompt, num_tokens=3):
    """The prompt tokens that the engine did not compute; the answer must be right."""
    scheduled = {}
    schedule = engine.scheduler.schedule

    def counted():
        output = schedule()
        for request_id, count in output.num_scheduled_tokens.items():
            scheduled[request_id] = scheduled.get(request_id, 0) + count
        return output

    engine.scheduler.schedule = counted
    engine.add(name, prompt, num_tokens)
    while engine.is_busy:
        engine.step()
        time.sleep(0.0002)
    engine.scheduler.schedule = schedule
    assert engine.ended[name][0] == "length"
    assert engine.outputs[name] == continuation(engine.model.sights, prompt, num_tokens), name
    return len(prompt) + num_tokens - 1 - scheduled[name]


@pytest.mark.parametrize("kind", SHARED)
@pytest.mark.parametrize("is_async", [False, True])
def test_an_idle_engine_gives_what_its_prefix_cache_has(begun, kind, is_async):
    source, target = begun(kind, EngineSettings(is_async=is_async), EngineSettings(num_blocks=96))
    for length in (49, 100, 131):
        prompt = [length, *range(length - 1)]
        assert ask(source, f"{length}", prompt) == 0
        steps = source.steps
        assert ask(target, f"{length}", prompt) == (length - 1) // 16 * 16
        assert source.steps == steps, "it was idle meanwhile"
        longer = [*prompt, *range(200, 240)]
        assert ask(target, f"{length} and more", longer) >= (length - 1) // 16 * 16
    for engine in (source, target):
        assert not engine.leftovers()


@pytest.mark.parametrize("is_v2", [False, True])
def test_blocks_of_other_requests_are_not_given(begun, is_v2):
    """The pool has room for about two prompts: whatever a name stood for is soon something else."""
    small = EngineSettings(num_blocks=20, is_v2=is_v2)
    source, target = begun("full", small, EngineSettings(num_blocks=160))
    rng, found = random.Random(7), []
    prompts = [[first, *range(rng.randrange(60, 130))] for first in range(24)]
    for number, prompt in enumerate(prompts):
        ask(source, f"s{number}", prompt)
        other = rng.choice(prompts[: number + 1])
        target.scheduler.reset_prefix_cache()
        found.append(ask(target, f"t{number}", other) > 0)
    assert 3 < sum(found) < len(found) - 3
    pool = source.scheduler.kv_cache_manager.block_pool
    assert all(pool.blocks[block].block_hash is not None for block in source.half._shared._contents)


def test_a_reset_voids_all_names(begun):
    source, target = begun("full", EngineSettings(), EngineSettings())
    prompt = list(range(100))
    ask(source, "a", prompt)
    source.reset(running=False, external=False)
    ask(source, "b", [7, 7, 7])
    assert ask(target, "a", prompt) == 0
    ask(source, "c", prompt)
    time.sleep(1.0)
    assert ask(target, "c", [*prompt, 5]) == 96


def test_blocks_that_a_peer_reads_are_used_again_last(begun):
    source, target = begun("full", EngineSettings(num_blocks=24), EngineSettings())
    first, second, *others = ([number, *range(99)] for number in range(1, 5))
    ask(source, "first", first)
    ask(source, "second", second)
    assert ask(target, "first", first) == 96
    for number, prompt in enumerate(others):
        ask(source, f"more {number}", prompt)
    known = source.half._shared._blocks
    left = [sum((0, name) in known for name in named(source, prompt)) for prompt in (first, second)]
    assert left[0] > left[1], "the second would have gone last without the peer"


def named(engine, prompt):
    """The names of a prompt's blocks."""
    whole = Request("", prompt, SamplingParams(max_tokens=1), None, block_hasher=engine._hasher)
    return list(whole.block_hashes)
