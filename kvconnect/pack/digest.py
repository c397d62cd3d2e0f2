"""The digest of a packed chunk: 64 bits that tell a whole slot from a torn, late or foreign one.

Every word of the wire is mixed with a seed and with its place, and the results are summed, so that
words can be taken in any order by any number of programs. A changed word always changes the sum, since
the mix is one to one. It guards against accidents, not against an attacker, who knows the formula.

    mix(x):  x ^= x >> 32;  x *= MULTIPLIER;  x ^= x >> 32        all modulo 2**64
    digest:  sum over words of mix(word + seed + STEP * (offset_bytes // word_bytes))

A stream's words have its ``word_bytes``, and are little endian. Bytes between streams do not count.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

STEP = 0x9E3779B97F4A7C15
"""The golden ratio of 2**64: it spreads places over all bits."""
MULTIPLIER = 0xBF58476D1CE4E5B9

_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_AT_ONCE = 1 << 15


def digest_bytes(data: NDArray[np.uint8], offset_bytes: int, word_bytes: int, seed: int) -> int:
    """The digest of one stream: ``data``, which begins ``offset_bytes`` into the slot."""
    words = data.view(_WORDS[word_bytes])
    first = offset_bytes // word_bytes
    step, multiplier, half = np.uint64(STEP), np.uint64(MULTIPLIER), np.uint64(32)
    places = np.arange(min(_AT_ONCE, len(words)), dtype=np.uint64) * step
    total = 0
    # A piece at a time stays in the processor's cache.
    for at in range(0, len(words), _AT_ONCE):
        piece = words[at : at + _AT_ONCE]
        x = piece + places[: len(piece)]
        x += np.uint64((seed + (first + at) * STEP) % 2**64)
        x ^= x >> half
        x *= multiplier
        x ^= x >> half
        total += int(x.sum(dtype=np.uint64))
    return total % 2**64
