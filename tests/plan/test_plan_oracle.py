"""Plans carried out byte by byte, against values picked out of the tensors by indexing.

The two sides have different layouts, paddings, block counts and block ids; every byte that the plan
does not name must stay as it was.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.cache.region_table import CacheTensor, RegionTable
from kvconnect.cache.shard import HeadInterval, Topology, partner_ranks, shard_heads
from kvconnect.cache.specs import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    SlidingWindowSpec,
    StateSpec,
)
from kvconnect.errors import LayoutError
from kvconnect.orders import GroupBlocks
from kvconnect.plan.align import TableCard, align_tables
from kvconnect.plan.transfer import Plan, make_plan
from tests.caches import attention_layer, block_values, fill_random

LAYOUTS = ["block token head", "block head token", "head block token"]
PLANE_LAYOUTS = ["plane block token head", "block plane head token", "plane block head token"]


def carry_out(plan: Plan) -> None:
    """The plan by brute force, and a check that no byte is written twice."""
    written: set[int] = set()
    for source, target, length in zip(
        plan.source.tolist(), plan.target.tolist(), plan.length.tolist(), strict=True
    ):
        span = set(range(target, target + length))
        assert not span & written
        written |= span
        ctypes.memmove(target, source, length)


@dataclass
class Side:
    caches: dict[str, CacheTensor]
    table: RegionTable
    ratio: int

    def card(self) -> TableCard:
        return TableCard.of(self.table)


def make_side(
    layouts, num_blocks, heads, kernel, ratio, content, pad, seed, total_heads=None, dtype=torch.float16
):
    caches = {}
    for index, layout in enumerate(layouts):
        cache = attention_layer(
            layout, num_blocks * ratio, len(heads), kernel, content, dtype, pad=0 if ratio > 1 else pad
        )
        fill_random(cache, seed + index)
        caches[f"layer{index}"] = cache
    planes = 2 if "plane" in layouts[0] else 1
    spec = FullAttentionSpec(kernel * ratio, len(heads), content * planes // 2, dtype)
    config = KVCacheConfig(num_blocks, (KVCacheGroup(tuple(caches), spec),))
    table = RegionTable.build(config, {0: kernel}, caches, dict.fromkeys(caches, heads))
    return Side(caches, table, ratio)


@st.composite
def transfers(draw):
    planes = draw(st.booleans())
    choices = PLANE_LAYOUTS if planes else LAYOUTS
    layers = draw(st.integers(1, 2))
    total_heads = draw(st.sampled_from([1, 2, 4, 6]))
    worlds = draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
    kernel = draw(st.sampled_from([1, 2, 4]))
    content = draw(st.sampled_from([2, 4]))
    ratios = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    pads = draw(st.tuples(st.integers(0, 3), st.integers(0, 3)))
    layouts = [[draw(st.sampled_from(choices)) for _ in range(layers)] for _ in range(2)]
    positions = draw(st.integers(1, 5))
    skip = draw(st.integers(0, 2))
    blocks = [draw(st.permutations(range(1, 12))) for _ in range(2)]
    return planes, total_heads, worlds, kernel, content, ratios, pads, layouts, positions, skip, blocks


@given(transfers())
def test_any_layout_any_ratio_any_world(case):
    _, total_heads, worlds, kernel, content, ratios, pads, layouts, positions, skip, blocks = case
    num_tokens = positions * kernel * ratios[1]
    sources = [
        make_side(
            layouts[0],
            60,
            shard_heads(total_heads, rank, worlds[0]),
            kernel,
            ratios[0],
            content,
            pads[0],
            100,
        )
        for rank in range(worlds[0])
    ]
    held = -(-num_tokens // (kernel * ratios[0]))
    source_ids = [*blocks[0], *range(20, 40)][:held]
    target_ids = blocks[1][:positions]
    first = min(skip, positions - 1)
    for rank in range(worlds[1]):
        heads = shard_heads(total_heads, rank, worlds[1])
        target = make_side(layouts[1], 14, heads, kernel, ratios[1], content, pads[1], 7)
        before = {
            name: [block_values(cache, block) for block in range(14 * ratios[1])]
            for name, cache in target.caches.items()
        }
        partners = partner_ranks(rank, Topology(worlds[1]), Topology(worlds[0]), total_heads)
        for partner in partners:
            link = align_tables(sources[partner].card(), target.card())
            plan = make_plan(
                link,
                [GroupBlocks(0, 0, tuple(source_ids))],
                [GroupBlocks(0, first, tuple(target_ids[first:]))],
                num_tokens,
            )
            carry_out(plan)
        wanted = {}
        for position in range(first * ratios[1], positions * ratios[1]):
            wanted[target_ids[position // ratios[1]] * ratios[1] + position % ratios[1]] = (
                source_ids[position // ratios[0]] * ratios[0] + position % ratios[0]
            )
        for name, cache in target.caches.items():
            for block in range(14 * ratios[1]):
                found = block_values(cache, block)
                if block not in wanted:
                    assert torch.equal(found, before[name][block]), "a byte outside of the plan changed"
                    continue
                parts = []
                for partner in partners:
                    owned = shard_heads(total_heads, partner, worlds[0])
                    shared = owned.intersect(heads)
                    local = HeadInterval(shared.start - owned.start, shared.stop - owned.start)
                    parts.append(block_values(sources[partner].caches[name], wanted[block], local))
                axis = 1 if "plane" in cache.axes else 0
                assert torch.equal(found, torch.cat(parts, dim=axis))


def dense_side(num_blocks, layers=3):
    storage = torch.zeros(layers, num_blocks, 4, 2, 8, dtype=torch.float16)
    tensors = {f"l{i}": CacheTensor(storage[i], "block token head content") for i in range(layers)}
    config = KVCacheConfig(
        num_blocks, (KVCacheGroup(tuple(tensors), FullAttentionSpec(4, 2, 4, torch.float16)),)
    )
    return RegionTable.build(config, {0: 4}, tensors), storage


def plan_for(source_ids, target_ids, num_tokens=None):
    (source, kept), (target, kept_too) = dense_side(40), dense_side(50)
    plan = make_plan(
        align_tables(TableCard.of(source), TableCard.of(target)),
        [GroupBlocks(0, 0, tuple(source_ids))],
        [GroupBlocks(0, 0, tuple(target_ids))],
        num_tokens or 4 * len(target_ids),
    )
    return plan, (kept, kept_too)


def test_adjacent_blocks_are_one_copy_per_layer():
    assert plan_for(range(1, 21), range(3, 23))[0].copies == 3
    assert plan_for(range(1, 21), range(3, 23))[0].pages == 60


def test_runs_are_found_whatever_the_order_of_allocation():
    assert plan_for(range(20, 0, -1), range(30, 10, -1))[0].copies == 3


def test_scattered_blocks_are_one_copy_each():
    assert plan_for(range(1, 21, 2), range(1, 21, 2))[0].copies == 30


def test_blocks_beyond_the_tokens_are_not_copied():
    plan, _ = plan_for(range(1, 11), range(1, 11), num_tokens=9)
    assert plan.pages == 3 * 3


def test_layers_packed_inside_a_block_merge_into_one_copy_per_run():
    def packed(num_blocks):
        storage = torch.zeros(num_blocks, 3, 4, 2, 8, dtype=torch.float16)
        tensors = {f"l{i}": CacheTensor(storage[:, i], "block token head content") for i in range(3)}
        config = KVCacheConfig(
            num_blocks, (KVCacheGroup(tuple(tensors), FullAttentionSpec(4, 2, 4, torch.float16)),)
        )
        return RegionTable.build(config, {0: 4}, tensors), storage

    (source, kept), (target, kept_too) = packed(20), packed(30)
    plan = make_plan(
        align_tables(TableCard.of(source), TableCard.of(target)),
        [GroupBlocks(0, 0, (1, 2, 3, 7))],
        [GroupBlocks(0, 0, (4, 5, 6, 9))],
        16,
    )
    assert plan.copies == 2
    assert plan.total_bytes == 4 * kept[0].nbytes
    del kept_too


@given(st.integers(1, 40), st.integers(1, 7), st.integers(16, 300))
def test_batches_keep_every_byte_and_both_bounds(blocks, max_copies, max_bytes):
    plan, _ = plan_for(range(1, 2 * blocks, 2)[:19], range(1, 2 * blocks, 2)[:19])
    bytes_of = {}
    for source, target, length in plan.batches(max_copies, max_bytes):
        assert 0 < len(length) <= max_copies
        assert int(length.sum()) <= max_bytes
        for a, b, n in zip(source.tolist(), target.tolist(), length.tolist(), strict=True):
            for offset in range(n):
                assert b + offset not in bytes_of
                bytes_of[b + offset] = a + offset
    expected = {
        b + offset: a + offset
        for a, b, n in zip(plan.source.tolist(), plan.target.tolist(), plan.length.tolist(), strict=True)
        for offset in range(n)
    }
    assert bytes_of == expected


def test_a_block_that_the_source_lacks_is_refused():
    with pytest.raises(LayoutError, match="tokens 8 to 11 are wanted"):
        plan_for((1, 2), (1, 2, 3))
    with pytest.raises(LayoutError, match="tokens 4 to 7 are wanted"):
        plan_for((1, 0, 3), (1, 2, 3))


def sliding_plan(source_ids, target_ids, num_tokens, window=8, kernel=4):
    def side():
        spec = SlidingWindowSpec(4, 1, 4, torch.float16, sliding_window=window)
        config = KVCacheConfig(20, (KVCacheGroup(("l",), spec),))
        cache = attention_layer("block token head", 80 // kernel, 1, kernel, 8)
        return RegionTable.build(config, {0: kernel}, {"l": cache}), cache

    (source, kept), (target, kept_too) = side(), side()
    plan = make_plan(
        align_tables(TableCard.of(source), TableCard.of(target)),
        [GroupBlocks(0, 0, source_ids)],
        [GroupBlocks(0, 0, target_ids)],
        num_tokens,
    )
    del kept, kept_too
    return plan


def test_blocks_before_the_window_may_be_missing_on_the_source():
    assert sliding_plan((0, 0, 3, 4, 5), (0, 7, 8, 9, 10), 20).pages == 3
    with pytest.raises(LayoutError, match="tokens 12 to 15"):
        sliding_plan((0, 0, 3, 0, 5), (0, 7, 8, 9, 10), 20)


def test_the_null_block_stays_null_when_it_is_split():
    assert sliding_plan((0, 0, 3, 4, 5), (0, 0, 8, 9, 10), 20, kernel=2).pages == 6
    with pytest.raises(LayoutError, match="tokens 12 to 13"):
        sliding_plan((0, 0, 3, 0, 5), (0, 7, 8, 9, 10), 20, kernel=2)


def test_state_is_one_block_whatever_its_position():
    def side(num_blocks):
        config = KVCacheConfig(
            num_blocks, (KVCacheGroup(("s",), StateSpec(64, ((10,),), (torch.int8,), page_size_padded=32)),)
        )
        storage = torch.zeros(num_blocks, 32, dtype=torch.int8)
        return RegionTable.build(
            config, {0: 64}, {"s": CacheTensor(storage[:, :10], "block content")}
        ), storage

    (source, kept), (target, kept_too) = side(8), side(9)
    link = align_tables(TableCard.of(source), TableCard.of(target))
    kept[5] = 7
    plan = make_plan(link, [GroupBlocks(0, 0, (5,))], [GroupBlocks(0, 3, (2,))], 1000)
    carry_out(plan)
    assert kept_too[2, :10].tolist() == [7] * 10
    assert kept_too[2, 10:].tolist() == [0] * 22
    for source_ids, target_ids in (((), (2,)), ((5,), (0,)), ((5, 6), (2,))):
        with pytest.raises(LayoutError, match="keeps state"):
            make_plan(link, [GroupBlocks(0, 0, source_ids)], [GroupBlocks(0, 0, target_ids)], 10)


def test_tables_that_cannot_be_matched_say_why():
    base = make_side(["block token head"], 8, HeadInterval(0, 2), 4, 1, 4, 0, 1)
    for match, other in (
        (
            "rows in a page differ, source 4, target 2",
            make_side(["block token head"], 8, HeadInterval(0, 2), 2, 1, 4, 0, 1),
        ),
        (
            "row bytes differ, source 8, target 16",
            make_side(["block token head"], 8, HeadInterval(0, 2), 4, 1, 8, 0, 1),
        ),
        (
            "dtype differ",
            make_side(["block token head"], 8, HeadInterval(0, 2), 4, 1, 4, 0, 1, dtype=torch.bfloat16),
        ),
        (
            "layer1.*none of the bytes",
            make_side(["block token head"] * 2, 8, HeadInterval(0, 2), 4, 1, 4, 0, 1),
        ),
        ("none of the bytes", make_side(["block token head"], 8, HeadInterval(2, 4), 4, 1, 4, 0, 1)),
    ):
        with pytest.raises(LayoutError, match=match):
            align_tables(base.card(), other.card())


def test_a_plan_prints_what_it_counts():
    plan, _ = plan_for((1, 2), (1, 2))
    assert repr(plan) == f"Plan(3 copies of 6 pages, {6 * 4 * 2 * 8 * 2} bytes)"
    assert plan.length.dtype == np.int64
