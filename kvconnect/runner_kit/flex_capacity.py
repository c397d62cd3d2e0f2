"""The persistent buffers that a flex-attention metadata builder reuses across steps.

A batch's tokens, in order, are cut into *query groups* of ``q_block_size`` tokens. For every group the
buffers name the kernel pages that any token of the group may attend to. They are allocated once, for the
largest batch there can be, and keep their addresses, so that CUDA graphs can capture them. This file knows
nothing of kernels or models: pages are numbers out of block tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from kvconnect.cache.specs import div_ceil
from kvconnect.errors import ConfigError, LocalError

# Kernels may be made to read this page: it exists in every cache and holds nothing.
NULL_PAGE = 0
# Rows of kv_indices begin at multiples of 16 bytes.
ROW_ALIGNMENT = 4
# Page ids are int32, so a group's number goes above them in a sort key.
PAGE_BITS = 32


@dataclass(frozen=True)
class FlexCapacity:
    """How much the buffers must hold. A function of four numbers, all of them in tokens.

    ``q_block_size`` is a query group's, ``page_tokens`` a kernel page's. Raises ``ConfigError`` for one
    that is not a positive integer.
    """

    max_num_batched_tokens: int
    max_model_len: int
    q_block_size: int
    page_tokens: int

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{field.name} is {value!r}; it must be an integer of at least 1")

    @property
    def query_groups(self) -> int:
        """Most query groups of a batch. The batch bounds them, not the length of a sequence."""
        return div_ceil(self.max_num_batched_tokens, self.q_block_size)

    @property
    def kv_indices(self) -> int:
        """Most pages of one group: each of its tokens may belong to another request of full length.

        A batch of ``q_block_size`` requests at ``max_model_len`` without common pages needs all of them.
        """
        return self.q_block_size * div_ceil(self.max_model_len, self.page_tokens)

    @property
    def row_stride(self) -> int:
        """Elements from one group's indices to the next one's: room for a slot beyond the last."""
        return div_ceil(self.kv_indices + 1, ROW_ALIGNMENT) * ROW_ALIGNMENT


@dataclass(frozen=True)
class FlexBlocks:
    """What one step's kernels read: views of the persistent tensors, valid until the next ``fill``.

    Attributes:
        kv_num_blocks: pages of each query group, int32 of shape ``(groups,)``.
        kv_indices: their ids, ascending, int32 of shape ``(groups, capacity.kv_indices)``; null pages
            after them.
        most_kv_blocks: what ``kv_num_blocks`` cannot exceed, int64 of shape ``(groups,)`` on the host,
            so that shapes can be chosen without waiting for a device.
    """

    kv_num_blocks: torch.Tensor
    kv_indices: torch.Tensor
    most_kv_blocks: torch.Tensor


class FlexBuffers:
    """``kv_num_blocks`` and ``kv_indices`` at fixed addresses, refilled every step.

    A slot beyond the last valid index of a group may be read, up to and including slot
    ``capacity.kv_indices``, which is one past the end of the row: kernels fetch the next index ahead of
    time. All such slots lie inside the allocation and hold the null page.
    """

    def __init__(self, capacity: FlexCapacity, device: torch.device | str = "cpu") -> None:
        self.capacity = capacity
        groups, stride = capacity.query_groups, capacity.row_stride
        self._flat = torch.full((groups * stride,), NULL_PAGE, dtype=torch.int32, device=device)
        self.kv_indices = self._flat.view(groups, stride)[:, : capacity.kv_indices]
        """int32 of shape ``(query_groups, kv_indices)``, rows ``row_stride`` apart. Never moves."""
        self.kv_num_blocks = torch.zeros(groups, dtype=torch.int32, device=device)
        """int32 of shape ``(query_groups,)``. Never moves."""
        self._filled = (0, 0)

    def fill(
        self,
        *,
        query_lens: Sequence[int] | torch.Tensor,
        seq_lens: Sequence[int] | torch.Tensor,
        block_tables: torch.Tensor,
        sliding_window: int | None = None,
    ) -> FlexBlocks:
        """Name the pages of a batch whose requests' tokens follow each other in order.

        Args:
            query_lens: tokens of each request in the batch, on the host; they are its last ones.
            seq_lens: tokens of each request including those, on the host.
            block_tables: kernel page ids by request and page of the sequence, on the buffers' device.
                The null page is never named: no token attends to it.
            sliding_window: a token sees itself and the ``sliding_window - 1`` tokens before it; None: all.

        Nothing is waited for on the device, and no Python runs per token, page or group.

        Raises:
            LocalError: the batch is beyond the capacity or contradicts itself. The buffers are unchanged.
        """
        queries, ends = _host(query_lens), _host(seq_lens)
        self._check(queries, ends, block_tables, sliding_window)
        used = div_ceil(int(queries.sum()), self.capacity.q_block_size)
        runs = self._page_runs(queries, ends, sliding_window)
        group, _, _, length = runs
        most = torch.zeros(used, dtype=torch.int64).index_add_(0, group, length)
        # What the previous step named is null again.
        groups, width = self._filled
        self.kv_num_blocks[:groups] = 0
        self.kv_indices[:groups, :width] = NULL_PAGE
        self._filled = (used, int(most.max()) if used else 0)
        if total := int(length.sum()):
            self._write(runs, total, block_tables)
        return FlexBlocks(self.kv_num_blocks[:used], self.kv_indices[:used], most)

    def _check(
        self, queries: torch.Tensor, ends: torch.Tensor, tables: torch.Tensor, window: int | None
    ) -> None:
        limits = self.capacity
        if queries.ndim != 1 or queries.shape != ends.shape or len(queries) != len(tables):
            raise LocalError(
                f"query lengths of shape {tuple(queries.shape)}, sequence lengths of shape "
                f"{tuple(ends.shape)} and {len(tables)} rows of block tables are not of the same requests"
            )
        if window is not None and window < 1:
            raise LocalError(f"sliding_window is {window}; it must be at least 1")
        if not len(queries):
            return
        if int(queries.min()) < 0:
            raise LocalError(f"a request has {int(queries.min())} tokens in the batch; the least is 0")
        if bool((queries > ends).any()):
            first = int((queries > ends).nonzero()[0])
            raise LocalError(
                f"a request has {int(queries[first])} tokens in the batch, but {int(ends[first])} in all"
            )
        if int(queries.sum()) > limits.max_num_batched_tokens:
            raise LocalError(
                f"a batch of {int(queries.sum())} tokens does not fit flex-attention buffers for "
                f"{limits.max_num_batched_tokens}"
            )
        longest = int(ends.max())
        most = limits.max_model_len
        if longest > most:
            raise LocalError(f"a sequence of {longest} tokens does not fit flex-attention buffers for {most}")
        if longest > tables.shape[1] * limits.page_tokens:
            raise LocalError(
                f"a sequence of {longest} tokens needs {div_ceil(longest, limits.page_tokens)} pages, but "
                f"its row of the block table has {tables.shape[1]}"
            )

    def _page_runs(self, queries: torch.Tensor, ends: torch.Tensor, window: int | None) -> torch.Tensor:
        """The runs of pages that each request's tokens see, one per group they lie in. On the host.

        Rows of a tensor: the group, the request, the first page of its sequence, and how many.
        """
        q_block, page = self.capacity.q_block_size, self.capacity.page_tokens
        batch_end = queries.cumsum(0)
        batch_start = batch_end - queries
        first_group = batch_start // q_block
        num_groups = torch.where(queries > 0, (batch_end - 1) // q_block - first_group + 1, 0)
        request = torch.arange(len(queries)).repeat_interleave(num_groups)
        group = first_group[request] + _ranks(num_groups, request)
        first_token = torch.maximum(batch_start[request], group * q_block)
        last_token = torch.minimum(batch_end[request], (group + 1) * q_block) - 1
        position = (ends - batch_end)[request]
        last_page = (position + last_token) // page
        # The windows of neighbouring tokens overlap, so what a run of tokens sees has no holes.
        seen_from = torch.zeros_like(first_token) if window is None else position + first_token - window + 1
        first_page = seen_from.clamp(min=0) // page
        return torch.stack((group, request, first_page, last_page - first_page + 1))

    def _write(self, runs: torch.Tensor, total: int, tables: torch.Tensor) -> None:
        group, request, first, length = runs.to(tables.device, non_blocking=True)
        run = torch.arange(len(group), device=tables.device).repeat_interleave(length, output_size=total)
        pages = tables[request[run], first[run] + _ranks(length, run)].long()
        # Requests of a group can share pages (a common prefix); sorted, the copies are neighbours.
        key = ((group[run] << PAGE_BITS) | pages).sort().values
        pages, group = key & ((1 << PAGE_BITS) - 1), key >> PAGE_BITS
        fresh = pages != NULL_PAGE
        fresh[1:] &= key[1:] != key[:-1]
        # int64 counts, because index_add wants one dtype; the copy narrows them.
        counts = torch.zeros(len(self.kv_num_blocks), dtype=torch.int64, device=tables.device)
        counts.index_add_(0, group, fresh.long())
        slot = fresh.cumsum(0) - 1 - (counts.cumsum(0) - counts)[group]
        # What is not kept is written, as a null page, where nothing else ever is: the last row's last slot.
        place = torch.where(fresh, group * self.capacity.row_stride + slot, len(self._flat) - 1)
        self._flat[place] = torch.where(fresh, pages, NULL_PAGE).int()
        self.kv_num_blocks.copy_(counts)


def _host(lengths: Sequence[int] | torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(lengths, dtype=torch.int64, device="cpu")


def _ranks(counts: torch.Tensor, owner: torch.Tensor) -> torch.Tensor:
    """0, 1, .. within each owner, for ``owner`` made by repeating each index ``counts`` times."""
    return torch.arange(len(owner), device=owner.device) - (counts.cumsum(0) - counts)[owner]
