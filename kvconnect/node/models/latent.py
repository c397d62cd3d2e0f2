"""Latent attention models: ``mla``, and ``mixed``, which adds a draft layer of another page size."""

from __future__ import annotations

import torch

from kvconnect.cache.specs import MLASpec
from kvconnect.node.attention import Backend, StepContext
from kvconnect.node.models.base import (
    CachedLayer,
    CacheLayout,
    CacheSizing,
    Dims,
    ModelOutput,
    Trunk,
)
from kvconnect.node.models.grouped import GroupedAttention
from kvconnect.node.models.parts import ChaoticHead, Mlp, WeightSource, rms_norm, rotate
from kvconnect.runner_kit.kernel_blocks import MultipleOf

LATENT_BACKEND = Backend("TORCH_LATENT", (MultipleOf(16),))
LATENT_64_BACKEND = Backend("TORCH_LATENT_64", (64,))


class LatentAttention:
    """All heads attend over one latent row per token: a compressed part and a rotary part."""

    def __init__(
        self,
        weights: WeightSource,
        hidden: int,
        name: str,
        *,
        heads: int = 8,
        latent: int = 48,
        rotary: int = 16,
        head_size: int = 32,
    ) -> None:
        self.name = name
        self._heads, self._latent, self._rotary = heads, latent, rotary
        self._down = weights.matrix(hidden, latent + rotary)
        # The up-projection of keys is absorbed into the query, that of values follows the attention.
        self._query = weights.matrix(hidden, heads * (latent + rotary))
        self._up_values = weights.normal((heads, latent, head_size), scale=latent**-0.5)
        self._output = weights.matrix(heads * head_size, hidden)

    def __call__(self, x: torch.Tensor, step: StepContext) -> torch.Tensor:
        row = x @ self._down
        latent = rms_norm(row[:, : self._latent])
        rotary = rotate(row[:, None, self._latent :], step.positions)
        keys = torch.cat((latent[:, None], rotary), dim=-1)
        query = (x @ self._query).view(-1, self._heads, self._latent + self._rotary)
        query = torch.cat(
            (query[..., : self._latent], rotate(query[..., self._latent :], step.positions)), dim=-1
        )
        mixed = step.attend(self.name, query, keys, None, value_width=self._latent)
        return torch.einsum("thl,hlv->thv", mixed, self._up_values).flatten(1) @ self._output

    def cached(self, block_size: int, backend: Backend, dtype: torch.dtype) -> CachedLayer:
        """The layer's cache with pages of ``block_size`` tokens."""
        spec = MLASpec(block_size, self._latent + self._rotary, dtype)
        return CachedLayer(self.name, spec, "block token content", backend)

    def describe(self) -> str:
        """The attention's dimensions."""
        return f"{self._heads}q{self._latent}+{self._rotary}"


class LatentModel:
    """Latent attention in all layers, one storage per layer."""

    name = "mla"
    default_block_size = 16
    backend = LATENT_BACKEND

    def __init__(self, weights: WeightSource, dims: Dims, num_layers: int = 4) -> None:
        self.dims = dims
        self._trunk = Trunk(weights, dims)
        self._mixers = [
            LatentAttention(weights, dims.hidden, f"layers.{index}.attn") for index in range(num_layers)
        ]
        self._trunk.add(self._mixers)

    def layout(self, sizing: CacheSizing) -> CacheLayout:
        """One group of all layers."""
        size = sizing.block_size or self.default_block_size
        layers = tuple(mixer.cached(size, self.backend, sizing.cache_dtype) for mixer in self._mixers)
        return CacheLayout((layers,))

    def forward(self, token_ids: torch.Tensor, step: StepContext, sampled: torch.Tensor) -> ModelOutput:
        """See ``Model``."""
        hidden = self._trunk.hidden_states(token_ids, step)
        return ModelOutput(self._trunk.head(hidden[sampled]))

    def describe(self) -> str:
        """See ``Model``."""
        return f"h{self.dims.hidden}v{self.dims.vocab_size}:" + ",".join(m.describe() for m in self._mixers)


class MixedModel(LatentModel):
    """Latent main layers and a grouped-query draft layer in one cache group with two page sizes.

    The draft layer reads the main model's last hidden state and the token's embedding at every position,
    keeps its own cache, and proposes one more token wherever the main model samples. Its pages are
    smaller than the scheduler's block: the main backend takes exactly 64 tokens.
    """

    name = "mixed"
    default_block_size = 128
    backend = LATENT_64_BACKEND

    def __init__(self, weights: WeightSource, dims: Dims) -> None:
        super().__init__(weights, dims)
        self._draft_input = weights.matrix(2 * dims.hidden, dims.hidden)
        self._draft_mixer = GroupedAttention(weights, dims.hidden, "draft.layers.0.attn", kv_heads=2)
        self._draft_mlp = Mlp(weights, dims.hidden)
        self._draft_head = ChaoticHead(weights, dims.hidden, dims.vocab_size)

    def layout(self, sizing: CacheSizing) -> CacheLayout:
        """One group: the main layers, then the draft layer, keys and values in planes of their own."""
        main = super().layout(sizing).groups[0]
        draft = self._draft_mixer.cached(
            main[0].spec.block_size, "plane block token head content", sizing.cache_dtype
        )
        return CacheLayout(((*main, draft),))

    def forward(self, token_ids: torch.Tensor, step: StepContext, sampled: torch.Tensor) -> ModelOutput:
        """See ``Model``."""
        hidden = self._trunk.hidden_states(token_ids, step)
        tokens = self._trunk.head(hidden[sampled])
        both = torch.cat((rms_norm(hidden), rms_norm(self._trunk.embedding[token_ids])), dim=-1)
        x = both @ self._draft_input
        x = x + self._draft_mixer(rms_norm(x), step)
        x = x[sampled]
        x = x + self._draft_mlp(rms_norm(x))
        return ModelOutput(tokens, self._draft_head(x))

    def describe(self) -> str:
        """See ``Model``."""
        return f"{super().describe()}+draft:{self._draft_mixer.describe()}"
