"""Flex-attention buffers against plain Python, and the configuration that used to crash at start."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.errors import ConfigError, LocalError
from kvconnect.runner_kit.flex_capacity import FlexBuffers, FlexCapacity


@st.composite
def capacities(draw):
    return FlexCapacity(
        max_num_batched_tokens=draw(st.integers(1, 40)),
        max_model_len=draw(st.integers(1, 60)),
        q_block_size=draw(st.integers(1, 9)),
        page_tokens=draw(st.integers(1, 9)),
    )


@st.composite
def batches(draw, limits):
    """``(query length, sequence length, pages)`` per request within the limits; pages may be shared."""
    left, requests = limits.max_num_batched_tokens, []
    while left and len(requests) < 12 and draw(st.integers(0, 9)):
        query = draw(st.integers(0, min(left, limits.max_model_len)))
        length = draw(st.integers(max(query, 1), limits.max_model_len))
        count = -(-length // limits.page_tokens)
        few = st.integers(0, 6)
        pages = draw(st.lists(few | st.integers(1, 2**31 - 1), min_size=count, max_size=count))
        requests.append((query, length, pages))
        left -= query
    return requests


def as_arguments(requests, limits, spare=0):
    columns = -(-limits.max_model_len // limits.page_tokens) + spare
    table = torch.zeros((len(requests), columns), dtype=torch.int32)
    for row, (_, _, pages) in enumerate(requests):
        table[row, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
    queries = [query for query, _, _ in requests]
    return {"query_lens": queries, "seq_lens": [s for _, s, _ in requests], "block_tables": table}


def brute_force(requests, limits, window):
    """For each query group, the pages that any of its tokens attends to: token by token, key by key."""
    tokens = [
        (position, pages) for query, length, pages in requests for position in range(length - query, length)
    ]
    groups = []
    for first in range(0, len(tokens), limits.q_block_size):
        seen = set()
        for position, pages in tokens[first : first + limits.q_block_size]:
            for key in range(position + 1):
                if window is None or position - key < window:
                    seen.add(pages[key // limits.page_tokens])
        groups.append(seen - {0})
    return groups


@st.composite
def fills(draw):
    limits = draw(capacities())
    window = st.none() | st.integers(1, limits.max_model_len + 3)
    steps = st.tuples(batches(limits), window, st.integers(0, 2))
    return limits, draw(st.lists(steps, min_size=1, max_size=3))


@given(fills())
def test_fill_matches_plain_python_and_leaves_nothing_of_the_step_before(case):
    limits, steps = case
    buffers = FlexBuffers(limits)
    for requests, window, spare in steps:
        blocks = buffers.fill(**as_arguments(requests, limits, spare), sliding_window=window)
        expected = brute_force(requests, limits, window)
        assert len(blocks.kv_num_blocks) == len(blocks.kv_indices) == len(expected)
        for group, pages in enumerate(expected):
            count = int(blocks.kv_num_blocks[group])
            assert blocks.kv_indices[group, :count].tolist() == sorted(pages)
            assert count <= int(blocks.most_kv_blocks[group]) <= limits.kv_indices
            assert not blocks.kv_indices[group, count:].any()
        assert not buffers.kv_num_blocks[len(expected) :].any()
        assert not buffers.kv_indices[len(expected) :].any()
        assert blocks.kv_num_blocks.data_ptr() in (0, buffers.kv_num_blocks.data_ptr())
        assert blocks.kv_indices.data_ptr() in (0, buffers.kv_indices.data_ptr())
        guard = beyond(buffers)
        assert not guard.any(), "a slot past a row's end does not hold the null page"


def beyond(buffers):
    """Slot ``kv_indices`` of every group. ``as_strided`` fails if one lies outside the allocation."""
    kv = buffers.kv_indices
    return kv.as_strided((kv.shape[0],), (kv.stride(0),), kv.storage_offset() + kv.shape[1])


@given(capacities())
def test_the_worst_batch_needs_every_slot(limits):
    per_request = -(-limits.max_model_len // limits.page_tokens)
    count = limits.max_num_batched_tokens
    requests = [
        (1, limits.max_model_len, [1 + row * per_request + k for k in range(per_request)])
        for row in range(count)
    ]
    blocks = FlexBuffers(limits).fill(**as_arguments(requests, limits))
    assert len(blocks.kv_num_blocks) == limits.query_groups
    full = count // limits.q_block_size
    assert blocks.kv_num_blocks[:full].tolist() == [limits.kv_indices] * full
    assert int(blocks.kv_num_blocks.sum()) == count * per_request


def test_a_long_model_with_a_small_batch_is_sized_by_the_batch():
    """Rows by max_model_len give [4096, 256], which has no room for the [1024, 4096] that a step needs.

    A runner sized so crashed at start. The model's length says how many pages one token may see; how many
    groups there are depends on the tokens of a batch alone.
    """
    limits = FlexCapacity(
        max_num_batched_tokens=16_384, max_model_len=65_536, q_block_size=16, page_tokens=256
    )
    buffers = FlexBuffers(limits)
    assert buffers.kv_indices.shape == (limits.query_groups, limits.kv_indices) == (1024, 4096)
    assert buffers.kv_num_blocks.dtype == buffers.kv_indices.dtype == torch.int32
    table = torch.arange(1, 1 + 16 * 256, dtype=torch.int32).view(16, 256)
    blocks = buffers.fill(query_lens=[1024] * 16, seq_lens=[65_536] * 16, block_tables=table)
    assert blocks.kv_indices.shape == (1024, 4096)
    assert blocks.kv_num_blocks.tolist() == [
        (65_536 - 1024 + 16 * (group % 64) + 15) // 256 + 1 for group in range(1024)
    ]
    blocks = buffers.fill(query_lens=[1] * 16, seq_lens=[65_536] * 16, block_tables=table)
    assert blocks.kv_num_blocks.tolist() == [4096]
    assert not beyond(buffers).any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query_lens": [9, 8]}, "17 tokens does not fit .* for 16"),
        ({"seq_lens": [33, 20]}, "33 tokens does not fit .* for 32"),
        ({"query_lens": [9, 7], "seq_lens": [9, 6]}, "7 tokens in the batch, but 6 in all"),
        ({"block_tables": torch.ones((2, 2), dtype=torch.int32)}, "20 tokens needs 3 pages, .* has 2"),
        ({"block_tables": torch.ones((3, 4), dtype=torch.int32)}, "3 rows"),
        ({"seq_lens": [20]}, "not of the same requests"),
        ({"query_lens": [-1, 2]}, "has -1 tokens"),
        ({"sliding_window": 0}, "sliding_window is 0"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(change, message):
    buffers = FlexBuffers(FlexCapacity(16, 32, 4, 8))
    batch = {
        "query_lens": [5, 2],
        "seq_lens": [20, 17],
        "block_tables": torch.arange(1, 9, dtype=torch.int32).view(2, 4),
    }
    buffers.fill(**batch)
    before = buffers.kv_num_blocks.tolist(), buffers.kv_indices.tolist()
    with pytest.raises(LocalError, match=message):
        buffers.fill(**{**batch, **change})
    assert (buffers.kv_num_blocks.tolist(), buffers.kv_indices.tolist()) == before


@pytest.mark.parametrize("field", ["max_num_batched_tokens", "max_model_len", "q_block_size", "page_tokens"])
@pytest.mark.parametrize("value", [0, -3, 1.5, True])
def test_a_bad_number_is_named_with_its_bound(field, value):
    numbers = {"max_num_batched_tokens": 8, "max_model_len": 8, "q_block_size": 8, "page_tokens": 8}
    with pytest.raises(ConfigError, match=rf"{field} is {value!r}.*at least 1"):
        FlexCapacity(**{**numbers, field: value})
