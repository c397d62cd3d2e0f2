"""The model that keeps much: its tokens depend on its cache, and not on how a prompt is cut."""

from __future__ import annotations

import pytest

from tests.node.decoding import decode_with
from tests.node.node_harness import CopyConnector, make_client, make_prompt


@pytest.mark.parametrize("dtype", ["bf16", "fp8_e4m3"])
@pytest.mark.parametrize("budget", [16, 100])
def test_tokens_do_not_depend_on_how_a_prompt_is_cut(budget, dtype):
    expected = make_client(model="wide", kv_cache_dtype=dtype).complete(make_prompt(300))
    client = make_client(model="wide", kv_cache_dtype=dtype, max_num_batched_tokens=budget)
    assert client.complete(make_prompt(300)) == expected


def test_batched_decoding_gives_the_tokens_of_the_plain_path():
    prompts = [make_prompt(length, seed=length) for length in (40, 7, 129)]
    plain = make_client(model="wide", enable_prefix_caching=False)
    expected = [plain.complete(prompt, 20) for prompt in prompts]
    client = make_client(model="wide", enable_prefix_caching=False)
    decoder = decode_with(client, (1, 2, 4))
    for index, prompt in enumerate(prompts):
        client.submit(str(index), prompt, 20)
        client.steps(3)
    client.run("0", "1", "2")
    assert [client.tokens(str(index)) for index in range(3)] == expected
    assert decoder.num_runs > 15


def test_a_prompt_that_is_loaded_gives_the_same_tokens():
    prompt = make_prompt(200)
    expected = make_client(model="wide").complete(prompt)
    prefill = CopyConnector().attach(model="wide", reserved_blocks=61)
    prefill.complete(prompt, 1, {"do_remote_decode": True})
    params = prefill.last("request-0").kv_transfer_params
    decode = CopyConnector(prefill).attach(model="wide")
    assert decode.complete(prompt, params=dict(params)) == expected


def test_a_changed_cache_changes_tokens():
    prompt = make_prompt(200)
    client = make_client(model="wide")
    client.submit("a", prompt, 30)
    client.steps(2)
    for cached in client.engine.runner.cache.tensors.values():
        cached.tensor[:] = 0.5
    client.run("a")
    assert client.tokens("a") != make_client(model="wide").complete(prompt, 30)
