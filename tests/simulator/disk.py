"""The disk of one simulated rank: a tier in memory whose work takes its time on the virtual clock."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from kvconnect.offload.disk.folder import bytes_on_disk
from kvconnect.offload.tier import DISK, Content
from tests.offload.memory_tier import MemoryTier

if TYPE_CHECKING:
    from tests.simulator.scenario import KeepPlan
    from tests.simulator.worker import SimWorker

_AGAIN_S = 0.3


class SimDisk(MemoryTier):
    """What was written once is there after a restart. Rows have ``row_bytes`` at most."""

    def __init__(self, worker: SimWorker, keeps: KeepPlan, row_bytes: int) -> None:
        super().__init__(keeps.disk_bytes // bytes_on_disk(row_bytes) * row_bytes, name=DISK)
        self._worker, self._world = worker, worker.world
        self._kept = keeps.on_disk.setdefault(worker.rank, OrderedDict())
        self._kept_bytes = sum(map(len, self._kept.values()))
        self.tracker.add(list(self._kept))

    @property
    def contents(self) -> Collection[Content]:
        """What is on it."""
        return self._kept.keys()

    def _submit(self, work: Callable[[], None]) -> None:
        late_s = self._world.random.choice((0.002, 0.02, 0.5)) * self._world.random.random()
        self._world.after(late_s, lambda: self._run(work))

    def _run(self, work: Callable[[], None]) -> None:
        if self._worker.channel.stopped:
            self._world.after(_AGAIN_S, lambda: self._run(work))
        elif not self._worker.is_dead:
            work()
