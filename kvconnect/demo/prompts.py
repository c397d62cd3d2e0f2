"""What the demo asks: seeded prompts whose lengths sit on and around every block border."""

from __future__ import annotations

import random

VOCAB = 512

# One token; less than a block; exact blocks of 16, 32 and 128; one more than that; several hundred.
_LENGTHS = (1, 9, 16, 129, 333, 128, 32, 257, 64, 150, 15, 480, 2, 17, 384, 96)
# Every so many prompts one continues another: its beginning may already lie in a cache.
_SHARED_EVERY = 4
_SHARED_TOKENS = 128


def make_prompts(count: int, seed: int) -> list[list[int]]:
    """``count`` different prompts of random ids. The same arguments always give the same prompts.

    No prompt is the beginning of another one, save for those of one token: a node that has seen the
    others still lacks the end of each.
    """
    generator = random.Random(seed)
    shared = [generator.randrange(VOCAB) for _ in range(_SHARED_TOKENS)]
    prompts = []
    for index in range(count):
        length = _LENGTHS[index % len(_LENGTHS)]
        prompt = [generator.randrange(VOCAB) for _ in range(length)]
        if index % _SHARED_EVERY == _SHARED_EVERY - 1:
            prompt = shared + prompt[: max(2, length - _SHARED_TOKENS)]
        prompts.append(prompt)
    return prompts
