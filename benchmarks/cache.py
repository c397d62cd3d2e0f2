"""The cache of one side, its requests' blocks, and digests of what they hold.

Digests are taken with plain tensor indexing: nothing that moves or describes pages is used to check them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.device import wait_for_device
from kvconnect.cache.region_table import CacheTensor, RegionTable
from kvconnect.cache.specs import AttentionSpec, KVCacheConfig, KVCacheGroup
from kvconnect.plan.blocks import GroupBlocks

Digests = NDArray[np.int64]

VALUE_BYTES = 2
"""The caches keep bfloat16."""

BLOCK_TOKENS = 16
NHD, PLANES = "block token head content", "block plane head token content"
"""The dimensions of a cache tensor: tokens outside heads, or inside with keys and values apart."""

_UNTOUCHED = 0x5A
_WORD_BYTES = 8
_DIGEST_SEED = 0xD16E57


@dataclass(frozen=True)
class CacheShape:
    """The cache of one side: ``layers`` tensors of ``num_blocks`` pages."""

    layers: int
    num_blocks: int
    heads: int
    head_size: int
    block_tokens: int = BLOCK_TOKENS
    axes: str = NHD

    @property
    def page_bytes(self) -> int:
        """Bytes of one block in one layer."""
        return self.block_tokens * self.heads * self.head_size * 2 * VALUE_BYTES

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers."""
        return self.layers * self.page_bytes

    @property
    def total_bytes(self) -> int:
        return self.num_blocks * self.block_bytes


class BenchCache:
    """Layers in allocations of their own, filled with normal values, or with one byte where they land.

    Args:
        shape: how many layers and blocks, and how a page is laid out.
        device: ``cpu`` or ``cuda:N``.
        seed: of the values and of the block ids; None fills all with one byte.
    """

    def __init__(self, shape: CacheShape, device: str, seed: int | None) -> None:
        self.shape = shape
        self.device = device
        self.slots: list[tuple[int, ...]] = []
        planes = 2 if "plane" in shape.axes else 1
        sizes = {
            "block": shape.num_blocks,
            "plane": planes,
            "token": shape.block_tokens,
            "head": shape.heads,
            "content": 2 * shape.head_size // planes,
        }
        extents = [sizes[axis] for axis in shape.axes.split()]
        generator = torch.Generator(device).manual_seed(seed or 0)
        self.tensors: dict[str, CacheTensor] = {}
        for index in range(shape.layers):
            tensor = torch.empty(extents, dtype=torch.bfloat16, device=device)
            if seed is None:
                tensor.view(torch.uint8).fill_(_UNTOUCHED)
            else:
                tensor.normal_(generator=generator)
            self.tensors[f"layer{index}"] = CacheTensor(tensor, shape.axes)
        wait_for_device(device)

    def config(self) -> KVCacheConfig:
        """What a serving stack would say of this cache."""
        shape = self.shape
        spec = AttentionSpec(shape.block_tokens, shape.heads, shape.head_size, torch.bfloat16)
        return KVCacheConfig(shape.num_blocks, (KVCacheGroup(tuple(self.tensors), spec),))

    def table(self) -> RegionTable:
        return RegionTable.build(self.config(), {0: self.shape.block_tokens}, self.tensors)

    def draw(self, slots: int, blocks: int, seed: int) -> None:
        """Give each of so many requests random blocks of its own."""
        ids = random.Random(seed).sample(range(1, self.shape.num_blocks), slots * blocks)
        self.slots = [tuple(ids[start : start + blocks]) for start in range(0, len(ids), blocks)]

    def groups(self, slot: int) -> tuple[GroupBlocks, ...]:
        """The blocks of a slot as orders spell them."""
        return (GroupBlocks(0, 0, self.slots[slot]),)

    def clear(self) -> None:
        """Take away what the slots' blocks hold."""
        ids = self._index([block for slot in self.slots for block in slot])
        for cache in self.tensors.values():
            cache.tensor.view(torch.uint8).index_fill_(0, ids, _UNTOUCHED)
        wait_for_device(self.device)

    def digests(self, slots: Sequence[int]) -> Digests:
        """One number per slot, layer and page."""
        row_words = self.shape.page_bytes // _WORD_BYTES
        generator = torch.Generator().manual_seed(_DIGEST_SEED)
        # Odd factors: then no single word can change unnoticed.
        factors = torch.randint(-(2**62), 2**62, (row_words,), generator=generator).mul_(2).add_(1)
        factors = factors.to(self.device)
        made = []
        for slot in slots:
            ids = self._index(self.slots[slot])
            for cache in self.tensors.values():
                rows = cache.tensor[ids].flatten().view(torch.int64).view(-1, row_words)
                made.append((rows * factors).sum(dim=1))
        columns = torch.stack(made).reshape(len(slots), self.shape.layers, -1)
        return np.asarray(columns.cpu().numpy(), dtype=np.int64)

    def _index(self, ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor(ids, dtype=torch.int64, device=self.device)
