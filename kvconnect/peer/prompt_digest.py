"""What a prompt is called: one digest of its tokens, and of all else that their KV depends on.

Both nodes of a pair work it out for themselves, with any serving stacks and versions: only what is
given here counts, and how it is written down is ours.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Iterable, Sequence

PROMPT_BYTES = 16


def digest_prompt(token_ids: Sequence[int], keys: Iterable[Sequence[str | int | bytes]] = ()) -> bytes:
    """The digest of tokens, and of what they are computed with besides: adapters, images, a salt.

    Two prompts have the same one only if they have the same tokens and the same ``keys`` in the same order.
    """
    digest = hashlib.blake2b(struct.pack("<Q", len(token_ids)), digest_size=PROMPT_BYTES)
    # Four bytes a token, the lowest first.
    packed = array("I")
    try:
        # Less than half the time of ``struct.pack``, which makes a tuple of all tokens first.
        packed.fromlist(token_ids if isinstance(token_ids, list) else list(token_ids))
        if sys.byteorder == "big":
            packed.byteswap()
        digest.update(packed)
    except (OverflowError, TypeError):
        # No vocabulary has such tokens, but a client may send them. Longer than as many that fit.
        digest.update(repr(list(token_ids)).encode().ljust(4 * len(token_ids) + 1))
    for key in keys:
        digest.update(struct.pack("<I", len(key)))
        for part in key:
            data = part if isinstance(part, bytes) else str(part).encode("utf-8", "surrogatepass")
            digest.update(struct.pack("<cQ", type(part).__name__[:1].encode(), len(data)))
            digest.update(data)
    return digest.digest()
