"""The models that a node can serve, by name: their layers, and the recipes.

A model defines the contents of its layers' caches and their page layout; it never sees a block id. All
computation is in float64, so that batching, chunking and the order of additions change results by about
1e-15 and never change a token.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from kvconnect.cache.retention import FULL, Window
from kvconnect.cache.specs import AttentionSpec, LayerSpec, MLASpec, StateSpec, div_ceil
from kvconnect.errors import ConfigError
from kvconnect.node.attention import COMPUTE_DTYPE, Backend, RequestStates, StepContext
from kvconnect.runner_kit.kernel_blocks import MultipleOf

CACHE_DTYPE = torch.bfloat16


@dataclass(frozen=True)
class CachedLayer:
    """One layer's cache: the contents of a block, the order of dimensions, the attention backend.

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

    ``single_storage``: one allocation holds all layers one after the other; otherwise each place has its own.
    """

    groups: tuple[tuple[CachedLayer, ...], ...]
    single_storage: bool = False


class Mixer(Protocol):
    """The part of a layer that mixes tokens and has a cache: attention or a recurrence."""

    def __call__(self, x: torch.Tensor, step: StepContext) -> torch.Tensor: ...

    def cached(self, block_size: int, dtype: torch.dtype) -> CachedLayer:
        """The layer's cache with blocks of ``block_size`` tokens."""
        ...


# --- layers: weights, norms, rotary positions, MLP, and what mixes tokens ---

NORM_EPSILON = 1e-6
VOCAB, HIDDEN = 512, 128
"""The number of tokens, and the width between layers."""


class WeightSource:
    """Random weights that depend on a name and a seed only, never on the device.

    Values are drawn on the CPU in the order of the calls, then moved to ``device``.
    """

    def __init__(self, name: str, seed: int, device: torch.device) -> None:
        digest = hashlib.blake2b(f"{name}:{seed}".encode(), digest_size=8).digest()
        self._generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        self.device = device

    def matrix(self, rows: int, columns: int, *, scale: float = 1.0) -> torch.Tensor:
        """Shape ``(rows, columns)``; a unit-variance row vector times it has variance ``scale ** 2``."""
        return self.normal((rows, columns), scale=scale * rows**-0.5)

    def normal(self, shape: tuple[int, ...], *, scale: float = 1.0) -> torch.Tensor:
        """Independent normal values with standard deviation ``scale``."""
        drawn = torch.randn(shape, generator=self._generator, dtype=COMPUTE_DTYPE)
        return (drawn * scale).to(self.device)


def rms_norm(x: torch.Tensor) -> torch.Tensor:
    """Scale the last dimension to unit mean square."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + NORM_EPSILON)


def rotate(x: torch.Tensor, step: StepContext) -> torch.Tensor:
    """Rotary position embedding of ``x``, shape ``(tokens, heads, width)`` with an even width."""
    left, right = x.chunk(2, dim=-1)
    cos, sin = step.turns(left.shape[-1])
    return torch.cat((left * cos - right * sin, left * sin + right * cos), dim=-1)


class Mlp:
    """A gated two-layer perceptron from ``(tokens, hidden)`` to the same shape."""

    def __init__(self, weights: WeightSource) -> None:
        hidden = HIDDEN
        self._gate = weights.matrix(hidden, 2 * hidden)
        self._up = weights.matrix(hidden, 2 * hidden)
        self._down = weights.matrix(2 * hidden, hidden)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.nn.functional.silu(x @ self._gate) * (x @ self._up)) @ self._down


class ChaoticHead:
    """Token scores so sensitive that a wrong byte in the cache changes the sampled token.

    ``sin(GAIN * (h @ W))``: a relative error of 1e-6 in ``h`` turns the phases by about 0.1. With some 100
    tokens the best phases are 0.01 apart, so the winner changes. Float64 noise turns them by 1e-10, which
    changes a token about once in ten million.
    """

    GAIN = 1e5

    def __init__(self, weights: WeightSource) -> None:
        self._weight = weights.matrix(HIDDEN, VOCAB)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Greedy tokens of shape ``(n,)`` for hidden states of shape ``(n, hidden)``."""
        return torch.sin(self.GAIN * (rms_norm(hidden) @ self._weight)).argmax(-1)


GROUPED_BACKEND, SLIDING_BACKEND, LATENT_BACKEND = (
    Backend(f"TORCH_{kind}", (MultipleOf(16),)) for kind in ("GROUPED", "SLIDING", "LATENT")
)
LATENT_64_BACKEND = Backend("TORCH_LATENT_64", (64,))


class GroupedAttention:
    """Attention whose query heads share fewer key and value heads."""

    def __init__(
        self, weights: WeightSource, name: str, axes: str, *, kv_heads: int = 4, window: int | None = None
    ) -> None:
        self.name = name
        self._axes = axes
        self._heads, self._kv_heads, self._head_size = 8, kv_heads, 32
        self._window = window
        hidden = HIDDEN
        self._query = weights.matrix(hidden, self._heads * self._head_size)
        self._key = weights.matrix(hidden, kv_heads * self._head_size)
        self._value = weights.matrix(hidden, kv_heads * self._head_size)
        self._output = weights.matrix(self._heads * self._head_size, hidden)

    def __call__(self, x: torch.Tensor, step: StepContext) -> torch.Tensor:
        query = rotate((x @ self._query).view(-1, self._heads, self._head_size), step)
        keys = rotate((x @ self._key).view(-1, self._kv_heads, self._head_size), step)
        values = (x @ self._value).view(-1, self._kv_heads, self._head_size)
        mixed = step.attend(self.name, query, keys, values, window=self._window)
        return mixed.flatten(1) @ self._output

    def cached(self, block_size: int, dtype: torch.dtype) -> CachedLayer:
        """See ``Mixer``."""
        rule = FULL if self._window is None else Window(self._window)
        spec = AttentionSpec(block_size, self._kv_heads, self._head_size, dtype, retention=rule)
        backend = GROUPED_BACKEND if self._window is None else SLIDING_BACKEND
        return CachedLayer(self.name, spec, self._axes, backend)


class LatentAttention:
    """All heads attend over one latent row per token: a compressed part and a rotary part."""

    def __init__(self, weights: WeightSource, name: str, backend: Backend = LATENT_BACKEND) -> None:
        self.name = name
        self._backend = backend
        self._heads, self._latent, self._rotary = 8, 48, 16
        head_size, hidden = 32, HIDDEN
        self._down = weights.matrix(hidden, self._latent + self._rotary)
        # The up-projection of keys is absorbed into the query; the one of values follows the attention.
        self._query = weights.matrix(hidden, self._heads * (self._latent + self._rotary))
        self._up_values = weights.normal((self._heads, self._latent, head_size), scale=self._latent**-0.5)
        self._output = weights.matrix(self._heads * head_size, hidden)

    def __call__(self, x: torch.Tensor, step: StepContext) -> torch.Tensor:
        row = x @ self._down
        latent = rms_norm(row[:, : self._latent])
        rotary = rotate(row[:, None, self._latent :], step)
        keys = torch.cat((latent[:, None], rotary), dim=-1)
        query = (x @ self._query).view(-1, self._heads, self._latent + self._rotary)
        turned = rotate(query[..., self._latent :], step)
        query = torch.cat((query[..., : self._latent], turned), dim=-1)
        mixed = step.attend(self.name, query, keys, None)[..., : self._latent]
        return torch.einsum("thl,hlv->thv", mixed, self._up_values).flatten(1) @ self._output

    def cached(self, block_size: int, dtype: torch.dtype) -> CachedLayer:
        """See ``Mixer``."""
        spec = MLASpec(block_size, self._latent + self._rotary, dtype)
        return CachedLayer(self.name, spec, "block token content", self._backend)


STATE_DTYPE = torch.float32
GATE_STEPS = 1024
# The readout depends on the last bits of the previous state, before decay and addition round them away.
FINE_PHASE = 2.0**24
SCAN_SLICE = 256


class GatedLinearAttention:
    """A short causal convolution, then ``state = gate * state + key x value``, read by the query."""

    TAPS = 4

    def __init__(self, weights: WeightSource, name: str) -> None:
        self.name = name
        self._heads, self._size = 4, 16
        self._channels = 3 * self._heads * self._size
        self._input = weights.matrix(HIDDEN, self._channels)
        self._taps = weights.normal((self.TAPS, self._channels), scale=self.TAPS**-0.5)
        self._gate = weights.matrix(HIDDEN, self._heads)
        self._output = weights.matrix(self._heads * self._size, HIDDEN)

    def __call__(self, x: torch.Tensor, step: StepContext) -> torch.Tensor:
        mixed = (x @ self._input).to(CACHE_DTYPE)
        # Decays of 0.9 to 0.998 on a grid, so that rounding noise cannot move them.
        gates = 0.9 + 0.098 * torch.sigmoid(x @ self._gate)
        gates = ((gates * GATE_STEPS).round() / GATE_STEPS).to(STATE_DTYPE)
        outputs = [self._scan(mixed[s.span], gates[s.span], s) for s in step.states(self.name)]
        return rms_norm(torch.cat(outputs)).flatten(1) @ self._output

    def _scan(self, mixed: torch.Tensor, gates: torch.Tensor, states: RequestStates) -> torch.Tensor:
        """Scan the tokens of one request, in order; returns ``(tokens, heads, width)``."""
        window, state = states.read()
        count = len(mixed)
        padded = torch.cat((window, mixed)).to(COMPUTE_DTYPE)
        convolved = padded[:count] * self._taps[0]
        for tap in range(1, self.TAPS):
            convolved = convolved + padded[tap : tap + count] * self._taps[tap]
        # Division is rounded correctly on every device; an exponential may differ by its vectorisation.
        convolved = (convolved / (1 + convolved.abs())).to(STATE_DTYPE)
        query, keys, values = convolved.view(count, 3, self._heads, self._size).unbind(1)
        outputs = []
        for begin in range(0, count, SCAN_SLICE):
            span = slice(begin, begin + SCAN_SLICE)
            after = keys[span, :, :, None] * values[span, :, None, :]
            before = torch.empty_like(after)
            for place, gate in enumerate(gates[span, :, None, None].unbind()):
                before[place] = state
                state = after[place].add_(torch.mul(state, gate))
            seen = after.to(COMPUTE_DTYPE) + torch.sin(before.to(COMPUTE_DTYPE) * FINE_PHASE)
            outputs.append(torch.einsum("thk,thkv->thv", query[span].to(COMPUTE_DTYPE), seen))
        states.write((padded[-(self.TAPS - 1) :], state))
        return torch.cat(outputs)

    def cached(self, block_size: int, dtype: torch.dtype) -> CachedLayer:
        """See ``Mixer``. The state keeps its own dtypes, for any dtype of attention caches."""
        shapes = ((self.TAPS - 1, self._channels), (self._heads, self._size, self._size))
        spec = StateSpec(block_size, shapes, (CACHE_DTYPE, STATE_DTYPE))
        return CachedLayer(self.name, spec, "block content", None)


# --- recipes ---


@dataclass(frozen=True)
class Recipe:
    """How a model is made of layers.

    Attributes:
        mixers: makes one for each layer.
        groups: the layers of each cache group, as in ``CacheLayout``.
        draft: makes the layer of a draft model, which joins the first group. It reads the main model's last
            hidden state and the token's embedding, and proposes a token wherever the main model samples one.
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
    # One group with two page sizes: the draft layer has separate planes for keys and values. The main backend
    # takes exactly 64 tokens, so pages are smaller than the scheduler's block.
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
    # Three recurrent layers, one group each, overlaid on the pages of one attention layer.
    "hybrid": Recipe(_hybrid, groups=((2,), (0,), (1,), (3,)), default_block_size=32),
}


class Model:
    """A decoder with random weights: embedding, pre-norm layers, the greedy head, perhaps a draft layer."""

    def __init__(self, name: str, recipe: Recipe, weights: WeightSource) -> None:
        self.name = name
        self._recipe = recipe
        self._embedding = weights.normal((VOCAB, HIDDEN))
        self._head = ChaoticHead(weights)
        self._mixers = recipe.mixers(weights)
        self._mlps = [Mlp(weights) for _ in self._mixers]
        self._draft = DraftModel(recipe.draft, weights) if recipe.draft is not None else None

    def layout(
        self, block_size: int | None, max_model_len: int, dtype: torch.dtype = CACHE_DTYPE
    ) -> CacheLayout:
        """The model's cache, with a state padded to the attention page that it shares.

        Without ``block_size`` it is the model's own. Raises ``ConfigError`` for one that it cannot use.
        """
        size = block_size or self._recipe.default_block_size
        if block_size is None and any(isinstance(mixer, GatedLinearAttention) for mixer in self._mixers):
            # A state does not shrink with the cache's dtype, so the page that it shares keeps its bytes.
            size = size * CACHE_DTYPE.itemsize // dtype.itemsize
        cached = [mixer.cached(size, dtype) for mixer in self._mixers]
        page_bytes = max(layer.spec.page_size_bytes for layer in cached if layer.backend is not None)
        cached = [_padded(layer, size, page_bytes, max_model_len) for layer in cached]
        groups = [tuple(cached[index] for index in group) for group in self._recipe.groups]
        if self._draft is not None:
            groups[0] += (self._draft.mixer.cached(size, dtype),)
        return CacheLayout(tuple(groups), self._recipe.single_storage)

    def forward(
        self, token_ids: torch.Tensor, step: StepContext, sampled: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run tokens of shape ``(n,)``; ``sampled`` are the indices whose next token is computed.

        Returns the greedy tokens at these, and the draft model's proposals or None, of shape ``(sampled,)``.
        Both stay on the model's device: reading them waits for the device.
        """
        embedded = x = self._embedding[token_ids]
        for mixer, mlp in zip(self._mixers, self._mlps, strict=True):
            x = x + mixer(rms_norm(x), step)
            x = x + mlp(rms_norm(x))
        draft_tokens = self._draft(x, embedded, step, sampled) if self._draft is not None else None
        return self._head(x[sampled]), draft_tokens


class DraftModel:
    """One layer and a head behind a main model: see ``Recipe``."""

    def __init__(self, mixer: Callable[[WeightSource], Mixer], weights: WeightSource) -> None:
        self._input = weights.matrix(2 * HIDDEN, HIDDEN)
        self.mixer = mixer(weights)
        self._mlp = Mlp(weights)
        self._head = ChaoticHead(weights)

    def __call__(
        self, hidden: torch.Tensor, embedded: torch.Tensor, step: StepContext, sampled: torch.Tensor
    ) -> torch.Tensor:
        x = torch.cat((rms_norm(hidden), rms_norm(embedded)), dim=-1) @ self._input
        x = (x + self.mixer(rms_norm(x), step))[sampled]
        return self._head(x + self._mlp(rms_norm(x)))


def _padded(layer: CachedLayer, block_size: int, page_bytes: int, max_model_len: int) -> CachedLayer:
    """A state layer padded to the attention page that it shares, with one block for a whole request.

    Raises ``ConfigError`` if a state does not fit into the page.
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
    """A model with weights drawn from its name and ``seed``. Raises ``ConfigError`` for an unknown name."""
    if name not in RECIPES:
        raise ConfigError(f"model {name!r} is unknown; choose one of {', '.join(sorted(RECIPES))}")
    return Model(name, RECIPES[name], WeightSource(name, seed, torch.device(device)))
