"""A decoder of serving size with random weights: dense, grouped-query attention, bfloat16 throughout.

The node's own models compute in float64, to show any wrong byte; here only the time of a step counts. How a
step attends is an argument of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from benchmarks.cache import CacheShape, Layout
from kvconnect.cache.specs import FullAttentionSpec
from kvconnect.node.attention import Backend
from kvconnect.node.kv_cache import NodeCache
from kvconnect.node.models import CachedLayer, CacheLayout, CacheSizing
from kvconnect.runner_kit.kernel_blocks import MultipleOf

DTYPE = torch.bfloat16
_BACKEND = Backend("PAGED", (MultipleOf(1),))
_ROPE_BASE = 500_000.0

Attend = Callable[[str, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Store keys and values of a layer, ``(tokens, kv heads, width)``, and attend with its queries."""


@dataclass(frozen=True)
class ModelSize:
    """The widths of a decoder."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    mlp: int
    vocab: int

    def shape(self, num_blocks: int, layout: Layout) -> CacheShape:
        """A cache of so many blocks for it."""
        return CacheShape(self.layers, num_blocks, self.kv_heads, self.head_size, layout)

    @property
    def token_bytes(self) -> int:
        """Bytes of KV that a token has in all layers."""
        return self.layers * self.kv_heads * 2 * self.head_size * DTYPE.itemsize


MODEL_SIZES = {
    "8b": ModelSize(32, 4096, 32, 8, 128, 14336, 128_256),
    "tiny": ModelSize(2, 64, 4, 2, 16, 128, 512),
}


@dataclass(frozen=True)
class _Layer:
    name: str
    query_key_value: torch.Tensor
    output: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class BenchModel:
    """See ``kvconnect.node.models.Model``, of which it has the layout of a cache."""

    def __init__(self, size: ModelSize, layout: Layout, device: str) -> None:
        self.size = size
        self._layout = layout
        generator = torch.Generator(device).manual_seed(0)

        def matrix(rows: int, columns: int) -> torch.Tensor:
            drawn = torch.randn(rows, columns, generator=generator, dtype=DTYPE, device=device)
            return drawn.mul_(rows**-0.5)

        self._embedding = matrix(size.vocab, size.hidden).mul_(size.vocab**0.5)
        self._head = matrix(size.hidden, size.vocab)
        own, shared = size.heads * size.head_size, size.kv_heads * size.head_size
        self._layers = [
            _Layer(
                f"layer{index}",
                matrix(size.hidden, own + 2 * shared),
                matrix(own, size.hidden),
                matrix(size.hidden, 2 * size.mlp),
                matrix(size.mlp, size.hidden),
            )
            for index in range(size.layers)
        ]
        half = size.head_size // 2
        self._frequencies = _ROPE_BASE ** (-torch.arange(half, device=device, dtype=torch.float32) / half)

    def layout(self, sizing: CacheSizing) -> CacheLayout:
        """One group of all layers, each in an allocation of its own."""
        size = self.size
        block_tokens = sizing.block_size or self._layout.block_tokens
        spec = FullAttentionSpec(block_tokens, size.kv_heads, size.head_size, DTYPE)
        cached = tuple(CachedLayer(layer.name, spec, self._layout.axes, _BACKEND) for layer in self._layers)
        return CacheLayout((cached,))

    def run(
        self, token_ids: torch.Tensor, positions: torch.Tensor, sampled: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """The greedy tokens at the places ``sampled``."""
        size = self.size
        angles = positions[:, None].float() * self._frequencies
        cos, sin = (turn.to(DTYPE).repeat(1, 2)[:, None] for turn in (angles.cos(), angles.sin()))
        x = self._embedding[token_ids]
        for layer in self._layers:
            mixed = (_norm(x) @ layer.query_key_value).view(len(x), -1, size.head_size)
            turning, values = mixed[:, : -size.kv_heads], mixed[:, -size.kv_heads :]
            left, right = turning.chunk(2, dim=-1)
            turned = torch.addcmul(turning * cos, torch.cat((-right, left), dim=-1), sin)
            query, keys = turned[:, : size.heads].contiguous(), turned[:, size.heads :]
            x = torch.addmm(x, attend(layer.name, query, keys, values).flatten(1), layer.output)
            gate, up = (_norm(x) @ layer.gate_up).chunk(2, dim=-1)
            x = torch.addmm(x, functional.silu(gate) * up, layer.down)
        return (_norm(x[sampled]) @ self._head).argmax(-1)


def _norm(x: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(x, x.shape[-1:])


def layer_pages(cache: NodeCache, layer: str) -> torch.Tensor:
    """A layer's cache as ``(blocks, tokens, kv heads, content)``, in the memory order that it has."""
    made = cache.tensors[layer]
    axes = made.axes.split()
    return made.tensor.permute([axes.index(axis) for axis in ("block", "token", "head", "content")])


def attend_decode(cache: NodeCache, positions: torch.Tensor) -> Attend:
    """One token of each row of the batch tables, over their pages, at the slots computed for the step."""
    rows, page_tokens = len(positions), cache.kernel_block_sizes[0]
    slots = cache.tables.slots(0)[:rows]
    blocks, offsets = slots // page_tokens, slots % page_tokens
    table = cache.tables.batch_table(0)[:rows]

    def attend(layer: str, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        pages = layer_pages(cache, layer)
        pages[blocks, offsets] = torch.cat((keys, values), dim=-1)
        if query.is_cuda:
            # Fast enough that a decode step takes what a serving stack's does.
            from benchmarks.attention_triton import attend_triton

            return attend_triton(query, pages, table, positions)
        return attend_torch(query, pages, table, positions)

    return attend


def attend_torch(
    query: torch.Tensor, pages: torch.Tensor, table: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Attend with one token per request over all positions up to its own, whose keys are stored.

    Gathers every page that the table has room for.

    Args:
        query: ``(rows, heads, width)``, contiguous.
        pages: ``(blocks, tokens, kv heads, 2 * width)`` in any memory order, keys before values.
        table: int32 block ids, ``(rows, most blocks)``.
        positions: of each row's token, ``(rows,)``.

    Returns:
        ``(rows, heads, width)``.
    """
    rows, heads, width = query.shape
    kv_heads = pages.shape[2]
    seen = pages[table.long()].flatten(1, 2).float()
    keys, values = seen.permute(0, 2, 1, 3).chunk(2, dim=-1)
    grouped = query.view(rows, kv_heads, heads // kv_heads, width).float()
    hidden = torch.arange(keys.shape[2], device=query.device) > positions[:, None]
    scores = grouped @ keys.transpose(2, 3) * width**-0.5
    weights = scores.masked_fill(hidden[:, None, None, :], float("-inf")).softmax(-1)
    mixed: torch.Tensor = weights @ values.masked_fill(hidden[:, None, :, None], 0.0)
    return mixed.reshape(rows, heads, width).to(query.dtype)
