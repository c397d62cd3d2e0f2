"""The persistent buffers that a flex-attention metadata builder reuses across steps.

The tokens of a batch, in order, are divided into *query groups* of ``q_block_size`` tokens. For every group
the buffers list the kernel pages to which any token of the group may attend. They are allocated once, for the
largest batch, and keep their addresses, so that CUDA graphs can capture them. This module must not know
kernels or models: pages are numbers from block tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from kvconnect.cache.specs import div_ceil
from kvconnect.errors import ConfigError, LocalError

# The null page pads the buffers: it exists in every cache, so kernels can read it safely.
NULL_PAGE = 0
# Rows of kv_indices begin at multiples of 16 bytes.
ROW_ALIGNMENT = 4
# Page ids are int32: a sort key has the group's number in the bits above them.
PAGE_BITS = 32


@dataclass(frozen=True)
class FlexCapacity:
    """The sizes of the buffers, computed from four numbers of tokens.

    ``q_block_size`` are the tokens of a query group, ``page_tokens`` those of a kernel page. Raises
    ``ConfigError``: one of the numbers is not a positive integer.
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
        """The most query groups of a batch. It depends on the batch size, not on the length of a sequence."""
        return div_ceil(self.max_num_batched_tokens, self.q_block_size)

    @property
    def kv_indices(self) -> int:
        """The most pages of one group: each of its tokens may belong to another request of full length.

        ``q_block_size`` requests at ``max_model_len`` without common pages need all of them.
        """
        return self.q_block_size * div_ceil(self.max_model_len, self.page_tokens)

    @property
    def row_stride(self) -> int:
        """Elements from one row of ``kv_indices`` to the next, with room for a slot after the last index."""
        return div_ceil(self.kv_indices + 1, ROW_ALIGNMENT) * ROW_ALIGNMENT


@dataclass(frozen=True)
class FlexBlocks:
    """The input of one step's kernels: views of the persistent tensors, valid until the next ``fill``.

    Attributes:
        kv_num_blocks: the number of pages of each query group, int32 of shape ``(groups,)``.
        kv_indices: the page ids of each group, ascending, then null pages; int32 of shape
            ``(groups, capacity.kv_indices)``.
        most_kv_blocks: an upper bound of ``kv_num_blocks``, int64 of shape ``(groups,)`` on the host, so
            that shapes can be chosen without waiting for the device.
    """

    kv_num_blocks: torch.Tensor
    kv_indices: torch.Tensor
    most_kv_blocks: torch.Tensor


class FlexBuffers:
    """``kv_num_blocks`` and ``kv_indices`` at fixed addresses, refilled every step.

    Kernels prefetch the next index, so they may read slots after the last valid index of a group, up to and
    including slot ``capacity.kv_indices``, which is one past the end of the row. All these slots lie inside
    the allocation and hold the null page.
    """

    def __init__(self, capacity: FlexCapacity, device: torch.device | str = "cpu") -> None:
        self.capacity = capacity
        groups, stride = capacity.query_groups, capacity.row_stride
        self._flat = torch.full((groups * stride,), NULL_PAGE, dtype=torch.int32, device=device)
        self.kv_indices = self._flat.view(groups, stride)[:, : capacity.kv_indices]
        """int32 of shape ``(query_groups, kv_indices)``, rows ``row_stride`` apart, at a fixed address."""
        self.kv_num_blocks = torch.zeros(groups, dtype=torch.int32, device=device)
        """int32 of shape ``(query_groups,)``, at a fixed address."""
        self._filled = (0, 0)

    def fill(
        self,
        *,
        query_lens: Sequence[int] | torch.Tensor,
        seq_lens: Sequence[int] | torch.Tensor,
        block_tables: torch.Tensor,
        sliding_window: int | None = None,
    ) -> FlexBlocks:
        """List the pages of a batch, in which the tokens of each request are contiguous.

        Args:
            query_lens: the tokens of each request in the batch, its last ones, shape ``(n,)`` on the host.
            seq_lens: all tokens of each request, those in the batch included, shape ``(n,)`` on the host.
            block_tables: kernel page ids by request and page of the sequence, shape ``(n, pages)``, on the
                buffers' device. The null page is never listed: no token attends to it.
            sliding_window: a token sees itself and the ``sliding_window - 1`` tokens before it; None: all.

        It does not wait for the device, and runs no Python per token, page or group.

        Raises:
            LocalError: the batch exceeds the capacity or is inconsistent. The buffers are unchanged.
        """
        queries, ends = _host(query_lens), _host(seq_lens)
        self._check(queries, ends, block_tables, sliding_window)
        used = div_ceil(int(queries.sum()), self.capacity.q_block_size)
        runs = self._page_runs(queries, ends, sliding_window)
        group, _, _, length = runs
        most = torch.zeros(used, dtype=torch.int64).index_add_(0, group, length)
        # Reset the entries of the previous step.
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
        """Runs of pages that tokens see, one per pair of a group and a request. On the host.

        int64 of shape ``(4, runs)``: group, request, first page in the request's sequence, number of pages.
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
        # The windows of neighbouring tokens overlap, so the pages that a run of tokens sees are contiguous.
        seen_from = torch.zeros_like(first_token) if window is None else position + first_token - window + 1
        first_page = seen_from.clamp(min=0) // page
        return torch.stack((group, request, first_page, last_page - first_page + 1))

    def _write(self, runs: torch.Tensor, total: int, tables: torch.Tensor) -> None:
        group, request, first, length = runs.to(tables.device, non_blocking=True)
        run = torch.arange(len(group), device=tables.device).repeat_interleave(length, output_size=total)
        pages = tables[request[run], first[run] + _ranks(length, run)].long()
        # Requests of a group can share pages (a common prefix). Sorting makes duplicates adjacent.
        key = ((group[run] << PAGE_BITS) | pages).sort().values
        pages, group = key & ((1 << PAGE_BITS) - 1), key >> PAGE_BITS
        fresh = pages != NULL_PAGE
        fresh[1:] &= key[1:] != key[:-1]
        # int64 counts, since index_add needs equal dtypes; the copy below narrows them.
        counts = torch.zeros(len(self.kv_num_blocks), dtype=torch.int64, device=tables.device)
        counts.index_add_(0, group, fresh.long())
        slot = fresh.cumsum(0) - 1 - (counts.cumsum(0) - counts)[group]
        # Dropped pages are written as null pages to the last slot of the last row, which has no other use.
        place = torch.where(fresh, group * self.capacity.row_stride + slot, len(self._flat) - 1)
        self._flat[place] = torch.where(fresh, pages, NULL_PAGE).int()
        self.kv_num_blocks.copy_(counts)


def _host(lengths: Sequence[int] | torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(lengths, dtype=torch.int64, device="cpu")


def _ranks(counts: torch.Tensor, owner: torch.Tensor) -> torch.Tensor:
    """0, 1, .. within each owner, where ``owner`` repeats each index i ``counts[i]`` times."""
    return torch.arange(len(owner), device=owner.device) - (counts.cumsum(0) - counts)[owner]
