"""Nodes of unlike cache types, over the real connector: what landed is the cast of what was held."""

from __future__ import annotations

import json
import time

import pytest
import torch

from tests.node.node_harness import MODEL_NAMES, Client, make_client, make_prompt

ASK_FOR_KV = {"do_remote_decode": True, "do_remote_prefill": False}
TORCH_DTYPES = {"bf16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn}
LENGTH = 130


def make_node(role: str, *, convert: bool, **options: object) -> Client:
    extra = {"engine": "memory", "convert_dtype": convert, "peer_timeout_s": 4}
    config = {"kv_role": role, "kv_load_failure_policy": "fail", "kv_connector_extra_config": extra}
    return make_client(kv_transfer_config=json.dumps(config), **options)


def hand_over(p: Client, d: Client, prompt: list[int]) -> tuple[list[list[int]], ...]:
    """One request by both nodes. The block ids of both sides."""
    d_ids: list[list[int]] = []
    deadline = time.monotonic() + 30
    p.submit("r", prompt, 1, ASK_FOR_KV)
    for client in (p, d):
        while client.last("r") is None:
            assert time.monotonic() < deadline
            p.engine.run_once()
            d.engine.run_once()
            blocks = d.requests["r"].blocks if client is d else None
            if blocks is not None and any(blocks.ids):
                d_ids = [list(ids) for ids in blocks.ids]
        if client is p:
            p_ids = p.requests["r"].blocks.snapshot()
            d.submit("r", prompt, 8, dict(p.last("r").kv_transfer_params))
    return p_ids, d_ids


def rows(client: Client, layer: str, ids: list[int]) -> list[torch.Tensor | None]:
    """The values of a layer's loaded tokens, token by token, found by hand; None for those that are gone."""
    cache = client.engine.runner.cache
    named, group = cache.tensors[layer], cache.group_of[layer]
    axes = named.axes.split()
    kernel = cache.kernel_block_sizes[group]
    ratio = cache.config.groups[group].block_size // kernel
    order = [axes.index(axis) for axis in axes if axis not in ("block", "token")]
    view = named.tensor.permute(axes.index("block"), axes.index("token"), *order)
    found = []
    for token in range(LENGTH - 1):
        block, row = divmod(token, kernel)
        logical, part = divmod(block, ratio)
        found.append(view[ids[logical] * ratio + part, row] if ids[logical] else None)
    return found


@pytest.mark.parametrize("name", MODEL_NAMES)
@pytest.mark.parametrize(("ours", "theirs"), [("bf16", "fp8_e4m3"), ("fp8_e4m3", "bf16")])
def test_every_row_that_landed_is_the_cast_of_the_one_that_was_held(name, ours, theirs):
    p = make_node("kv_producer", convert=True, model=name, kv_cache_dtype=ours)
    d = make_node("kv_consumer", convert=True, model=name, kv_cache_dtype=theirs, reserved_blocks=11)
    try:
        held_ids, landed_ids = hand_over(p, d, make_prompt(LENGTH, seed=3))
        assert d.last("r").failure is None
        assert len(d.tokens("r")) == 8
        assert d.last("r").cached_tokens == LENGTH - 1
        cache, compared = d.engine.runner.cache, 0
        for layer, group in cache.group_of.items():
            if cache.config.groups[group].is_state:
                continue
            for held, landed in zip(
                rows(p, layer, held_ids[group]), rows(d, layer, landed_ids[group]), strict=True
            ):
                if held is not None and landed is not None:
                    assert held.float().abs().sum() > 0
                    cast = held.float().clamp(-448, 448).to(TORCH_DTYPES[theirs])
                    assert torch.equal(cast.view(torch.uint8), landed.contiguous().view(torch.uint8)), layer
                    compared += 1
        assert compared >= 2 * 16
    finally:
        p.engine.stop()
        d.engine.stop()


@pytest.mark.parametrize("says_so", ["p", "d", ""])
def test_unlike_types_are_refused_unless_both_sides_ask_for_it(says_so):
    p = make_node("kv_producer", convert=says_so == "p")
    d = make_node("kv_consumer", convert=says_so == "d", kv_cache_dtype="fp8_e4m3", reserved_blocks=11)
    try:
        hand_over(p, d, make_prompt(40))
        failure = d.last("r").failure
        assert failure is not None
        assert "dtype" in failure.message
        assert ("convert_dtype" in failure.message) == bool(says_so)
    finally:
        p.engine.stop()
        d.engine.stop()
