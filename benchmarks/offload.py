"""What blocks cost on their way to host memory and back.

Copies in both directions beside what the link and plainer ways can do, and with ``--decode`` a model's steps
beside copies that go on all the time, in the same run.
"""

from __future__ import annotations

import ctypes
import random
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, ClassVar

import numpy as np
import torch

from benchmarks.cache import BenchCache, CacheShape, Layout
from benchmarks.device import check_device, run_seconds, wait_for_device
from benchmarks.harness import report
from benchmarks.loops import DecodeLoop, SharedCache, StepTime, StepTimes, fill_blocks, step_percentiles
from benchmarks.model import BenchModel
from benchmarks.node import ModelOptions
from kvconnect.errors import ConfigError, EngineError
from kvconnect.offload.copies.copier import Copier, CopyTicket, make_arena, make_copier
from kvconnect.offload.copies.rows import RowArena, RowLayout
from kvconnect.offload.index.budgets import plan_arena
from kvconnect.pack.page_lanes import Column
from kvconnect.transfer.orders import RowCopies

_TOKENS = 16
_LAYOUT = Layout("nhd", _TOKENS)
_REPEATS = 7
# Directions of copies: out (True) and back (False).
_FLOWS = {"out": (True,), "back": (False,), "both": (True, False)}
_RAMP_S = 0.3
_MOST_IN_FLIGHT = 8
_TURN_S = 0.002


@dataclass(frozen=True)
class Options(ModelOptions):
    """A run: of copies, or with ``decode`` of decode steps while blocks leave and come back."""

    SUITED: ClassVar = {
        **ModelOptions.SUITED,
        "blocks": ([16, 64], [256, 1024]),
        "batch": (4, 32),
        "context": (64, 4096),
        "gb_per_s": (0.01, 10.0),
    }

    page_bytes: Annotated[list[int], "Bytes of a page (repeatable)."] = field(default_factory=lambda: [16384])
    regions: Annotated[int, "Layers, each in its own allocation."] = 64
    blocks: Annotated[
        list[int], "Blocks at a time (repeatable); default: 256 and 1024, on a CPU 16 and 64."
    ] = field(default_factory=list)
    decode: Annotated[bool, "Time decode steps beside copies instead."] = False
    batch: Annotated[int, "With --decode: requests; default: 32, on a CPU 4."] = 0
    context: Annotated[int, "With --decode: tokens of each; default: 4096, on a CPU 64."] = 0
    gb_per_s: Annotated[float, "With --decode: GB/s in each direction; default: 10, on a CPU 0.01."] = 0.0
    rounds: Annotated[int, "With --decode: how often without and with alternate."] = 3
    seconds: Annotated[float, "With --decode: seconds of each."] = 2.0

    @property
    def request_bytes(self) -> int:
        """What comes back by one order, as for a request that returns."""
        return (64 << 10) if self.device == "cpu" else (256 << 20)


# ---- copies


class Case:
    """Random blocks of layers in allocations of their own, and twice as many rows as are used.

    Raises:
        ConfigError: a page of so many bytes cannot be made.
    """

    def __init__(self, device: str, page_bytes: int, regions: int, blocks: int) -> None:
        if page_bytes < 4 * _TOKENS or page_bytes % (4 * _TOKENS):
            raise ConfigError(f"page_bytes is {page_bytes}; accepted: multiples of {4 * _TOKENS}")
        self.device, self.page_bytes, self.regions, self.blocks = device, page_bytes, regions, blocks
        self.total_bytes = page_bytes * regions * blocks
        shape = CacheShape(regions, 2 * blocks + 1, 1, page_bytes // (4 * _TOKENS), _LAYOUT)
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
        rows = self.layout.groups[0]
        blocks = np.array(self.source, dtype=np.int64)
        page = np.array([region.address for region in self.cache.table().regions], dtype=np.int64)
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
        """Whether what went out and came back to other blocks is what it was."""
        wanted = self.cache.digests([0], _TOKENS)
        out = copier.snapshot([RowCopies(0, self.source, tuple(rows))])
        out.wait()
        back = copier.restore([RowCopies(0, self.target, tuple(rows))], copier.mark())
        back.wait()
        landed = self.cache.digests([1], _TOKENS)
        return (out.error, back.error) == (None, None) and np.array_equal(wanted, landed)


def measure_case(case: Case) -> Iterator[dict[str, Any]]:
    """Both directions, rows scattered in host memory and adjacent; rates until all is done, in GB/s.

    ``contiguous`` is one copy of as many bytes between the device and pinned memory, ``per_page`` one copy
    for each page: both are measured once, before. ``host_us`` is how long calls take.
    """
    contiguous, per_page = case.contiguous(), case.per_page()
    copier = case.copier()
    for order, rows in case.rows.items():
        verified = case.verified(copier, rows)
        before = copier.staging_waits
        snapshot = partial(copier.snapshot, [RowCopies(0, case.source, rows)])
        restore = partial(copier.restore, [RowCopies(0, case.target, rows)])
        rate_out = case.gb_per_s(lambda call=snapshot: call().wait())  # type: ignore[misc]
        rate_back = case.gb_per_s(lambda call=restore: call().wait())  # type: ignore[misc]
        waits = copier.staging_waits - before
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
            "staging_waits": waits,
            "verified": verified,
        }
    copier.close()
    case.arena.close()


# ---- decode steps beside copies


class _Flow:
    """Orders copies of blocks at a rate, a bounded number of them at a time."""

    def __init__(self, rig: _Rig, out: bool, bytes_per_s: float, began: float) -> None:
        self._rig, self._out, self._bytes_per_s = rig, out, bytes_per_s
        self._began, self._ordered = began, 0
        self._tickets: deque[tuple[CopyTicket, int]] = deque()
        self._turn = 0
        # Scattered, as they are once rows were used a few times.
        count = min(len(rig.blocks_out if out else rig.blocks_back), rig.rows_each)
        rows = random.Random(out).sample(range(rig.rows_each), count)
        blocks = rig.blocks_out if out else rig.blocks_back
        self._orders = tuple(blocks[:count]), tuple(row if out else rig.rows_each + row for row in rows)
        self.ended: list[tuple[float, int]] = []

    def order(self) -> None:
        """Order what is due, if not too much is under way."""
        self.settle()
        row_bytes = self._rig.row_bytes
        due = int((time.perf_counter() - self._began) * self._bytes_per_s) - self._ordered
        blocks, rows = self._orders
        count = min(due // row_bytes, len(blocks))
        least = 1 if self._out else min(len(blocks), self._rig.request_blocks)
        if count < least or len(self._tickets) >= _MOST_IN_FLIGHT:
            return
        if self._turn + count > len(blocks):
            self._turn = 0
        mine = slice(self._turn, self._turn + count)
        self._turn += count
        self._ordered += count * row_bytes
        copies = [RowCopies(0, blocks[mine], rows[mine])]
        copier = self._rig.copier
        ticket = copier.snapshot(copies) if self._out else copier.restore(copies, copier.mark())
        self._tickets.append((ticket, count * row_bytes))

    def settle(self) -> None:
        """Note what is done. Raises ``EngineError``: a copy failed."""
        while self._tickets and self._tickets[0][0].done:
            ticket, length_bytes = self._tickets.popleft()
            if ticket.error:
                raise EngineError(f"a copy of blocks failed: {ticket.error}")
            self.ended.append((time.perf_counter(), length_bytes))

    def finish(self) -> None:
        """Wait for what is under way."""
        for ticket, _ in self._tickets:
            ticket.wait()
        self.settle()


class _Rig:
    """A model that decodes, rows, and blocks that are copied: out those that it reads, back others."""

    def __init__(self, options: Options) -> None:
        size = options.size
        each = -(-options.context // _TOKENS)
        decoded = options.batch * each
        row_bytes = size.token_bytes * _TOKENS
        self.rows_each = max(8, min(2048, (2 << 30) // row_bytes))
        self.request_blocks = max(1, options.request_bytes // row_bytes)
        back = min(self.rows_each, 2 * self.request_blocks)
        cache = BenchCache(size.shape(1 + decoded + back, _LAYOUT), options.device, seed=1)
        model = BenchModel(size, _LAYOUT, options.device)
        ids = list(range(1, 1 + decoded))
        blocks = [ids[row * each : (row + 1) * each] for row in range(options.batch)]
        shared = SharedCache(model, cache, options.batch, options.context)
        fill_blocks(shared, blocks)
        self.loop = DecodeLoop(model, shared, blocks, options.context)
        self.blocks_out = ids
        self.blocks_back = list(range(1 + decoded, 1 + decoded + back))
        layout = RowLayout.build(cache.table())
        self.row_bytes = layout.row_bytes[0]
        plan = plan_arena(2 * self.rows_each * self.row_bytes, layout.row_bytes, {0: 1.0})
        self.arena = make_arena(plan, options.device)
        self.copier: Copier = make_copier(layout, self.arena, options.device)

    def close(self) -> None:
        self.copier.close()
        self.arena.close()

    def window(self, options: Options, flows: Sequence[bool]) -> tuple[StepTimes, dict[bool, float]]:
        """Decode for a while with copies meanwhile; the steps, and GB/s of each direction."""
        began = time.perf_counter()
        made = [_Flow(self, out, options.gb_per_s * 1e9, began) for out in flows]
        # Blocks leave before the step that may overwrite them; what comes back waits for no step.
        leaving = [flow for out, flow in zip(flows, made, strict=True) if out]
        coming = [flow for out, flow in zip(flows, made, strict=True) if not out]

        stop = threading.Event()

        def restore() -> None:
            while not stop.wait(_TURN_S):
                for flow in coming:
                    flow.order()

        def meanwhile() -> None:
            for flow in leaving:
                flow.settle()

        helper = threading.Thread(target=restore, daemon=True)
        if coming:
            helper.start()
        steps: list[StepTime] = []
        counted_from, until = began + _RAMP_S, began + _RAMP_S + options.seconds
        # One step counts however slow the machine is.
        while time.perf_counter() < until or len(steps) < 2 or steps[-2].ended_at < counted_from:
            for flow in leaving:
                flow.order()
            steps.append(self.loop.step(meanwhile))
        stop.set()
        if coming:
            helper.join()
        for flow in made:
            flow.finish()
        moved = {
            out: sum(size for ended, size in flow.ended if counted_from < ended <= until)
            for out, flow in zip(flows, made, strict=True)
        }
        rates = {out: moved.get(out, 0) / options.seconds / 1e9 for out in (True, False)}
        return StepTimes.within(steps, counted_from), rates


def measure_decode(options: Options) -> Iterator[dict[str, Any]]:
    """Each flow in turn; without and with it alternate.

    Medians over rounds, and over all steps of their kind. ``out`` and ``back`` are GB/s that moved.
    """
    rig = _Rig(options)

    def tokens_per_s(windows: Sequence[StepTimes]) -> float:
        per_step = rig.loop.tokens_per_step
        return statistics.median(per_step * len(one.step_s) / sum(one.step_s) for one in windows)

    for flow, directions in _FLOWS.items():
        waits = rig.copier.staging_waits
        without, having, moved = [], [], []
        for _ in range(options.rounds):
            without.append(rig.window(options, ())[0])
            steps, rates = rig.window(options, directions)
            having.append(steps)
            moved.append(rates)
        before, after = tokens_per_s(without), tokens_per_s(having)
        yield {
            "device": options.device,
            "model": options.model,
            "batch": options.batch,
            "context": options.context,
            "flow": flow,
            "asked_gb_per_s": options.gb_per_s,
            "out": statistics.median(rates[True] for rates in moved),
            "back": statistics.median(rates[False] for rates in moved),
            "tokens_per_s_without": before,
            "tokens_per_s_with": after,
            "ratio": after / before,
            **step_percentiles(without, having),
            "staging_waits": rig.copier.staging_waits - waits,
        }
    rig.close()


def bench_offload(options: Options) -> int:
    """Time blocks on their way to host memory and back, or decode steps beside such copies.

    Returns 0, or 1 if wrong bytes came back.

    Raises:
        ConfigError: an option is not usable, or the device is not there.
    """
    check_device(options.device)
    if options.decode:
        for found in measure_decode(options):
            report("offload-decode", found)
        return 0
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
