"""Nodes of unlike cache types, over the real connector: what landed is the cast of what was held."""

from __future__ import annotations

import json
import time

import pytest
import torch

from kvconnect.cache.identity import Naming, differences
from kvconnect.node.models import build_model
from kvconnect.node.node_connector import identity
from kvconnect.node.node_options import NodeOptions
from tests.node.node_harness import MODEL_NAMES, Client, make_client, make_prompt

ASK_FOR_KV = {"do_remote_decode": True, "do_remote_prefill": False}
TORCH_DTYPES = {"bf16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn}
DEADLINE_S = 30
LENGTH = 130


def make_node(role: str, *, convert: bool, **options: object) -> Client:
    extra = {"engine": "memory", "convert_dtype": convert, "peer_timeout_s": 4}
    config = {
        "kv_connector": "KVConnect",
        "kv_role": role,
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": extra,
    }
    return make_client(kv_transfer_config=json.dumps(config), **options)


def run(client: Client, other: Client, name: str) -> None:
    """Steps of both nodes until the request ended."""
    deadline = time.monotonic() + DEADLINE_S
    while client.last(name) is None:
        assert time.monotonic() < deadline
        other.engine.run_once()
        client.engine.run_once()


def hand_over(p: Client, d: Client, prompt: list[int]) -> tuple[dict[str, list], dict[str, list]]:
    """The block ids of both sides, by name of the side's request."""
    p.submit("r", prompt, 1, ASK_FOR_KV)
    run(p, d, "r")
    d.submit("r", prompt, 8, p.last("r").kv_transfer_params)
    d_ids: list[list[int]] = []
    deadline = time.monotonic() + DEADLINE_S
    while d.last("r") is None:
        assert time.monotonic() < deadline
        p.engine.run_once()
        d.engine.run_once()
        blocks = d.requests["r"].blocks
        if blocks is not None and any(blocks.ids):
            d_ids = [list(ids) for ids in blocks.ids]
    return p.last("r").kv_block_ids, d_ids


def rows(client: Client, layer: str, ids: list[int], count: int) -> list[torch.Tensor]:
    """The values of the first ``count`` tokens of a layer, token by token, found by hand."""
    cache = client.engine.runner.cache
    named, group = cache.tensors[layer], cache.group_of[layer]
    axes = named.axes.split()
    kernel = cache.kernel_block_sizes[group]
    ratio = cache.config.groups[group].block_size // kernel
    order = [axes.index(axis) for axis in axes if axis not in ("block", "token")]
    view = named.tensor.permute(axes.index("block"), axes.index("token"), *order)
    found = []
    for token in range(count):
        block, row = divmod(token, kernel)
        logical, part = divmod(block, ratio)
        found.append(view[ids[logical] * ratio + part, row] if ids[logical] else None)
    return found


@pytest.mark.parametrize("name", MODEL_NAMES)
@pytest.mark.parametrize(("ours", "theirs"), [("bf16", "fp8_e4m3"), ("fp8_e4m3", "bf16")])
def test_every_row_that_landed_is_the_cast_of_the_one_that_was_held(name, ours, theirs):
    p = make_node("kv_producer", convert=True, model=name, kv_cache_dtype=ours)
    d = make_node("kv_consumer", convert=True, model=name, kv_cache_dtype=theirs, reserved_blocks=11)
    prompt = make_prompt(LENGTH, seed=3)
    try:
        held_ids, landed_ids = hand_over(p, d, prompt)
        assert d.last("r").failure is None
        assert len(d.tokens("r")) == 8
        assert d.last("r").cached_tokens == LENGTH - 1
        cache, compared = d.engine.runner.cache, 0
        for layer, group in cache.group_of.items():
            if group in cache.state_groups:
                continue
            held = rows(p, layer, held_ids[group], LENGTH - 1)
            landed = rows(d, layer, landed_ids[group], LENGTH - 1)
            for ours_row, theirs_row in zip(held, landed, strict=True):
                if ours_row is None or theirs_row is None:
                    continue
                assert ours_row.float().abs().sum() > 0
                cast = ours_row.float().clamp(-448, 448).to(TORCH_DTYPES[theirs])
                assert torch.equal(cast.view(torch.uint8), theirs_row.contiguous().view(torch.uint8)), layer
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


def test_the_cache_dtype_is_no_part_of_the_fingerprint_where_it_is_converted():
    model = build_model("gqa")
    options = [NodeOptions(kv_cache_dtype=name) for name in ("bf16", "fp8_e4m3")]
    names = Naming("h", 16)
    one, other = (identity(given, model, names, convert_dtype=True) for given in options)
    assert one == other
    assert all(differences(one, identity(given, model, names)) for given in options)
