"""A node whose whole batch attends at once, with torch's flex_attention over the pages that buffers name.

The buffers of ``runner_kit/flex_capacity.py`` name the kernel pages of each query group: nothing else
is gathered, and a wrong entry gives wrong tokens. Within those the mask decides by request and position.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from kvconnect.node.attention import AttentionPages, Backend, Segment
from kvconnect.node.node_options import NodeOptions
from kvconnect.runner_kit.attention_groups import GraphSupport
from kvconnect.runner_kit.flex_capacity import NULL_PAGE, FlexBuffers, FlexCapacity

# Query groups are as long as a kernel page, up to this: a decode step's few tokens are padded to a group.
MAX_QUERY_BLOCK = 64
# Query-key pairs per head in one call: bounds the score matrix, which exists in full.
PAIRS_PER_CALL = 1 << 19

# The compiler's stance belongs to the process: two nodes in one process take turns.
_stance_lock = threading.Lock()
_Part = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class FlexBackend(Backend):
    """flex_attention for layers of one kind, and the limits that its buffers are allocated for.

    It chooses shapes by the batch, so a CUDA graph cannot hold it.
    """

    max_num_batched_tokens: int
    max_model_len: int
    device: torch.device
    graph_support: GraphSupport = GraphSupport.NEVER

    def make_metadata_builder(self, kernel_block_size: int) -> FlexAttention:
        """The persistent buffers for pages of ``kernel_block_size`` tokens, and attention over them."""
        capacity = FlexCapacity(
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            q_block_size=min(kernel_block_size, MAX_QUERY_BLOCK),
            page_tokens=kernel_block_size,
        )
        return FlexAttention(FlexBuffers(capacity, self.device))


def flex_backend(backend: Backend, options: NodeOptions) -> FlexBackend:
    """What takes a backend's place, for the same block sizes."""
    return FlexBackend(
        name=backend.name.replace("TORCH", "FLEX"),
        kernel_block_sizes=backend.kernel_block_sizes,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=options.max_model_len,
        device=torch.device(options.device),
    )


class FlexAttention:
    """Attention over the pages in ``buffers``, for the layers of one cache group and backend.

    Of the query groups of each call it has the ids of their pages, ``(groups, width)`` with null pages at
    the end, how many of them count, ``(groups,)``, and which rows of them each token sees,
    ``(groups, q_block_size, width * page_tokens)``.
    """

    def __init__(self, buffers: FlexBuffers) -> None:
        self.buffers = buffers
        self._segments: Sequence[Segment] = ()
        self._table = torch.empty(0)
        self._parts: list[_Part] = []
        self._filled_for: tuple[int | None, int] | None = None

    def begin(self, segments: Sequence[Segment], table: torch.Tensor) -> None:
        """See ``PagedAttention``."""
        self._segments, self._table, self._filled_for = segments, table, None

    def attend(
        self, pages: AttentionPages, query: torch.Tensor, *, window: int | None, value_width: int | None
    ) -> torch.Tensor:
        """See ``PagedAttention``."""
        # All layers of a step read the same pages, so the buffers are filled for the first of them.
        wanted = (window, pages.keys.pages.shape[0])
        if self._filled_for != wanted:
            self._fill(*wanted)
            self._filled_for = wanted
        tokens, heads, width = query.shape
        limits = self.buffers.capacity
        counts = [len(ids) for ids, _, _ in self._parts]
        padded = query.new_zeros((sum(counts) * limits.q_block_size, heads, width))
        padded[:tokens] = query
        grouped = padded.view(-1, limits.q_block_size, heads, width).transpose(1, 2)
        parts = zip(torch.split(grouped, counts), self._parts, strict=True)
        outputs = [self._attend_part(part, one, pages, value_width) for part, one in parts]
        return torch.cat(outputs).transpose(1, 2).flatten(0, 1)[:tokens]

    def _attend_part(
        self, query: torch.Tensor, part: _Part, pages: AttentionPages, value_width: int | None
    ) -> torch.Tensor:
        """``(groups, heads, q_block_size, width)`` to the same with the values' width."""
        ids, num_pages, visible = part
        keys = self._gather(pages.keys.gather(ids), num_pages)
        if pages.values is None:
            values = keys[..., :value_width]
        else:
            values = self._gather(pages.values.gather(ids), num_pages)
        limits, (groups, width) = self.buffers.capacity, ids.shape
        # The pages were gathered in the order of their indices, so the mask's blocks are 0, 1, ..
        order = torch.arange(width, dtype=torch.int32, device=query.device)
        block_mask = BlockMask.from_kv_blocks(
            num_pages.view(groups, 1, 1),
            order.expand(groups, 1, 1, width),
            BLOCK_SIZE=(limits.q_block_size, limits.page_tokens),
            mask_mod=lambda batch, _head, row, column: visible[batch, row, column],
            seq_lengths=(limits.q_block_size, width * limits.page_tokens),
            compute_q_blocks=False,
        )
        return _flex_attention(query, keys, values, block_mask)

    def _fill(self, window: int | None, num_pages: int) -> None:
        device, limits = self._table.device, self.buffers.capacity
        segments = self._segments
        tables = self._table[torch.tensor([s.row for s in segments], device=device)]
        blocks = self.buffers.fill(
            query_lens=[s.length for s in segments],
            seq_lens=[s.start + s.length for s in segments],
            block_tables=tables,
            sliding_window=window,
        )
        logical = _logical_pages(segments, tables, num_pages, limits.page_tokens, window)
        used, most = len(blocks.kv_num_blocks), blocks.most_kv_blocks
        # A padded token belongs to the first request and stands before its start, so it sees nothing.
        request = torch.zeros(used * limits.q_block_size, dtype=torch.int64)
        position = torch.full_like(request, -1)
        for index, segment in enumerate(segments):
            request[segment.span] = index
            position[segment.span] = torch.arange(segment.start, segment.start + segment.length)
        shape = (used, limits.q_block_size)
        request, position = request.view(shape).to(device), position.view(shape).to(device)
        groups = max(1, PAIRS_PER_CALL // (limits.q_block_size * int(most.max()) * limits.page_tokens))
        whole = (request, position, blocks.kv_indices, blocks.kv_num_blocks, most)
        parts = zip(*(torch.split(one, groups) for one in whole), strict=True)
        self._parts = []
        for rows, places, indices, count, widths in parts:
            ids = indices[:, : int(widths.max())].long()
            place = logical[rows[:, :, None], ids[:, None, :]]
            beyond = torch.arange(ids.shape[1], device=device) >= count[:, None]
            place.masked_fill_(beyond[:, None, :], -1)
            self._parts.append((ids, count, _visible(place, places, limits.page_tokens, window)))

    def _gather(self, rows: torch.Tensor, num_pages: torch.Tensor) -> torch.Tensor:
        """``(groups, rows, heads, width)`` to ``(groups, heads, rows, width)``, as a kernel would see it.

        It does not visit the pages after the last that counts. Here they are in the product, where only
        a zero leaves no trace of any value in the page.
        """
        count = num_pages.long()[:, None] * self.buffers.capacity.page_tokens
        beyond = torch.arange(rows.shape[1], device=rows.device) >= count
        return rows.masked_fill_(beyond[:, :, None, None], 0).transpose(1, 2)


def _logical_pages(
    segments: Sequence[Segment], tables: torch.Tensor, num_pages: int, page_tokens: int, window: int | None
) -> torch.Tensor:
    """Where in each request's sequence each page of the cache is, ``(requests, num_pages)``; -1: nowhere."""
    spans = [segment.pages(page_tokens, window) for segment in segments]
    first, end = torch.tensor([(span.start, span.stop) for span in spans], device=tables.device).T[..., None]
    column = torch.arange(tables.shape[1], device=tables.device).expand_as(tables)
    # A row still names pages that left the window, and by now they can be pages of the window again.
    pages = torch.where((column >= first) & (column < end), tables.long(), NULL_PAGE)
    logical = torch.full((len(segments), num_pages), -1, dtype=torch.int64, device=tables.device)
    logical.scatter_(1, pages, column)
    logical[:, NULL_PAGE] = -1
    return logical


def _visible(
    place: torch.Tensor, position: torch.Tensor, page_tokens: int, window: int | None
) -> torch.Tensor:
    """Which rows a token sees, from each page's place in its request (-1: not its) and its position."""
    key = place[..., None] * page_tokens + torch.arange(page_tokens, device=place.device)
    query = position[..., None, None]
    seen = (place[..., None] >= 0) & (key <= query)
    if window is not None:
        seen &= key > query - window
    return seen.flatten(2)


def _flex_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, block_mask: BlockMask
) -> torch.Tensor:
    # Not compiled: the fused kernel has no float64. The stance keeps torch from compiling the call on its
    # own, which it would do for every new shape.
    with _stance_lock, torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        out = flex_attention(query, keys, values, block_mask=block_mask, enable_gqa=True)
    assert isinstance(out, torch.Tensor)
    return out
