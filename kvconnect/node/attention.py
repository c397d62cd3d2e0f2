"""Paged attention in torch: where a step's tokens lie in the cache, and attention over them.

Rows are written to the cache first and read back from it, so a query always sees rows rounded to the cache's
dtype, however the tokens were cut into steps. Pages are read whole, as kernels do: rows without a token get
weight zero, which hides any finite value but no NaN.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvconnect.runner_kit.kernel_blocks import GraphSupport, MultipleOf

if TYPE_CHECKING:
    from kvconnect.node.kv_cache import NodeCache

# The dtype of all computation; the cache's dtype is coarser.
COMPUTE_DTYPE = torch.float64
ROPE_BASE = 10_000.0
# Query rows per call: bounds the score matrix of a long prompt's chunk.
QUERY_SLICE = 256


@dataclass(frozen=True)
class PagedRows:
    """One cached quantity as ``(kernel blocks, tokens, heads, width)``, a view of the cache."""

    pages: torch.Tensor

    def write(self, kernel_ids: torch.Tensor, offsets: torch.Tensor, rows: torch.Tensor) -> None:
        """Store ``rows`` of shape ``(n, heads, width)`` at ``offsets`` of the pages ``kernel_ids``."""
        bits = self._as_bits()
        bits[kernel_ids, offsets] = rows.to(self.pages.dtype).view(bits.dtype)

    def gather(self, kernel_ids: torch.Tensor) -> torch.Tensor:
        """All rows of the pages in order, in float64; those without a token may hold any bits.

        Ids of shape ``(.., n)`` give ``(.., n * tokens, heads, width)``.
        """
        rows = self._as_bits()[kernel_ids].view(self.pages.dtype).to(COMPUTE_DTYPE)
        return rows.flatten(kernel_ids.dim() - 1, kernel_ids.dim())

    def _as_bits(self) -> torch.Tensor:
        """The pages; as int8 for float8, which not every torch version can index."""
        return self.pages.view(torch.int8) if self.pages.dtype.itemsize == 1 else self.pages


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


LayerPages = AttentionPages | StatePages


@dataclass(frozen=True)
class RequestStates:
    """The recurrent states of one request of a step, whose tokens are the rows ``span`` of the batch.

    ``begins``: the request is at its first token. Then the states are zero, and the block may hold any bytes.
    """

    span: slice
    pages: StatePages
    block_id: torch.Tensor
    begins: bool

    def read(self) -> list[torch.Tensor]:
        """Copies of the states, each of the shape in the spec."""
        held = self.pages.pages[self.block_id]
        if self.begins:
            held = torch.zeros_like(held)
        states, start = [], 0
        for shape, dtype in zip(self.pages.shapes, self.pages.dtypes, strict=True):
            end = start + torch.Size(shape).numel() * dtype.itemsize
            states.append(held[start:end].clone().view(dtype).view(shape))
            start = end
        return states

    def write(self, states: Sequence[torch.Tensor]) -> None:
        """Store the states, in the order and with the dtypes of the spec."""
        parts = [
            state.to(dtype).flatten().view(torch.int8)
            for state, dtype in zip(states, self.pages.dtypes, strict=True)
        ]
        self.pages.pages[self.block_id] = torch.cat(parts)


@dataclass(frozen=True)
class Segment:
    """The tokens ``start .. start + length - 1`` of the request in row ``row`` of the block tables.

    ``offset`` is the index of its first token in the step's batch.
    """

    row: int
    start: int
    length: int
    offset: int

    @property
    def span(self) -> slice:
        """The segment's rows in the batch."""
        return slice(self.offset, self.offset + self.length)

    def pages(self, page_tokens: int, window: int | None) -> range:
        """Indices of the pages that it reads: from the page where the window begins to the last token's."""
        first = 0 if window is None else max(0, self.start - window + 1)
        return range(first // page_tokens, (self.start + self.length - 1) // page_tokens + 1)


class PagedAttention:
    """Attention over pages of ``page_tokens``, for the layers of one cache group and backend."""

    def __init__(self, page_tokens: int) -> None:
        self.page_tokens = page_tokens

    def attend(
        self,
        pages: AttentionPages,
        query: torch.Tensor,
        segments: Sequence[Segment],
        table: torch.Tensor,
        *,
        window: int | None,
    ) -> torch.Tensor:
        """As ``StepContext.attend``, after the batch's keys and values were stored.

        ``segments`` are the step's tokens in batch order, ``table`` is the block table of the cache group.
        """
        outputs = []
        for segment in segments:
            read = segment.pages(self.page_tokens, window)
            ids = table[segment.row, read.start : read.stop].long()
            keys = pages.keys.gather(ids)
            values = keys if pages.values is None else pages.values.gather(ids)
            positions = torch.arange(segment.start, segment.start + segment.length, device=ids.device)
            key = torch.arange(read.start * self.page_tokens, read.stop * self.page_tokens, device=ids.device)
            whole = (query[segment.span], positions[:, None])
            for part, position in zip(*(torch.split(one, QUERY_SLICE) for one in whole), strict=True):
                visible = key <= position
                if window is not None:
                    visible &= key > position - window
                mixed = attend_rows(part[None], keys[None], values[None], visible[None])
                outputs.append(mixed[0])
        return torch.cat(outputs)


@dataclass(frozen=True)
class Backend:
    """An attention implementation, and the block sizes in tokens that it supports."""

    name: str
    kernel_block_sizes: Sequence[int | MultipleOf]
    graph_support: GraphSupport = GraphSupport.UNIFORM_DECODE

    def make_metadata_builder(self, kernel_block_size: int) -> PagedAttention:
        """Attention over pages of ``kernel_block_size`` tokens."""
        return PagedAttention(kernel_block_size)


class StepContext:
    """One forward pass: any number of tokens of each request, over the applied block tables of ``cache``.

    Attributes:
        segments: the tokens of each request, in batch order.
        positions: of these tokens, shape ``(tokens,)``.
        tables: kernel block ids by group.
    """

    def __init__(self, cache: NodeCache, segments: Sequence[Segment]) -> None:
        self.cache, self.segments = cache, segments
        positions = torch.cat([torch.arange(s.start, s.start + s.length) for s in segments])
        self.positions = positions.to(cache.device)
        count = len(positions)
        starts = [*(segment.offset for segment in segments), count]
        cache.tables.compute_slots([segment.row for segment in segments], starts, self.positions, count)
        self.tables = {group: cache.tables.table(group) for group in cache.kernel_block_sizes}
        self._slots: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for group, size in cache.kernel_block_sizes.items():
            # A padded token has no slot, and gets one of the null block.
            slots = cache.tables.slots(group)[:count].clamp(min=0)
            self._slots[group] = slots // size, slots % size
        self._turns: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def turns(self, half: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of the rotary angles at each position, of shape ``(tokens, 1, half)``."""
        if half not in self._turns:
            exponents = -torch.arange(half, dtype=COMPUTE_DTYPE, device=self.positions.device) / half
            angles = self.positions.to(COMPUTE_DTYPE)[:, None, None] * ROPE_BASE**exponents
            self._turns[half] = angles.cos(), angles.sin()
        return self._turns[half]

    def states(self, layer: str) -> Iterator[RequestStates]:
        """A recurrent layer's states of all requests of the step, in batch order."""
        pages = self.cache.pages[layer]
        if not isinstance(pages, StatePages):
            raise TypeError(f"layer {layer!r} keeps no recurrent state")
        table = self.tables[self.cache.group_of[layer]]
        for segment in self.segments:
            yield RequestStates(segment.span, pages, table[segment.row, 0].long(), segment.start == 0)

    def attend(
        self,
        layer: str,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor | None,
        *,
        window: int | None = None,
    ) -> torch.Tensor:
        """Store the batch's keys and values, then attend over the cache.

        ``query`` is ``(tokens, query heads, width)``, ``keys`` and ``values`` ``(tokens, kv heads, ..)``.
        With ``values`` None the key rows are the values. Returns ``(tokens, query heads, value width)``.
        """
        pages, table = self._store(layer, keys, values), self.tables[self.cache.group_of[layer]]
        attention = self.cache.layer_attention[layer]
        return attention.attend(pages, query, self.segments, table, window=window)

    def _store(self, layer: str, keys: torch.Tensor, values: torch.Tensor | None) -> AttentionPages:
        pages = self.cache.pages[layer]
        if not isinstance(pages, AttentionPages):
            raise TypeError(f"layer {layer!r} keeps no rows by token")
        kernel_ids, offsets = self._slots[self.cache.group_of[layer]]
        pages.keys.write(kernel_ids, offsets, keys)
        if pages.values is not None and values is not None:
            pages.values.write(kernel_ids, offsets, values)
        return pages


def attend_rows(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor
) -> torch.Tensor:
    """Attention of each row's queries over its keys.

    ``query`` is ``(rows, tokens, heads, width)``, keys and values ``(rows, positions, kv heads, ..)``, and
    ``visible`` is ``(rows, tokens, positions)``; every token sees at least one position.
    """
    mixed = scaled_dot_product_attention(
        query.transpose(1, 2),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        attn_mask=visible[:, None],
        enable_gqa=True,
    )
    return mixed.transpose(1, 2)
