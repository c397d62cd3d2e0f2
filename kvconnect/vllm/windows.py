"""Blocks of windows that a load may have filled in part: vLLM's prefix cache is not to have them.

A peer whose blocks end elsewhere has nothing of the tokens before a window. vLLM caches full blocks of a load
when its request goes on. A hit that ends with a block that the request fills itself sees no more than it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvconnect.cache.specs import KVCacheGroup


class PartlyFilled:
    """The loaded blocks of windows by request, as long as vLLM may cache them, and those filled in part."""

    def __init__(self, groups: Sequence[KVCacheGroup] = ()) -> None:
        self._groups = [
            index
            for index, group in enumerate(groups)
            if group.has_cache and group.retention.by_position and not group.retention.sees_all
        ]
        self._pool: Any = None
        self._loaded: dict[str, frozenset[int]] = {}
        self._ragged: dict[str, frozenset[int]] = {}

    def bind(self, pool: Any) -> None:
        """vLLM's block pool."""
        self._pool = pool

    def admitted(self, request_id: str, block_ids: Sequence[Sequence[int]], num_external_tokens: int) -> None:
        """A request got blocks: for a load, or to go on, for which vLLM has just cached what was loaded."""
        if num_external_tokens and self._groups:
            ids = (block for group in self._groups for block in block_ids[group] if block)
            self._loaded[request_id] = frozenset(ids)
        elif request_id in self._ragged:
            self.end(request_id)

    def reported(self, ragged: Iterable[str]) -> None:
        """The windows of these loads, which end now, may begin with a block that is not full."""
        for request_id in ragged:
            if request_id in self._loaded:
                self._ragged[request_id] = self._loaded.pop(request_id)

    def step(self) -> None:
        """A step was scheduled: a request may have been about to go on, or was reported late."""
        for blocks in self._ragged.values():
            self._pool.evict_blocks(blocks)

    def end(self, request_id: str) -> None:
        """A request ends, and its blocks are about to be freed, or what it loaded was cached just now."""
        self._loaded.pop(request_id, None)
        if (blocks := self._ragged.pop(request_id, None)) is not None:
            self._pool.evict_blocks(blocks)
