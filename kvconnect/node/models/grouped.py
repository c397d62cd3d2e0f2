"""Grouped-query attention models: ``gqa`` (full attention) and ``sliding`` (windows and full mixed)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvconnect.cache.specs import FullAttentionSpec, SlidingWindowSpec
from kvconnect.node.attention import Backend, StepContext
from kvconnect.node.models.base import (
    CachedLayer,
    CacheLayout,
    CacheSizing,
    Dims,
    ModelOutput,
    Trunk,
)
from kvconnect.node.models.parts import WeightSource, rotate
from kvconnect.runner_kit.kernel_blocks import MultipleOf

GROUPED_BACKEND = Backend("TORCH_GROUPED", (MultipleOf(16),))
SLIDING_BACKEND = Backend("TORCH_SLIDING", (MultipleOf(16),))


class GroupedAttention:
    """Attention whose query heads share fewer key and value heads."""

    def __init__(
        self,
        weights: WeightSource,
        hidden: int,
        name: str,
        *,
        heads: int = 8,
        kv_heads: int = 4,
        head_size: int = 32,
        window: int | None = None,
    ) -> None:
        self.name = name
        self.kv_heads = kv_heads
        self.head_size = head_size
        self.window = window
        self._heads = heads
        self._query = weights.matrix(hidden, heads * head_size)
        self._key = weights.matrix(hidden, kv_heads * head_size)
        self._value = weights.matrix(hidden, kv_heads * head_size)
        self._output = weights.matrix(heads * head_size, hidden)

    def __call__(self, x: torch.Tensor, step: StepContext) -> torch.Tensor:
        query = rotate((x @ self._query).view(-1, self._heads, self.head_size), step.positions)
        keys = rotate((x @ self._key).view(-1, self.kv_heads, self.head_size), step.positions)
        values = (x @ self._value).view(-1, self.kv_heads, self.head_size)
        mixed = step.attend(self.name, query, keys, values, window=self.window)
        return mixed.flatten(1) @ self._output

    def cached(self, block_size: int, axes: str, dtype: torch.dtype) -> CachedLayer:
        """The layer's cache with pages of ``block_size`` tokens in the order of ``axes``."""
        if self.window is None:
            full = FullAttentionSpec(block_size, self.kv_heads, self.head_size, dtype)
            return CachedLayer(self.name, full, axes, GROUPED_BACKEND)
        spec = SlidingWindowSpec(block_size, self.kv_heads, self.head_size, dtype, sliding_window=self.window)
        return CachedLayer(self.name, spec, axes, SLIDING_BACKEND)

    def describe(self) -> str:
        """The attention's dimensions."""
        return f"{self._heads}q{self.kv_heads}kv{self.head_size}w{self.window or 0}"


class GroupedModel:
    """Full attention in all layers. Pages are head by head, keys beside values; one storage holds all."""

    name = "gqa"
    default_block_size = 16

    def __init__(self, weights: WeightSource, dims: Dims, num_layers: int = 4) -> None:
        self.dims = dims
        self._trunk = Trunk(weights, dims)
        self._mixers = [
            GroupedAttention(weights, dims.hidden, f"layers.{index}.attn") for index in range(num_layers)
        ]
        self._trunk.add(self._mixers)

    def layout(self, sizing: CacheSizing) -> CacheLayout:
        """One group of all layers."""
        size = sizing.block_size or self.default_block_size
        layers = tuple(
            mixer.cached(size, "block head token content", sizing.cache_dtype) for mixer in self._mixers
        )
        return CacheLayout((layers,), single_storage=True)

    def forward(self, token_ids: torch.Tensor, step: StepContext, sampled: torch.Tensor) -> ModelOutput:
        """See ``Model``."""
        hidden = self._trunk.hidden_states(token_ids, step)
        return ModelOutput(self._trunk.head(hidden[sampled]))

    def describe(self) -> str:
        """See ``Model``."""
        return f"h{self.dims.hidden}v{self.dims.vocab_size}:" + ",".join(m.describe() for m in self._mixers)


class SlidingModel(GroupedModel):
    """Four windowed layers in two groups and two full layers in a third, whose pages overlay each other."""

    name = "sliding"
    WINDOW = 96
    FULL_LAYERS: Sequence[int] = (2, 5)

    def __init__(self, weights: WeightSource, dims: Dims) -> None:
        super().__init__(weights, dims, num_layers=0)
        self._mixers = [
            GroupedAttention(
                weights,
                dims.hidden,
                f"layers.{index}.attn",
                window=None if index in self.FULL_LAYERS else self.WINDOW,
            )
            for index in range(6)
        ]
        self._trunk.add(self._mixers)

    def layout(self, sizing: CacheSizing) -> CacheLayout:
        """The full layers, then the windowed ones in groups of as many layers."""
        size = sizing.block_size or self.default_block_size
        cached = [
            mixer.cached(size, "block token head content", sizing.cache_dtype) for mixer in self._mixers
        ]
        return CacheLayout(
            ((cached[2], cached[5]), (cached[0], cached[3]), (cached[1], cached[4])), single_storage=False
        )
