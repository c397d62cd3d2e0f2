"""What a model of the node is: named cached layers, and a forward pass over a step's tokens.

A model says what its layers keep and how their pages are laid out; it never allocates a cache and never
sees a block id. The cache and the runner know models only through this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from kvconnect.cache.specs import LayerSpec
from kvconnect.node.attention import Backend, StepContext
from kvconnect.node.models.parts import ChaoticHead, Mlp, WeightSource, rms_norm

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
class Dims:
    """The widths that all models share."""

    vocab_size: int = 512
    hidden: int = 128


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
    dims: Dims
    default_block_size: int

    def layout(self, sizing: CacheSizing) -> CacheLayout:
        """The model's cache. Raises ConfigError for a block size that it cannot use."""
        ...

    def forward(self, token_ids: torch.Tensor, step: StepContext, sampled: torch.Tensor) -> ModelOutput:
        """Run the tokens of shape ``(n,)``; ``sampled`` are the places whose next token is wanted."""
        ...

    def describe(self) -> str:
        """The dimensions that two nodes must share for their caches to mean the same."""
        ...


class Mixer(Protocol):
    """The part of a layer that mixes tokens: attention or a recurrence."""

    def __call__(self, x: torch.Tensor, step: StepContext) -> torch.Tensor: ...


@dataclass
class Trunk:
    """Embedding, a stack of pre-norm layers, and the greedy head."""

    weights: WeightSource
    dims: Dims
    embedding: torch.Tensor = field(init=False)
    head: ChaoticHead = field(init=False)
    layers: list[tuple[Mixer, Mlp]] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.embedding = self.weights.normal((self.dims.vocab_size, self.dims.hidden))
        self.head = ChaoticHead(self.weights, self.dims.hidden, self.dims.vocab_size)

    def add(self, mixers: Sequence[Mixer]) -> None:
        """Stack layers on top."""
        for mixer in mixers:
            self.layers.append((mixer, Mlp(self.weights, self.dims.hidden)))

    def hidden_states(self, token_ids: torch.Tensor, step: StepContext) -> torch.Tensor:
        """The last layer's output for every token, ``(n, hidden)``."""
        x = self.embedding[token_ids]
        for mixer, mlp in self.layers:
            x = x + mixer(rms_norm(x), step)
            x = x + mlp(rms_norm(x))
        return x
