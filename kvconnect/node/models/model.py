"""What a model of the node is: named cached layers, and a forward pass over a step's tokens.

A model defines what its layers keep and how their pages are laid out; it never sees a block id.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from kvconnect.cache.specs import LayerSpec
from kvconnect.node.attention import Backend, StepContext

CACHE_DTYPE = torch.bfloat16


@dataclass(frozen=True)
class CacheSizing:
    """What the operator asked for: block size (None: the model's own), longest sequence, cache dtype."""

    block_size: int | None
    max_model_len: int
    cache_dtype: torch.dtype = CACHE_DTYPE


@dataclass(frozen=True)
class CachedLayer:
    """One layer's cache: what a block holds, how its dimensions are ordered, who reads it.

    ``axes`` names the dimensions of the cache tensor in memory order, as ``CacheTensor`` does.
    ``backend`` is None for recurrent state.
    """

    name: str
    spec: LayerSpec
    axes: str
    backend: Backend | None


@dataclass(frozen=True)
class CacheLayout:
    """The cached layers by group. Layers at the same place of different groups share their pages.

    ``single_storage``: one allocation holds all layers one after the other, else each place has its own.
    """

    groups: tuple[tuple[CachedLayer, ...], ...]
    single_storage: bool = False


@dataclass(frozen=True)
class ModelOutput:
    """Greedy tokens at the sampled places, and the draft model's proposals if there is one.

    Both of shape ``(sampled,)`` and on the model's device: reading them there would wait for it.
    """

    tokens: torch.Tensor
    draft_tokens: torch.Tensor | None = None


class Model(Protocol):
    """A decoder with random weights."""

    name: str
    vocab_size: int

    def layout(self, sizing: CacheSizing) -> CacheLayout:
        """The model's cache. Raises ConfigError for a block size that it cannot use."""
        ...

    def forward(self, token_ids: torch.Tensor, step: StepContext, sampled: torch.Tensor) -> ModelOutput:
        """Run the tokens of shape ``(n,)``; ``sampled`` are the places whose next token is wanted."""
        ...


class Mixer(Protocol):
    """The part of a layer that mixes tokens, and keeps something of them: attention or a recurrence."""

    def __call__(self, x: torch.Tensor, step: StepContext) -> torch.Tensor: ...

    def cached(self, block_size: int, dtype: torch.dtype) -> CachedLayer:
        """The layer's cache with blocks of ``block_size`` tokens."""
        ...
