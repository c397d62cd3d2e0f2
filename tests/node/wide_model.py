"""The model "wide", which nodes that have imported this serve: 16 KiB of KV a token in bfloat16."""

from __future__ import annotations

import torch

from kvconnect.cache.specs import MLASpec
from kvconnect.node.attention import Backend, StepContext
from kvconnect.node.models import HIDDEN, RECIPES, CachedLayer, Recipe, WeightSource, rms_norm
from kvconnect.runner_kit.kernel_blocks import MultipleOf

WIDE_BACKEND = Backend("TORCH_WIDE", (MultipleOf(16),))
_STEP = 2654435761
"""Odd and large: its multiples, modulo a smaller number, are spread over the whole range."""


class WideMemory:
    """Keeps a row of ``copies * hidden`` values per token, and adds parts of a few earlier tokens' rows.

    Its cache is large and its computation small, for measurements of transfers: the time of a prompt grows
    linearly with its length.
    """

    def __init__(self, weights: WeightSource, name: str) -> None:
        self.name = name
        self._hidden, self._copies, self._reads = HIDDEN, 32, 2
        self._input = weights.matrix(self._hidden, self._hidden)
        self._scales = weights.normal((self._copies, 1))
        self._output = weights.matrix(self._hidden, self._hidden)

    def __call__(self, x: torch.Tensor, step: StepContext) -> torch.Tensor:
        # In float32, no more digits than the cache keeps: wide rows are not computed with.
        rows = rms_norm(x @ self._input).float()[:, None] * self._scales.float()
        mixed = torch.zeros_like(x)
        for number in range(self._reads):
            positions = (step.positions + number) * _STEP % (step.positions + 1)
            read = _remember(step, self.name, rows.view(len(x), 1, -1), positions)
            part = (step.positions + number) % self._copies
            copies = read.view(-1, self._copies, self._hidden)
            mixed = mixed + copies[torch.arange(len(x), device=x.device), part].to(x.dtype)
        return rms_norm(mixed) @ self._output

    def cached(self, block_size: int, dtype: torch.dtype) -> CachedLayer:
        """See ``Mixer``."""
        spec = MLASpec(block_size, self._copies * self._hidden, dtype)
        return CachedLayer(self.name, spec, "block token content", WIDE_BACKEND)


def _remember(step: StepContext, layer: str, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Store the batch's rows, then read for each token the row at its entry of ``positions``.

    ``rows`` are ``(tokens, 1, width)``; ``positions`` belong to the token's own request, not after it.
    Returns ``(tokens, width)`` in the cache's dtype.
    """
    pages = step._store(layer, rows, None).keys
    group = step.cache.group_of[layer]
    size = step.cache.kernel_block_sizes[group]
    requests = torch.cat([torch.full((one.length,), one.row) for one in step.segments])
    kernel_ids = step.tables[group][requests.to(rows.device), positions // size].long()
    return pages._as_bits()[kernel_ids, positions % size].view(pages.pages.dtype).flatten(1)


RECIPES["wide"] = Recipe(lambda w: [WideMemory(w, f"layers.{i}.memory") for i in range(2)], groups=((0, 1),))
