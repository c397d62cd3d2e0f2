"""The arithmetic that every model of the node is made of: weights, norms, rotary positions, MLP.

Everything is computed in float64, so that batching, chunking and the order of additions move results
by about 1e-15 and never by a token.
"""

from __future__ import annotations

import hashlib

import torch

from kvconnect.node.attention import COMPUTE_DTYPE

NORM_EPSILON = 1e-6
ROPE_BASE = 10_000.0


class WeightSource:
    """Random weights that depend on a name and a seed only, never on the device.

    Draws happen on the CPU in the order of the calls and move to ``device`` afterwards.
    """

    hidden = 128
    """The width between layers."""

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


def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding of ``x``, shape ``(tokens, heads, width)`` with an even width."""
    half = x.shape[-1] // 2
    frequencies = ROPE_BASE ** (-torch.arange(half, dtype=COMPUTE_DTYPE, device=x.device) / half)
    angles = positions.to(COMPUTE_DTYPE)[:, None, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    left, right = x[..., :half], x[..., half:]
    return torch.cat((left * cos - right * sin, left * sin + right * cos), dim=-1)


class Mlp:
    """A gated two-layer perceptron of shape ``(tokens, hidden)`` to the same."""

    def __init__(self, weights: WeightSource) -> None:
        hidden = weights.hidden
        self._gate = weights.matrix(hidden, 2 * hidden)
        self._up = weights.matrix(hidden, 2 * hidden)
        self._down = weights.matrix(2 * hidden, hidden)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.nn.functional.silu(x @ self._gate) * (x @ self._up)) @ self._down


class ChaoticHead:
    """Token scores that depend on every bit of the hidden state that a wrong cache byte can move.

    ``sin(GAIN * (h @ W))``: a relative error of 1e-6 in ``h`` turns the phases by about 0.1, and with
    some hundred tokens the best phases are 0.01 apart, so the winner changes. Float64 noise turns them by
    1e-10, which changes a token about once in ten million.
    """

    GAIN = 1e5

    def __init__(self, weights: WeightSource, vocab_size: int) -> None:
        self._weight = weights.matrix(weights.hidden, vocab_size)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Greedy tokens of shape ``(n,)`` for hidden states of shape ``(n, hidden)``."""
        return torch.sin(self.GAIN * (rms_norm(hidden) @ self._weight)).argmax(-1)
