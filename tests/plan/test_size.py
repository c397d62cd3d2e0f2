"""The size of a plan, worked out without making it, is that of the plan."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.cache.region_table import CacheTensor, RegionTable
from kvconnect.cache.shard import HeadInterval
from kvconnect.cache.specs import FullAttentionSpec, KVCacheConfig, KVCacheGroup, MLASpec
from kvconnect.errors import LayoutError
from kvconnect.orders import GroupBlocks
from kvconnect.plan.align import TableCard, align_tables
from kvconnect.plan.transfer import PlanSize, make_plan, plan_size
from tests.caches import attention_layer

NUM_BLOCKS = 16
LAYOUTS = ["block token head", "block head token", "head block token"]


def card(layout: str, heads: HeadInterval, ratio: int, pad: int) -> TableCard:
    """A group whose pages may have gaps or split by head, and one whose pages are dense."""
    blocks = NUM_BLOCKS * ratio
    tensors = {
        "a": attention_layer(layout, blocks, len(heads), 4, 8, pad=0 if ratio > 1 else pad),
        "b": attention_layer("block token head", blocks, len(heads), 4, 8),
        "c": CacheTensor(torch.zeros(blocks, 4, 6, dtype=torch.float16), "block token content"),
    }
    config = KVCacheConfig(
        NUM_BLOCKS,
        (
            KVCacheGroup(("a", "b"), FullAttentionSpec(4 * ratio, len(heads), 4, torch.float16)),
            KVCacheGroup(("c",), MLASpec(4 * ratio, 6, torch.float16)),
        ),
    )
    return TableCard.of(RegionTable.build(config, {0: 4, 1: 4}, tensors, {"a": heads, "b": heads}))


@given(st.data())
def test_it_is_the_size_of_the_plan(data):
    shapes = st.tuples(st.sampled_from(LAYOUTS), st.integers(1, 3), st.integers(0, 2))
    link = align_tables(
        *(
            card(layout, heads, ratio, pad)
            for heads, (layout, ratio, pad) in zip(
                (HeadInterval(0, 4), HeadInterval(2, 4)), data.draw(st.tuples(shapes, shapes)), strict=True
            )
        )
    )
    ids = [st.lists(st.integers(1, NUM_BLOCKS - 1), min_size=9, max_size=9, unique=True) for _ in range(4)]
    source = [GroupBlocks(group, 0, tuple(data.draw(ids[group]))) for group in (0, 1)]
    positions = data.draw(st.integers(0, 3))
    target = [GroupBlocks(group, 0, tuple(data.draw(ids[2 + group])[:positions])) for group in (0, 1)]
    tokens = data.draw(st.integers(1, 36))
    plan, size = (make(link, source, target, tokens) for make in (make_plan, plan_size))
    assert (size.copies, size.total_bytes) == (plan.copies, plan.total_bytes)
    if plan.copies:
        assert (size.least_bytes, size.most_bytes) == (plan.length.min(), plan.length.max())


def test_adjacent_blocks_of_dense_pages_are_one_copy():
    link = align_tables(*(card(LAYOUTS[0], HeadInterval(0, 2), 1, 0) for _ in range(2)))
    blocks = [GroupBlocks(1, 0, (3, 4, 5))]
    run_bytes = 3 * 4 * 6 * 2
    assert plan_size(link, blocks, blocks, 12) == PlanSize(1, run_bytes, run_bytes, run_bytes)


def test_nothing_wanted_is_nothing_planned():
    link = align_tables(*(card(LAYOUTS[0], HeadInterval(0, 2), 1, 0) for _ in range(2)))
    assert plan_size(link, [], [], 100) == PlanSize(0, 0, 0, 0)


def test_it_refuses_what_the_plan_refuses():
    link = align_tables(*(card(LAYOUTS[0], HeadInterval(0, 2), 1, 0) for _ in range(2)))
    wanted = [GroupBlocks(0, 0, (1, 2))]
    for held, tokens in (([], 8), ([GroupBlocks(0, 0, (1,))], 8)):
        for make in (make_plan, plan_size):
            with pytest.raises(LayoutError, match="the source holds no"):
                make(link, held, wanted, tokens)
