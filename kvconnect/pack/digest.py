"""The digest of a packed chunk: 64 bits that distinguish an intact slot from a torn, late or foreign one.

Every word of the wire is mixed with a seed and its place, and the results are summed in any order. One
changed word always changes the sum, since the mix is one to one. The digest detects accidents; an attacker,
who knows the formula, can forge it.

    mix(x):  x ^= x >> 32;  x *= MULTIPLIER;  x ^= x >> 32        all modulo 2**64
    digest:  sum over words of mix(word + seed + STEP * place),   place = offset_bytes // word_bytes

A stream's words have its ``word_bytes``, and are little endian. Bytes between streams are not covered.

On a CPU the digest samples one line of ``LINE_BYTES`` in ``one_in``: the lines that lie wholly in one stream
and whose number in the slot, plus the seed, is a multiple of ``one_in``. A run of ``one_in`` torn or stale
lines always has a sampled line. Each generation of a slot samples other lines, since it is the seed.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

# The golden ratio of 2**64: it spreads places over all bits.
STEP = 0x9E3779B97F4A7C15
MULTIPLIER = 0xBF58476D1CE4E5B9

_AT_ONCE = 1 << 15

# A cache line of the processor.
LINE_BYTES = 64
# A digest covers at least this many lines, or all lines of a small chunk.
LEAST_LINES = 256
# One line in 256, which is one per 16 KiB, costs a few per cent of a transfer.
CPU_DIGEST_SAMPLE = 256

Lines = NDArray[np.int64]
# The non-empty streams of a chunk: (offset in the slot, length, word size), all in bytes.
Streams = tuple[tuple[int, int, int], ...]


def digest_streams(slot: NDArray[np.uint8], streams: Streams, seed: int, one_in: int) -> int:
    """The 64-bit digest of the streams in a slot, over about one line in ``one_in``."""
    num_lines = sum(length for _, length, _ in streams) // LINE_BYTES
    one_in = max(1, min(one_in, num_lines // LEAST_LINES))
    if one_in == 1:
        return sum(_digest_stream(slot, *stream, seed) for stream in streams) % 2**64
    some = (_digest_lines(slot, *alike, seed) for alike in _some_lines(streams, one_in, seed % one_in))
    return sum(some) % 2**64


def _digest_stream(slot: NDArray[np.uint8], offset: int, length: int, word: int, seed: int) -> int:
    words, first = slot[offset : offset + length].view(f"u{word}"), offset // word
    step = np.uint64(STEP)
    places = np.arange(min(_AT_ONCE, len(words)), dtype=np.uint64) * step
    total = 0
    # In pieces that stay in the processor's cache.
    for at in range(0, len(words), _AT_ONCE):
        piece = words[at : at + _AT_ONCE]
        x = piece + places[: len(piece)]
        x += np.uint64((seed + (first + at) * STEP) % 2**64)
        total += int(_mix(x).sum(dtype=np.uint64))
    return total % 2**64


@functools.lru_cache(maxsize=4096)
def _some_lines(streams: Streams, one_in: int, residue: int) -> list[tuple[int, Lines, NDArray[np.uint64]]]:
    """By word size, the sampled lines for seeds of this residue, and the place term of their first words."""
    offset, length, word_of = np.array(streams, dtype=np.int64).T
    # The first sampled line of each stream, and the number of sampled lines.
    first = -(-offset // LINE_BYTES)
    first += -(first + residue) % one_in
    count = np.maximum(0, -((first - (offset + length) // LINE_BYTES) // one_in))
    before = np.cumsum(count) - count
    lines = np.repeat(first - before * one_in, count) + np.arange(int(count.sum())) * one_in
    found = []
    for word in np.unique(word_of).tolist():
        alike = lines[np.repeat(word_of == word, count)]
        step = np.uint64(STEP * (LINE_BYTES // word) % 2**64)
        found.append((word, alike, alike.view(np.uint64) * step))
    return found


def _digest_lines(
    slot: NDArray[np.uint8], word_bytes: int, lines: Lines, begins: NDArray[np.uint64], seed: int
) -> int:
    """The digest of some lines of a slot; ``begins`` is ``STEP * place`` of each line's first word."""
    line_words = LINE_BYTES // word_bytes
    whole = len(slot) // LINE_BYTES * LINE_BYTES
    x = slot[:whole].view(f"u{word_bytes}").reshape(-1, line_words)[lines].astype(np.uint64, copy=False)
    x += (begins + np.uint64(seed % 2**64))[:, None]
    x += _line_steps(line_words)
    return int(_mix(x).sum(dtype=np.uint64))


@functools.cache
def _line_steps(line_words: int) -> NDArray[np.uint64]:
    return np.arange(line_words, dtype=np.uint64) * np.uint64(STEP)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x ^= x >> np.uint64(32)
    x *= np.uint64(MULTIPLIER)
    x ^= x >> np.uint64(32)
    return x
