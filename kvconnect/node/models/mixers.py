"""The layers that keep rows by token: grouped-query and latent attention, and a wide memory."""

from __future__ import annotations

import torch

from kvconnect.cache.specs import FullAttentionSpec, LayerSpec, MLASpec, SlidingWindowSpec
from kvconnect.node.attention import Backend, StepContext
from kvconnect.node.models.model import CachedLayer
from kvconnect.node.models.parts import WeightSource, rms_norm, rotate
from kvconnect.runner_kit.kernel_blocks import MultipleOf

GROUPED_BACKEND = Backend("TORCH_GROUPED", (MultipleOf(16),))
SLIDING_BACKEND = Backend("TORCH_SLIDING", (MultipleOf(16),))
LATENT_BACKEND = Backend("TORCH_LATENT", (MultipleOf(16),))
LATENT_64_BACKEND = Backend("TORCH_LATENT_64", (64,))
WIDE_BACKEND = Backend("TORCH_WIDE", (MultipleOf(16),))

_STEP = 2654435761
"""Odd and large: multiples of it, modulo something smaller, are spread over all of it."""


class GroupedAttention:
    """Attention whose query heads share fewer key and value heads."""

    def __init__(
        self, weights: WeightSource, name: str, axes: str, *, kv_heads: int = 4, window: int | None = None
    ) -> None:
        self.name = name
        self._axes = axes
        self._heads, self._kv_heads, self._head_size = 8, kv_heads, 32
        self._window = window
        hidden = weights.hidden
        self._query = weights.matrix(hidden, self._heads * self._head_size)
        self._key = weights.matrix(hidden, kv_heads * self._head_size)
        self._value = weights.matrix(hidden, kv_heads * self._head_size)
        self._output = weights.matrix(self._heads * self._head_size, hidden)

    def __call__(self, x: torch.Tensor, step: StepContext) -> torch.Tensor:
        query = rotate((x @ self._query).view(-1, self._heads, self._head_size), step.positions)
        keys = rotate((x @ self._key).view(-1, self._kv_heads, self._head_size), step.positions)
        values = (x @ self._value).view(-1, self._kv_heads, self._head_size)
        mixed = step.attend(self.name, query, keys, values, window=self._window)
        return mixed.flatten(1) @ self._output

    def cached(self, block_size: int, dtype: torch.dtype) -> CachedLayer:
        """See ``Mixer``."""
        shape = (block_size, self._kv_heads, self._head_size, dtype)
        if self._window is None:
            return CachedLayer(self.name, FullAttentionSpec(*shape), self._axes, GROUPED_BACKEND)
        spec: LayerSpec = SlidingWindowSpec(*shape, sliding_window=self._window)
        return CachedLayer(self.name, spec, self._axes, SLIDING_BACKEND)


class LatentAttention:
    """All heads attend over one latent row per token: a compressed part and a rotary part."""

    def __init__(self, weights: WeightSource, name: str, backend: Backend = LATENT_BACKEND) -> None:
        self.name = name
        self._backend = backend
        self._heads, self._latent, self._rotary = 8, 48, 16
        head_size, hidden = 32, weights.hidden
        self._down = weights.matrix(hidden, self._latent + self._rotary)
        # The up-projection of keys is absorbed into the query, that of values follows the attention.
        self._query = weights.matrix(hidden, self._heads * (self._latent + self._rotary))
        self._up_values = weights.normal((self._heads, self._latent, head_size), scale=self._latent**-0.5)
        self._output = weights.matrix(self._heads * head_size, hidden)

    def __call__(self, x: torch.Tensor, step: StepContext) -> torch.Tensor:
        row = x @ self._down
        latent = rms_norm(row[:, : self._latent])
        rotary = rotate(row[:, None, self._latent :], step.positions)
        keys = torch.cat((latent[:, None], rotary), dim=-1)
        query = (x @ self._query).view(-1, self._heads, self._latent + self._rotary)
        turned = rotate(query[..., self._latent :], step.positions)
        query = torch.cat((query[..., : self._latent], turned), dim=-1)
        mixed = step.attend(self.name, query, keys, None, value_width=self._latent)
        return torch.einsum("thl,hlv->thv", mixed, self._up_values).flatten(1) @ self._output

    def cached(self, block_size: int, dtype: torch.dtype) -> CachedLayer:
        """See ``Mixer``."""
        spec = MLASpec(block_size, self._latent + self._rotary, dtype)
        return CachedLayer(self.name, spec, "block token content", self._backend)


class WideMemory:
    """Keeps a row of ``copies * hidden`` values a token, and adds parts of a few earlier tokens' rows.

    It keeps much and computes little, for measurements of what moving its cache takes: the time of a prompt
    grows with its length and not with its square.
    """

    def __init__(self, weights: WeightSource, name: str) -> None:
        self.name = name
        self._hidden, self._copies, self._reads = weights.hidden, 32, 2
        self._input = weights.matrix(self._hidden, self._hidden)
        self._scales = weights.normal((self._copies, 1))
        self._output = weights.matrix(self._hidden, self._hidden)

    def __call__(self, x: torch.Tensor, step: StepContext) -> torch.Tensor:
        # No more digits than the cache keeps: what is wide is not computed with.
        rows = rms_norm(x @ self._input).float()[:, None] * self._scales.float()
        mixed = torch.zeros_like(x)
        for number in range(self._reads):
            positions = (step.positions + number) * _STEP % (step.positions + 1)
            read = step.remember(self.name, rows.view(len(x), 1, -1), positions)
            part = (step.positions + number) % self._copies
            copies = read.view(-1, self._copies, self._hidden)
            mixed = mixed + copies[torch.arange(len(x), device=x.device), part].to(x.dtype)
        return rms_norm(mixed) @ self._output

    def cached(self, block_size: int, dtype: torch.dtype) -> CachedLayer:
        """See ``Mixer``."""
        spec = MLASpec(block_size, self._copies * self._hidden, dtype)
        return CachedLayer(self.name, spec, "block token content", WIDE_BACKEND)
