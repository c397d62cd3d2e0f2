"""Kernel block sizes: the vectors that every backend author expects, and the refusals."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnect.cache.specs import (
    EncoderOnlySpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    MLASpec,
    StateSpec,
    UniformTypeSpec,
)
from kvconnect.errors import ConfigError, LayoutError
from kvconnect.runner_kit.kernel_blocks import (
    MultipleOf,
    prepare_kernel_block_sizes,
    select_common_block_size,
    split_refusal,
    sync_block_size,
)


@dataclass(frozen=True)
class Backend:
    name: str
    kernel_block_sizes: tuple[int | MultipleOf, ...]


GQA = FullAttentionSpec(128, 4, 64, torch.bfloat16)


def test_no_common_size_names_every_backend_and_what_it_takes():
    with pytest.raises(LayoutError, match=r"128.*flash takes 64.*mla takes 48"):
        select_common_block_size(128, [Backend("flash", (64,)), Backend("mla", (48,))])


@settings(max_examples=500)
@given(
    st.integers(1, 256),
    st.lists(
        st.lists(st.one_of(st.integers(1, 256), st.integers(1, 64).map(MultipleOf)), min_size=1, max_size=3),
        min_size=1,
        max_size=3,
    ),
)
def test_the_choice_is_the_largest_that_all_take(block_size, accepted):
    backends = [Backend(f"b{index}", tuple(sizes)) for index, sizes in enumerate(accepted)]

    def all_take(size):
        return all(
            any(size % a.base == 0 if isinstance(a, MultipleOf) else size == a for a in sizes)
            for sizes in accepted
        )

    possible = [size for size in range(1, block_size + 1) if block_size % size == 0 and all_take(size)]
    if possible:
        assert select_common_block_size(block_size, backends) == max(possible)
    else:
        with pytest.raises(LayoutError):
            select_common_block_size(block_size, backends)


def test_groups_of_a_config():
    specs = {"mla": MLASpec(128, 576, torch.bfloat16), "draft": FullAttentionSpec(128, 2, 64, torch.bfloat16)}
    config = KVCacheConfig(
        8,
        (
            KVCacheGroup(("attention",), GQA),
            KVCacheGroup(("state",), StateSpec(4096, ((4, 4),), (torch.float32,))),
            KVCacheGroup(("encoder",), EncoderOnlySpec(16)),
            KVCacheGroup(("mla", "draft"), UniformTypeSpec(specs)),
        ),
    )
    multiples = Backend("main", (MultipleOf(16),))
    backends = [[Backend("small", (16, 32, 64)), multiples], [], [], [Backend("mla", (64,)), multiples]]
    assert prepare_kernel_block_sizes(config, backends) == {0: 64, 1: 4096, 3: 64}


def test_a_group_without_backends_is_an_error():
    with pytest.raises(LayoutError, match="attention"):
        prepare_kernel_block_sizes(KVCacheConfig(8, (KVCacheGroup(("attention",), GQA),)), [[]])


@settings(max_examples=500)
@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 8))
def test_stored_rows_split_whole_or_not_at_all(rows, kernel, factor):
    spec = MLASpec(kernel * factor, 8, torch.float16, stored_block_size=rows)
    whole = (rows * kernel) % (kernel * factor) == 0
    assert (split_refusal(spec, kernel) is None) == (whole or factor == 1)


def test_a_split_that_only_stored_rows_forbid_says_so():
    spec = MLASpec(256, 8, torch.float16, stored_block_size=2)
    with pytest.raises(LayoutError, match="2 stored rows per 256 tokens"):
        select_common_block_size(256, [Backend("indexer", (64,))], [spec])


def test_a_padded_page_is_not_split():
    spec = FullAttentionSpec(128, 1, 8, torch.float16, page_size_padded=8192)
    with pytest.raises(LayoutError, match="padded to 8192"):
        select_common_block_size(128, [Backend("flash", (64,))], [spec])
    assert select_common_block_size(128, [Backend("any", (MultipleOf(16),))], [spec]) == 128


def test_sync_says_both_numbers_once(caplog):
    with caplog.at_level(logging.INFO):
        assert sync_block_size(128, 64) == 64
        assert sync_block_size(64, 64) == 64
    assert len(caplog.records) == 1
    assert "128" in caplog.text
    assert "64" in caplog.text


def test_a_kernel_block_above_the_logical_one_is_an_error():
    with pytest.raises(ConfigError, match=r"block_size is 16.*64"):
        sync_block_size(16, 64)
    with pytest.raises(ConfigError, match=r"block_size is 96.*64"):
        sync_block_size(96, 64)
