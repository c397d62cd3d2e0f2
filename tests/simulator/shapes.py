"""The models of a simulation, and how each side keeps one: tiny, and of every kind that moves differently."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from kvconnect.cache.specs import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    MLASpec,
    SlidingWindowSpec,
    StateSpec,
)

DTYPE = torch.float16
HEADS = 2
HEAD_SIZE = 2
LATENT_SIZE = 4
STATE_SIZE = 12
WINDOW_TOKENS = 12

HEAD_BYTES = 2 * HEAD_SIZE * DTYPE.itemsize
"""K and V of one token and head."""


@dataclass(frozen=True)
class Layer:
    """One layer: its kind, its number among all, and the bytes of a row (a token, or the state)."""

    name: str
    kind: str
    number: int

    @property
    def row_bytes(self) -> int:
        """Of the whole model, all heads included."""
        sizes = {"latent": LATENT_SIZE, "state": STATE_SIZE}
        return sizes[self.kind] * DTYPE.itemsize if self.kind in sizes else HEADS * HEAD_BYTES


@dataclass(frozen=True)
class Model:
    """Kinds of layers, each in a cache group of its own, with so many layers."""

    name: str
    kinds: tuple[tuple[str, int], ...]

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """All layers in order."""
        names = [(f"{kind}{index}", kind) for kind, count in self.kinds for index in range(count)]
        return tuple(Layer(name, kind, number) for number, (name, kind) in enumerate(names))

    @property
    def num_heads(self) -> int | None:
        """What peers must agree on: None where all ranks keep the same bytes."""
        return HEADS if self.has("full") or self.has("window") else None

    def has(self, kind: str) -> bool:
        """Whether it has layers of a kind."""
        return any(kind == known for known, _ in self.kinds)

    @property
    def reuses_prefixes(self) -> bool:
        """A prompt's beginning can be taken from the cache as it is."""
        return not (self.has("state") or self.has("window"))


MODELS = (
    Model("gqa", (("full", 2),)),
    Model("sliding", (("full", 1), ("window", 1))),
    Model("state", (("full", 1), ("state", 1))),
    Model("mla", (("latent", 2),)),
)


@dataclass(frozen=True)
class Shape:
    """How one side keeps a model. ``head_first``: a page has its heads outermost."""

    block_tokens: int
    kernel_tokens: int
    head_first: bool = False

    def config(self, model: Model, num_blocks: int, heads: int) -> KVCacheConfig:
        """The cache of a rank that keeps so many heads."""
        groups = []
        for kind, _ in model.kinds:
            names = tuple(layer.name for layer in model.layers if layer.kind == kind)
            groups.append(KVCacheGroup(names, self._spec(kind, heads)))
        return KVCacheConfig(num_blocks, tuple(groups))

    def _spec(self, kind: str, heads: int) -> FullAttentionSpec | MLASpec | StateSpec:
        tokens = self.block_tokens
        match kind:
            case "latent":
                return MLASpec(tokens, LATENT_SIZE, DTYPE)
            case "state":
                return StateSpec(tokens, ((STATE_SIZE,),), (DTYPE,))
            case "window":
                return SlidingWindowSpec(tokens, heads, HEAD_SIZE, DTYPE, sliding_window=WINDOW_TOKENS)
        return FullAttentionSpec(tokens, heads, HEAD_SIZE, DTYPE)

    def kernel_sizes(self, model: Model) -> dict[int, int]:
        """Tokens of a kernel block by group; a state is never split."""
        return {
            index: self.block_tokens if kind == "state" else self.kernel_tokens
            for index, (kind, _) in enumerate(model.kinds)
        }
