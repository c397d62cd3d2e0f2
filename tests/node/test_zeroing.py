"""Fresh blocks hold whatever their last owner left; NaN bytes among it must never reach a token."""

import pytest
import torch

from kvconnect.cache.specs import StateSpec
from kvconnect.node.attention import StepContext
from kvconnect.plan.blocks import expand_block_ids
from tests.node.node_harness import MODEL_NAMES, Client, CopyConnector, make_client, make_prompt

NAN_BYTES = (0x7F, 0xFF)


class NoZeroer:
    """What a runner would be without zeroing: it hears of the blocks and leaves them."""

    def zero_block_ids(self, ids):
        pass


def poison(client: Client, byte: int) -> None:
    """Fill every free block of every layer with ``byte``."""
    pool = client.engine.scheduler.manager.pool
    free = [block for block in range(pool.reserved + 1, pool.total) if pool.is_free(block)]
    assert free
    cache = client.engine.runner.cache
    for name, tensor in cache.tensors.items():
        ids = torch.from_numpy(expand_block_ids(free, cache.tables.blocks_per_kv_block[cache.group_of[name]]))
        bits = tensor.tensor.view(torch.uint8)
        dim = tensor.axes.split().index("block")
        bits.index_fill_(dim, ids.to(bits.device), byte)


def count_nan_attention(monkeypatch) -> list[int]:
    """A list that grows by the number of NaN values of every attention call."""
    found: list[int] = []
    attend = StepContext.attend

    def watched(self, *args, **kwargs):
        output = attend(self, *args, **kwargs)
        found.append(int(output.isnan().sum()))
        return output

    monkeypatch.setattr(StepContext, "attend", watched)
    return found


@pytest.mark.parametrize("backend", ["sdpa", "flex"])
@pytest.mark.parametrize("byte", NAN_BYTES)
def test_a_hybrid_fp8_node_without_zeroing_answers_the_first_request_with_nan(byte, backend, monkeypatch):
    prompt = make_prompt(40)
    options = {"model": "hybrid", "kv_cache_dtype": "fp8_e4m3", "attention_backend": backend}
    expected = make_client(**options).complete(prompt)
    found = count_nan_attention(monkeypatch)

    client = make_client(**options)
    client.engine.runner.zeroer = NoZeroer()
    poison(client, byte)
    # All scores are NaN, so the "greedy" token is the first there is, over and over.
    assert client.complete(prompt) == [0] * 8
    assert all(found)

    found.clear()
    client = make_client(**options)
    poison(client, byte)
    assert client.complete(prompt) == expected
    assert found
    assert not any(found)


@pytest.mark.parametrize(
    ("name", "dtype"), [(name, dtype) for name in MODEL_NAMES for dtype in ("auto", "fp8_e4m3")]
)
def test_no_left_over_byte_reaches_a_token(name, dtype):
    """Prompts in pieces, decoding into new blocks, and blocks that change owners."""
    prompts = [make_prompt(length, seed=length) for length in (70, 33, 129)]
    clean = make_client(model=name, kv_cache_dtype=dtype, enable_prefix_caching=False)
    expected = [clean.complete(prompt, 40) for prompt in prompts]
    client = make_client(
        model=name, kv_cache_dtype=dtype, enable_prefix_caching=False, max_num_batched_tokens=50
    )
    poison(client, 0xFF)
    for index, prompt in enumerate(prompts):
        client.submit(str(index), prompt, 40)
    client.steps(3)
    poison(client, 0x7F)
    client.run("0", "1", "2")
    assert [client.tokens(str(i)) + client.drafts(str(i)) for i in range(3)] == expected


def test_only_fresh_attention_blocks_are_zeroed_and_each_once():
    client = make_client(model="hybrid", kv_cache_dtype="fp8_e4m3", max_num_batched_tokens=64)
    runner, zeroed = client.engine.runner, []
    prepare = runner.prepare
    runner.prepare = lambda step: zeroed.append(list(step.new_block_ids_to_zero)) or prepare(step)
    client.submit("r", make_prompt(100), 40)
    client.run("r")
    blocks = client.last("r").kv_block_ids
    sizes = [group.block_size for group in runner.cache.config.groups]
    assert sizes[0] == 64
    assert [ids for ids in zeroed if ids] == [[blocks[0][0]], [blocks[0][1]], [blocks[0][2]]]


def test_zeroing_follows_the_block_tables_and_precedes_the_forward():
    client = make_client(model="hybrid")
    runner, calls = client.engine.runner, []
    for owner, name in (
        (runner.cache.tables, "apply"),
        (runner.zeroer, "zero_block_ids"),
        (runner.model, "forward"),
    ):
        call = getattr(owner, name)
        setattr(owner, name, lambda *args, _n=name, _c=call: calls.append(_n) or _c(*args))
    client.submit("r", make_prompt(5), 1)
    client.steps(1)
    assert calls == ["apply", "zero_block_ids", "forward"]


# Loads


def _loading(name: str, prompt: list[int], **options: object):
    """D with a load that waits, the blocks that were zeroed for it, and its connector."""
    prefill = CopyConnector()
    p = prefill.attach(model=name, kv_cache_dtype="fp8_e4m3")
    poison(p, 0x7F)
    p.submit("p", prompt, 1, {"do_remote_decode": True})
    p.run("p")
    decode = CopyConnector(p, hold_loads=True)
    d = decode.attach(model=name, kv_cache_dtype="fp8_e4m3", reserved_blocks=11, **options)
    poison(d, 0xFF)
    zeroed: list[int] = []
    zero = d.engine.runner.zeroer.zero_block_ids
    d.engine.runner.zeroer.zero_block_ids = lambda ids: zeroed.extend(ids) or zero(ids)
    d.submit("r", prompt, 30, p.last("p").kv_transfer_params)
    d.steps(1)
    assert decode.pending == ["r"]
    return d, decode, zeroed


@pytest.mark.parametrize("name", MODEL_NAMES)
@pytest.mark.parametrize("length", [60, 128, 129])
def test_a_load_into_blocks_of_nan_gives_the_tokens_of_a_local_request(name, length):
    prompt = make_prompt(length, seed=length)
    expected = make_client(model=name, kv_cache_dtype="fp8_e4m3").complete(prompt, 30)
    d, decode, _ = _loading(name, prompt)
    d.steps(3)
    decode.release()
    d.run("r")
    assert d.tokens("r") + d.drafts("r") == expected


def test_a_block_that_a_load_fills_whole_is_not_zeroed():
    """The load owns it. Of its last block it writes only what it needs, and the next block nothing."""
    d, decode, zeroed = _loading("gqa", make_prompt(16 * 6 + 3))
    blocks = decode.allocated["r"][0][0]
    assert len(blocks) == 7
    assert zeroed == blocks[6:]
    decode.release()
    d.run("r")
    assert zeroed == d.last("r").kv_block_ids[0][6:]


def test_state_blocks_of_a_load_are_no_attention_blocks():
    _, decode, zeroed = _loading("hybrid", make_prompt(100))
    attention, *states = decode.allocated["r"][0]
    assert zeroed == attention[1:]
    assert not {block for (block,) in states} & set(zeroed)


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_zeroing_is_over_when_a_load_begins(name):
    d, decode, _ = _loading(name, make_prompt(100))
    zeroer, calls = d.engine.runner.zeroer, []
    zeroer.zero_block_ids = lambda ids: calls.append("zero")
    # Orders of every step, of which those of this request's load come with the one that zeroes its blocks.
    decode.before_step = lambda orders: calls.append("orders")
    d.submit("other", make_prompt(90, seed=1), 3, decode.client.requests["r"].kv_transfer_params)
    d.steps(1)
    assert calls[-1] == "orders"
    assert calls.index("zero") < len(calls) - 1


def test_a_preempted_or_failed_request_gets_zeroed_blocks_again():
    prompt = make_prompt(100)
    expected = make_client(model="hybrid", kv_cache_dtype="fp8_e4m3").complete(prompt, 30)
    d, decode, zeroed = _loading("hybrid", prompt)
    poison(d, 0x7F)
    decode.fail_with = "the peer left"
    decode.release()
    d.run("r")
    assert d.tokens("r") == expected
    assert zeroed[1:] == d.last("r").kv_block_ids[0]


def test_a_state_page_is_as_wide_as_the_attention_page_it_shares():
    """The zeroer skips state groups; a hybrid model's fp8 block must still hold a whole state."""
    config = make_client(model="hybrid", kv_cache_dtype="fp8_e4m3").engine.runner.cache.config
    attention, *states = [spec for group in config.groups for _, spec in group.layer_specs()]
    assert attention.dtype == torch.float8_e4m3fn
    for spec in states:
        assert isinstance(spec, StateSpec)
        assert spec.content_bytes <= spec.page_size_bytes == attention.page_size_bytes
