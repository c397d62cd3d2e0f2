"""What it costs that a step is watched: KV events, the timeline and the metrics of a decode node.

In each step every request gets a token, a 16th of them fill a block, which is stored where an old one makes
room, one request comes whose KV is loaded, and one ends. Nodes that differ in what watches them take turns,
so that whatever else the machine does disturbs all of them: what counts is the median of the differences of
steps that follow one another. A node that nothing watches either shows how far that can be trusted.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from benchmarks.scheduler_offload import BLOCK_TOKENS, PROMPT_TOKENS, Keeping, Running, stored
from kvconnect.halves.scheduler_half import SchedulerHalf
from kvconnect.metrics import Metrics, OffloadMetrics, merge_changes
from kvconnect.transfer.orders import Results

_WARM_UP_TURNS = 2
_STEPS = 16
"""Of a turn: as many as a block has tokens."""
_NODES: dict[str, tuple[str, ...]] = {
    "nothing": (),
    "events": ("events",),
    "timeline": ("timeline",),
    "metrics": ("metrics",),
    "all three": ("events", "timeline", "metrics"),
}
_ROW_BYTES = 1 << 20


@dataclass(frozen=True)
class WatchTiming:
    """What a step takes, and what of it is for those that watch it."""

    watched_by: str
    added_us: float
    step_us: float


class Watched(Keeping):
    """``watches`` are which of events, timeline and metrics are on; ``transfer`` has a clock for a timeline.

    ``loaded`` makes the request that comes with a step, of a number. There are old blocks for so many turns.
    """

    def __init__(
        self,
        running: int,
        watches: tuple[str, ...],
        transfer: SchedulerHalf,
        loaded: Callable[[int], Running],
        turns: int,
    ) -> None:
        known = (_WARM_UP_TURNS + turns) * _STEPS * running // PROMPT_TOKENS + 1
        super().__init__(
            running,
            1,
            has_events="events" in watches,
            transfer=transfer,
            known=known,
            num_rows=(known + running) * PROMPT_TOKENS // BLOCK_TOKENS,
        )
        self._watches, self._loaded = watches, loaded
        # The exporter of the process has nothing to show of a benchmark.
        self._metrics = Metrics(CollectorRegistry())
        self._kept_metrics = OffloadMetrics(CollectorRegistry())

    def step(self) -> float:
        """Seconds of a step, and of what a worker notes of it."""
        news, coming = self._grow(), self._loaded(self._serial)
        self._serial += 1
        start = time.perf_counter()
        self._admit(coming)
        orders = self._launch(news)
        results = Results(received=(coming.request_id,), offload=stored(orders).offload)
        self.half.update_results(results)
        self.half.update_after_alloc(coming, (coming.block_ids,), 0)
        coming.num_tokens += 1
        self._end([coming])
        self.half.take_events()
        if "timeline" in self._watches:
            self._metrics.timeline.take(orders.notes)
        if "metrics" in self._watches:
            self._count(sum(len(store.hashes) for store in orders.offload.stores))
        return time.perf_counter() - start

    def _count(self, num_stored: int) -> None:
        """What the threads of a worker count of such a step, and what the one of its steps asks of that."""
        kept, moved = self._kept_metrics, self._metrics
        for is_open in (1, 0):
            for kind, number in kept.open.items():
                number.set(is_open if kind == "store" else 0)
            kept.held_rows.set(0)
            kept.taken["host"].set(self._serial * _ROW_BYTES)
            kept.limit["host"].set(1 << 40)
        kept.wait_seconds.labels("staging").inc(1e-6)
        kept.moved("store", "host", num_stored, num_stored * _ROW_BYTES, 1e-3)
        for is_open in (1, 0):
            moved.loads.set(is_open)
            moved.loads_waiting.set(0)
            moved.quarantined.set(0)
            moved.slots_landing.set(is_open)
        moved.transfers.labels("received", "ok").inc()
        moved.transfer_bytes.labels("received", "nvlink").inc(_ROW_BYTES)
        moved.copies.labels("received").inc()
        moved.transfer_seconds.labels("received").inc(1e-3)
        moved.load_seconds.observe(1e-3)
        merge_changes(moved.changes(), kept.changes())


def watch_timings(make: Callable[[tuple[str, ...]], Watched], turns: int) -> list[WatchTiming]:
    """Time the steps of nodes that ``make`` makes, by what watches them."""
    nodes = {"": make(())} | {name: make(watches) for name, watches in _NODES.items()}
    gc.collect()
    best: dict[str, list[float]] = {name: [] for name in nodes}
    for _ in range(_WARM_UP_TURNS + turns):
        for name, node in nodes.items():
            best[name].append(min(node.step() for _ in range(_STEPS)) * 1e6)
    bare = best.pop("")
    found = []
    for name, steps in best.items():
        added = [step - without for step, without in zip(steps, bare, strict=True)][_WARM_UP_TURNS:]
        step_us = statistics.median(steps[_WARM_UP_TURNS:])
        found.append(WatchTiming(name, round(statistics.median(added), 1), round(step_us, 1)))
    return found
