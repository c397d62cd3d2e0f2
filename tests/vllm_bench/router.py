"""A router in miniature: what it knows of a server's caches from vLLM's event batches alone."""

from __future__ import annotations

from typing import Any

import msgspec
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, KVEventBatch
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import hash_block_tokens
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

from kvconnect.offload.index.tier_index import READY


class Router:
    """Stands for the publisher of a scheduler, of which every batch goes through vLLM's encoding."""

    def __init__(self, cache: Any, hash_tokens: int) -> None:
        self._hash_tokens = hash_tokens
        self._kinds = [get_kv_cache_spec_kind(group.kv_cache_spec).value for group in cache.kv_cache_groups]
        self.held: dict[tuple[str, int], set[bytes]] = {}

    def publish(self, batch: KVEventBatch) -> None:
        """Take a batch as a subscriber does."""
        decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=KVEventBatch)
        for event in decoded.events:
            if isinstance(event, AllBlocksCleared):
                # vLLM's own, of the device. The tiers take back what they announced.
                self.held = {key: held for key, held in self.held.items() if key[0] != "GPU"}
                continue
            held = self.held.setdefault((event.medium, event.group_idx), set())
            if isinstance(event, BlockRemoved):
                assert held.issuperset(event.block_hashes) or event.medium == "GPU", event
                held.difference_update(event.block_hashes)
            else:
                assert held.isdisjoint(event.block_hashes) or event.medium == "GPU", event
                held.update(event.block_hashes)
                if event.medium != "GPU":
                    self._check(event)

    def _check(self, event: Any) -> None:
        """The tokens are those of the blocks, by vLLM's own hash."""
        assert event.kv_cache_spec_kind == self._kinds[event.group_idx]
        assert len(event.token_ids) == event.block_size * len(event.block_hashes)
        before, tokens = event.parent_block_hash, event.token_ids
        for name in event.block_hashes:
            for _ in range(event.block_size // self._hash_tokens):
                before = hash_block_tokens(sha256, before, tokens[: self._hash_tokens])
                del tokens[: self._hash_tokens]
            assert before == name, "the tokens are not those of the block"

    def check(self, half: Any) -> None:
        """What was heard is what host memory has."""
        if half.offload is None or half.offload.host.events:
            return
        index = half.offload.host.index
        for rows in index.classes:
            for group, names in rows.row_of.items():
                there = {name for name, row in names.items() if rows.state[row] == READY}
                assert self.held.get(("CPU", group), set()) == there
