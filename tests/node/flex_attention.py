"""A node that attends to the pages alone that the buffers of ``runner_kit/flex_capacity.py`` name.

They name the kernel pages of each query group: a wrong entry gives wrong tokens. Within those the mask
decides by request and position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvconnect.node.attention import AttentionPages, Backend, PagedAttention, Segment, attend_rows
from kvconnect.node.node_options import NodeOptions
from kvconnect.runner_kit.flex_capacity import NULL_PAGE, FlexBuffers, FlexCapacity
from kvconnect.runner_kit.kernel_blocks import GraphSupport

# Query groups are as long as a kernel page, up to this: a decode step's few tokens are padded to a group.
MAX_QUERY_BLOCK = 64


@dataclass(frozen=True, kw_only=True)
class FlexBackend(Backend):
    """For layers of one kind, with the options that its buffers are allocated for.

    It chooses shapes by the batch, so a CUDA graph cannot hold it.
    """

    options: NodeOptions
    graph_support: GraphSupport = GraphSupport.NEVER

    def make_metadata_builder(self, kernel_block_size: int) -> FlexAttention:
        capacity = FlexCapacity(
            self.options.max_num_batched_tokens,
            self.options.max_model_len,
            min(kernel_block_size, MAX_QUERY_BLOCK),
            kernel_block_size,
        )
        return FlexAttention(FlexBuffers(capacity, torch.device(self.options.device)))


def flex_backend(backend: Backend, options: NodeOptions) -> FlexBackend:
    """What takes a backend's place, for the same block sizes."""
    name = backend.name.replace("TORCH", "FLEX")
    return FlexBackend(name=name, kernel_block_sizes=backend.kernel_block_sizes, options=options)


class FlexAttention(PagedAttention):
    """Attention over the pages in ``buffers``."""

    def __init__(self, buffers: FlexBuffers) -> None:
        super().__init__(buffers.capacity.page_tokens)
        self.buffers = buffers

    def attend(
        self,
        pages: AttentionPages,
        query: torch.Tensor,
        segments: Sequence[Segment],
        table: torch.Tensor,
        *,
        window: int | None,
    ) -> torch.Tensor:
        device, limits = table.device, self.buffers.capacity
        tables = table[torch.tensor([one.row for one in segments], device=device)]
        blocks = self.buffers.fill(
            query_lens=[one.length for one in segments],
            seq_lens=[one.start + one.length for one in segments],
            block_tables=tables,
            sliding_window=window,
        )
        logical = _logical_pages(segments, tables, len(pages.keys.pages), limits.page_tokens, window)
        request = torch.cat([torch.full((one.length,), at) for at, one in enumerate(segments)]).to(device)
        position = torch.cat([torch.arange(one.start, one.start + one.length) for one in segments]).to(device)
        outputs = []
        for group, first in enumerate(range(0, len(query), limits.q_block_size)):
            rows = slice(first, first + limits.q_block_size)
            ids = blocks.kv_indices[group, : int(blocks.kv_num_blocks[group])].long()
            keys = pages.keys.gather(ids)
            values = keys if pages.values is None else pages.values.gather(ids)
            place = logical[request[rows]][:, ids]
            key = place[..., None] * limits.page_tokens + torch.arange(limits.page_tokens, device=device)
            visible = (place[..., None] >= 0) & (key <= position[rows, None, None])
            if window is not None:
                visible &= key > position[rows, None, None] - window
            seen = visible.flatten(1)[None]
            outputs.append(attend_rows(query[rows][None], keys[None], values[None], seen)[0])
        return torch.cat(outputs)


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
