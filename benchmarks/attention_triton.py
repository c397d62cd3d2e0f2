# The kernel is Triton's language, not Python's: its parameters have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Attention over pages as a Triton kernel.

A request's positions are cut into parts with a program each, so that few requests fill a GPU. What the
parts find is weighed and added up afterwards. Shapes depend on the batch size alone, so a CUDA graph can
hold it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_PARTS = 4
_TILE_TOKENS = 64
# The least rows of a matrix product: fewer query heads are padded.
_LEAST_ROWS = 16


@triton.jit
def paged_attention_kernel(
    query,
    pages,
    table,
    positions,
    mixed,
    weight,
    scale,
    page_stride,
    token_stride,
    head_stride,
    table_stride,
    SHARING: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program ``(row, kv head, part)``: its ``SHARING`` query heads over one part of the row's positions.

    Writes the part's result to ``mixed`` of shape ``(rows, heads, parts, WIDTH)``, and to ``weight`` the
    logarithm of what it counts.
    """
    row = tl.program_id(0)
    head = tl.program_id(1)
    part = tl.program_id(2)
    parts = tl.num_programs(2)
    length = tl.load(positions + row).to(tl.int32) + 1
    part_tokens = tl.cdiv(tl.cdiv(length, parts), TILE) * TILE
    first = part * part_tokens
    last = tl.minimum(first + part_tokens, length)
    members = tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    is_member = members < SHARING
    query_heads = (row * tl.num_programs(1) + head) * SHARING + members
    queries = tl.load(
        query + query_heads[:, None] * WIDTH + columns[None, :], mask=is_member[:, None], other=0.0
    )
    most = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    found = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(first, last, TILE):
        position = start + tl.arange(0, TILE)
        seen = position < last
        page = tl.load(table + row * table_stride + position // PAGE_TOKENS, mask=seen, other=0).to(tl.int64)
        place = page * page_stride + (position % PAGE_TOKENS) * token_stride + head * head_stride
        keys = tl.load(pages + place[None, :] + columns[:, None], mask=seen[None, :], other=0.0)
        scores = tl.where(seen[None, :], tl.dot(queries, keys) * scale, float("-inf"))
        now_most = tl.maximum(most, tl.max(scores, axis=1))
        weights = tl.exp(scores - now_most[:, None])
        shrink = tl.exp(most - now_most)
        total = total * shrink + tl.sum(weights, axis=1)
        values = tl.load(pages + place[:, None] + WIDTH + columns[None, :], mask=seen[:, None], other=0.0)
        found = found * shrink[:, None] + tl.dot(weights.to(values.dtype), values)
        most = now_most
    # A part without positions counts nothing.
    is_empty = total == 0.0
    out = query_heads * parts + part
    found = found / tl.where(is_empty, 1.0, total)[:, None]
    tl.store(mixed + out[:, None] * WIDTH + columns[None, :], found, mask=is_member[:, None])
    counted = tl.where(is_empty, float("-inf"), most + tl.log(tl.where(is_empty, 1.0, total)))
    tl.store(weight + out, counted, mask=is_member)


def attend_triton(
    query: torch.Tensor, pages: torch.Tensor, table: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """See ``attend_torch``. Widths are powers of two from 16."""
    rows, heads, width = query.shape
    kv_heads = pages.shape[2]
    sharing = heads // kv_heads
    mixed = torch.empty((rows, heads, _PARTS, width), dtype=torch.float32, device=query.device)
    weight = torch.empty((rows, heads, _PARTS), dtype=torch.float32, device=query.device)
    paged_attention_kernel[(rows, kv_heads, _PARTS)](
        query,
        pages,
        table,
        positions,
        mixed,
        weight,
        width**-0.5,
        pages.stride(0),
        pages.stride(1),
        pages.stride(2),
        table.stride(0),
        SHARING=sharing,
        ROWS=max(_LEAST_ROWS, triton.next_power_of_2(sharing)),
        WIDTH=width,
        PAGE_TOKENS=pages.shape[1],
        TILE=_TILE_TOKENS,
        num_warps=4,
        num_stages=3,
    )
    return (mixed * weight.softmax(-1)[..., None]).sum(2).to(query.dtype)
