"""The models that a node can serve, by name: recipes of layers, and the decoder that runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from kvconnect.cache.specs import StateSpec, div_ceil
from kvconnect.errors import ConfigError
from kvconnect.node.attention import StepContext
from kvconnect.node.models.mixers import LATENT_64_BACKEND, GroupedAttention, LatentAttention, WideMemory
from kvconnect.node.models.model import (
    CACHE_DTYPE,
    CachedLayer,
    CacheLayout,
    CacheSizing,
    Mixer,
    Model,
    ModelOutput,
)
from kvconnect.node.models.parts import ChaoticHead, Mlp, WeightSource, rms_norm
from kvconnect.node.models.recurrence import GatedLinearAttention


@dataclass(frozen=True)
class Recipe:
    """How a model is made of layers.

    Attributes:
        mixers: makes one for each layer.
        groups: the layers of each cache group, as in ``CacheLayout``.
        draft: makes the layer of a draft model, which joins the first group. It reads the main model's last
            hidden state and the token's embedding, and proposes one more token wherever that one samples.
    """

    mixers: Callable[[WeightSource], Sequence[Mixer]]
    groups: tuple[tuple[int, ...], ...]
    default_block_size: int = 16
    single_storage: bool = False
    draft: Callable[[WeightSource], Mixer] | None = None


def _sliding(weights: WeightSource) -> Sequence[Mixer]:
    return [
        GroupedAttention(weights, _name(index), "block token head content", window=window)
        for index, window in enumerate((96, 96, None, 96, 96, None))
    ]


def _hybrid(weights: WeightSource) -> Sequence[Mixer]:
    first, second, last = (GatedLinearAttention(weights, f"layers.{index}.mixer") for index in (0, 1, 3))
    attention = GroupedAttention(weights, _name(2), "block plane token head content", kv_heads=2)
    return [first, second, attention, last]


def _name(index: int) -> str:
    return f"layers.{index}.attn"


RECIPES = {
    # Full attention. Pages are head by head, keys beside values.
    "gqa": Recipe(
        lambda w: [GroupedAttention(w, _name(i), "block head token content") for i in range(4)],
        groups=((0, 1, 2, 3),),
        single_storage=True,
    ),
    "mla": Recipe(lambda w: [LatentAttention(w, _name(i)) for i in range(4)], groups=((0, 1, 2, 3),)),
    # One group with two page sizes: keys and values of the draft layer have planes of their own. Pages are
    # smaller than the scheduler's block: the main backend takes exactly 64 tokens.
    "mixed": Recipe(
        lambda w: [LatentAttention(w, _name(i), LATENT_64_BACKEND) for i in range(4)],
        groups=((0, 1, 2, 3),),
        default_block_size=128,
        draft=lambda w: GroupedAttention(
            w, "draft.layers.0.attn", "plane block token head content", kv_heads=2
        ),
    ),
    # Two full layers and four windowed ones in three groups, whose pages overlay each other.
    "sliding": Recipe(_sliding, groups=((2, 5), (0, 3), (1, 4))),
    # Three recurrent layers, each a group of its own, overlaid on the pages of one attention layer.
    "hybrid": Recipe(_hybrid, groups=((2,), (0,), (1,), (3,)), default_block_size=32),
    # 16 KiB a token in bfloat16.
    "wide": Recipe(lambda w: [WideMemory(w, f"layers.{i}.memory") for i in range(2)], groups=((0, 1),)),
}


class LayeredModel:
    """Embedding, a stack of pre-norm layers, and the greedy head; and a draft layer, if there is one."""

    vocab_size = 512

    def __init__(self, name: str, recipe: Recipe, weights: WeightSource) -> None:
        self.name = name
        self._recipe = recipe
        self._embedding = weights.normal((self.vocab_size, weights.hidden))
        self._head = ChaoticHead(weights, self.vocab_size)
        self._mixers = recipe.mixers(weights)
        self._mlps = [Mlp(weights) for _ in self._mixers]
        self._draft = DraftModel(recipe.draft, weights, self.vocab_size) if recipe.draft is not None else None

    def layout(self, sizing: CacheSizing) -> CacheLayout:
        """See ``Model``. A state is padded to the attention page that it shares."""
        size = sizing.block_size or self._recipe.default_block_size
        if sizing.block_size is None and any(isinstance(m, GatedLinearAttention) for m in self._mixers):
            # A state does not shrink with the cache's dtype, so the page that it shares must keep its bytes.
            size = size * CACHE_DTYPE.itemsize // sizing.cache_dtype.itemsize
        cached = [mixer.cached(size, sizing.cache_dtype) for mixer in self._mixers]
        page_bytes = max(layer.spec.page_size_bytes for layer in cached if layer.backend is not None)
        cached = [_padded(layer, size, page_bytes, sizing.max_model_len) for layer in cached]
        groups = [tuple(cached[index] for index in group) for group in self._recipe.groups]
        if self._draft is not None:
            groups[0] += (self._draft.mixer.cached(size, sizing.cache_dtype),)
        return CacheLayout(tuple(groups), self._recipe.single_storage)

    def forward(self, token_ids: torch.Tensor, step: StepContext, sampled: torch.Tensor) -> ModelOutput:
        """See ``Model``."""
        embedded = x = self._embedding[token_ids]
        for mixer, mlp in zip(self._mixers, self._mlps, strict=True):
            x = x + mixer(rms_norm(x), step)
            x = x + mlp(rms_norm(x))
        draft_tokens = self._draft(x, embedded, step, sampled) if self._draft is not None else None
        return ModelOutput(self._head(x[sampled]), draft_tokens)


class DraftModel:
    """One layer and a head behind a main model: see ``Recipe``."""

    def __init__(
        self, mixer: Callable[[WeightSource], Mixer], weights: WeightSource, vocab_size: int
    ) -> None:
        self._input = weights.matrix(2 * weights.hidden, weights.hidden)
        self.mixer = mixer(weights)
        self._mlp = Mlp(weights)
        self._head = ChaoticHead(weights, vocab_size)

    def __call__(
        self, hidden: torch.Tensor, embedded: torch.Tensor, step: StepContext, sampled: torch.Tensor
    ) -> torch.Tensor:
        x = torch.cat((rms_norm(hidden), rms_norm(embedded)), dim=-1) @ self._input
        x = (x + self.mixer(rms_norm(x), step))[sampled]
        return self._head(x + self._mlp(rms_norm(x)))


def _padded(layer: CachedLayer, block_size: int, page_bytes: int, max_model_len: int) -> CachedLayer:
    """A state's page is as large as the attention page that it shares, and its block a whole request.

    Raises ``ConfigError``: a state does not fit into the page.
    """
    spec = layer.spec
    if not isinstance(spec, StateSpec):
        return layer
    if spec.content_bytes > page_bytes:
        least = div_ceil(spec.content_bytes, page_bytes // block_size)
        raise ConfigError(
            f"block_size {block_size} gives attention pages of {page_bytes} bytes, but a recurrent state "
            f"takes {spec.content_bytes}; set block_size to a multiple of 16 of at least {least}"
        )
    return replace(layer, spec=StateSpec(max_model_len, spec.shapes, spec.dtypes, page_bytes))


def build_model(name: str, *, seed: int = 0, device: torch.device | str = "cpu") -> Model:
    """A model with weights drawn from its name and ``seed``. Raises ConfigError: there is no such model."""
    if name not in RECIPES:
        raise ConfigError(f"model {name!r} is unknown; choose one of {', '.join(sorted(RECIPES))}")
    return LayeredModel(name, RECIPES[name], WeightSource(name, seed, torch.device(device)))
