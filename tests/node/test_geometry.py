"""What a connector is given: the same numbers everywhere, and the same tensors however a node was started."""

import json

import pytest
import torch

from kvconnect.cache.identity import Naming, differences
from kvconnect.cache.region_table import RegionTable
from kvconnect.node.kv_cache import CACHE_DTYPES, NodeCache
from kvconnect.node.models import build_model
from kvconnect.node.node_connector import identity
from kvconnect.node.node_options import NodeOptions
from kvconnect.runner_kit.kernel_blocks import GraphSupport
from tests.node.node_harness import MODEL_NAMES, CopyConnector, answer_of, make_client, make_prompt, prefilled

# A dense model, a backend that takes 64 only, and blocks of 128.
SPLIT = {"block_size": 128, "kernel_block_sizes": (64,)}


def test_view_block_table_and_region_table_agree_on_the_kernel_block():
    connector = CopyConnector()
    client = connector.attach(**SPLIT, num_blocks=20)
    cache = client.engine.runner.cache
    assert cache.kernel_block_sizes == {0: 64}
    for tensor in connector.tensors.values():
        size = dict(zip(tensor.axes.split(), tensor.tensor.shape, strict=True))
        assert (size["block"], size["token"]) == (40, 64)
    table = RegionTable.build(cache.config, cache.kernel_block_sizes, connector.tensors)
    assert {(r.num_blocks, r.axes.tokens) for r in table.regions} == {(40, 64)}
    assert table.geometry()[0].block_tokens == 64
    assert table.geometry()[0].blocks_per_kv_block == 2
    assert cache.tables.blocks_per_kv_block == {0: 2}
    assert cache.tables.capacity(0) == 1024 // 64
    client.submit("r", make_prompt(200), 60)
    client.steps(1)
    held = client.requests["r"].blocks.ids[0]
    row = cache.tables.row(0, client.requests["r"].row).tolist()
    assert row == [kernel for block in held for kernel in (2 * block, 2 * block + 1)]


@pytest.mark.parametrize("length", [64, 65, 200])
def test_a_load_between_nodes_with_split_blocks_is_token_exact(length):
    options = {**SPLIT, "kv_cache_dtype": "fp8_e4m3"}
    prompt = make_prompt(length)
    expected = answer_of(prompt, 70, kv_cache_dtype="fp8_e4m3")
    prefill, params = prefilled(prompt, **options)
    d = CopyConnector(prefill.client).attach(**options, reserved_blocks=7)
    assert d.complete(prompt, 70, params) == expected


def test_the_worker_half_registers_the_same_split():
    config = {"kv_role": "kv_both", "kv_connector_extra_config": {"engine": "memory"}}
    engine = make_client(**SPLIT, num_blocks=20, kv_transfer_config=json.dumps(config)).engine
    try:
        regions = engine.worker.transfer.local.table.regions
        assert {(region.num_blocks, region.axes.tokens) for region in regions} == {(40, 64)}
    finally:
        engine.stop()


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_the_tensors_are_the_same_with_and_without_a_connector_and_with_both_backends(name):
    seen = []
    for connector, options in ((None, {}), (CopyConnector(), {}), (None, {"attention_backend": "flex"})):
        made = connector.attach if connector else make_client
        cache = made(model=name, **options).engine.runner.cache
        views = {
            layer: (one.axes, one.tensor.shape, one.tensor.stride(), one.tensor.dtype)
            for layer, one in cache.tensors.items()
        }
        offsets = [one.tensor.storage_offset() for one in cache.tensors.values()]
        seen.append((views, offsets, cache.kernel_block_sizes))
        is_flex = "attention_backend" in options
        support = GraphSupport.NEVER if is_flex else GraphSupport.UNIFORM_DECODE
        assert cache.attention.graph_support is support
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_an_fp8_cache_has_half_the_bytes_per_token_and_other_tokens(name):
    bits = {}
    for dtype, stored in (("bf16", "bfloat16"), ("fp8_e4m3", "float8_e4m3fn")):
        options = NodeOptions(num_blocks=8, max_num_seqs=1, max_model_len=1024)
        cache = NodeCache(build_model(name).layout(128, 1024, CACHE_DTYPES[dtype]), options)
        table = cache.region_table()
        attention = [one for one in table.regions if not table.geometry()[one.group].is_state]
        bits[dtype] = sum(region.page_bytes * 8 for region in attention)
        assert {region.dtype for region in attention} == {stored}
    assert bits["fp8_e4m3"] * 2 == bits["bf16"]
    prompt = make_prompt(100)
    fp8 = make_client(model=name, kv_cache_dtype="fp8_e4m3")
    assert fp8.complete(prompt) != answer_of(prompt, model=name)


def test_the_identity_has_the_seed_and_the_cache_dtype_unless_it_is_converted():
    model, names = build_model("gqa"), Naming("h", 16)
    plain, converted = (
        {
            name: identity(NodeOptions(kv_cache_dtype=name), model, names, convert_dtype=convert)
            for name in CACHE_DTYPES
        }
        for convert in (False, True)
    )
    assert plain["auto"] == plain["bf16"] != plain["fp8_e4m3"]
    assert plain["fp8_e4m3"].text("cache dtype") == "float8_e4m3fn"
    assert converted["bf16"] == converted["fp8_e4m3"]
    assert plain["auto"] != identity(NodeOptions(seed=1), model, names)
    assert all(differences(converted["bf16"], one) for one in plain.values())


def test_fp8_values_stay_far_from_the_largest():
    """The cache has no scales: e4m3 has no infinity, and a value above 448 would become NaN."""
    client = make_client(kv_cache_dtype="fp8_e4m3")
    client.complete(make_prompt(600))
    for tensor in client.engine.runner.cache.tensors.values():
        values = tensor.tensor.to(torch.float32)
        assert 1 < values.abs().max() < 100
