"""Who owns what, and who serves whom: every byte of every rank from exactly one rank of the other side.

What is owned is worked out here layer by layer and head by head, sharing nothing with the intervals.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.cache.shard import (
    HeadInterval,
    Residue,
    Topology,
    layer_number,
    partner_ranks,
    shard_heads,
    shared_tokens,
)
from kvconnect.errors import LayoutError

LAYERS = 7
sizes = st.integers(1, 16)
heads = st.one_of(st.none(), st.sampled_from([1, 2, 3, 4, 8]))


@st.composite
def topologies(draw):
    cuts = draw(st.lists(st.integers(0, LAYERS), max_size=3))
    return Topology(draw(st.integers(1, 6)), (0, *sorted(cuts)))


def cells(topology: Topology, rank: int, num_heads: int | None) -> Counter[tuple[int, int]]:
    """The (layer, head) pairs that a rank keeps, one by one."""
    stage, tensor = divmod(rank, topology.tensor)
    kept = Counter[tuple[int, int]]()
    # The last is a draft model's.
    for layer in range(LAYERS + 1):
        stages = [number for number, first in enumerate(topology.stages) if first <= layer]
        for head in range(num_heads or 1) if stages[-1] == stage else ():
            if num_heads is None or _keeps_head(head, num_heads, tensor, topology.tensor):
                kept[layer, head] += 1
    return kept


def _keeps_head(head: int, num_heads: int, tensor: int, world: int) -> bool:
    if world >= num_heads:
        return tensor * num_heads // world == head
    # As evenly as possible: the rank before which as many heads end as its share.
    return max(rank for rank in range(world) if rank * num_heads // world <= head) == tensor


@given(sizes, sizes)
def test_every_head_is_owned_and_ranks_are_even(num_heads, world_size):
    shards = [shard_heads(num_heads, rank, world_size) for rank in range(world_size)]
    assert {head for shard in shards for head in range(shard.start, shard.stop)} == set(range(num_heads))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


@given(topologies(), topologies(), heads)
def test_each_byte_that_a_rank_keeps_comes_from_exactly_one_partner(ours, theirs, num_heads):
    for rank in range(ours.size):
        wanted, got = cells(ours, rank, num_heads), Counter()
        partners = partner_ranks(rank, ours, theirs, num_heads)
        for partner in partners:
            shared = wanted & cells(theirs, partner, num_heads)
            assert shared, "a rank is asked that has nothing of it"
            got += shared
        assert got == wanted
        assert partners == sorted(set(partners))


@given(topologies(), st.integers(0, LAYERS - 1))
def test_a_layer_is_owned_by_one_pipeline_rank_and_drafts_by_the_last(topology, layer):
    name = f"model.layers.{layer}.self_attn.attn"
    owners = [rank for rank in range(topology.size) if topology.owns(rank, name)]
    kept = [{number for number, _ in cells(topology, rank, 1)} for rank in range(topology.size)]
    assert owners == [rank for rank, numbers in enumerate(kept) if layer in numbers]
    last = range(topology.size - topology.tensor, topology.size)
    for draft in ("draft_model.layers.0.attn", f"model.layers.{LAYERS}.attn"):
        assert [rank for rank in range(topology.size) if topology.owns(rank, draft)] == list(last)


def test_the_number_of_a_layer_is_the_first_in_its_name():
    assert layer_number("transformer.h.11.attn") == 11
    assert layer_number("model.layers.3.experts.7.attn") == 3
    assert layer_number("latent") is None


def test_replicas_are_spread_over_the_ranks_that_fetch():
    two, four, eight = Topology(2), Topology(4), Topology(8)
    assert [partner_ranks(rank, four, two, None) for rank in range(4)] == [[0], [1], [0], [1]]
    assert [partner_ranks(rank, two, eight, None) for rank in range(2)] == [[0], [1]]
    staged = Topology(1, (0, 2))
    assert [partner_ranks(rank, staged, two, None) for rank in range(2)] == [[0], [1]]


def test_equal_ranks_serve_each_other():
    """Layers that travel between equal ranks only rely on it."""
    for ours, theirs in (((0, 3), (0, 3)), ((0,), (0, 2, 4)), ((0, 1, 5), (0,))):
        for tensor, num_heads in ((4, None), (4, 2), (8, 4), (2, 1)):
            a, b = Topology(tensor, ours), Topology(tensor, theirs)
            for rank in range(a.size):
                partners = partner_ranks(rank, a, b, num_heads)
                assert {partner % tensor for partner in partners} == {rank % tensor}


def test_intersections_are_half_open():
    assert len(HeadInterval(0, 4).intersect(HeadInterval(4, 8))) == 0
    assert HeadInterval(0, 4).intersect(HeadInterval(2, 8)) == HeadInterval(2, 4)


def test_a_rank_outside_its_world_is_an_error():
    with pytest.raises(LayoutError, match="rank 2 is not in a world of 2"):
        shard_heads(8, 2, 2)
    with pytest.raises(LayoutError, match="rank 2 is not in a world of 2"):
        partner_ranks(2, Topology(2), Topology(2), None)


@pytest.mark.parametrize(
    ("topology", "rank"),
    [
        (Topology(2), 2),
        (Topology(1, (1, 2)), 0),
        (Topology(1, (0, 5, 3)), 0),
        (Topology(200, (0, 1)), 0),
        (Topology(1, (0, 1 << 40)), 0),
    ],
)
def test_topologies_that_no_node_can_have_are_refused(topology, rank):
    assert "is in no world" in topology.refusal(rank, None)
    assert Topology(2, (0, 4)).refusal(3, None) is None


@given(
    st.integers(1, 4).flatmap(lambda c: st.tuples(st.just(c), st.integers(0, c - 1))),
    st.integers(1, 4).flatmap(lambda c: st.tuples(st.just(c), st.integers(0, c - 1))),
    st.integers(1, 5),
    st.integers(0, 80),
)
def test_the_tokens_that_two_residues_share(one, other, unit, num_tokens):
    """Counted and numbered one by one."""
    residues = [Residue(context, rank, unit) for context, rank in (one, other)]
    kept = [[t for t in range(num_tokens) if t // unit % side.context == side.rank] for side in residues]
    both = [token for token in kept[0] if token in kept[1]]
    shared = shared_tokens(*residues)
    if shared is None:
        assert not both
        return
    assert shared.count(num_tokens) == len(both)
    if one[0] == other[0] == 1:
        return
    for side, own in zip(residues, kept, strict=True):
        start, step = shared.stride(side)
        # Where the units of what is shared lie among the units of what a side has.
        assert [own[index * unit : (index + 1) * unit] for index in range(start, len(own), step)][
            : -(-len(both) // unit)
        ] == [both[at : at + unit] for at in range(0, len(both), unit)]
