"""Paged attention in torch: where a step's tokens lie in the cache, and attention over them.

All cache reads and writes go through kernel block ids, taken from the block tables. Rows are written to
the cache first and read back from it, so what a query sees was always rounded to the cache's dtype,
however the tokens were cut into steps. This file knows nothing of models, scheduling or transfers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from kvconnect.arithmetic import div_ceil
from kvconnect.cache.block_table import BlockTables
from kvconnect.cache.kernel_blocks import MultipleOf

# What everything is computed in; the cache is coarser.
COMPUTE_DTYPE = torch.float64
# Query rows per slice: bounds the score matrix of a long prompt's chunk.
QUERY_SLICE = 256


@dataclass(frozen=True)
class Backend:
    """An attention implementation and the block sizes in tokens that it takes."""

    name: str
    kernel_block_sizes: Sequence[int | MultipleOf]


@dataclass(frozen=True)
class PagedRows:
    """One cached quantity as ``(kernel blocks, tokens, heads, width)``, a view of the cache."""

    pages: torch.Tensor

    def write(self, kernel_ids: torch.Tensor, offsets: torch.Tensor, rows: torch.Tensor) -> None:
        """Store ``rows`` of shape ``(n, heads, width)`` at ``offsets`` of the pages ``kernel_ids``."""
        self.pages[kernel_ids, offsets] = rows.to(self.pages.dtype)

    def gather(self, kernel_ids: torch.Tensor, num_rows: int) -> torch.Tensor:
        """The first ``num_rows`` rows of the pages in order, ``(num_rows, heads, width)``, in float64."""
        return self.pages[kernel_ids].flatten(0, 1)[:num_rows].to(COMPUTE_DTYPE)


@dataclass(frozen=True)
class AttentionPages:
    """The cache of one attention layer. ``values`` is None where keys and values are one row (MLA)."""

    keys: PagedRows
    values: PagedRows | None


@dataclass(frozen=True)
class StatePages:
    """The cache of one recurrent layer: int8 of shape ``(blocks, content bytes)``, rows padded."""

    pages: torch.Tensor
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]

    def read(self, block_id: torch.Tensor) -> list[torch.Tensor]:
        """Copies of the states in one page."""
        page = self.pages[block_id]
        states, start = [], 0
        for shape, dtype in zip(self.shapes, self.dtypes, strict=True):
            end = start + torch.Size(shape).numel() * dtype.itemsize
            states.append(page[start:end].clone().view(dtype).view(shape))
            start = end
        return states

    def write(self, block_id: torch.Tensor, states: Sequence[torch.Tensor]) -> None:
        """Store the states, in the order and with the dtypes of the spec."""
        parts = [state.to(dtype) for state, dtype in zip(states, self.dtypes, strict=True)]
        self.pages[block_id] = torch.cat([part.contiguous().view(-1).view(torch.int8) for part in parts])


LayerPages = AttentionPages | StatePages


@dataclass(frozen=True)
class Segment:
    """The tokens ``start .. start + length - 1`` of the request in row ``row`` of the block tables.

    ``offset`` is the place of its first token in the step's batch.
    """

    row: int
    start: int
    length: int
    offset: int

    @property
    def span(self) -> slice:
        """The segment's rows in the batch."""
        return slice(self.offset, self.offset + self.length)


class StepContext:
    """One forward pass: its tokens, their positions, and where each lies in every group's pages.

    Args:
        segments: the requests' tokens, in batch order.
        tables: the block tables, applied.
        kernel_block_sizes: tokens per kernel block by group; groups of ``state_groups`` are indexed by
            request and not by token.
        layers: the cache of every layer by name, and ``group_of`` its group.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        *,
        tables: BlockTables,
        kernel_block_sizes: Mapping[int, int],
        state_groups: frozenset[int],
        layers: Mapping[str, LayerPages],
        group_of: Mapping[str, int],
        device: torch.device,
    ) -> None:
        self.segments = segments
        self._tables = tables
        self._sizes = kernel_block_sizes
        self._layers = layers
        self._group_of = group_of
        positions = [torch.arange(s.start, s.start + s.length) for s in segments]
        self.positions = torch.cat(positions).to(device)
        lengths = torch.tensor([s.length for s in segments])
        rows = torch.tensor([s.row for s in segments]).repeat_interleave(lengths).to(device)
        self._slots = {
            group: (tables.table(group)[rows, self.positions // size].long(), self.positions % size)
            for group, size in kernel_block_sizes.items()
            if group not in state_groups
        }

    def state(self, layer: str, segment: Segment) -> tuple[StatePages, torch.Tensor]:
        """A recurrent layer's pages and the block id of the segment's request."""
        pages = self._layers[layer]
        if not isinstance(pages, StatePages):
            raise TypeError(f"layer {layer!r} keeps no recurrent state")
        return pages, self._tables.table(self._group_of[layer])[segment.row, 0].long()

    def attend(
        self,
        layer: str,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor | None,
        *,
        window: int | None = None,
        value_width: int | None = None,
    ) -> torch.Tensor:
        """Store the batch's keys and values, then attend over the cache.

        ``query`` is ``(tokens, query heads, width)``, ``keys`` and ``values`` ``(tokens, kv heads, ..)``.
        With ``values`` None the first ``value_width`` columns of the key rows are the values.
        Returns ``(tokens, query heads, value width)``.
        """
        pages = self._layers[layer]
        if not isinstance(pages, AttentionPages):
            raise TypeError(f"layer {layer!r} is no attention layer")
        group = self._group_of[layer]
        kernel_ids, offsets = self._slots[group]
        pages.keys.write(kernel_ids, offsets, keys)
        if pages.values is not None and values is not None:
            pages.values.write(kernel_ids, offsets, values)
        size = self._sizes[group]
        outputs = []
        for segment in self.segments:
            end = segment.start + segment.length
            first = 0 if window is None else max(0, segment.start - window + 1) // size
            ids = self._tables.table(group)[segment.row, first : div_ceil(end, size)].long()
            seen = pages.keys.gather(ids, end - first * size)
            if pages.values is None:
                seen_values = seen[..., :value_width]
            else:
                seen_values = pages.values.gather(ids, end - first * size)
            outputs.append(
                _attend(query[segment.span], seen, seen_values, segment.start, first * size, window)
            )
        return torch.cat(outputs)


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    query_start: int,
    key_start: int,
    window: int | None,
) -> torch.Tensor:
    """Causal attention of one request's queries over its keys; positions count from the two starts."""
    tokens, heads, width = query.shape
    kv_heads = keys.shape[1]
    key_positions = torch.arange(key_start, key_start + keys.shape[0], device=query.device)
    by_head = keys.permute(1, 2, 0)
    values_by_head = values.permute(1, 0, 2)
    outputs = []
    for begin in range(0, tokens, QUERY_SLICE):
        part = query[begin : begin + QUERY_SLICE]
        grouped = part.view(-1, kv_heads, heads // kv_heads, width).permute(1, 2, 0, 3)
        scores = (grouped.flatten(1, 2) @ by_head) * width**-0.5
        scores = scores.view(kv_heads, heads // kv_heads, len(part), -1)
        positions = torch.arange(query_start + begin, query_start + begin + len(part), device=query.device)[
            :, None
        ]
        hidden = key_positions > positions
        if window is not None:
            hidden |= key_positions <= positions - window
        weights = scores.masked_fill_(hidden, float("-inf")).softmax(-1)
        mixed = weights.flatten(1, 2) @ values_by_head
        mixed = mixed.view(kv_heads, heads // kv_heads, len(part), -1)
        outputs.append(mixed.permute(2, 0, 1, 3).reshape(len(part), heads, -1))
    return torch.cat(outputs)
