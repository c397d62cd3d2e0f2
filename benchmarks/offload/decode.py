"""Decode steps of a node while blocks leave the device and come back without pause, beside those without."""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.node.loops import (
    DecodeLoop,
    StepTime,
    StepTimes,
    fill_blocks,
    share_cache,
    step_percentiles,
)
from benchmarks.node.model import BenchModel
from benchmarks.offload.options import Options
from benchmarks.transfer.cache import BenchCache
from benchmarks.transfer.cases import Layout
from kvconnect.errors import EngineError
from kvconnect.offload.copies.copier import Copier, CopyTicket, make_arena, make_copier
from kvconnect.offload.copies.rows import RowLayout
from kvconnect.offload.index.budgets import plan_arena
from kvconnect.transfer.orders import RowCopies

# Directions of copies: out (True) and back (False).
_FLOWS = {"out": (True,), "back": (False,), "both": (True, False)}
_LAYOUT = Layout("nhd", 16)
_RAMP_S = 0.3
_MOST_IN_FLIGHT = 8
_TURN_S = 0.002


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
        each = -(-options.used_context // _LAYOUT.block_tokens)
        decoded = options.used_batch * each
        row_bytes = size.token_bytes * _LAYOUT.block_tokens
        self.rows_each = max(8, min(2048, (2 << 30) // row_bytes))
        self.request_blocks = max(1, options.request_bytes // row_bytes)
        back = min(self.rows_each, 2 * self.request_blocks)
        cache = BenchCache(size.shape(1 + decoded + back, _LAYOUT), options.device, seed=1)
        model = BenchModel(size, _LAYOUT, options.device)
        ids = list(range(1, 1 + decoded))
        blocks = [ids[row * each : (row + 1) * each] for row in range(options.used_batch)]
        shared = share_cache(model, cache, options.used_batch, options.used_context)
        fill_blocks(shared, blocks)
        self.loop = DecodeLoop(model, shared, blocks, options.used_context)
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
        made = [_Flow(self, out, options.bytes_per_s, began) for out in flows]
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
            "model": options.used_model,
            "batch": options.used_batch,
            "context": options.used_context,
            "flow": flow,
            "asked_gb_per_s": options.bytes_per_s / 1e9,
            "out": round(statistics.median(rates[True] for rates in moved), 3),
            "back": round(statistics.median(rates[False] for rates in moved), 3),
            "tokens_per_s_without": round(before, 1),
            "tokens_per_s_with": round(after, 1),
            "ratio": round(after / before, 4),
            **step_percentiles(without, having),
            "staging_waits": rig.copier.staging_waits - waits,
        }
    rig.close()
