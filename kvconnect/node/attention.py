"""Paged attention in torch: where a step's tokens lie in the cache, and attention over them.

All cache reads and writes go through kernel block ids, taken from the block tables. Rows are written to
the cache first and read back from it, so what a query sees was always rounded to the cache's dtype,
however the tokens were cut into steps. Pages are read whole, as kernels do: the rows that no token was
written to are multiplied by a weight of zero, which hides any finite value and no NaN. This file knows
nothing of models, scheduling or transfers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kvconnect.runner_kit.attention_groups import GraphSupport
from kvconnect.runner_kit.block_table import BlockTables
from kvconnect.runner_kit.kernel_blocks import MultipleOf

# What everything is computed in; the cache is coarser.
COMPUTE_DTYPE = torch.float64
# Query rows per slice: bounds the score matrix of a long prompt's chunk.
QUERY_SLICE = 256


@dataclass(frozen=True)
class Backend:
    """An attention implementation and the block sizes in tokens that it takes."""

    name: str
    kernel_block_sizes: Sequence[int | MultipleOf]
    graph_support: GraphSupport = GraphSupport.UNIFORM_DECODE

    def make_metadata_builder(self, kernel_block_size: int) -> PageSpan:
        """What says which pages of ``kernel_block_size`` tokens a segment reads."""
        return PageSpan(kernel_block_size)


@dataclass(frozen=True)
class PageSpan:
    """Which pages of a request's row attention reads."""

    kernel_block_size: int

    def of(self, segment: Segment, window: int | None) -> range:
        """Positions in the row, from the page where the window begins to that of the last token."""
        first = 0 if window is None else max(0, segment.start - window + 1)
        last = segment.start + segment.length - 1
        return range(first // self.kernel_block_size, last // self.kernel_block_size + 1)


@dataclass(frozen=True)
class PagedRows:
    """One cached quantity as ``(kernel blocks, tokens, heads, width)``, a view of the cache."""

    pages: torch.Tensor

    def write(
        self,
        kernel_ids: torch.Tensor,
        offsets: torch.Tensor,
        rows: torch.Tensor,
        used: torch.Tensor | None = None,
    ) -> None:
        """Store ``rows`` of shape ``(n, heads, width)`` at ``offsets`` of the pages ``kernel_ids``.

        Where ``used`` of shape ``(n,)`` is False the page keeps what it has.
        """
        bits = self._as_bits()
        new = rows.to(self.pages.dtype).view(bits.dtype)
        if used is not None:
            new = torch.where(used[:, None, None], new, bits[kernel_ids, offsets])
        bits[kernel_ids, offsets] = new

    def read(self, kernel_ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Single rows as they are kept, flat: ``(n, heads * width)``."""
        return self._as_bits()[kernel_ids, offsets].view(self.pages.dtype).flatten(1)

    def gather(self, kernel_ids: torch.Tensor) -> torch.Tensor:
        """All rows of the pages in order, in float64, whatever the rows without a token hold.

        Ids of shape ``(.., n)`` give ``(.., n * tokens, heads, width)``.
        """
        rows = self._as_bits()[kernel_ids].view(self.pages.dtype).to(COMPUTE_DTYPE)
        return rows.flatten(kernel_ids.dim() - 1, kernel_ids.dim())

    def _as_bits(self) -> torch.Tensor:
        """The pages; bytes in place of float8, which not every torch version can index."""
        return self.pages.view(torch.int8) if self.pages.dtype.itemsize == 1 else self.pages


class BatchAttention(Protocol):
    """Attention that takes all requests of a step in one call, in place of ``_attend`` for each."""

    def begin(self, segments: Sequence[Segment], table: torch.Tensor) -> None:
        """A step begins: its tokens in batch order, and the block table of this cache group."""
        ...

    def attend(
        self, pages: AttentionPages, query: torch.Tensor, *, window: int | None, value_width: int | None
    ) -> torch.Tensor:
        """As ``StepContext.attend``, with the batch's keys and values stored already."""
        ...


@dataclass(frozen=True)
class AttentionPages:
    """The cache of one attention layer. ``values`` is None where keys and values are one row (MLA).

    ``batched`` attends over it, or None: each request on its own, as in this file.
    """

    keys: PagedRows
    values: PagedRows | None
    batched: BatchAttention | None = None


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


@dataclass(frozen=True)
class BatchedState:
    """The states of a batch's requests: blocks ``block_ids`` of ``pages``, both ``(n,)``.

    Where ``used`` is False nothing is stored.
    """

    pages: StatePages
    block_ids: torch.Tensor
    used: torch.Tensor

    def read(self) -> list[torch.Tensor]:
        """Copies of the states, each of shape ``(n, *shape)``."""
        held = self.pages.pages[self.block_ids]
        states, start = [], 0
        for shape, dtype in zip(self.pages.shapes, self.pages.dtypes, strict=True):
            end = start + torch.Size(shape).numel() * dtype.itemsize
            states.append(held[:, start:end].contiguous().view(dtype).view(-1, *shape))
            start = end
        return states

    def write(self, states: Sequence[torch.Tensor]) -> None:
        """Store the states, in the order and with the dtypes of the spec."""
        parts = [
            state.to(dtype).flatten(1).contiguous().view(torch.int8)
            for state, dtype in zip(states, self.pages.dtypes, strict=True)
        ]
        held = self.pages.pages[self.block_ids]
        self.pages.pages[self.block_ids] = torch.where(self.used[:, None], torch.cat(parts, 1), held)


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
        self.segments: Sequence[Segment] = segments
        self._tables = tables
        self._sizes = kernel_block_sizes
        self._layers = layers
        self._group_of = group_of
        positions = [torch.arange(s.start, s.start + s.length) for s in segments]
        self.positions = torch.cat(positions).to(device)
        count = len(self.positions)
        starts = [segment.offset for segment in segments]
        tables.compute_slots([s.row for s in segments], [*starts, count], self.positions, count)
        self._slots = {
            group: (tables.slots(group)[:count] // size, tables.slots(group)[:count] % size)
            for group, size in kernel_block_sizes.items()
            if group not in state_groups
        }
        for layer, pages in layers.items():
            if isinstance(pages, AttentionPages) and pages.batched is not None:
                pages.batched.begin(segments, tables.table(group_of[layer]))

    def batched_state(self, layer: str) -> BatchedState | None:
        """A recurrent layer's states if every request of the step computes one token, else None."""
        return None

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
        if pages.batched is not None:
            return pages.batched.attend(pages, query, window=window, value_width=value_width)
        span = PageSpan(self._sizes[group])
        outputs = []
        for segment in self.segments:
            read = span.of(segment, window)
            ids = self._tables.table(group)[segment.row, read.start : read.stop].long()
            seen = pages.keys.gather(ids)
            seen_values = seen[..., :value_width] if pages.values is None else pages.values.gather(ids)
            first = read.start * span.kernel_block_size
            outputs.append(_attend(query[segment.span], seen, seen_values, segment.start, first, window))
        return torch.cat(outputs)

    def remember(self, layer: str, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Store the batch's rows, then read the row at one of ``positions`` for each token.

        ``rows`` are ``(tokens, 1, width)``; ``positions`` are of the token's own request, and not after it.
        Returns ``(tokens, width)`` as the cache keeps them.
        """
        pages = self._layers[layer]
        if not isinstance(pages, AttentionPages):
            raise TypeError(f"layer {layer!r} keeps no rows by token")
        group = self._group_of[layer]
        kernel_ids, offsets = self._slots[group]
        pages.keys.write(kernel_ids, offsets, rows)
        size = self._sizes[group]
        read = [
            pages.keys.read(
                self._tables.table(group)[segment.row, positions[segment.span] // size].long(),
                positions[segment.span] % size,
            )
            for segment in self.segments
        ]
        return torch.cat(read)


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
