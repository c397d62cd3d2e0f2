"""Gated linear attention, which keeps recurrent state.

The state is bit for bit the same however the tokens were cut into steps: what enters it is rounded to a
coarse grid first, and from there on only single, correctly rounded elementwise operations follow.
"""

from __future__ import annotations

import torch

from kvconnect.cache.specs import StateSpec
from kvconnect.node.attention import COMPUTE_DTYPE, RequestStates, StepContext
from kvconnect.node.models.model import CACHE_DTYPE, CachedLayer
from kvconnect.node.models.parts import WeightSource, rms_norm

STATE_DTYPE = torch.float32
GATE_STEPS = 1024
# The readout sees the last bits of the state that it finds, before decay and addition round them away.
FINE_PHASE = 2.0**24
SCAN_SLICE = 256


class GatedLinearAttention:
    """A short causal convolution, then ``state = gate * state + key x value``, read by the query."""

    TAPS = 4

    def __init__(self, weights: WeightSource, name: str) -> None:
        self.name = name
        self._heads, self._size = 4, 16
        self._channels = 3 * self._heads * self._size
        self._input = weights.matrix(weights.hidden, self._channels)
        self._taps = weights.normal((self.TAPS, self._channels), scale=self.TAPS**-0.5)
        self._gate = weights.matrix(weights.hidden, self._heads)
        self._output = weights.matrix(self._heads * self._size, weights.hidden)

    def __call__(self, x: torch.Tensor, step: StepContext) -> torch.Tensor:
        mixed = (x @ self._input).to(CACHE_DTYPE)
        # Decays of 0.9 to 0.998 on a grid, so that rounding noise cannot move them.
        gates = 0.9 + 0.098 * torch.sigmoid(x @ self._gate)
        gates = ((gates * GATE_STEPS).round() / GATE_STEPS).to(STATE_DTYPE)
        outputs = [self._scan(mixed[s.span], gates[s.span], s) for s in step.states(self.name)]
        return rms_norm(torch.cat(outputs)).flatten(1) @ self._output

    def _scan(self, mixed: torch.Tensor, gates: torch.Tensor, states: RequestStates) -> torch.Tensor:
        """Equally many tokens of each of some requests, in their order; ``(tokens, heads, width)``."""
        window, state = states.read()
        requests = len(window)
        count = len(mixed) // requests
        padded = torch.cat((window, mixed.view(requests, count, -1)), dim=1).to(COMPUTE_DTYPE)
        convolved = padded[:, :count] * self._taps[0]
        for tap in range(1, self.TAPS):
            convolved = convolved + padded[:, tap : tap + count] * self._taps[tap]
        # Division is rounded correctly everywhere; an exponential may differ by how it was vectorised.
        convolved = (convolved / (1 + convolved.abs())).to(STATE_DTYPE)
        parts = convolved.view(requests, count, 3, self._heads, self._size)
        query, keys, values = parts[:, :, 0].to(COMPUTE_DTYPE), parts[:, :, 1], parts[:, :, 2]
        gates = gates.view(requests, count, self._heads, 1, 1)
        outputs = []
        for begin in range(0, count, SCAN_SLICE):
            span = slice(begin, begin + SCAN_SLICE)
            after = keys[:, span, ..., :, None] * values[:, span, ..., None, :]
            before = torch.empty_like(after)
            for place, gate in enumerate(gates[:, span].unbind(1)):
                before[:, place] = state
                state = after[:, place].add_(torch.mul(state, gate))
            seen = after.to(COMPUTE_DTYPE) + torch.sin(before.to(COMPUTE_DTYPE) * FINE_PHASE)
            outputs.append(torch.einsum("rthk,rthkv->rthv", query[:, span], seen))
        states.write((padded[:, -(self.TAPS - 1) :], state))
        return torch.cat(outputs, dim=1).flatten(0, 1)

    def cached(self, block_size: int, dtype: torch.dtype) -> CachedLayer:
        """See ``Mixer``. The state's own types stay, for any dtype of attention caches."""
        shapes = ((self.TAPS - 1, self._channels), (self._heads, self._size, self._size))
        spec = StateSpec(block_size, shapes, (CACHE_DTYPE, STATE_DTYPE))
        return CachedLayer(self.name, spec, "block content", None)
