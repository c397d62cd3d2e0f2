"""Prompts through the decoder of serving size of ``bench_node``, over the pages of a node's cache.

A chunk of a prompt sees what the cache holds of the tokens before it, wherever that came from.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.node.model import BenchModel
from kvconnect.cache.specs import div_ceil
from kvconnect.node.attention import AttentionPages, Segment, StepContext
from kvconnect.node.kv_cache import NodeCache
from kvconnect.node.models import ModelOutput


class PromptModel(BenchModel):
    """The same decoder for any step of a node, in bfloat16. ``attach`` is called before the first one."""

    def attach(self, cache: NodeCache) -> None:
        """Have the device's own attention read this cache."""
        for name, group in cache.group_of.items():
            cache.layer_attention[name] = PromptAttention(cache.kernel_block_sizes[group])

    def forward(self, token_ids: torch.Tensor, step: StepContext, sampled: torch.Tensor) -> ModelOutput:
        """See ``Model``."""
        return ModelOutput(self.run(token_ids, step.positions, sampled, step.attend))


class PromptAttention:
    """See ``PagedAttention``: the requests of a step one after the other, all pages of each in one call."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._segments: Sequence[Segment] = ()

    def begin(self, segments: Sequence[Segment], table: torch.Tensor) -> None:
        """See ``PagedAttention``."""
        self._segments, self._table = segments, table

    def attend(
        self, pages: AttentionPages, query: torch.Tensor, *, window: int | None, value_width: int | None
    ) -> torch.Tensor:
        """See ``PagedAttention``. Keys and values side by side; no window."""
        assert pages.values is not None
        mixed = []
        for segment in self._segments:
            end = segment.start + segment.length
            ids = self._table[segment.row, : div_ceil(end, self._block_tokens)].long()
            asked = query[segment.span].transpose(0, 1)[None]
            sharing = query.shape[1] // pages.keys.pages.shape[2]
            keys, values = (
                rows.pages[ids].flatten(0, 1)[:end].transpose(0, 1).repeat_interleave(sharing, 0)[None]
                for rows in (pages.keys, pages.values)
            )
            seen = scaled_dot_product_attention(
                asked, keys, values, attn_mask=causal_lower_right(segment.length, end)
            )
            mixed.append(seen[0].transpose(0, 1))
        return torch.cat(mixed)
