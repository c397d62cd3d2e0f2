"""What lower tiers have, against a set for each rank."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.errors import LocalError
from kvconnect.offload.index.lower_index import LowerIndex
from kvconnect.orders import TierChange

HASHES = [bytes([n]) * 32 for n in range(12)]
some = st.lists(st.sampled_from(HASHES), max_size=12).map(tuple)
changes = st.builds(TierChange, st.sampled_from(["disk", "other"]), st.integers(0, 1), some, some)
RANKS = 2
steps = st.one_of(
    st.tuples(st.just("update"), st.integers(0, RANKS - 1), st.lists(changes, max_size=3)),
    st.tuples(st.just("drop"), st.sampled_from(["disk", "other"]), st.integers(0, 1), some),
    st.tuples(st.just("clear")),
)


@given(st.lists(steps, max_size=12), some)
def test_a_content_is_there_where_every_rank_has_it(steps, asked):
    index = LowerIndex(RANKS)
    have = {
        (rank, tier, group): set() for rank in range(RANKS) for tier in ("disk", "other") for group in (0, 1)
    }
    for step, *what in steps:
        if step == "update":
            rank, told = what
            index.update(rank, told)
            for change in told:
                have[rank, change.tier, change.group] |= set(change.added)
                have[rank, change.tier, change.group] -= set(change.removed)
        elif step == "drop":
            index.drop(*what)
            for rank in range(RANKS):
                have[rank, what[0], what[1]] -= set(what[2])
        else:
            index.clear()
            have = {key: set() for key in have}
    for tier in ("disk", "other"):
        for group in (0, 1):
            everywhere = set.intersection(*(have[rank, tier, group] for rank in range(RANKS)))
            assert index.has(tier, group, HASHES) == [content in everywhere for content in HASHES]
            leading = next((at for at, content in enumerate(asked) if content not in everywhere), len(asked))
            assert index.lookup(tier, group, asked) == leading
            assert index.counts().get(tier, {}).get(group, 0) == len(everywhere)


def test_a_long_prefix_is_looked_up_in_parts():
    hashes = [n.to_bytes(32, "big") for n in range(2000)]
    index = LowerIndex(1)
    index.update(0, [TierChange("disk", 0, tuple(hashes))])
    assert index.lookup("disk", 0, hashes) == 2000
    index.update(0, [TierChange("disk", 0, (), (hashes[1234],))])
    assert index.lookup("disk", 0, hashes) == 1234
    assert index.lookup("store", 0, hashes) == index.lookup("disk", 1, hashes) == 0


def test_contents_are_counted_once_every_rank_has_them():
    index = LowerIndex(2)
    told = TierChange("disk", 0, tuple(HASHES))
    index.update(0, [told])
    assert index.counts() == {"disk": {0: 0}}
    index.update(1, [told, told])
    assert index.counts() == {"disk": {0: 12}}
    index.update(0, [TierChange("disk", 0, (), tuple(HASHES[:2]))])
    index.update(1, [TierChange("disk", 0, (), tuple(HASHES[:1]))])
    index.drop("disk", 0, HASHES[1:4])
    assert index.counts() == {"disk": {0: 8}}
    index.clear()
    assert index.counts() == {}


def test_a_rank_that_does_not_exist():
    with pytest.raises(LocalError, match="rank 2 reports, there are 2"):
        LowerIndex(2).update(2, [])
    with pytest.raises(LocalError, match="num_ranks is 0, it must be at least 1"):
        LowerIndex(0)
