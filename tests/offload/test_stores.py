"""Rows go to the first blocks of the first requests of a step, and what is long is stored part by part."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvconnect.offload.scheduler.stores import MOST_AT_ONCE
from kvconnect.transfer.stack import Computed, Step
from tests.offload.half_kit import Kind, Req, Stack, check_index

BLOCK_TOKENS = 4


def half_of(num_rows):
    """A scheduler half of one cache group."""
    return Stack((Kind(BLOCK_TOKENS),), BLOCK_TOKENS, rows=num_rows).half


def admitted(half, name, blocks):
    """A request of these blocks, each of one token over and over."""
    request = Req(name, [token for token in blocks for _ in range(BLOCK_TOKENS)], 1)
    half.new_request(request, reads=False)
    half.update_after_alloc(request, ([],), 0)
    return request


def stored(half, requests):
    """Half of each prompt is computed and then the rest; the names that are stored then."""
    for part in (2, 1):
        computed = []
        for at, request in enumerate(requests):
            count = request.num_tokens // BLOCK_TOKENS
            first, end = (0, count // 2) if part == 2 else (count // 2, count)
            ids = list(range(100 * at + first + 1, 100 * at + end + 1))
            computed.append(Computed(request.request_id, end * BLOCK_TOKENS, (ids,)))
        half.launched(Step(computed))
        stores = half.build_orders().stores
        assert all(len(set(store.copies.rows)) == len(store.hashes) for store in stores)
        check_index(half.host.index)
        yield part, {name for store in stores for name in store.hashes}


prompts = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple), max_size=4)


@given(st.integers(1, 12), st.lists(prompts, min_size=1, max_size=3))
def test_rows_go_to_the_first_blocks_of_the_first_requests(num_rows, steps):
    half, there, num_short = half_of(num_rows), set(), 0
    for number, prompts in enumerate(steps):
        requests = [admitted(half, f"{number}.{at}", prompt) for at, prompt in enumerate(prompts)]
        for part, names in stored(half, requests):
            before = set(there)
            for request in requests:
                own = request.hashes(BLOCK_TOKENS)
                # More than there are rows for could be part of no hit.
                for name in own[: len(own) // part][:num_rows]:
                    if name not in there and len(there) == num_rows:
                        num_short += 1
                        break
                    there.add(name)
            assert names == there - before
    assert half.host.draft.failures == ["offload_rows_short"] * num_short


def test_of_what_is_long_a_part_is_seen_to_in_each_step():
    half = half_of(3000)
    request = admitted(half, "long", range(2500))
    ids = (list(range(1, 2501)),)
    for first in (0, MOST_AT_ONCE, 2 * MOST_AT_ONCE):
        assert half.due["long"] == 0
        half.launched(Step((Computed("long", request.num_tokens, ids),)))
        ids = None
        (store,) = half.build_orders().stores
        assert store.hashes == tuple(request.hashes(BLOCK_TOKENS)[first : first + MOST_AT_ONCE])
        assert store.copies.block_ids == tuple(range(first + 1, first + len(store.hashes) + 1))
    assert half.due["long"] > request.num_tokens
