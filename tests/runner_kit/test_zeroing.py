"""Zeroing against a byte-for-byte reference that shares no code, over caches of every shape."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnect.cache.region_table import CacheTensor, RegionTable
from kvconnect.cache.specs import (
    AttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    MLASpec,
    StateSpec,
)
from kvconnect.errors import ConfigError, LayoutError, LocalError
from kvconnect.runner_kit.block_table import BlockTables
from kvconnect.runner_kit.zeroing import KVBlockZeroer, logical_pages, word_bytes
from tests.caches import attention_layer, fill_random
from tests.pack.sides import DEVICE, KERNELS, on_device

KERNELS = [name for name in KERNELS if name == "triton" or (name == "torch" and DEVICE == "cpu")]


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return (
        torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage()).cpu().clone()
    )


def zero_by_hand(cache: CacheTensor, ratio: int, ids: set[int]) -> torch.Tensor:
    """What the storage must look like: logical blocks zeroed by plain indexing on a copy."""
    before = raw_bytes(cache.tensor)
    copy = (
        before.clone()
        .view(cache.tensor.dtype)
        .as_strided(cache.tensor.shape, cache.tensor.stride(), cache.tensor.storage_offset())
    )
    axis = cache.axes.split().index("block")
    for block in ids:
        for kernel in range(block * ratio, (block + 1) * ratio):
            copy.select(axis, kernel).zero_()
    return raw_bytes(copy)


LAYOUTS = ["block token head", "block head token", "head block token", "plane block token head"]


@st.composite
def caches(draw):
    num_blocks = draw(st.integers(1, 6))
    ratio = draw(st.integers(1, 3))
    kernel = draw(st.sampled_from([1, 2, 4]))
    layers = []
    for index in range(draw(st.integers(1, 3))):
        layout = draw(st.sampled_from(LAYOUTS))
        heads, content = draw(st.integers(1, 2)), draw(st.sampled_from([2, 6, 8]))
        dtype = draw(st.sampled_from([torch.float16, torch.uint8, torch.float32]))
        pad = draw(st.integers(0, 3)) if ratio == 1 else 0
        cache = attention_layer(layout, num_blocks * ratio, heads, kernel, content, dtype, pad=pad)
        fill_random(cache, index + 1)
        planes = 2 if "plane" in layout else 1
        spec = AttentionSpec(kernel * ratio, heads, content * planes // 2, dtype)
        layers.append((f"layer{index}", cache, spec))
    ids = draw(st.lists(st.integers(0, num_blocks - 1), max_size=8))
    skipped = draw(st.booleans())
    return num_blocks, ratio, kernel, layers, ids, skipped


def check(kernels, case):
    num_blocks, ratio, kernel, layers, ids, skipped = case
    tensors = {name: on_device(cache) for name, cache, _ in layers}
    specs = {name: spec for name, _, spec in layers}
    config = KVCacheConfig(num_blocks, (KVCacheGroup.of(specs),))
    table = RegionTable.build(config, {0: kernel}, tensors)
    alone = frozenset({"layer0"}) if skipped else frozenset()
    expected = {
        name: raw_bytes(cache.tensor) if name in alone else zero_by_hand(cache, ratio, set(ids))
        for name, cache in tensors.items()
    }
    KVBlockZeroer(table, device=DEVICE, runner_only_layers=alone, kernels=kernels).zero_block_ids(ids)
    for name, cache in tensors.items():
        assert torch.equal(raw_bytes(cache.tensor), expected[name])


@pytest.mark.parametrize("kernels", KERNELS)
def test_exactly_the_pages_are_zeroed(kernels):
    @settings(max_examples=200 if kernels == "torch" or DEVICE == "cuda" else 60)
    @given(caches())
    def any_cache(case):
        check(kernels, case)

    any_cache()


def overlaid(num_blocks=5, order=("state", "narrow", "wide")):
    """A state group and two attention groups of different widths on one storage."""
    storage = torch.full((num_blocks * 512,), 7, dtype=torch.int8, device=DEVICE)
    wide = storage.view(torch.float16).view(num_blocks, 16, 2, 8)
    narrow = storage.view(torch.float16).as_strided((num_blocks, 16, 4), (256, 4, 1))
    state = storage.as_strided((num_blocks, 500), (512, 1))
    config = KVCacheConfig(
        num_blocks,
        (
            KVCacheGroup(("state",), StateSpec(64, ((500,),), (torch.int8,), page_size_padded=512)),
            KVCacheGroup(("narrow",), MLASpec(16, 4, torch.float16, page_size_padded=512)),
            KVCacheGroup(("wide",), AttentionSpec(16, 2, 4, torch.float16)),
        ),
    )
    tensors = {
        "state": CacheTensor(state, "block content"),
        "narrow": CacheTensor(narrow, "block token content"),
        "wide": CacheTensor(wide, "block token head content"),
    }
    given_in_order = {name: tensors[name] for name in order}
    return storage, RegionTable.build(config, {0: 64, 1: 16, 2: 16}, given_in_order)


@pytest.mark.parametrize("order", [("state", "narrow", "wide"), ("wide", "narrow", "state")])
@pytest.mark.parametrize("kernels", KERNELS)
def test_overlaid_pages_are_zeroed_once_at_their_widest(kernels, order):
    storage, table = overlaid(order=order)
    zeroer = KVBlockZeroer(table, device=DEVICE, kernels=kernels)
    assert zeroer.pages[:, 2].tolist() == [512]
    zeroer.zero_block_ids([1, 3])
    assert storage.view(5, 512).any(dim=1).tolist() == [True, False, True, False, True]


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_cache_of_states_alone_is_left_alone(kernels):
    storage = torch.full((4, 64), 7, dtype=torch.int8, device=DEVICE)
    config = KVCacheConfig(4, (KVCacheGroup(("s",), StateSpec(8, ((64,),), (torch.int8,))),))
    table = RegionTable.build(config, {0: 8}, {"s": CacheTensor(storage, "block content")})
    zeroer = KVBlockZeroer(table, device=DEVICE, kernels=kernels)
    zeroer.zero_block_ids([0, 1, 2, 3])
    assert bool((storage == 7).all())


@pytest.mark.parametrize("kernels", KERNELS)
def test_an_id_that_is_no_block_zeroes_nothing(kernels):
    storage, table = overlaid()
    zeroer = KVBlockZeroer(table, device=DEVICE, kernels=kernels)
    for ids in ([1, 5], [-1, 1]):
        with pytest.raises(LocalError, match="the cache has 0..4"):
            zeroer.zero_block_ids(ids)
    zeroer.zero_block_ids([])
    assert bool((storage == 7).all())
    zeroer.zero_block_ids([2] * 40)
    assert storage.view(5, 512).any(dim=1).tolist() == [True, True, False, True, True]


def test_layers_that_do_not_exist_and_unknown_kernels_are_errors():
    _, table = overlaid()
    with pytest.raises(LayoutError, match="layers other are"):
        KVBlockZeroer(table, device=DEVICE, runner_only_layers=frozenset({"other"}))
    with pytest.raises(ConfigError, match="'cuda'"):
        KVBlockZeroer(table, device=DEVICE, kernels="cuda")


def test_a_machine_without_triton_is_told_what_to_install(monkeypatch):
    _, table = overlaid()
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ConfigError, match="pip install triton"):
        KVBlockZeroer(table, device=DEVICE, kernels="triton")
    one = {0: 16}
    with pytest.raises(ConfigError, match="pip install triton"):
        BlockTables(max_requests=1, max_blocks=one, block_sizes=one, kernel_block_sizes=one, kernels="triton")


def test_words_are_as_wide_as_every_number_allows():
    assert word_bytes(np.array([[64, 128, 24]])) == 8
    assert word_bytes(np.array([[64, 128, 20]])) == 4
    assert word_bytes(np.array([[63, 128, 20]])) == 1


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 5), st.integers(1, 4))
def test_compressed_blocks_split_in_stored_rows_or_are_refused(stored, ratio, width, num_blocks):
    """A block of `ratio` kernel blocks that keeps `stored` rows: split where that gives whole rows."""
    kernel_tokens = 16
    spec = MLASpec(kernel_tokens * ratio, width, torch.float16, stored_block_size=stored)
    config = KVCacheConfig(num_blocks, (KVCacheGroup(("l",), spec),))
    storage = torch.full((num_blocks, stored, width), 3.0, dtype=torch.float16, device=DEVICE)
    if stored % ratio:
        tensor = CacheTensor(storage, "block token content")
        with pytest.raises(LayoutError):
            RegionTable.build(config, {0: kernel_tokens}, {"l": tensor})
        return
    split = storage.view(num_blocks * ratio, stored // ratio, width)
    table = RegionTable.build(config, {0: kernel_tokens}, {"l": CacheTensor(split, "block token content")})
    (region,) = table.regions
    assert region.end <= storage.data_ptr() + storage.nbytes
    assert region.axes.tokens == stored // ratio
    assert logical_pages(table, frozenset())[0, 2] == storage[0].nbytes
    KVBlockZeroer(table, device=DEVICE).zero_block_ids([num_blocks - 1])
    assert not storage[-1].any()
    assert bool((storage[:-1] == 3).all())
