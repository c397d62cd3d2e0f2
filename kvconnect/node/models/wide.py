"""A model that keeps much and computes little: ``wide``, for measurements of what moving its cache takes.

No attention: a token reads the rows of a few earlier tokens, so that its time grows with the length of
a prompt and not with its square.
"""

from __future__ import annotations

import torch

from kvconnect.cache.specs import MLASpec
from kvconnect.node.attention import Backend, StepContext
from kvconnect.node.models.base import CachedLayer, CacheLayout, CacheSizing, Dims, ModelOutput, Trunk
from kvconnect.node.models.parts import WeightSource, rms_norm
from kvconnect.runner_kit.kernel_blocks import MultipleOf

WIDE_BACKEND = Backend("TORCH_WIDE", (MultipleOf(16),))
_STEP = 2654435761
"""Odd and large: multiples of it, modulo something smaller, are spread over all of it."""


class WideMemory:
    """Keeps a row of ``copies * hidden`` values a token, and adds what parts of a few earlier rows say."""

    def __init__(
        self, weights: WeightSource, hidden: int, name: str, *, copies: int = 32, reads: int = 2
    ) -> None:
        self.name = name
        self._hidden, self._copies, self._reads = hidden, copies, reads
        self._input = weights.matrix(hidden, hidden)
        self._scales = weights.normal((copies, 1))
        self._output = weights.matrix(hidden, hidden)

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
        """The layer's cache with pages of ``block_size`` tokens."""
        spec = MLASpec(block_size, self._copies * self._hidden, dtype)
        return CachedLayer(self.name, spec, "block token content", WIDE_BACKEND)

    def describe(self) -> str:
        """The memory's dimensions."""
        return f"{self._copies}x{self._hidden}r{self._reads}"


class WideModel:
    """Such memories in all layers, one storage per layer; 16 KiB a token in bfloat16."""

    name = "wide"
    default_block_size = 16

    def __init__(self, weights: WeightSource, dims: Dims, num_layers: int = 2) -> None:
        self.dims = dims
        self._trunk = Trunk(weights, dims)
        self._mixers = [
            WideMemory(weights, dims.hidden, f"layers.{index}.memory") for index in range(num_layers)
        ]
        self._trunk.add(self._mixers)

    def layout(self, sizing: CacheSizing) -> CacheLayout:
        """One group of all layers."""
        size = sizing.block_size or self.default_block_size
        return CacheLayout((tuple(mixer.cached(size, sizing.cache_dtype) for mixer in self._mixers),))

    def forward(self, token_ids: torch.Tensor, step: StepContext, sampled: torch.Tensor) -> ModelOutput:
        """See ``Model``."""
        hidden = self._trunk.hidden_states(token_ids, step)
        return ModelOutput(self._trunk.head(hidden[sampled]))

    def describe(self) -> str:
        """See ``Model``."""
        return f"h{self.dims.hidden}v{self.dims.vocab_size}:" + ",".join(m.describe() for m in self._mixers)
