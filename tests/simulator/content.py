"""What the KV of every token is, byte by byte, in the plainest words.

The KV of a token depends on all tokens up to it, on its layer and on its head. Here it is a stretch of one
fixed table of noise, whose place the prompt, the token and the layer decide: two that differ in anything
hold other bytes. Shares no code with plans, wires and packers.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

_NOISE: Bytes = np.random.default_rng(20_24).integers(1, 256, 1 << 20, dtype=np.uint8)


@dataclass(frozen=True)
class Prompt:
    """A text: its first ``prefix_tokens`` are those of every other one with this ``prefix``.

    ``text`` tells it apart from all others after that. What is generated goes on from there. Names are not
    those of the same text with another ``salt``; its KV is.
    """

    text: int
    num_tokens: int
    prefix: int = 0
    prefix_tokens: int = 0
    salt: str = ""

    def name_of_block(self, stop_token: int) -> tuple[int | str, ...]:
        """What all tokens up to ``stop_token`` are, as a key of a prefix cache."""
        salt = (self.salt,) if self.salt else ()
        if stop_token <= self.prefix_tokens:
            return (*salt, self.prefix)
        return (*salt, self.prefix, self.prefix_tokens, self.text)

    def moved(self, by: int) -> Prompt:
        """A prompt that has nothing in common with this one, and as much as it with others so moved."""
        return replace(self, text=self.text + by, prefix=self.prefix + by) if by else self


@functools.lru_cache(4096)
def names_of(prompt: Prompt, num_tokens: int, tokens: int) -> tuple[bytes, ...]:
    """What a node calls a prompt's first tokens, one name for every so many."""
    stops = range(tokens, num_tokens + 1, tokens)
    return tuple(f"{prompt.name_of_block(stop)}@{stop}".encode() for stop in stops)


def rows_of(prompt: Prompt, layer: int, start: int, stop: int, row_bytes: int) -> Bytes:
    """The KV of tokens ``start`` to ``stop - 1`` in a layer, as (token, byte)."""
    shared = min(max(start, prompt.prefix_tokens), stop)
    parts = [
        _stretch(name, layer, first, last, row_bytes)
        for name, first, last in ((prompt.prefix, start, shared), (prompt.text, shared, stop))
        if first < last
    ]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def state_of(prompt: Prompt, layer: int, num_tokens: int, state_bytes: int) -> Bytes:
    """The recurrent state of a layer after so many tokens, as (byte,)."""
    text = prompt.prefix if num_tokens <= prompt.prefix_tokens else prompt.text
    state: Bytes = _stretch(text * 64 + num_tokens, layer + 31, 0, 1, state_bytes)[0]
    return state


def noise(place: int, length: int) -> Bytes:
    """Bytes that are nobody's KV, different for every place."""
    start = place * 7919 % (len(_NOISE) - length)
    return _NOISE[start : start + length]


def _stretch(name: int, layer: int, first: int, last: int, row_bytes: int) -> Bytes:
    start = (name * 1_000_003 + layer * 15_485_863) % (len(_NOISE) // 2) + first * row_bytes
    stretch: Bytes = _NOISE[start : start + (last - first) * row_bytes].reshape(last - first, row_bytes)
    return stretch
