"""What a prompt is called: one digest of its tokens, and of all else that their KV depends on.

Both nodes of a pair work it out for themselves, whatever their serving stacks and versions: only what is
given here counts, and how it is written down is ours.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any

PROMPT_BYTES = 16
_CHUNK_TOKENS = 4096

PromptDigest = Callable[[Any, int], bytes | None]
"""The digest of a request's first so many tokens. None for a request that stands for another one, without its
tokens, and ends at once. Raises nothing, whatever a client sent."""


def digest_prompt(token_ids: Sequence[int], keys: Iterable[Sequence[str | int | bytes]] = ()) -> bytes:
    """The digest of tokens, and of what they are computed with besides: adapters, images, a salt.

    Two prompts have the same one only if they have the same tokens and the same ``keys`` in the same order.
    """
    digest = hashlib.blake2b(struct.pack("<Q", len(token_ids)), digest_size=PROMPT_BYTES)
    for start in range(0, len(token_ids), _CHUNK_TOKENS):
        digest.update(_packed(token_ids[start : start + _CHUNK_TOKENS]))
    for key in keys:
        digest.update(struct.pack("<I", len(key)))
        for part in key:
            data = part if isinstance(part, bytes) else str(part).encode("utf-8", "surrogatepass")
            digest.update(struct.pack("<cQ", type(part).__name__[:1].encode(), len(data)))
            digest.update(data)
    return digest.digest()


def _packed(token_ids: Sequence[int]) -> bytes:
    try:
        # Several times as fast as an array made of a list.
        return struct.pack(f"<{len(token_ids)}I", *token_ids)
    except struct.error:
        # No vocabulary has such tokens, but a client may send them. Longer than any chunk of four bytes each.
        return repr(list(token_ids)).encode().ljust(4 * _CHUNK_TOKENS + 1)


def untold(request: Any, num_tokens: int) -> bytes:
    """Of a serving stack that does not say what its tokens are: all prompts of a length count as one."""
    return b""
