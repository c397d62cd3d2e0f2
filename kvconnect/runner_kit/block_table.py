"""Block tables: tensors by which attention kernels find the kernel blocks of a request's tokens.

There is one table per cache group, with one row per request. Callers pass logical block ids; the tables hold
kernel block ids. Writes are staged on the host and applied together, on a GPU in one launch for all groups.
The tensors are allocated once and keep their addresses, so that CUDA graphs can capture them. A write past
the end of a row raises an error and changes nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvconnect.cache.specs import div_exact
from kvconnect.errors import LocalError
from kvconnect.runner_kit.kernels import wants_triton

PAD_SLOT = -1
"""The slot of a token whose KV is not written."""

Numbers = NDArray[np.int32]


class TableMemory(NamedTuple):
    """Tensors and numbers with one entry per table, in the order of groups: see ``BlockTables``."""

    tables: Sequence[torch.Tensor]
    batch: Sequence[torch.Tensor]
    slots: Sequence[torch.Tensor]
    ratios: Sequence[int]
    kernel_block_sizes: Sequence[int]


class TableOps:
    """The unchecked operations behind ``BlockTables``, in torch: a few calls per group.

    A record is five int32 numbers: table, row, first entry, count and offset in ``ids``. A positive count is
    a number of logical ids to write, a negative one a number of entries to set to the null block.
    """

    def __init__(self, memory: TableMemory) -> None:
        self._tables, self._batch, self._slots, self._ratios, self._sizes = memory

    def apply(self, records: Numbers, ids: Numbers, keep_order: bool) -> None:
        """Apply records, in order if ``keep_order``; without it no two records may write the same entry."""
        for index, table in enumerate(self._tables):
            mine = records[records[:, 0] == index].astype(np.int64)
            if not len(mine):
                continue
            ratio = self._ratios[index]
            writes = mine[:, 3] > 0
            entries = np.where(writes, mine[:, 3] * ratio, -mine[:, 3])
            within = np.arange(entries.sum()) - np.repeat(np.cumsum(entries) - entries, entries)
            target = np.repeat(mine[:, 1] * table.shape[1] + mine[:, 2], entries) + within
            values = np.zeros(len(target), dtype=np.int32)
            written = np.repeat(writes, entries)
            source = (np.repeat(mine[:, 4], entries) + within // ratio)[written]
            values[written] = ids[source] * ratio + (within % ratio)[written]
            if keep_order:
                # Of several indexed writes to one entry, an arbitrary one wins: keep only the last.
                _, last = np.unique(target[::-1], return_index=True)
                keep = len(target) - 1 - last
                target, values = target[keep], values[keep]
            entry = torch.from_numpy(target).to(table.device)
            table.view(-1)[entry] = torch.from_numpy(values).to(table.device)

    def gather(self, request_indices: torch.Tensor, num_rows: int) -> None:
        count = len(request_indices)
        for table, batch in zip(self._tables, self._batch, strict=True):
            batch[:count] = table[request_indices]
            batch[count:num_rows] = 0

    def compute_slots(
        self, indices: torch.Tensor, query_start: torch.Tensor, positions: torch.Tensor, num_tokens: int
    ) -> None:
        for slots in self._slots:
            slots[:num_tokens] = PAD_SLOT
        if not len(indices):
            return
        tokens = torch.arange(len(positions), device=positions.device)
        request = torch.searchsorted(query_start, tokens, right=True) - 1
        known = (request >= 0) & (request < len(indices))
        rows = indices[request.clamp(0, len(indices) - 1)]
        for table, slots, size in zip(self._tables, self._slots, self._sizes, strict=True):
            block = torch.div(positions, size, rounding_mode="floor")
            held = known & (positions >= 0) & (block < table.shape[1])
            picked = table[rows, block.clamp(0, table.shape[1] - 1)].long()
            slots[: len(positions)] = torch.where(held, picked * size + positions % size, PAD_SLOT)


Indices = Sequence[int] | NDArray[np.int64] | torch.Tensor


class BlockTables:
    """One block table per cache group, in kernel blocks.

    Args:
        max_requests: the number of rows of every table.
        max_blocks: the most *logical* blocks of one request, per group index.
        block_sizes: tokens of a logical block, per group index.
        kernel_block_sizes: tokens of a kernel block, per group index; divides the logical size.
        max_tokens: the most tokens of one batch, for ``compute_slots``.
        device: the device of the tensors that kernels read.
        kernels: ``"torch"``, ``"triton"``, or ``"auto"`` for Triton on CUDA and torch elsewhere.
    """

    def __init__(
        self,
        *,
        max_requests: int,
        max_blocks: Mapping[int, int],
        block_sizes: Mapping[int, int],
        kernel_block_sizes: Mapping[int, int],
        max_tokens: int = 0,
        device: torch.device | str = "cpu",
        kernels: str = "auto",
    ) -> None:
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.blocks_per_kv_block = {
            group: div_exact(block_sizes[group], kernel) for group, kernel in kernel_block_sizes.items()
        }
        self.kernel_block_sizes = dict(kernel_block_sizes)
        self._position = {group: index for index, group in enumerate(kernel_block_sizes)}
        self._ratios = tuple(self.blocks_per_kv_block.values())
        self._capacities = tuple(
            max_blocks[group] * ratio for group, ratio in self.blocks_per_kv_block.items()
        )

        def tables() -> list[torch.Tensor]:
            return [
                torch.zeros((max_requests, capacity), dtype=torch.int32, device=device)
                for capacity in self._capacities
            ]

        self._tables, self._batch = tables(), tables()
        self._slots = [
            torch.full((max_tokens,), PAD_SLOT, dtype=torch.int64, device=device) for _ in self._position
        ]
        sizes = tuple(kernel_block_sizes.values())
        memory = TableMemory(self._tables, self._batch, self._slots, self._ratios, sizes)
        self._ops: TableOps
        if wants_triton(kernels, bool(self._tables) and self._tables[0].is_cuda):
            from kvconnect.runner_kit.table_ops_triton import TritonTableOps

            self._ops = TritonTableOps(memory)
        else:
            self._ops = TableOps(memory)
        self._device = self._tables[0].device if self._tables else torch.device(device)
        self._counts = np.zeros((max_requests, len(self._position)), dtype=np.int64)
        self._staged = _Staged()

    def capacity(self, group: int) -> int:
        """The most kernel blocks in a row of the group's table."""
        return self._capacities[self._position[group]]

    def num_blocks(self, group: int, request_index: int) -> int:
        """The number of kernel blocks in a row, with staged ones."""
        return int(self._counts[request_index, self._position[group]])

    def append_block_ids(
        self, request_index: int, new_block_ids: Sequence[Sequence[int]], overwrite: bool = False
    ) -> None:
        """Stage logical block ids for a request's rows, one list per group index.

        ``overwrite`` replaces the rows' content, without lists by null blocks. Groups without a table must
        have an empty list.

        Raises:
            LocalError: a row would overflow, an id is negative, or the request index is out of range.
                Nothing is staged then, in any group.
        """
        self._check_row(request_index)
        counts: list[int] = self._counts[request_index].tolist()
        ends = [0] * len(counts) if overwrite else counts.copy()
        for group, ids in enumerate(new_block_ids):
            if not len(ids):
                continue
            index = self._position.get(group)
            if index is None:
                raise LocalError(f"cache group {group} has no block table, but got {len(ids)} block ids")
            ends[index] += len(ids) * self._ratios[index]
            if ends[index] > self._capacities[index]:
                raise LocalError(
                    f"request index {request_index} would hold {ends[index]} kernel blocks in cache group "
                    f"{group}, whose rows hold {self._capacities[index]}"
                )
            if min(ids) < 0:
                raise LocalError(f"cache group {group} got block id {min(ids)}, ids are 0 or more")
        self._staged.touch(request_index)
        for group, ids in enumerate(new_block_ids):
            if len(ids):
                index = self._position[group]
                self._staged.write(index, request_index, 0 if overwrite else counts[index], ids)
        for index, (count, end) in enumerate(zip(counts, ends, strict=True)):
            if count > end:
                self._staged.zero(index, request_index, end, count - end)
        self._counts[request_index] = ends

    def apply(self) -> None:
        """Apply all staged writes in their order, so that kernels on the current stream see them."""
        staged = self._staged
        if staged.records:
            records = np.frombuffer(staged.records, dtype=np.int32).reshape(-1, 5)
            self._ops.apply(records, np.frombuffer(staged.ids, dtype=np.int32), staged.keep_order)
            self._staged = _Staged()

    def table(self, group: int) -> torch.Tensor:
        """The group's table: int32 of shape ``(max_requests, capacity)``, at a fixed address."""
        return self._tables[self._position[group]]

    def row(self, group: int, request_index: int) -> torch.Tensor:
        """The kernel block ids of one request: a view of ``table``, int32 ``(num_blocks,)``."""
        return self.table(group)[request_index, : self.num_blocks(group, request_index)]

    def batch_table(self, group: int) -> torch.Tensor:
        """Rows of the last ``gather``: int32 of shape ``(max_requests, capacity)``, at a fixed address."""
        return self._batch[self._position[group]]

    def slots(self, group: int) -> torch.Tensor:
        """The slots that ``compute_slots`` filled: int64 of shape ``(max_tokens,)``, at a fixed address."""
        return self._slots[self._position[group]]

    def gather(self, request_indices: Indices, num_rows: int) -> None:
        """Fill ``batch_table`` of every group: row i becomes row ``request_indices[i]`` of ``table``.

        Further rows before ``num_rows`` become zero. On a GPU it is one launch, which a CUDA graph can
        capture if ``request_indices`` is a tensor on the device.

        Raises ``LocalError``: ``num_rows`` is not between the number of requests and ``max_requests``, or an
        index on the host is out of range.
        """
        self._check_rows(request_indices)
        indices = self._on_device(request_indices)
        if not len(indices) <= num_rows <= self.max_requests:
            raise LocalError(
                f"num_rows is {num_rows}, accepted: {len(indices)} (the requests) to {self.max_requests}"
            )
        self._ops.gather(indices, num_rows)

    def compute_slots(
        self, request_indices: Indices, query_start: Indices, positions: Indices, num_tokens: int
    ) -> None:
        """Fill ``slots`` of every group: the place in the cache to which the KV of each token is written.

        Request i of the batch computes tokens ``query_start[i] .. query_start[i + 1] - 1``, at ``positions``
        in its sequence. ``slot = kernel_block * kernel_block_size + position % kernel_block_size``. Slots of
        tokens from ``query_start[-1]`` up to ``num_tokens``, and of positions beyond a row, become -1. On a
        GPU it is one launch, which a CUDA graph can capture if the arguments are tensors on the device.

        Raises:
            LocalError: ``num_tokens`` is more than ``max_tokens``, or the arguments do not fit together.
        """
        self._check_rows(request_indices)
        indices, starts, places = (
            self._on_device(given) for given in (request_indices, query_start, positions)
        )
        if num_tokens > self.max_tokens or len(places) > num_tokens:
            raise LocalError(
                f"num_tokens is {num_tokens}, accepted: {len(places)} (the positions) to {self.max_tokens}"
            )
        if len(starts) != len(indices) + 1:
            raise LocalError(f"query_start has {len(starts)} entries for {len(indices)} requests")
        self._ops.compute_slots(indices, starts, places, num_tokens)

    def _on_device(self, given: Indices) -> torch.Tensor:
        """The numbers as an int64 tensor on the device; such a tensor is returned as it is."""
        if not isinstance(given, torch.Tensor):
            given = torch.as_tensor(np.asarray(given, dtype=np.int64))
        return given.to(self._device, torch.int64)

    def _check_row(self, request_index: int) -> None:
        if not 0 <= request_index < self.max_requests:
            raise LocalError(f"request index {request_index} is not in 0..{self.max_requests - 1}")

    def _check_rows(self, request_indices: Indices) -> None:
        """Checks host values only: reading a tensor would wait for the device, and kernels bound indices."""
        if isinstance(request_indices, torch.Tensor) or not len(request_indices):
            return
        for index in (min(request_indices), max(request_indices)):
            self._check_row(int(index))


class _Staged:
    """Writes that wait for ``BlockTables.apply``, as records and ids (see ``TableOps``)."""

    def __init__(self) -> None:
        self.records, self.ids = array("i"), array("i")
        self.keep_order = False
        """Whether more than one call has staged writes to the same row."""
        self._touched = set[int]()

    def touch(self, request_index: int) -> None:
        """Note that a row is about to be written."""
        self.keep_order |= request_index in self._touched
        self._touched.add(request_index)

    def write(self, table: int, row: int, start: int, block_ids: Sequence[int]) -> None:
        """Stage logical ids from kernel entry ``start`` on."""
        self.records.extend((table, row, start, len(block_ids), len(self.ids)))
        self.ids.extend(block_ids)

    def zero(self, table: int, row: int, start: int, count: int) -> None:
        """Stage the null block for ``count`` kernel entries from ``start`` on."""
        self.records.extend((table, row, start, -count, 0))
