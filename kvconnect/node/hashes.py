"""What the content of cache blocks is called: chained hashes of the tokens that they stand for.

Pure: tokens in, hashes out. What the bytes of a block depend on besides (the model, its weights, the
cache's type) is no part of a hash.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

SCHEME = "blake2b-128 of the chain so far and int32 tokens"
_DIGEST_BYTES = 16


def extend_chain(chain: list[bytes], token_ids: Sequence[int], block_tokens: int) -> None:
    """Add the hashes of all whole blocks of ``token_ids`` that ``chain`` does not have yet.

    Each hash covers every token up to the end of its block.
    """
    known = len(chain)
    count = len(token_ids) // block_tokens
    if known >= count:
        return
    added = np.asarray(token_ids[known * block_tokens : count * block_tokens], dtype=np.int32).tobytes()
    width = block_tokens * 4
    previous = chain[-1] if chain else b""
    for start in range(0, len(added), width):
        previous = hashlib.blake2b(
            previous + added[start : start + width], digest_size=_DIGEST_BYTES
        ).digest()
        chain.append(previous)
