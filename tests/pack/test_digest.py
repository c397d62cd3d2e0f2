"""Digests of one line in so many: the same by hand, and what they are sure to find."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.pack import digest
from kvconnect.pack.digest import digest_streams
from tests.pack.sides import M64, digest_by_hand

WORDS = st.sampled_from([1, 2, 4, 8])
SEEDS = st.integers(0, M64 - 1)


@st.composite
def slots(draw):
    """Random bytes, and streams of them as a chunk has them: one after the other, with gaps."""
    streams, end = [], 0
    for word in draw(st.lists(WORDS, min_size=1, max_size=6)):
        offset = -(-end // 16) * 16
        length = word * draw(st.integers(1, 600))
        streams.append((offset, length, word))
        end = offset + length
    data = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 256, end, dtype=np.uint8)
    return data, tuple(streams)


def sampled_by_hand(data, streams, seed, one_in):
    total = 0
    for offset, length, word in streams:
        for at in range(offset, offset + length, word):
            line = at // 64
            is_whole = offset <= line * 64 and (line + 1) * 64 <= offset + length
            if one_in > 1 and (not is_whole or (line + seed) % one_in):
                continue
            total += digest_by_hand([(at, word, bytes(data[at : at + word]))], seed)
    return total % M64


@given(slot=slots(), seed=SEEDS, one_in=st.integers(1, 80))
def test_a_sampled_digest_is_the_sum_by_hand(slot, seed, one_in):
    data, streams = slot
    before, digest.LEAST_LINES = digest.LEAST_LINES, 1
    try:
        used = max(1, min(one_in, sum(length for _, length, _ in streams) // 64))
        assert digest_streams(data, streams, seed, one_in) == sampled_by_hand(data, streams, seed, used)
    finally:
        digest.LEAST_LINES = before


@given(slot=slots(), seed=SEEDS, one_in=st.integers(2, 20), data=st.data())
def test_whatever_is_torn_over_as_many_lines_is_found(slot, seed, one_in, data):
    raw, streams = slot
    offset, length, _ = max(streams, key=lambda stream: stream[1])
    lines = range(-(-offset // 64), (offset + length) // 64)
    if len(lines) < one_in:
        return
    first = data.draw(st.sampled_from(lines[: len(lines) - one_in + 1]))
    torn = raw.copy()
    torn[first * 64 : (first + one_in) * 64] ^= 0xA5
    assert digest_streams(torn, streams, seed, one_in) != digest_streams(raw, streams, seed, one_in)


def test_a_small_chunk_is_digested_whole():
    data = np.zeros(64 * digest.LEAST_LINES, dtype=np.uint8)
    streams = ((0, len(data), 8),)
    before = digest_streams(data, streams, 7, 64)
    for at in (0, 8, 4096, len(data) - 1):
        data[at] ^= 1
        assert digest_streams(data, streams, 7, 64) != before
        data[at] ^= 1


def test_another_generation_looks_at_other_lines():
    data = np.zeros(64 * 64 * digest.LEAST_LINES, dtype=np.uint8)
    streams = ((0, len(data), 8),)
    flipped = data.copy()
    flipped[1000] ^= 1
    found = [
        digest_streams(data, streams, seed, 64) != digest_streams(flipped, streams, seed, 64)
        for seed in range(64)
    ]
    assert found.count(True) == 1
