"""The thread of a worker's tiers: it carries out orders, waits for the device, and drives the lower tiers."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvconnect.errors import ConfigError
from kvconnect.metrics import OffloadMetrics
from kvconnect.offload.copies.copier import Copier
from kvconnect.offload.copies.host_arena import RowArena
from kvconnect.offload.tier import HOST, LowerTier
from kvconnect.offload.worker.jobs import RankJob, RankJobs
from kvconnect.offload.worker.row_work import RowWork

logger = logging.getLogger(__name__)

Command = tuple[Callable[[float], None], RankJob | None]
"""What to run on the thread, with the time then; and the job that fails if it raises."""

_LONGEST_SLEEP_S = 1.0
_SHORT_NAP_S = 200e-6
_LONG_NAP_S = 1e-3
_SHORT_NAPS = 50
_LAST_COPIES_S = 5.0
_CLOSE_TIMEOUT_S = 20.0


class TierLoop:
    """Only the thread writes ``metrics``. At its end it closes the tiers, the copier and the arena."""

    def __init__(
        self,
        copier: Copier,
        arena: RowArena,
        tiers: Sequence[LowerTier],
        jobs: RankJobs,
        metrics: OffloadMetrics,
        device: torch.device,
    ) -> None:
        self.work = RowWork(copier, arena, tiers, jobs, metrics)
        self._jobs, self._metrics, self._device = jobs, metrics, device
        self.held_rows: Sequence[int] = ()
        """Of host memory, by class, as the scheduler half reported them last."""
        self._plan = arena.plan
        self._closed_last = (copier, arena)
        self._commands: deque[Command] = deque()
        self._wake = threading.Event()
        self._is_stopping = False
        self._naps = 0
        self._thread = threading.Thread(target=self._run, name="kvconnect-offload", daemon=True)
        self._listen()
        self._thread.start()

    # For any thread

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def order(self, *commands: Command) -> None:
        self._commands += commands
        self._wake.set()

    def replace(self, make: Callable[[], Sequence[LowerTier]]) -> None:
        """Have everything forgotten, the lower tiers closed, and those used in their place that are made."""

        def replace(now: float) -> None:
            self.work.close_tiers(now, with_changes=False)
            self.work.clear(now)
            try:
                self.work.tiers = make()
            except ConfigError as error:
                self._metrics.failures.labels("offload_tiers_lost").inc()
                logger.error("lower tiers cannot be used any more: %s", error)
            self._listen()

        self.order((replace, None))

    def tiers(self) -> dict[str, dict[str, Any]]:
        """What each tier holds, nearest first: see ``LowerTier.state``."""
        held = list(zip(self._plan.classes, self.held_rows, strict=False))
        host = {
            "records": sum(count for _, count in held),
            "taken_bytes": sum(rows.row_bytes * count for rows, count in held),
            "limit_bytes": self._plan.length_bytes,
        }
        return {HOST: host} | {tier.name: tier.state() for tier in self.work.tiers}

    def close(self) -> None:
        self._is_stopping = True
        self._wake.set()
        self._thread.join(_CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            # Closing what a running thread uses would crash it; the process is ending anyway.
            logger.error("the thread of the tiers did not stop within %s s", _CLOSE_TIMEOUT_S)

    def _listen(self) -> None:
        for tier in self.work.tiers:
            tier.on_update(self._wake.set)
        # Until the thread has asked them.
        self._jobs.is_recovering = bool(self.work.tiers)

    # The thread itself

    def step(self, now: float) -> float:
        """Do what can be done now. Returns how long in seconds to sleep if nothing happens."""
        progress = bool(self._commands)
        while self._commands:
            command, job = self._commands.popleft()
            try:
                command(now)
            except Exception as error:
                self._count_bug()
                if job is not None:
                    self._jobs.fail(job, f"it could not be carried out: {error}")
        progress |= self.work.advance(now)
        if progress:
            self._export()
            self._naps = 0
            return 0.0
        if self.work.tickets:
            self._naps += 1
            return _SHORT_NAP_S if self._naps < _SHORT_NAPS else _LONG_NAP_S
        self._naps = 0
        return min(max(self.work.next_deadline_s - now, 1e-3), _LONGEST_SLEEP_S)

    def _run(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        while not self._is_stopping:
            sleep_s = self._step()
            if sleep_s > 0 and self._wake.wait(sleep_s):
                self._wake.clear()
        # The last of the thread: copies end, tiers are closed, and what is open then fails.
        give_up_s = time.monotonic() + _LAST_COPIES_S
        self._step()
        while self.work.tickets and time.monotonic() < give_up_s:
            time.sleep(_SHORT_NAP_S)
            self._step()
        self.work.close_tiers(time.monotonic())
        self._jobs.fail_all("the worker was closed")
        self._export()
        for memory in self._closed_last:
            memory.close()

    def _step(self) -> float:
        try:
            return self.step(time.monotonic())
        except Exception:
            # Nothing that goes wrong in a tier raises here. Jobs end by their deadlines.
            self._count_bug()
            return 0.1

    def _count_bug(self) -> None:
        self._metrics.failures.labels("internal").inc()
        logger.exception("the thread of the tiers met an error of its own")

    def _export(self) -> None:
        for kind, count in self._jobs.counts().items():
            self._metrics.open[kind].set(count)
        self._metrics.held_rows.set(len(self._jobs.held))
        for name, state in self.tiers().items():
            if name in self._metrics.taken:
                self._metrics.taken[name].set(state["taken_bytes"])
                self._metrics.limit[name].set(state["limit_bytes"])
