"""The division of host memory: no byte too many, no row with two owners, errors that say what would do."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.cache.retention import Window
from kvconnect.cache.specs import AttentionSpec, KVCacheGroup, StateSpec
from kvconnect.config import OffloadConfig
from kvconnect.errors import ConfigError, LocalError
from kvconnect.offload.index.budgets import aligned_row_bytes, plan_arena, plan_for, usual_shares

FULL = KVCacheGroup(("full",), AttentionSpec(16, 1, 8, torch.bfloat16))
WINDOW = KVCacheGroup(("window",), AttentionSpec(16, 1, 8, torch.bfloat16, retention=Window(128)))
STATE = KVCacheGroup(("state",), StateSpec(4096, ((4, 4),), (torch.float32,)))


@st.composite
def wishes(draw):
    """Bytes in all, of rows, shares that may add up to more than 1, and rows of the shortest hit."""
    row_bytes = draw(st.dictionaries(st.integers(0, 9), st.integers(1, 5000), min_size=1, max_size=5))
    weights = {group: draw(st.integers(1, 20)) for group in row_bytes}
    whole = max(1, sum(weights.values()) + draw(st.integers(-5, 5)))
    least = {group: draw(st.integers(0, 3)) for group in row_bytes}
    shares = {group: weight / whole for group, weight in weights.items()}
    return draw(st.integers(0, 1 << 20)), row_bytes, shares, least


@given(wishes(), st.sampled_from([0.0, 1 / 16, 0.3, 0.75]))
def test_rows_lie_in_the_memory_and_nowhere_twice(wish, lent_share):
    cpu_bytes, row_bytes, shares, least = wish
    own = 1 - Fraction(lent_share)
    whole = max(1, sum(map(Fraction, shares.values())))
    lengths = {group: aligned_row_bytes(length) for group, length in row_bytes.items()}
    limits = {
        group: int(cpu_bytes * Fraction(shares[group]) / whole * own / length)
        for group, length in lengths.items()
    }
    is_enough = all(limits[group] >= max(1, least[group]) for group in limits)
    try:
        plan = plan_arena(cpu_bytes, row_bytes, shares, least, lent_share)
    except ConfigError as error:
        assert not is_enough
        enough = int(str(error).rsplit(" ", 1)[1])
        plan_arena(enough, row_bytes, shares, least, lent_share)
        with pytest.raises(ConfigError):
            plan_arena(enough - 1, row_bytes, shares, least, lent_share)
        return
    assert is_enough
    assert plan.groups == tuple(sorted(row_bytes))
    assert plan.length_bytes <= cpu_bytes
    assert plan.limits == limits
    assert sorted(rows.row_bytes for rows in plan.classes) == sorted({*lengths.values()})
    seen: dict[int, int] = {}
    for group in plan.groups:
        rows = plan.row_class(group)
        assert rows.row_bytes == lengths[group]
        assert row_bytes[group] <= rows.row_bytes < row_bytes[group] + 64
        for row in range(rows.num_all):
            offset = plan.offset_bytes(group, row)
            assert offset % 64 == 0
            assert 0 <= offset <= plan.length_bytes - rows.row_bytes
            assert seen.setdefault(offset, plan.class_of[group]) == plan.class_of[group]
    ends = sorted((offset, offset + plan.classes[index].row_bytes) for offset, index in seen.items())
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(ends))
    for index, rows in enumerate(plan.classes):
        assert rows.num_rows == sum(plan.limits[group] for group in plan.groups_of(index))
        assert abs(rows.num_lent - rows.num_rows * lent_share / own) <= len(row_bytes) * (
            1 + lent_share / own
        )


@pytest.mark.parametrize(
    ("shares", "match"),
    [
        (
            {0: 0.25, 1: 0.75},
            r"cpu_bytes is 1000: cache group 0 may take 0.25 of it, one of its blocks has 64 bytes, and the "
            rf"shortest hit needs 4 of them; it must be at least {16 * 640 * 4 // 3 + 1}$",
        ),
        ({0: 1.0, 1: 0.0}, r"shares gives cache group 1 nothing; accepted: more than 0"),
    ],
)
def test_a_group_without_the_rows_of_one_hit_is_named_with_what_all_groups_need(shares, match):
    with pytest.raises(ConfigError, match=match):
        plan_arena(1000, {0: 64, 1: 600}, shares, {0: 4, 1: 16})


def test_a_row_that_does_not_exist():
    plan = plan_arena(640, {0: 64}, {0: 1.0})
    with pytest.raises(LocalError, match="cache group 0 has rows 0 to 9, row 10 was asked for"):
        plan.offset_bytes(0, 10)
    with pytest.raises(LocalError, match=r"cache group 1 has no rows; those that have: \[0\]"):
        plan.row_class(1)


def test_shares_are_one_for_each_group():
    config = OffloadConfig(cpu_bytes=1 << 20, shares=(0.75, 0.25))
    plan = plan_for(config, [FULL, WINDOW], {0: 512, 1: 512})
    assert plan.limits == {0: 1536, 1: 512}
    with pytest.raises(
        ConfigError, match=r"shares is \[0.75, 0.25\], it must have one number for each of the 3"
    ):
        plan_for(config, [FULL, WINDOW, STATE], {0: 512, 1: 512, 2: 64})


def test_a_group_that_is_not_kept_has_no_share():
    config = OffloadConfig(cpu_bytes=1 << 20, shares=(0.5, 0.25, 0.25))
    assert plan_for(config, [FULL, WINDOW, STATE], {0: 512, 2: 64}).groups == (0, 2)


def test_usual_shares_are_by_what_a_prompt_leaves():
    rows = {0: 512, 1: 512, 2: 64}
    shares = usual_shares([FULL, WINDOW, STATE], rows, 4096, prompt_tokens=16384)
    # 1024 blocks of all tokens; 6 windows of 9 blocks; 6 states.
    left = {0: 1024 * 512, 1: 6 * 9 * 512, 2: 6 * 64}
    assert shares == pytest.approx({group: size / sum(left.values()) for group, size in left.items()})
    assert sum(shares.values()) == pytest.approx(1.0)


def test_usual_shares_without_checkpoints_and_with_a_window_that_holds_all():
    assert usual_shares([FULL, STATE], {0: 64, 1: 64}, 0, prompt_tokens=64) == pytest.approx(
        {0: 4 / 6, 1: 2 / 6}
    )
    assert usual_shares([FULL, WINDOW], {0: 64, 1: 64}, 16, prompt_tokens=256) == {0: 0.5, 1: 0.5}
