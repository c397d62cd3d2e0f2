"""What a cache must hold: a function of the tokens up to a position, of the layer and of the head.

Imports neither kvconnect nor vLLM: what is checked must not be computed by what is under test.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Words = np.ndarray
VOCABULARY = 250
LONGEST = 512
"""Tokens that a sequence may have, drafts included."""

_MASK = (1 << 64) - 1
_SEED = 0x9E3779B97F4A7C15


def mix(value: int) -> int:
    """A bijection of 64 bits in which every bit of the input changes half of those of the output."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def mix_all(values: Words) -> Words:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


@dataclass(frozen=True)
class Sight:
    """What the layers of one cache group see, and of how many heads and layers their cache is.

    ``window`` counts the position itself; ``chunk`` is the size of a local chunk; ``is_state`` a recurrent
    state after the last token in place of rows by token. ``first_layer`` numbers the layers over all groups.
    """

    num_layers: int
    num_heads: int
    first_layer: int
    window: int = 0
    chunk: int = 0
    is_state: bool = False

    def first_visible(self, position: int) -> int:
        """The first position that a query at ``position`` attends to."""
        if self.window:
            return max(0, position - self.window + 1)
        if self.chunk:
            return position // self.chunk * self.chunk
        return 0

    @property
    def keys(self) -> Words:
        """One word per layer and head."""
        numbers = [
            [mix(_SEED ^ ((self.first_layer + layer) << 8 | head)) for head in range(self.num_heads)]
            for layer in range(self.num_layers)
        ]
        return np.array(numbers, dtype=np.uint64)


class Text:
    """The tokens of one request, with what the caches of all groups must hold of them."""

    def __init__(self, sights: Sequence[Sight]) -> None:
        self._sights = sights
        self._keys = [sight.keys for sight in sights]
        self.tokens: list[int] = []
        self._hashes = np.zeros(LONGEST + 1, dtype=np.uint64)
        self._hashes[0] = _SEED
        # By group the xor of all words before a position, over layers and heads.
        self._sums = [np.zeros(LONGEST + 1, dtype=np.uint64) for _ in sights]

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        first = len(self.tokens)
        value = int(self._hashes[first])
        for offset, token in enumerate(tokens):
            value = mix(value * 3 + token + 1)
            self._hashes[first + offset + 1] = value
        self.tokens.extend(tokens)
        for group, sight in enumerate(self._sights):
            if sight.is_state:
                continue
            words = np.bitwise_xor.reduce(self.words(group, first, len(self.tokens)), axis=(0, 2))
            sums = self._sums[group]
            sums[first + 1 : len(self.tokens) + 1] = np.bitwise_xor.accumulate(words) ^ sums[first]

    def truncate(self, num_tokens: int) -> None:
        del self.tokens[num_tokens:]

    def words(self, group: int, first: int, end: int) -> Words:
        """Of positions ``first`` to ``end - 1``: by layer, position and head."""
        return mix_all(self._hashes[None, first + 1 : end + 1, None] ^ self._keys[group][:, None, :])

    def state(self, group: int, num_tokens: int) -> Words:
        """The state after so many tokens: by layer and word."""
        return mix_all(self._hashes[num_tokens] ^ self._keys[group])

    def seen(self, group: int, position: int) -> int:
        """What a query at ``position`` makes of all that it sees of one group."""
        sight = self._sights[group]
        if sight.is_state:
            return int(np.bitwise_xor.reduce(self.state(group, position + 1), axis=None))
        sums = self._sums[group]
        return int(sums[position + 1] ^ sums[sight.first_visible(position)])


def sampled(seen: Sequence[int], position: int) -> int:
    """The token after ``position``, of what the groups showed there."""
    value = position
    for part in seen:
        value = mix(value ^ part)
    return value % VOCABULARY


def continuation(sights: Sequence[Sight], prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What a model computes after a prompt, by the reference alone."""
    return list(_continuation(tuple(sights), tuple(prompt), num_tokens))


@functools.lru_cache(maxsize=256)
def _continuation(sights: tuple[Sight, ...], prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    sequence = Text(sights)
    sequence.extend(prompt)
    for _ in range(num_tokens):
        last = len(sequence) - 1
        sequence.extend([sampled([sequence.seen(group, last) for group in range(len(sights))], last)])
    return sequence.tokens[len(prompt) :]
