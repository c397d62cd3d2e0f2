"""Dictionaries by content that never pause for long.

A dictionary stops for as long as it is large when it grows: at a million contents that is longer than a
step. Many small ones in its place stop for a fraction of a millisecond each.
"""

from __future__ import annotations

NUM_SHARDS = 256
SHARD_MASK = NUM_SHARDS - 1
# A content's shard is ``shards[hash(content) & SHARD_MASK]``, written out where it is used: a call would cost
# more than the rest.
Shards = list[dict[bytes, int]]


def make_shards() -> Shards:
    """Empty dictionaries."""
    return [{} for _ in range(NUM_SHARDS)]
