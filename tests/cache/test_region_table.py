"""The region table: every layout as regions of pages, and what it refuses by name."""

from __future__ import annotations

import itertools
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.cache.region_table import CacheTensor, RegionTable
from kvconnect.cache.retention import Window
from kvconnect.cache.shard import HeadInterval
from kvconnect.cache.specs import AttentionSpec, KVCacheConfig, KVCacheGroup, MLASpec, StateSpec
from kvconnect.errors import LayoutError
from tests.caches import attention_layer, fill_random, overlaid_groups, single_group


def test_layers_of_one_group_may_differ_in_page_size():
    specs = {"mla": MLASpec(16, 96, torch.float16), "eagle": AttentionSpec(16, 8, 32, torch.float16)}
    tensors = {
        "mla": CacheTensor(torch.zeros(2, 16, 96, dtype=torch.float16), "block token content"),
        "eagle": CacheTensor(torch.zeros(2, 16, 8, 64, dtype=torch.float16), "block token head content"),
    }
    table = RegionTable.build(KVCacheConfig(2, (KVCacheGroup.of(specs),)), {0: 16}, tensors)
    assert table.layers == ("mla", "eagle")
    for region in table.regions:
        tensor, sizes = tensors[region.layer].tensor, (region.num_blocks, region.page_bytes)
        assert (region.address, region.length_bytes) == (tensor.data_ptr(), tensor.nbytes)
        assert sizes == (2, tensor.nbytes // 2)


LAYOUTS = [
    " ".join(order)
    for axes in (("block", "token", "head"), ("plane", "block", "token", "head"))
    for order in itertools.permutations(axes)
    # Tokens outside of the block would tear every page apart: no engine keeps a cache so.
    if order.index("token") > order.index("block")
]


@given(
    st.sampled_from(LAYOUTS),
    st.integers(1, 5),
    st.integers(1, 3),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 3),
    st.integers(0, 3),
)
def test_the_pages_of_a_layer_are_exactly_its_bytes(layout, num_blocks, heads, tokens, content, pad):
    cache = attention_layer(layout, num_blocks, heads, tokens, content * 2, pad=pad)
    fill_random(cache, seed=1)
    planes = 2 if "plane" in layout else 1
    spec = AttentionSpec(tokens, heads, content * planes, torch.float16)
    try:
        table = single_group(spec, num_blocks, layer=cache)
    except LayoutError as refused:
        # Heads or planes between the tokens of a page and the next token: rows, not pages.
        assert "token axis" in str(refused)
        return
    base = cache.tensor.untyped_storage().data_ptr()
    raw = torch.empty(0, dtype=torch.uint8).set_(cache.tensor.untyped_storage())
    for block in range(num_blocks):
        pages = torch.cat(
            [
                raw[start : start + region.page_bytes]
                for region in table.regions
                for start in [region.address - base + block * region.block_stride]
            ]
        )
        picked = cache.tensor.select(cache.axes.split().index("block"), block).contiguous()
        assert sorted(pages.tolist()) == sorted(picked.view(torch.uint8).reshape(-1).tolist())


def test_heads_outermost_become_one_region_each():
    cache = attention_layer("head block token", 4, 2, 16, 8)
    table = single_group(AttentionSpec(16, 2, 4, torch.float16), 4, layer=cache)
    assert [region.heads for region in table.regions] == [HeadInterval(0, 1), HeadInterval(1, 2)]


def test_planes_apart_become_two_regions_and_planes_inside_one():
    apart = attention_layer("plane block token head", 4, 2, 16, 8)
    inside = attention_layer("block plane token head", 4, 2, 16, 8)
    spec = AttentionSpec(16, 2, 8, torch.float16)
    assert [r.first_plane for r in single_group(spec, 4, layer=apart).regions] == [0, 1]
    (region,) = single_group(spec, 4, layer=inside).regions
    assert region.axes.planes == 2


def test_layers_packed_inside_a_block_are_kept_apart():
    storage = torch.zeros(8, 3, 16, 2, 4, dtype=torch.float16)
    tensors = {f"l{i}": CacheTensor(storage[:, i], "block token head content") for i in range(3)}
    table = single_group(AttentionSpec(16, 2, 2, torch.float16), 8, **tensors)
    assert {region.block_stride for region in table.regions} == {storage[0].nbytes}


def overlay(second_offset=0):
    """A sliding and a full group that share a storage, block by block."""
    storage = torch.zeros(8 * 256 + second_offset + 64, dtype=torch.float16)
    view = storage[: 8 * 256].view(8, 16, 2, 8)
    other = storage[second_offset:].as_strided((8, 16, 2, 8), (256, 16, 8, 1))
    specs = (
        AttentionSpec(16, 2, 4, torch.float16, retention=Window(32)),
        AttentionSpec(16, 2, 4, torch.float16),
    )
    config = KVCacheConfig(8, (KVCacheGroup(("sliding",), specs[0]), KVCacheGroup(("full",), specs[1])))
    return RegionTable.build(
        config,
        {0: 16, 1: 16},
        {
            "sliding": CacheTensor(view, "block token head content"),
            "full": CacheTensor(other, "block token head content"),
        },
    )


def test_groups_that_share_bytes_under_different_ids_are_refused():
    assert overlaid_groups(overlay()) == {(0, 1)}
    with pytest.raises(LayoutError, match="'full' and 'sliding'.*different block ids"):
        overlay(second_offset=16)


def test_state_pages_may_be_padded_and_overlay_attention():
    storage = torch.zeros(4 * 512, dtype=torch.int8)
    attention = storage.view(torch.float16).view(4, 16, 2, 8)
    state = storage.as_strided((4, 400), (512, 1))
    config = KVCacheConfig(
        4,
        (
            KVCacheGroup(("state",), StateSpec(64, ((400,),), (torch.int8,), page_size_padded=512)),
            KVCacheGroup(("full",), AttentionSpec(16, 2, 4, torch.float16)),
        ),
    )
    table = RegionTable.build(
        config,
        {0: 64, 1: 16},
        {
            "state": CacheTensor(state, "block content"),
            "full": CacheTensor(attention, "block token head content"),
        },
    )
    assert overlaid_groups(table) == {(0, 1)}
    assert table.regions[0].page_bytes == 400
    assert table.regions[0].block_stride == 512


def test_kernel_blocks_inside_logical_blocks():
    cache = attention_layer("block token head", 8, 2, 64, 8)
    config = KVCacheConfig(4, (KVCacheGroup(("layer",), AttentionSpec(128, 2, 4, torch.float16)),))
    table = RegionTable.build(config, {0: 64}, {"layer": cache})
    assert table.regions[0].num_blocks == 8
    assert table.groups[0].blocks_per_kv_block == 2


def refuse(match, spec, cache, num_blocks=4, kernel=None):
    config = KVCacheConfig(num_blocks, (KVCacheGroup(("layer",), spec),))
    with pytest.raises(LayoutError, match=match):
        RegionTable.build(config, {0: kernel or spec.block_size}, {"layer": cache})


def test_refusals_name_the_layer_and_both_values():
    spec = AttentionSpec(16, 2, 4, torch.float16)
    good = torch.zeros(4, 16, 2, 8, dtype=torch.float16)
    refuse(
        "'layer'.*block axis has 4 blocks.*gives 5", spec, CacheTensor(good, "block token head content"), 5
    )
    refuse("'layer'.*axes 'block token content'", spec, CacheTensor(good, "block token content"))
    refuse("'layer'.*must name a block", spec, CacheTensor(good, "plane token head content"))
    refuse(
        "'layer'.*hold 512 bytes.*has 1024",
        AttentionSpec(16, 4, 4, torch.float16),
        CacheTensor(good, "block token head content"),
    )
    refuse("'layer'.*content axis", spec, CacheTensor(good.transpose(2, 3), "block token head content"))
    sparse = torch.zeros(4, 16, 4, 8, dtype=torch.float16)[:, :, :2]
    refuse("'layer'.*token axis", spec, CacheTensor(sparse, "block token head content"))


def test_padded_pages_are_not_split_into_kernel_blocks():
    padded = attention_layer("block token head", 8, 2, 64, 8, pad=8)
    refuse("cannot be split into 2", AttentionSpec(128, 2, 4, torch.float16), padded, kernel=64)


PLACES = st.tuples(st.integers(0, 2), st.integers(0, 40), st.sampled_from([8, 12, 16]), st.integers(1, 8))


@given(st.lists(PLACES, min_size=2, max_size=4))
def test_pages_overlap_under_one_block_id_of_two_groups_alone(layers):
    storage, groups, tensors, pages = torch.zeros(128, dtype=torch.int8), {}, {}, []
    for index, (group, start, stride, size) in enumerate(layers):
        groups.setdefault(group, {})[f"l{index}"] = MLASpec(4, size, torch.int8, stored_block_size=1)
        view = storage.as_strided((4, size), (stride, 1), start)
        tensors[f"l{index}"] = CacheTensor(view, "block content")
        pages += [(group, at, start + at * stride, start + at * stride + size) for at in range(4)]
    is_wrong = any(
        one[2] < other[3] and other[2] < one[3] and (one[0] == other[0] or one[1] != other[1])
        for one, other in itertools.combinations(pages, 2)
    )
    config = KVCacheConfig(4, tuple(map(KVCacheGroup.of, groups.values())))
    with pytest.raises(LayoutError, match="overlap at address") if is_wrong else nullcontext():
        RegionTable.build(config, dict.fromkeys(range(len(groups)), 4), tensors)


def test_unknown_layers_and_doubled_layers_are_refused():
    spec = MLASpec(16, 8, torch.float16)
    with pytest.raises(LayoutError, match="'other'"):
        RegionTable.build(
            KVCacheConfig(4, (KVCacheGroup(("layer",), spec),)),
            {0: 16},
            {"other": CacheTensor(torch.zeros(4, 16, 8, dtype=torch.float16), "block token content")},
        )
    with pytest.raises(LayoutError, match="groups 0 and 1"):
        KVCacheConfig(4, (KVCacheGroup(("a",), spec), KVCacheGroup(("a",), spec)))
