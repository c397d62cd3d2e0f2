"""vLLM's block pool as ``PrefixPool``. Imports no vLLM.

vLLM's ``BlockPool.unpin_blocks`` gives up a reference to a block that is still read, and reports when the
block goes to another request or the caches are reset.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class WatchedPool:
    """The blocks of vLLM's prefix cache; ``pool`` is the one that vLLM binds its connectors to."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._reused: list[int] = []

    def watch(self, group: int, hashes: Sequence[bytes]) -> Sequence[int]:
        """See ``PrefixPool``."""
        find, groups = self._pool.get_cached_block, [group]
        blocks = [found[0] if (found := find(name, groups)) else None for name in hashes]
        watched = [block for block in blocks if block is not None]
        # References that are taken and given up again: what remains are the watchers.
        self._pool.touch(watched)
        self._pool.unpin_blocks(reversed(watched), self._on_reuse)
        return [0 if block is None else int(block.block_id) for block in blocks]

    def take_reused(self) -> Sequence[int]:
        """See ``PrefixPool``."""
        if not self._reused:
            return ()
        reused, self._reused = self._reused, []
        return reused

    def refresh(self, block_ids: Sequence[int]) -> None:
        """See ``PrefixPool``. vLLM reuses the blocks at the end of a prefix first, as of its own requests."""
        blocks = [self._pool.blocks[block_id] for block_id in block_ids]
        free = [block for block in blocks if not block.ref_cnt and block.block_hash is not None]
        self._pool.touch(free)
        self._pool.free_blocks(reversed(free))

    def _on_reuse(self, block: Any) -> None:
        self._reused.append(int(block.block_id))
