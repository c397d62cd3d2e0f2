"""What blocks cost on their way to host memory and back, beside what the link and plainer ways can do."""

from __future__ import annotations

import ctypes
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, ClassVar

import numpy as np
import torch

from benchmarks.cache import BLOCK_TOKENS, BenchCache, CacheShape
from benchmarks.device import check_device, run_seconds, wait_for_device
from benchmarks.harness import Options as BaseOptions
from benchmarks.harness import report
from kvconnect.errors import ConfigError
from kvconnect.offload.copies.copier import Copier, CopyTicket, make_arena, make_copier
from kvconnect.offload.copies.rows import RowArena, RowLayout
from kvconnect.offload.index.budgets import plan_arena
from kvconnect.pack.page_lanes import Column
from kvconnect.transfer.orders import RowCopies

_REPEATS = 7


@dataclass(frozen=True)
class Options(BaseOptions):
    SUITED: ClassVar = {"blocks": ([16, 64], [256, 1024])}

    device: Annotated[str, "cpu or cuda."] = "cpu"
    page_bytes: Annotated[list[int], "Bytes of a page (repeatable)."] = field(default_factory=lambda: [16384])
    regions: Annotated[int, "Layers, each in its own allocation."] = 64
    blocks: Annotated[
        list[int], "Blocks at a time (repeatable); default: 256 and 1024, on a CPU 16 and 64."
    ] = field(default_factory=list)


class Case:
    """Random blocks of layers in allocations of their own, and twice as many rows as are used.

    Raises:
        ConfigError: a page of so many bytes cannot be made.
    """

    def __init__(self, device: str, page_bytes: int, regions: int, blocks: int) -> None:
        if page_bytes <= 0 or page_bytes % (4 * BLOCK_TOKENS):
            raise ConfigError(f"page_bytes is {page_bytes}; accepted: multiples of {4 * BLOCK_TOKENS}")
        self.device, self.page_bytes, self.regions, self.blocks = device, page_bytes, regions, blocks
        self.total_bytes = page_bytes * regions * blocks
        shape = CacheShape(regions, 2 * blocks + 1, 1, page_bytes // (4 * BLOCK_TOKENS))
        self.cache = BenchCache(shape, device, seed=0)
        self.cache.draw(2, blocks, seed=0)
        self.source, self.target = self.cache.slots
        self.layout = RowLayout.build(self.cache.table())
        row_bytes = self.layout.row_bytes
        self.arena: RowArena = make_arena(plan_arena(2 * blocks * row_bytes[0], row_bytes, {0: 1.0}), device)
        scattered = random.Random(1).sample(range(2 * blocks), blocks)
        self.rows = {"scattered": tuple(scattered), "adjacent": tuple(range(blocks))}

    def copier(self) -> Copier:
        return make_copier(self.layout, self.arena, self.device)

    def gb_per_s(self, call: Callable[[], object]) -> float:
        """The median rate of a call that returns when all is done."""
        return self.total_bytes / statistics.median(run_seconds(call, 1 + _REPEATS)[1:]) / 1e9

    def host_us(self, call: Callable[[], object]) -> float:
        """The median time until a call returns, the device idle before it."""
        seconds = statistics.median(run_seconds(call, _REPEATS))
        wait_for_device(self.device)
        return seconds * 1e6

    def contiguous(self) -> tuple[float, float]:
        """Of one copy out of as many bytes, and of one back."""
        on_device = torch.ones(self.total_bytes, dtype=torch.uint8, device=self.device)
        on_host = torch.empty(self.total_bytes, dtype=torch.uint8, pin_memory=self.device != "cpu")
        on_host.fill_(1)

        def copy(target: torch.Tensor, source: torch.Tensor) -> None:
            target.copy_(source, non_blocking=True)
            wait_for_device(self.device)

        return (
            self.gb_per_s(lambda: copy(on_host, on_device)),
            self.gb_per_s(lambda: copy(on_device, on_host)),
        )

    def per_page(self) -> tuple[float, float]:
        """Of one copy for each page, out and back: the pages of a block side by side in its row."""
        blocks = np.array(self.source, dtype=np.int64)
        page = np.array([region.address for region in self.cache.table().regions], dtype=np.int64)
        pages: Column = (blocks[:, None] * self.page_bytes + page[None, :]).reshape(-1)
        hosts = self.arena.addresses(0, np.array(self.rows["scattered"], dtype=np.int64))
        places = np.arange(self.regions, dtype=np.int64) * self.page_bytes
        in_rows: Column = (hosts[:, None] + places[None, :]).reshape(-1)
        assert sum(lane.length for lane in self.layout.lanes[0]) == self.page_bytes * self.regions
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
        """Whether what went out and came back to other blocks is what it was."""
        wanted = self.cache.digests([0])
        out = copier.snapshot([RowCopies(0, self.source, tuple(rows))])
        out.wait()
        back = copier.restore([RowCopies(0, self.target, tuple(rows))], copier.mark())
        back.wait()
        landed = self.cache.digests([1])
        return (out.error, back.error) == (None, None) and np.array_equal(wanted, landed)


def _finish(copy: Callable[[], CopyTicket], waited: list[float]) -> None:
    """Make a copy, and note how long the model waited for staging memory."""
    ticket = copy()
    ticket.wait()
    waited.append(ticket.waited_s)


def measure_case(case: Case) -> Iterator[dict[str, Any]]:
    """Both directions, rows scattered in host memory and adjacent; rates until all is done, in GB/s.

    ``contiguous`` is one copy of as many bytes between the device and pinned memory, ``per_page`` one copy
    for each page: both are measured once, before. ``host_us`` is how long calls take.
    """
    contiguous, per_page = case.contiguous(), case.per_page()
    copier = case.copier()
    for order, rows in case.rows.items():
        verified = case.verified(copier, rows)
        waited = list[float]()
        snapshot = partial(copier.snapshot, [RowCopies(0, case.source, rows)])
        restore = partial(copier.restore, [RowCopies(0, case.target, rows)])
        rate_out, rate_back = (case.gb_per_s(partial(_finish, copy, waited)) for copy in (snapshot, restore))
        yield {
            "device": case.device,
            "rows": order,
            "page_bytes": case.page_bytes,
            "regions": case.regions,
            "blocks": case.blocks,
            "total_bytes": case.total_bytes,
            "contiguous_out": contiguous[0],
            "contiguous_back": contiguous[1],
            "per_page_out": per_page[0],
            "per_page_back": per_page[1],
            "out": rate_out,
            "back": rate_back,
            "out_of_contiguous": rate_out / contiguous[0],
            "back_of_contiguous": rate_back / contiguous[1],
            "out_host_us": case.host_us(snapshot),
            "back_host_us": case.host_us(restore),
            "staging_waits": sum(waited_s > 0 for waited_s in waited),
            "verified": verified,
        }
    copier.close()
    case.arena.close()


def bench_offload(options: Options) -> int:
    """Time blocks on their way to host memory and back.

    Returns 0, or 1 if wrong bytes came back.

    Raises:
        ConfigError: an option is not usable, or the device is not there.
    """
    check_device(options.device)
    verified = True
    for page_bytes in options.page_bytes:
        for blocks in options.blocks:
            case = Case(options.device, page_bytes, options.regions, blocks)
            for timing in measure_case(case):
                report("offload", timing)
                verified &= timing["verified"]
            # Two of them may not fit at once.
            del case
    return 0 if verified else 1
