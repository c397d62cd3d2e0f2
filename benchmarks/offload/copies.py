"""Copies of blocks to host memory and back, beside what the link and plainer ways can do in the same run."""

from __future__ import annotations

import ctypes
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvconnect.cache.region_table import CacheTensor, RegionTable
from kvconnect.cache.specs import FullAttentionSpec, KVCacheConfig, KVCacheGroup
from kvconnect.errors import ConfigError
from kvconnect.offload.copies.arena import RowArena
from kvconnect.offload.copies.copier import Copier, make_arena, make_copier
from kvconnect.offload.copies.rows import RowLayout
from kvconnect.offload.index.budgets import plan_arena
from kvconnect.orders import RowCopies
from kvconnect.pack.lanes import Column

_TOKENS = 16
_REPEATS = 7


@dataclass(frozen=True)
class CopyTiming:
    """One case, both directions; rates are medians from the call until all is done, in GB/s.

    ``rows`` are adjacent in host memory, or scattered. ``contiguous`` is one copy of as many bytes between
    the device and pinned memory, ``per_page`` one copy for each page. ``host_us`` is how long calls take.
    """

    device: str
    rows: str
    page_bytes: int
    regions: int
    blocks: int
    total_bytes: int
    contiguous_out: float
    contiguous_back: float
    per_page_out: float
    per_page_back: float
    out: float
    back: float
    out_of_contiguous: float
    back_of_contiguous: float
    out_host_us: float
    back_host_us: float
    staging_waits: int
    verified: bool


class Case:
    """Layers in allocations of their own, random blocks of them, and twice as many rows as are used.

    Raises:
        ConfigError: a page of so many bytes cannot be made.
    """

    def __init__(self, device: str, page_bytes: int, regions: int, blocks: int) -> None:
        if page_bytes < 4 * _TOKENS or page_bytes % (4 * _TOKENS):
            raise ConfigError(f"page_bytes is {page_bytes}; accepted: multiples of {4 * _TOKENS}")
        self.device, self.page_bytes, self.regions, self.blocks = device, page_bytes, regions, blocks
        self.total_bytes = page_bytes * regions * blocks
        self.num_blocks = 2 * blocks + 1
        names = tuple(f"layer{index}" for index in range(regions))
        shape = (self.num_blocks, page_bytes // 2)
        self.tensors = {
            name: torch.randint(0, 2**15, shape, dtype=torch.int16, device=device) for name in names
        }
        spec = FullAttentionSpec(_TOKENS, 1, page_bytes // (4 * _TOKENS), torch.int16)
        views = {
            name: CacheTensor(tensor.view(self.num_blocks, _TOKENS, 1, -1), "block token head content")
            for name, tensor in self.tensors.items()
        }
        config = KVCacheConfig(self.num_blocks, (KVCacheGroup(names, spec),))
        self.table = RegionTable.build(config, {0: _TOKENS}, views)
        self.layout = RowLayout.build(self.table)
        row_bytes = self.layout.row_bytes
        self.arena: RowArena = make_arena(plan_arena(2 * blocks * row_bytes[0], row_bytes, {0: 1.0}), device)
        ids = random.Random(0).sample(range(1, self.num_blocks), 2 * blocks)
        self.source, self.target = tuple(ids[:blocks]), tuple(ids[blocks:])
        scattered = random.Random(1).sample(range(2 * blocks), blocks)
        self.rows = {"scattered": tuple(scattered), "adjacent": tuple(range(blocks))}

    def copier(self) -> Copier:
        return make_copier(self.layout, self.arena, self.device)

    def gb_per_s(self, call: Callable[[], object]) -> float:
        """The median rate of a call that returns when all is done."""
        times = []
        for _ in range(_REPEATS + 1):
            self._settle()
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
        return self.total_bytes / statistics.median(times[1:]) / 1e9

    def host_us(self, call: Callable[[], object]) -> float:
        """The median time until a call returns, the device idle before it."""
        times = []
        for _ in range(_REPEATS):
            self._settle()
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
        self._settle()
        return statistics.median(times) * 1e6

    def contiguous(self) -> tuple[float, float]:
        """Of one copy out of as many bytes, and of one back."""
        on_device = torch.ones(self.total_bytes, dtype=torch.uint8, device=self.device)
        on_host = torch.empty(self.total_bytes, dtype=torch.uint8, pin_memory=self.device != "cpu")
        on_host.fill_(1)

        def copy(target: torch.Tensor, source: torch.Tensor) -> None:
            target.copy_(source, non_blocking=True)
            self._settle()

        return (
            self.gb_per_s(lambda: copy(on_host, on_device)),
            self.gb_per_s(lambda: copy(on_device, on_host)),
        )

    def per_page(self) -> tuple[float, float]:
        """Of one copy for each page, out and back: the pages of a block side by side in its row."""
        rows = self.layout.groups[0]
        blocks = np.array(self.source, dtype=np.int64)
        page = np.array([region.address for region in self.table.regions], dtype=np.int64)
        pages: Column = (blocks[:, None] * self.page_bytes + page[None, :]).reshape(-1)
        hosts = self.arena.addresses(0, np.array(self.rows["scattered"], dtype=np.int64))
        places = np.arange(self.regions, dtype=np.int64) * self.page_bytes
        in_rows: Column = (hosts[:, None] + places[None, :]).reshape(-1)
        assert rows.content_bytes == self.page_bytes * self.regions
        copy = self._page_copies(np.full(len(pages), self.page_bytes, dtype=np.int64))
        return self.gb_per_s(lambda: copy(pages, in_rows)), self.gb_per_s(lambda: copy(in_rows, pages))

    def _page_copies(self, length: Column) -> Callable[[Column, Column], None]:
        if self.device == "cpu":

            def copy_here(source: Column, target: Column) -> None:
                for here, there, size in zip(source.tolist(), target.tolist(), length.tolist(), strict=True):
                    ctypes.memmove(there, here, size)

            return copy_here
        from kvconnect.offload.copies.cuda_device import CudaDevice

        memory = CudaDevice(torch.device(self.device))
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

        def copy(source: Column, target: Column) -> None:
            memory.copy(source, target, length, stream.cuda_stream)
            stream.synchronize()

        return copy

    def verified(self, copier: Copier, rows: Sequence[int]) -> bool:
        """What went out and came back to other blocks is what it was, by plain indexing."""
        wanted = {name: tensor[list(self.source)] for name, tensor in self.tensors.items()}
        out = copier.snapshot([RowCopies(0, self.source, tuple(rows))])
        out.wait()
        back = copier.restore([RowCopies(0, self.target, tuple(rows))], copier.mark())
        back.wait()
        return (out.error, back.error) == (None, None) and all(
            torch.equal(tensor[list(self.target)], wanted[name]) for name, tensor in self.tensors.items()
        )

    def _settle(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()


def measure_case(case: Case) -> Iterator[CopyTiming]:
    """Rows scattered and adjacent; the yardsticks are measured once, before."""
    contiguous, per_page = case.contiguous(), case.per_page()
    copier = case.copier()
    for rows in case.rows:
        yield _measure(case, copier, rows, contiguous, per_page)
    copier.close()
    case.arena.close()


def _measure(
    case: Case,
    copier: Copier,
    rows: str,
    contiguous: tuple[float, float],
    per_page: tuple[float, float],
) -> CopyTiming:
    out = [RowCopies(0, case.source, case.rows[rows])]
    back = [RowCopies(0, case.target, case.rows[rows])]
    verified = case.verified(copier, case.rows[rows])
    waits = copier.staging_waits
    rate_out = case.gb_per_s(lambda: copier.snapshot(out).wait())
    rate_back = case.gb_per_s(lambda: copier.restore(back).wait())
    return CopyTiming(
        device=case.device,
        rows=rows,
        page_bytes=case.page_bytes,
        regions=case.regions,
        blocks=case.blocks,
        total_bytes=case.total_bytes,
        contiguous_out=round(contiguous[0], 2),
        contiguous_back=round(contiguous[1], 2),
        per_page_out=round(per_page[0], 2),
        per_page_back=round(per_page[1], 2),
        out=round(rate_out, 2),
        back=round(rate_back, 2),
        out_of_contiguous=round(rate_out / contiguous[0], 3),
        back_of_contiguous=round(rate_back / contiguous[1], 3),
        staging_waits=copier.staging_waits - waits,
        out_host_us=round(case.host_us(lambda: copier.snapshot(out)), 1),
        back_host_us=round(case.host_us(lambda: copier.restore(back)), 1),
        verified=verified,
    )
