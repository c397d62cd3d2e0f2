"""Fresh blocks hold whatever their last owner left; NaN bytes among it must never reach a token."""

import pytest
import torch

from kvconnect.cache.specs import StateSpec
from tests.node.node_harness import (
    MODEL_NAMES,
    Client,
    CopyConnector,
    answer_of,
    make_client,
    make_prompt,
    prefilled,
    until,
)

FP8 = {"kv_cache_dtype": "fp8_e4m3"}


class NoZeroer:
    """What a runner would be without zeroing: it hears of the blocks and leaves them."""

    def zero_block_ids(self, ids):
        pass


def poison(client: Client) -> None:
    """Set every bit of every free block of every layer, which is NaN in all types that a cache may have."""
    pool = client.engine.scheduler.manager.pool
    free = [block for block in range(pool.reserved + 1, pool.total) if pool.is_free(block)]
    assert free
    cache = client.engine.runner.cache
    for name, tensor in cache.tensors.items():
        ratio = cache.tables.blocks_per_kv_block[cache.group_of[name]]
        ids = torch.tensor([block * ratio + part for block in free for part in range(ratio)])
        bits = tensor.tensor.view(torch.uint8)
        bits.index_fill_(tensor.axes.split().index("block"), ids.to(bits.device), 0xFF)


@pytest.mark.parametrize("backend", ["sdpa", "flex"])
def test_a_hybrid_fp8_node_without_zeroing_answers_the_first_request_with_nan(backend):
    """Without it the tests below would be empty."""
    client = make_client(model="hybrid", attention_backend=backend, **FP8)
    client.engine.runner.zeroer = NoZeroer()
    poison(client)
    # All scores are NaN, so the "greedy" token is the first there is, over and over.
    assert client.complete(make_prompt(40)) == [0] * 8


@pytest.mark.parametrize("dtype", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("name", MODEL_NAMES)
def test_no_left_over_byte_reaches_a_token(name, dtype):
    """Prompts in pieces, decoding into new blocks, and blocks that change owners."""
    prompts = [make_prompt(length, seed=length) for length in (70, 33, 129)]
    options = {"model": name, "kv_cache_dtype": dtype, "enable_prefix_caching": False}
    expected = [answer_of(prompt, 40, **options) for prompt in prompts]
    client = make_client(**options, max_num_batched_tokens=50)
    poison(client)
    for index, prompt in enumerate(prompts):
        client.submit(str(index), prompt, 40)
    client.steps(3)
    poison(client)
    client.run("0", "1", "2")
    assert [client.answer(str(index)) for index in range(3)] == expected


def test_only_fresh_attention_blocks_are_zeroed_and_each_once():
    client = make_client(model="hybrid", max_num_batched_tokens=64, **FP8)
    runner, zeroed = client.engine.runner, []
    prepare = runner.prepare
    runner.prepare = lambda step: zeroed.append(list(step.new_block_ids_to_zero)) or prepare(step)
    request = client.submit("r", make_prompt(100), 40)
    until(lambda: len(client.tokens("r")) == 39, client)
    blocks = request.blocks.ids
    assert runner.cache.config.groups[0].block_size == 64
    assert [ids for ids in zeroed if ids] == [[blocks[0][0]], [blocks[0][1]], [blocks[0][2]]]


# Loads


def _loading(name: str, prompt: list[int], **options: object):
    """D with a load that waits, the blocks that were zeroed for it, and its connector."""
    prefill, params = prefilled(prompt, model=name, **FP8)
    decode = CopyConnector(prefill.client, hold_loads=True)
    d = decode.attach(model=name, reserved_blocks=11, **FP8, **options)
    poison(d)
    zeroed: list[int] = []
    zero = d.engine.runner.zeroer.zero_block_ids
    d.engine.runner.zeroer.zero_block_ids = lambda ids: zeroed.extend(ids) or zero(ids)
    d.submit("r", prompt, 20, params)
    d.steps(1)
    assert decode.asked == ["r"]
    return d, decode, zeroed


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("name", MODEL_NAMES)
@pytest.mark.parametrize("length", [60, 128, 129])
def test_a_load_into_blocks_of_nan_gives_the_tokens_of_a_local_request(name, length, fails):
    prompt = make_prompt(length, seed=length)
    expected = answer_of(prompt, 20, model=name, **FP8)
    d, decode, zeroed = _loading(name, prompt)
    first, *states = decode.allocated["r"][0]
    # A load owns the blocks that it fills whole. Of its last block it writes only what it needs.
    size = d.engine.runner.cache.config.groups[0].block_size
    whole = (length - (name == "hybrid")) // size
    assert set(first[whole:]) <= set(zeroed)
    assert set(first[:whole]).isdisjoint(zeroed)
    if name == "hybrid":
        assert not {block for (block,) in states} & set(zeroed), "states are no attention blocks"
    d.steps(3)
    if fails:
        poison(d)
        decode.fail_with = "the peer left"
    decode.release()
    d.run("r")
    assert d.answer("r") == expected


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_zeroing_is_over_when_a_load_begins(name):
    d, decode, _ = _loading(name, make_prompt(100))
    calls: list[str] = []
    d.engine.runner.zeroer.zero_block_ids = lambda ids: calls.append("zero")
    # Orders of every step, of which those of this request's load come with the one that zeroes its blocks.
    decode.before_step = lambda orders: calls.append("orders")
    d.submit("other", make_prompt(90, seed=1), 3, decode.client.requests["r"].kv_transfer_params)
    d.steps(1)
    assert calls[-1] == "orders"
    assert calls.index("zero") < len(calls) - 1


def test_a_state_page_is_as_wide_as_the_attention_page_it_shares():
    """The zeroer skips state groups; a hybrid model's fp8 block must still hold a whole state."""
    config = make_client(model="hybrid", **FP8).engine.runner.cache.config
    attention, *states = [spec for group in config.groups for _, spec in group.layer_specs()]
    assert attention.dtype == torch.float8_e4m3fn
    for spec in states:
        assert isinstance(spec, StateSpec)
        assert spec.content_bytes <= spec.page_size_bytes == attention.page_size_bytes
