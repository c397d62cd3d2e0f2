"""What vLLM's configuration says to the tiers: which groups, in which blocks, and of which weights."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvconnect.cache.retention import Window
from kvconnect.cache.specs import EncoderOnlySpec, StateSpec
from kvconnect.errors import ConfigError
from kvconnect.vllm.geometry import scheduler_config
from kvconnect.vllm.offload import (
    BlockHashes,
    check_blocks,
    hash_block_tokens,
    hit_requirements,
    kept_config,
    kept_groups,
)
from tests.vllm.specs import cache_config, spec

NO_DRAFTS = SimpleNamespace(speculative_config=None)


def attention(block_size, **more):
    return spec("FullAttentionSpec", block_size, prefix_cacheable=True, **more)


def window(block_size, tokens, retained=0):
    fields = {"sliding_window": tokens, "extra_retained_tokens": retained, "prefix_cacheable": True}
    return spec("SlidingWindowSpec", block_size, **fields)


def mamba(block_size, mode="align"):
    return attention(block_size, shapes=((1,),), dtypes=("int8",), mamba_cache_mode=mode)


def ring(block_size):
    return spec("FullAttentionSpec", block_size, prefix_cacheable=False)


def cache_of(*specs, eagle=(), **more):
    kept = tuple(index for index, one in enumerate(specs) if one.prefix_cacheable)
    groups = {f"l{index}": one for index, one in enumerate(specs)}
    cache = cache_config(10, groups, prefix_cacheable_group_ids=kept, **more)
    for index, group in enumerate(cache.kv_cache_groups):
        group.is_eagle_group = index in eagle
    return cache


def test_groups_that_vllm_does_not_find_by_hashes_are_not_kept():
    cache = cache_of(attention(16), ring(8), window(16, 100, retained=2), mamba(32))
    assert kept_groups(cache) == (0, 2, 3)
    groups = scheduler_config(kept_config(cache)).groups
    assert isinstance(groups[1].spec, EncoderOnlySpec)
    assert groups[2].retention == Window(102)
    assert isinstance(groups[3].spec, StateSpec)


def test_a_hit_ends_where_the_blocks_of_all_groups_end():
    assert hit_requirements(NO_DRAFTS, cache_of(attention(16), window(24, 100), ring(10))).align_tokens == 240


def test_the_rows_of_the_shortest_hit_are_known_when_the_workers_start():
    cache = cache_of(attention(16), ring(8), window(16, 100), mamba(32))
    assert hit_requirements(NO_DRAFTS, cache).least_rows() == {0: 2, 2: 7, 3: 1}
    assert hit_requirements(NO_DRAFTS, cache).least_rows(min_tokens=100) == {0: 8, 2: 7, 3: 1}


def test_blocks_of_whole_hash_blocks_are_accepted():
    check_blocks(cache_of(attention(32), window(16, 100), mamba(64)), 16)


@pytest.mark.parametrize(
    ("cache", "numbers"),
    [
        (cache_of(attention(256), mamba(4096, "none")), ("256", "4096")),
        (cache_of(attention(24)), ("24", "4096")),
        (cache_of(mamba(4096, "none")), ("4096", "'none'")),
        (cache_of(attention(4096), mamba(4096, "all")), ("4096", "'all'")),
    ],
)
def test_others_are_refused_with_both_numbers_and_what_helps(cache, numbers):
    with pytest.raises(ConfigError) as refused:
        check_blocks(cache, 4096)
    text = str(refused.value)
    for number in (*numbers, "4096", "hybrid models (for example Mamba and attention)", "prefix caching"):
        assert number in text


def test_a_model_of_which_nothing_can_be_kept_is_refused():
    with pytest.raises(ConfigError, match="no cache group"):
        check_blocks(cache_of(ring(8)), 8)


def test_the_hash_block_is_what_vllm_says():
    assert hash_block_tokens(SimpleNamespace(), cache_of(attention(64), hash_block_size=32)) == 32


def test_a_block_is_known_by_the_hash_at_its_end():
    request = SimpleNamespace(block_hashes=[bytes([number]) for number in range(7)])
    hashes = BlockHashes(16)
    assert hashes(request, 16) is request.block_hashes, "no copy for every question"
    assert hashes(request, 48) == [b"\x02", b"\x05"]
    request.block_hashes += [bytes([number]) for number in (7, 8)]
    assert len(hashes(request, 48)) == 3


def test_draft_groups_are_those_that_vllm_marks_or_all_that_keep_tokens():
    def drafts(config, *specs, **more):
        groups = hit_requirements(config, cache_of(*specs, **more)).groups
        return [group.group for group in groups if group.is_draft]

    eagle, other = (
        SimpleNamespace(speculative_config=SimpleNamespace(use_eagle_block_drop=lambda drops=drops: drops))
        for drops in (True, False)
    )
    assert drafts(eagle, attention(16), attention(16), eagle={1}) == [1]
    assert drafts(eagle, attention(16), mamba(16), window(16, 8)) == [0, 2]
    assert drafts(other, attention(16)) == drafts(NO_DRAFTS, attention(16)) == []
