"""Attention of one query per request over the pages that its block table names.

Fast enough on a GPU that a decode step takes what a serving stack's does.
"""

from __future__ import annotations

import torch


def attend_pages(
    query: torch.Tensor, pages: torch.Tensor, table: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Attend with one token per request over all positions up to its own, whose keys are stored.

    Args:
        query: ``(rows, heads, width)``, contiguous.
        pages: ``(blocks, tokens, kv heads, 2 * width)`` in any memory order, keys before values.
        table: int32 block ids, ``(rows, most blocks)``.
        positions: of each row's token, ``(rows,)``.

    Returns:
        ``(rows, heads, width)``.
    """
    if query.is_cuda:
        from benchmarks.node.attention_triton import attend_triton

        return attend_triton(query, pages, table, positions)
    return attend_torch(query, pages, table, positions)


def attend_torch(
    query: torch.Tensor, pages: torch.Tensor, table: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """See ``attend_pages``. Gathers every page that the table has room for."""
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
