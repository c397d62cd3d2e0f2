"""The flex-attention backend: the tokens of the other one, out of the pages that its buffers name."""

from __future__ import annotations

import importlib

import pytest
import torch

from kvconnect.node.attention import AttentionPages, PagedRows, Segment
from kvconnect.runner_kit.attention_groups import GraphSupport
from kvconnect.runner_kit.flex_capacity import FlexBuffers, FlexCapacity
from tests.node.flex_attention import FlexAttention
from tests.node.node_harness import MODEL_NAMES, Client, make_client, make_prompt

# One token, one page exactly and one token more, a block of every model, and more than a window.
LENGTHS = (1, 16, 17, 128, 300)


def together(client: Client, prompts: list[list[int]], max_tokens: int = 8) -> list[list[int]]:
    """Tokens and draft tokens of prompts that run at the same time."""
    names = [str(index) for index in range(len(prompts))]
    for name, prompt in zip(names, prompts, strict=True):
        client.submit(name, prompt, max_tokens)
    client.run(*names)
    return [client.tokens(name) + client.drafts(name) for name in names]


def flex_parts(client: Client) -> dict[str, FlexAttention]:
    """What attends, by layer. Every attention layer has one."""
    parts = client.engine.runner.cache.layer_attention
    assert parts
    assert all(isinstance(part, FlexAttention) for part in parts.values())
    return parts  # type: ignore[return-value]


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_tokens_are_equal_alone(name):
    plain, flex = make_client(model=name), make_client(model=name, attention_backend="flex")
    flex_parts(flex)
    for length in LENGTHS:
        prompt = make_prompt(length, seed=length)
        assert flex.complete(prompt) == plain.complete(prompt), f"{length} tokens"


@pytest.mark.parametrize("budget", [1024, 33])
@pytest.mark.parametrize("name", MODEL_NAMES)
def test_tokens_are_equal_in_chunks_and_concurrently(name, budget):
    common = make_prompt(128, seed=1)
    # Three share pages, so one query group meets a page in several requests.
    prompts = [common + make_prompt(n, seed=n) for n in (5, 20, 90)]
    prompts += [make_prompt(length, seed=length) for length in (1, 64, 300)]
    expected = [make_client(model=name).complete(prompt) for prompt in prompts]
    client = make_client(model=name, attention_backend="flex", max_num_batched_tokens=budget)
    client.complete(common)
    assert together(client, prompts) == expected


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_cache_and_kernel_blocks_are_those_of_the_other_backend(name):
    plain = make_client(model=name, block_size=128).engine.runner.cache
    flex = make_client(model=name, block_size=128, attention_backend="flex").engine.runner.cache
    assert flex.kernel_block_sizes == plain.kernel_block_sizes
    assert name != "mixed" or flex.kernel_block_sizes == {0: 64}
    for layer, tensor in plain.tensors.items():
        assert flex.tensors[layer].tensor.shape == tensor.tensor.shape
        assert flex.tensors[layer].tensor.stride() == tensor.tensor.stride()
    assert flex.attention.graph_support == GraphSupport.NEVER


@pytest.mark.parametrize(("model", "options"), [("gqa", {"block_size": 128}), ("mixed", {"block_size": 256})])
def test_large_blocks_give_the_same_tokens(model, options):
    prompts = [make_prompt(length, seed=length) for length in (300, 3)]
    expected = together(make_client(model=model, **options), prompts)
    assert together(make_client(model=model, attention_backend="flex", **options), prompts) == expected


def corrupted(monkeypatch, change) -> None:
    """Let ``change`` have the buffers' views after every fill, before anything reads them."""
    fill = FlexBuffers.fill

    def fill_and_change(self, **batch):
        blocks = fill(self, **batch)
        change(blocks)
        return blocks

    monkeypatch.setattr(FlexBuffers, "fill", fill_and_change)


def wrong_page(blocks):
    last = int(blocks.kv_num_blocks[-1]) - 1
    blocks.kv_indices[-1, last] += 1


def lost_page(blocks):
    blocks.kv_num_blocks[-1] -= 1


def page_of_a_stranger(blocks):
    blocks.kv_indices[0, 0] = 200


@pytest.mark.parametrize("change", [wrong_page, lost_page, page_of_a_stranger])
@pytest.mark.parametrize("name", MODEL_NAMES)
def test_a_wrong_entry_changes_tokens(monkeypatch, name, change):
    prompt = make_prompt(300, seed=4)
    expected = make_client(model=name).complete(prompt, 4)
    corrupted(monkeypatch, change)
    assert make_client(model=name, attention_backend="flex").complete(prompt, 4) != expected


def removed_page(blocks):
    lost_page(blocks)
    blocks.kv_indices[-1, int(blocks.kv_num_blocks[-1])] = 0


@pytest.mark.parametrize("name", ["gqa", "mla"])
def test_an_index_beyond_the_count_is_not_attended_to(monkeypatch, name):
    prompt = make_prompt(300, seed=4)
    results = []
    for change in (lost_page, removed_page):
        with monkeypatch.context() as patch:
            corrupted(patch, change)
            results.append(make_client(model=name, attention_backend="flex").complete(prompt, 4))
    assert results[0] == results[1]


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_buffers_stay_where_they_are_and_fit_the_limits(name):
    client = make_client(model=name, attention_backend="flex", max_num_batched_tokens=100)
    buffers = {layer: part.buffers for layer, part in flex_parts(client).items()}
    before = {layer: (b.kv_num_blocks.data_ptr(), b.kv_indices.data_ptr()) for layer, b in buffers.items()}
    together(client, [make_prompt(length, seed=length) for length in (250, 30)])
    for layer, made in buffers.items():
        group = client.engine.runner.cache.group_of[layer]
        size = client.engine.runner.cache.kernel_block_sizes[group]
        block = made.capacity.q_block_size
        assert (made.kv_num_blocks.data_ptr(), made.kv_indices.data_ptr()) == before[layer]
        assert made.kv_indices.shape == (-(-100 // block), block * (1024 // size))
        assert int(made.kv_num_blocks[0]) > 0


@pytest.mark.parametrize("window", [16, None])
def test_only_the_places_that_a_request_sees_count_in_its_row(window):
    """A row goes on naming pages that left the window, when the same request has them again."""
    generator = torch.Generator().manual_seed(0)
    pages = AttentionPages(
        *(PagedRows(torch.randn((8, 16, 2, 4), generator=generator, dtype=torch.float64)) for _ in range(2))
    )
    query = torch.randn((4, 2, 4), generator=generator, dtype=torch.float64)
    # Positions 40 to 43: with the window they see pages 1 and 2 of the row, without it page 0 as well.
    rows = ([4, 5, 6, 0, 0], [4, 5, 6, 5, 6] if window is None else [6, 5, 6, 5, 6])
    results = []
    for row in rows:
        part = FlexAttention(FlexBuffers(FlexCapacity(16, 80, 16, 16)))
        part.begin([Segment(0, 40, 4, 0)], torch.tensor([row], dtype=torch.int32))
        results.append(part.attend(pages, query, window=window, value_width=None))
    assert torch.equal(results[0], results[1])
    assert results[0].abs().min() > 0


@pytest.mark.parametrize("name", ["gqa", "mla", "sliding"])
@pytest.mark.parametrize(
    ("backend", "calls", "most_pairs"),
    [
        ("sdpa", "kvconnect.node.attention.scaled_dot_product_attention", 256 * 1024),
        ("flex", "tests.node.flex_attention.flex_attention", 1 << 19),
    ],
)
def test_one_call_has_a_bounded_number_of_scores(monkeypatch, name, backend, calls, most_pairs):
    prompt = make_prompt(900)
    expected = make_client(model=name, max_num_batched_tokens=100).complete(prompt, 2)
    module, _, function = calls.rpartition(".")
    module = importlib.import_module(module)
    attend, pairs = getattr(module, function), []

    def look(query, keys, *rest, **named):
        pairs.append(query.shape[0] * query.shape[2] * keys.shape[2])
        return attend(query, keys, *rest, **named)

    monkeypatch.setattr(module, function, look)
    client = make_client(model=name, attention_backend=backend, max_num_batched_tokens=1024)
    assert client.complete(prompt, 2) == expected
    assert 0 < max(pairs) <= most_pairs


def test_what_the_null_page_holds_does_not_matter():
    prompts = [make_prompt(length, seed=length) for length in (100, 3, 40)]
    expected = together(make_client(model="sliding"), prompts)
    client = make_client(model="sliding", attention_backend="flex")
    for layer in client.engine.runner.cache.pages.values():
        assert isinstance(layer, AttentionPages)
        for rows in (layer.keys, layer.values):
            assert rows is not None
            rows.pages[0] = float("nan")
    assert together(client, prompts) == expected


def test_an_eight_bit_cache():
    prompts = [make_prompt(length, seed=length) for length in (70, 9)]
    options = {"model": "hybrid", "kv_cache_dtype": "fp8_e4m3"}
    expected = together(make_client(**options), prompts)
    assert together(make_client(**options, attention_backend="flex"), prompts) == expected


def test_layers_of_one_kind_share_a_backend_and_states_have_none():
    cache = make_client(model="hybrid", attention_backend="flex").engine.runner.cache
    assert [group.backend.name for group in cache.attention.groups] == ["FLEX_GROUPED"]
    parts = flex_parts(make_client(model="sliding", attention_backend="flex"))
    assert len(parts) == 6
    assert len({id(part) for part in parts.values()}) == 3


def test_nothing_is_compiled_and_the_compiler_is_left_as_it_was():
    client = make_client(attention_backend="flex")
    torch.compiler.reset()
    with torch.compiler.set_stance("fail_on_recompile"):
        for length in (5, 40, 300):
            client.complete(make_prompt(length))
    calls = []

    def backend(graph, _inputs):
        calls.append(graph)
        return graph.forward

    assert torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2)).tolist() == [2, 2]
    assert calls
