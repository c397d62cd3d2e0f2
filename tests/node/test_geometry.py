"""What a connector is given: the same numbers everywhere, and the same tensors however a node was started."""

import json

import pytest
import torch

from kvconnect.cache.identity import Naming
from kvconnect.cache.region_table import RegionTable
from kvconnect.errors import ConfigError
from kvconnect.node.kv_cache import CACHE_DTYPES, NodeCache
from kvconnect.node.models import CacheSizing, build_model
from kvconnect.node.node_connector import identity
from kvconnect.node.node_options import NodeOptions
from kvconnect.runner_kit.attention_groups import GraphSupport
from tests.node.node_harness import MODEL_NAMES, CopyConnector, make_client, make_prompt


def views(tensors) -> dict:
    """What of the tensors a connector can see."""
    return {
        layer: (t.axes, tuple(t.tensor.shape), t.tensor.stride(), t.tensor.dtype, t.tensor.storage_offset())
        for layer, t in tensors.items()
    }


# A dense model, a backend that takes 64 only, and blocks of 128


def test_view_block_table_and_region_table_agree_on_the_kernel_block():
    connector = CopyConnector()
    client = connector.attach(model="gqa", block_size=128, kernel_block_sizes=(64,), num_blocks=20)
    cache = client.engine.runner.cache
    assert cache.kernel_block_sizes == {0: 64}
    for tensor in connector.tensors.values():
        size = dict(zip(tensor.axes.split(), tensor.tensor.shape, strict=True))
        assert (size["block"], size["token"]) == (40, 64)
    table = RegionTable.build(cache.config, cache.kernel_block_sizes, connector.tensors)
    assert {(r.num_blocks, r.axes.tokens) for r in table.regions} == {(40, 64)}
    assert table.geometry_of(0).block_tokens == 64
    assert table.geometry_of(0).blocks_per_kv_block == 2
    assert cache.tables.blocks_per_kv_block == {0: 2}
    assert cache.tables.capacity(0) == 1024 // 64
    client.submit("r", make_prompt(200), 60)
    client.steps(1)
    held = client.requests["r"].blocks.ids[0]
    row = cache.tables.row(0, client.requests["r"].row).tolist()
    assert row == [kernel for block in held for kernel in (2 * block, 2 * block + 1)]


@pytest.mark.parametrize("length", [64, 65, 200])
def test_a_load_between_nodes_with_split_blocks_is_token_exact(length):
    options = {"block_size": 128, "kernel_block_sizes": (64,), "kv_cache_dtype": "fp8_e4m3"}
    prompt = make_prompt(length)
    expected = make_client(kv_cache_dtype="fp8_e4m3").complete(prompt, 70)
    prefill = CopyConnector()
    p = prefill.attach(**options)
    p.submit("p", prompt, 1, {"do_remote_decode": True})
    p.run("p")
    d = CopyConnector(p).attach(**options, reserved_blocks=7)
    assert d.complete(prompt, 70, p.last("p").kv_transfer_params) == expected


def test_the_worker_half_registers_the_same_split():
    config = {
        "kv_connector": "KVConnect",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"engine": "memory"},
    }
    options = {"block_size": 128, "num_blocks": 20, "kv_transfer_config": json.dumps(config)}
    engine = make_client(kernel_block_sizes=(64,), **options).engine
    try:
        assert engine.worker.transfer.kernel_block_sizes == {0: 64}
        assert {(r.num_blocks, r.axes.tokens) for r in engine.worker.table.regions} == {(40, 64)}
    finally:
        engine.stop()


def test_a_kernel_block_that_does_not_fit_is_refused_by_name():
    with pytest.raises(ConfigError, match="TORCH_GROUPED takes 64"):
        make_client(block_size=32, kernel_block_sizes=(64,))
    with pytest.raises(ConfigError, match="TORCH_LATENT_64 takes 64"):
        make_client(model="mixed", block_size=32)


# However the node was started


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_the_tensors_are_the_same_with_and_without_a_connector_and_with_both_backends(name):
    plain = make_client(model=name).engine.runner.cache
    connector = CopyConnector()
    connector.attach(model=name)
    flex = CopyConnector()
    flex.attach(model=name, attention_backend="flex")
    assert views(plain.tensors) == views(connector.tensors) == views(flex.tensors)


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_one_set_up_feeds_tables_and_cache(name):
    cache = make_client(model=name).engine.runner.cache
    assert cache.attention.graph_support is GraphSupport.UNIFORM_DECODE
    assert cache.tables.kernel_block_sizes == cache.attention.kernel_block_sizes
    layers = {layer for group in cache.attention.groups for layer in group.layer_names}
    assert layers == {layer for layer, group in cache.group_of.items() if group not in cache.state_groups}
    for group in cache.attention.groups:
        assert group.metadata_builder.page_tokens == group.kernel_block_size
        assert group.kernel_block_size == cache.kernel_block_sizes[group.cache_group]


# The cache's dtype


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_an_fp8_cache_has_half_the_bytes_per_token_and_other_tokens(name):
    bits = {}
    for dtype in ("bf16", "fp8_e4m3"):
        sizing = CacheSizing(128, 1024, CACHE_DTYPES[dtype])
        cache = NodeCache(build_model(name).layout(sizing), num_blocks=8, max_num_seqs=1, max_model_len=1024)
        table = cache.region_table()
        bits[dtype] = sum(
            region.page_bytes * 8 for region in table.regions if not table.geometry_of(region.group).is_state
        )
        assert {r.dtype for r in table.regions if not table.geometry_of(r.group).is_state} == {
            {"bf16": "bfloat16", "fp8_e4m3": "float8_e4m3fn"}[dtype]
        }
    assert bits["fp8_e4m3"] * 2 == bits["bf16"]
    prompt = make_prompt(100)
    assert make_client(model=name, kv_cache_dtype="fp8_e4m3").complete(prompt) != (
        make_client(model=name).complete(prompt)
    )


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_fp8_tokens_depend_on_neither_budget_nor_concurrency(name):
    prompts = [make_prompt(length, seed=length) for length in (150, 33, 64)]
    options = {"model": name, "kv_cache_dtype": "fp8_e4m3", "enable_prefix_caching": False}
    alone = [make_client(**options).complete(prompt, 20) for prompt in prompts]
    client = make_client(**options, max_num_batched_tokens=37)
    for index, prompt in enumerate(prompts):
        client.submit(str(index), prompt, 20)
    client.run("0", "1", "2")
    assert [client.tokens(str(i)) + client.drafts(str(i)) for i in range(3)] == alone


def test_the_fingerprint_names_the_cache_dtype():
    model = build_model("gqa")
    names = Naming("h", 16)
    seen = {
        name: identity(NodeOptions(kv_cache_dtype=name), model, names).text("cache dtype")
        for name in CACHE_DTYPES
    }
    assert seen["auto"] == seen["bf16"] != seen["fp8_e4m3"]
    assert seen["fp8_e4m3"] == "float8_e4m3fn"


def test_bad_dtypes_and_blocks_too_small_for_a_state_are_named():
    with pytest.raises(ConfigError, match="kv_cache_dtype is 'int4'; accepted: auto, bf16, fp8_e4m3"):
        make_client(kv_cache_dtype="int4")
    with pytest.raises(ConfigError, match="at least 41"):
        make_client(model="hybrid", kv_cache_dtype="fp8_e4m3", block_size=32)


def test_fp8_values_stay_far_from_the_largest():
    """The cache has no scales: e4m3 has no infinity, and a value above 448 would become NaN."""
    client = make_client(kv_cache_dtype="fp8_e4m3")
    client.complete(make_prompt(600))
    for tensor in client.engine.runner.cache.tensors.values():
        values = tensor.tensor.to(torch.float32)
        assert 1 < values.abs().max() < 100
