"""What vLLM's configuration and backends say of KV: each field that counts, and what a page shows."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-vllm")

import torch
from transformers import AutoConfig

from kvconnect.cache.identity import Identity, differences, marks_differ
from kvconnect.runner_kit.model_configuration import FREE_FIELDS, configuration, plain
from kvconnect.vllm.stated_identity import _rotary
from kvconnect.vllm.values import page_orders

MODEL_TYPES = ("llama", "gemma3_text", "qwen3_next", "deepseek_v3", "gpt_oss", "llama4_text")
"""With numbers, texts, lists, mappings of mappings, and nothing as values of their fields."""
FREE = {field for fields in FREE_FIELDS.values() for field in fields}


def stated(config):
    return Identity.of({"configuration": configuration(config)})


def other(value):
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str():
            return value + "x"
        case list():
            return [*value, 1]
        case dict():
            return {**value, "more": 1}
    return 7


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_each_field_of_a_configuration_counts_or_is_listed_as_free(model_type):
    made = AutoConfig.for_model(model_type)
    before = stated(made)
    assert differences(before, stated(AutoConfig.for_model(model_type))) == []
    for field, value in made.to_dict().items():
        if field in ("model_type", "architectures"):
            continue
        changed = AutoConfig.for_model(model_type)
        # As an override does, and past what the class makes of it.
        changed.to_dict = dict(made.to_dict(), **{field: other(value)}).copy
        found = differences(before, stated(changed))
        assert bool(found) is (field not in FREE), field
        assert all(f"configuration.{field}" in one for one in found)
        assert bool(marks_differ(before.marks, stated(changed).marks)) is bool(found)


def test_what_one_release_of_transformers_does_not_know_is_no_difference_at_its_default():
    made = AutoConfig.for_model("llama")
    older = AutoConfig.for_model("llama")
    older.to_dict = {key: value for key, value in made.to_dict().items() if key != "mlp_bias"}.copy
    assert differences(stated(made), stated(older)) == []
    made.mlp_bias = True
    assert differences(stated(made), stated(older))


def test_objects_are_told_by_what_they_hold_and_not_where_they_lie():
    class Thing:
        def __init__(self, value):
            self.value = value

    assert plain(Thing(1)) == plain(Thing(1)) != plain(Thing(2))
    assert plain([torch.bfloat16, {"a": {3, 1}}]) == ["bfloat16", {"a": [1, 3]}]


def rope(theta, **more):
    angles = torch.arange(512.0)[:, None] / theta ** (torch.arange(0, 64, 2) / 64)
    module = torch.nn.Module()
    module.cos_sin_cache = torch.cat([angles.cos(), angles.sin()], 1)
    module.__dict__.update({"is_neox_style": True, **more})
    return list(_rotary([module]))


def test_another_base_another_style_and_long_factors_turn_keys_otherwise():
    assert rope(10_000) == rope(10_000)
    assert len({*rope(10_000), *rope(100), *rope(10_000, is_neox_style=False)}) == 3
    long = rope(10_000, use_long_rope=True, original_max_position_embeddings=256)
    assert long != rope(10_000, use_long_rope=False, original_max_position_embeddings=256)


class Backend:
    """One whose pages are rows of K and V, in an order of its own."""

    def __init__(self, order="kv"):
        self.order = order

    def do_kv_cache_update(self, layer, key, value, cache, slots):
        rows = {"kv": [key, value], "vk": [value, key], "mixed": [key.flip(2), value]}[self.order]
        block = cache.shape[2]
        for slot in slots.tolist():
            cache[slot // block, :, slot % block] = torch.cat(rows, 2)[slot].to(cache.dtype)


def layer(order="kv", heads=2, block=16, nhd=False, backend=True):
    shape = (4, block, heads, 16) if nhd else (4, heads, block, 16)
    cache = torch.full(shape, 3.0, dtype=torch.bfloat16)
    cache = cache.transpose(1, 2) if nhd else cache
    impl = Backend(order) if backend else object()
    fields = {
        "num_kv_heads": heads,
        "head_size": 8,
        "kv_cache_dtype": "auto",
        "kv_cache": cache,
        "impl": impl,
    }
    return SimpleNamespace(**fields), cache


def order_of(has_slots=False, **more):
    made, cache = layer(**more)
    (text,) = page_orders({"l": made}, {"l": cache}, torch.bfloat16, lambda name: has_slots).values()
    assert (cache == 3.0).all(), "the page has its bytes back"
    return Identity.of({"page order": text})


def test_the_order_within_a_page_is_found_out_by_writing_one():
    base = order_of()
    for order in ("vk", "mixed"):
        assert differences(base, order_of(order=order))
    for more in ({"heads": 4}, {"block": 32}, {"nhd": True}):
        assert not differences(base, order_of(**more)), "these are bridged"


def test_pages_of_slots_are_compared_as_they_lie_in_memory():
    assert not differences(order_of(has_slots=True), order_of(has_slots=True))
    assert differences(order_of(has_slots=True), order_of(has_slots=True, nhd=True))


def test_pages_that_are_never_divided_are_refused_by_their_block_sizes_and_the_flag():
    (found,) = differences(order_of(has_slots=True), order_of(has_slots=True, block=32))
    for words in ("undivided pages of 16 tokens", "undivided pages of 32 tokens", "--block-size"):
        assert words in found


def test_a_backend_that_writes_no_page_is_named_with_its_release():
    assert "not shown: " in order_of(backend=False).text("page order")
