"""``hybrid``: gated linear attention layers with recurrent state, and one full attention layer.

The state is bit for bit the same however the tokens were cut into steps: what enters it is rounded to a
coarse grid first, and from there on only single, correctly rounded elementwise operations follow.
"""

from __future__ import annotations

import torch

from kvconnect.arithmetic import div_ceil
from kvconnect.cache.specs import FullAttentionSpec, StateSpec
from kvconnect.errors import ConfigError
from kvconnect.node.attention import COMPUTE_DTYPE, BatchedState, Segment, StepContext
from kvconnect.node.models.base import (
    CACHE_DTYPE,
    CachedLayer,
    CacheLayout,
    CacheSizing,
    Dims,
    ModelOutput,
    Trunk,
)
from kvconnect.node.models.grouped import GroupedAttention
from kvconnect.node.models.parts import WeightSource, rms_norm

STATE_DTYPE = torch.float32
GATE_STEPS = 1024
# The readout sees the last bits of the state that it finds, before decay and addition round them away.
FINE_PHASE = 2.0**24
SCAN_SLICE = 256


class GatedLinearAttention:
    """A short causal convolution, then ``state = gate * state + key x value``, read by the query."""

    TAPS = 4

    def __init__(
        self, weights: WeightSource, hidden: int, name: str, *, heads: int = 4, head_size: int = 16
    ) -> None:
        self.name = name
        self._heads, self._size = heads, head_size
        self._channels = 3 * heads * head_size
        self._input = weights.matrix(hidden, self._channels)
        self._taps = weights.normal((self.TAPS, self._channels), scale=self.TAPS**-0.5)
        self._gate = weights.matrix(hidden, heads)
        self._output = weights.matrix(heads * head_size, hidden)

    def spec(self, block_size: int, page_bytes: int | None = None) -> StateSpec:
        """The state of one request, in a page of ``page_bytes``."""
        shapes = ((self.TAPS - 1, self._channels), (self._heads, self._size, self._size))
        return StateSpec(block_size, shapes, (CACHE_DTYPE, STATE_DTYPE), page_bytes)

    def __call__(self, x: torch.Tensor, step: StepContext) -> torch.Tensor:
        mixed = (x @ self._input).to(CACHE_DTYPE)
        # Decays of 0.9 to 0.998 on a grid, so that rounding noise cannot move them.
        gates = 0.9 + 0.098 * torch.sigmoid(x @ self._gate)
        gates = ((gates * GATE_STEPS).round() / GATE_STEPS).to(STATE_DTYPE)
        batch = step.batched_state(self.name)
        if batch is not None:
            return rms_norm(self._advance(mixed, gates, batch)).flatten(1) @ self._output
        outputs = [self._scan(mixed[part.span], gates[part.span], step, part) for part in step.segments]
        return rms_norm(torch.cat(outputs)).flatten(1) @ self._output

    def _advance(self, mixed: torch.Tensor, gates: torch.Tensor, batch: BatchedState) -> torch.Tensor:
        """One token of every request, by the same operations as ``_scan``, so with the same bits."""
        window, state = batch.read()
        padded = torch.cat((window, mixed[:, None]), dim=1).to(COMPUTE_DTYPE)
        convolved = padded[:, 0] * self._taps[0]
        for tap in range(1, self.TAPS):
            convolved = convolved + padded[:, tap] * self._taps[tap]
        convolved = (convolved / (1 + convolved.abs())).to(STATE_DTYPE)
        parts = convolved.view(-1, 3, self._heads, self._size)
        query, keys, values = parts[:, 0].to(COMPUTE_DTYPE), parts[:, 1], parts[:, 2]
        after = keys[..., :, None] * values[..., None, :] + torch.mul(state, gates[..., None, None])
        seen = after.to(COMPUTE_DTYPE) + torch.sin(state.to(COMPUTE_DTYPE) * FINE_PHASE)
        batch.write((padded[:, 1:], after))
        return torch.einsum("thk,thkv->thv", query, seen)

    def _scan(
        self, mixed: torch.Tensor, gates: torch.Tensor, step: StepContext, segment: Segment
    ) -> torch.Tensor:
        """One request's tokens: ``(n, channels)`` and ``(n, heads)`` to ``(n, heads, width)``."""
        pages, block_id = step.state(self.name, segment)
        window, state = pages.read(block_id)
        padded = torch.cat((window, mixed)).to(COMPUTE_DTYPE)
        count = len(mixed)
        convolved = padded[:count] * self._taps[0]
        for tap in range(1, self.TAPS):
            convolved = convolved + padded[tap : tap + count] * self._taps[tap]
        # Division is rounded correctly everywhere; an exponential may differ by how it was vectorised.
        convolved = (convolved / (1 + convolved.abs())).to(STATE_DTYPE)
        parts = convolved.view(count, 3, self._heads, self._size)
        query, keys, values = parts[:, 0].to(COMPUTE_DTYPE), parts[:, 1], parts[:, 2]
        outputs = []
        for begin in range(0, count, SCAN_SLICE):
            span = slice(begin, begin + SCAN_SLICE)
            states = keys[span, :, :, None] * values[span, :, None, :]
            before = torch.empty_like(states)
            for index, gate in enumerate(gates[span, :, None, None].unbind()):
                before[index] = state
                state = torch.mul(state, gate)
                state = states[index].add_(state)
            seen = states.to(COMPUTE_DTYPE) + torch.sin(before.to(COMPUTE_DTYPE) * FINE_PHASE)
            outputs.append(torch.einsum("thk,thkv->thv", query[span], seen))
        pages.write(block_id, (padded[-(self.TAPS - 1) :], state))
        return torch.cat(outputs)

    def describe(self) -> str:
        """The layer's dimensions."""
        return f"gla{self._heads}x{self._size}"


class HybridModel:
    """Three recurrent layers, each a group of its own, overlaid on the pages of one attention layer."""

    name = "hybrid"
    default_block_size = 32
    ATTENTION_LAYER = 2

    def __init__(self, weights: WeightSource, dims: Dims) -> None:
        self.dims = dims
        self._trunk = Trunk(weights, dims)
        self._recurrent = [
            GatedLinearAttention(weights, dims.hidden, f"layers.{index}.mixer") for index in (0, 1, 3)
        ]
        self._attention = GroupedAttention(
            weights, dims.hidden, f"layers.{self.ATTENTION_LAYER}.attn", kv_heads=2
        )
        first, second, last = self._recurrent
        self._trunk.add([first, second, self._attention, last])

    def layout(self, sizing: CacheSizing) -> CacheLayout:
        """The attention group, then one state group per recurrent layer.

        Raises:
            ConfigError: a state does not fit into the attention page that it shares.
        """
        # A state does not shrink with the cache's dtype, so the page that it shares must keep its bytes.
        own = self.default_block_size * CACHE_DTYPE.itemsize // sizing.cache_dtype.itemsize
        size = sizing.block_size or own
        attention = self._attention.cached(size, "block plane token head content", sizing.cache_dtype)
        assert isinstance(attention.spec, FullAttentionSpec)
        page, state = attention.spec.page_size_bytes, self._recurrent[0].spec(1).content_bytes
        if state > page:
            least = div_ceil(state, page // size)
            raise ConfigError(
                f"block_size {size} gives attention pages of {page} bytes, but a recurrent state takes "
                f"{state}; set block_size to a multiple of 16 of at least {least}"
            )
        states = tuple(
            (CachedLayer(layer.name, layer.spec(sizing.max_model_len, page), "block content", None),)
            for layer in self._recurrent
        )
        return CacheLayout(((attention,), *states))

    def forward(self, token_ids: torch.Tensor, step: StepContext, sampled: torch.Tensor) -> ModelOutput:
        """See ``Model``."""
        hidden = self._trunk.hidden_states(token_ids, step)
        return ModelOutput(self._trunk.head(hidden[sampled]))

    def describe(self) -> str:
        """See ``Model``."""
        parts = [*(layer.describe() for layer in self._recurrent), self._attention.describe()]
        return f"h{self.dims.hidden}v{self.dims.vocab_size}:{','.join(parts)}"
