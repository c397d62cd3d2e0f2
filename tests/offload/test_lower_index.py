"""What lower tiers have, against a set for each rank."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvconnect.offload.scheduler.host import LowerIndex
from kvconnect.transfer.orders import TierChange

HASHES = [bytes([n]) * 32 for n in range(12)]
some = st.lists(st.sampled_from(HASHES), max_size=12).map(tuple)
changes = st.builds(TierChange, st.sampled_from(["disk", "other"]), st.integers(0, 1), some, some)
RANKS = 2
steps = st.one_of(
    st.tuples(st.just("update"), st.integers(0, RANKS - 1), st.lists(changes, max_size=3)),
    st.tuples(st.just("drop"), st.sampled_from(["disk", "other"]), st.integers(0, 1), some),
    st.tuples(st.just("clear")),
)


@given(st.lists(steps, max_size=12))
def test_a_content_is_there_where_every_rank_has_it(steps):
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
            assert index.counts().get(tier, {}).get(group, 0) == len(everywhere)
