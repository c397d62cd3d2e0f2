"""Head intervals: every head is owned, and every rank gets each of its heads exactly once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.cache.shard import HeadInterval, consumer_ranks, partner_ranks, shard_heads
from kvconnect.errors import LayoutError

sizes = st.integers(1, 16)


@given(sizes, sizes)
def test_every_head_is_owned_and_ranks_are_even(num_heads, world_size):
    shards = [shard_heads(num_heads, rank, world_size) for rank in range(world_size)]
    assert {head for shard in shards for head in range(shard.start, shard.stop)} == set(range(num_heads))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


@given(sizes, sizes, sizes)
def test_each_wanted_head_comes_from_exactly_one_partner(num_heads, world_size, peer_world_size):
    for rank in range(world_size):
        wanted = shard_heads(num_heads, rank, world_size)
        got = [
            head
            for partner in partner_ranks(rank, world_size, peer_world_size, num_heads)
            for shared in [shard_heads(num_heads, partner, peer_world_size).intersect(wanted)]
            for head in range(shared.start, shared.stop)
        ]
        assert sorted(got) == list(range(wanted.start, wanted.stop))


@given(sizes, sizes, st.one_of(st.none(), sizes))
def test_consumers_are_the_inverse_of_partners(world_size, peer_world_size, num_heads):
    consumers = consumer_ranks(world_size, peer_world_size, num_heads)
    for rank in range(world_size):
        partners = partner_ranks(rank, world_size, peer_world_size, num_heads)
        assert partners == [partner for partner in range(peer_world_size) if rank in consumers[partner]]


def test_replicated_bytes_come_from_one_rank():
    assert partner_ranks(3, 4, 2, None) == [1]
    assert partner_ranks(0, 2, 8, None) == [0]
    assert partner_ranks(1, 2, 8, None) == [4]


def test_intersections_are_half_open():
    assert len(HeadInterval(0, 4).intersect(HeadInterval(4, 8))) == 0
    assert HeadInterval(0, 4).intersect(HeadInterval(2, 8)) == HeadInterval(2, 4)


def test_a_rank_outside_its_world_is_an_error():
    with pytest.raises(LayoutError, match="rank 2 is not in a world of 2"):
        shard_heads(8, 2, 2)
    with pytest.raises(LayoutError):
        partner_ranks(2, 2, 2, None)
