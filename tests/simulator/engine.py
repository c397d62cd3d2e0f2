"""The memory engine on a bad day: slow, failing, cut short, or not quiescent when it says that it failed.

The engine is the real one, without threads and sockets. What happens to a batch is drawn when it is
submitted, and done by the engine's own controls.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvconnect.engine.base import Batch, Completion
from kvconnect.engine.memory import MemoryEngine
from tests.engine.faulty_engine import FaultyEngine
from tests.simulator.world import World

if TYPE_CHECKING:
    from tests.simulator.checks import Checks
    from tests.simulator.scenario import NodePlan


@dataclass
class EngineFaults:
    """How often which fault meets a batch. The rest of it are times in seconds.

    ``late_s``: how long after a failure that was not quiescent its bytes may still move. ``resumes``: how
    often a batch that was under way when its process was stopped goes on when that runs again, whatever
    its time is. ``settles``: a library that cannot call back what it was given: a batch that is cancelled
    fails when its bytes have moved.
    """

    batch_s: float = 0.002
    stall: float = 0.0
    stall_s: float = 5.0
    fail: float = 0.0
    busy: float = 0.0
    cut: float = 0.0
    corrupt: float = 0.0
    settles: bool = False
    late_s: float = 1.0
    resumes: float = 0.0


class SimEngine(FaultyEngine):
    """A memory engine of one simulated process.

    ``may_move`` are the batches that may still read and write memory, by id, each with the time until which:
    those in flight, and those that failed and go on. ``armed`` is called once, while the next batch is under
    way.
    """

    def __init__(
        self,
        world: World,
        who: str,
        plan: NodePlan,
        watch: Checks,
        wake: Callable[[], None],
    ) -> None:
        super().__init__(
            clock=world.clock,
            max_bytes=plan.max_bytes,
            max_batches_per_peer=plan.max_batches,
        )
        self.who, self.faults = who, plan.engine_faults
        self.may_move: dict[int, tuple[Batch, float]] = {}
        self.is_closed = False
        self.armed: Callable[[], None] | None = None
        self._stuck: list[Batch] = []
        self._settling: set[int] = set()
        self._aimed_at: dict[int, MemoryEngine | None] = {}
        self._world = world
        self._watch = watch
        self._wake = wake

    def submit(self, batch: Batch) -> None:
        world, faults = self._world, self.faults
        delay_s = faults.batch_s * (0.5 + world.random.random())
        if faults.stall and world.chance(faults.stall):
            delay_s += faults.stall_s * world.random.random()
        kind = world.random.random()
        what = "moves"
        self.delay_next(delay_s)
        if kind < faults.fail:
            what = "fails"
            self.fail_next(quiescent=True)
        elif kind < faults.fail + faults.busy:
            what = "fails and goes on"
            if world.chance(0.5):
                self.fail_next(quiescent=False)
            else:
                self.cut_next(int(batch.total_bytes * world.random.random()), quiescent=False)
        elif kind < faults.fail + faults.busy + faults.cut:
            what = "is cut short"
            self.cut_next(int(batch.total_bytes * world.random.random()))
        elif kind < faults.fail + faults.busy + faults.cut + faults.corrupt:
            what = "is corrupted"
            self.corrupt_next(world.random.randrange(1 << 16))
        world.note(self.who, "engine takes", batch.batch_id, batch.peer, batch.total_bytes, what)
        super().submit(batch)
        self.may_move[batch.batch_id] = (batch, world.now + batch.timeout_s)
        self._aimed_at[batch.batch_id] = self._local_target(batch.peer)
        self._watch.submitted(self, batch)
        armed, self.armed = self.armed, None
        if armed is not None:
            world.after(delay_s * world.random.random(), armed)
        world.after(delay_s, self._wake)

    def stop(self) -> None:
        """The process is stopped: what is under way may go on when it runs again."""
        for batch, _ in list(self.may_move.values()):
            if self.faults.resumes and self._world.chance(self.faults.resumes):
                self._stuck.append(batch)
                self.may_move[batch.batch_id] = (batch, math.inf)

    def go_on(self) -> None:
        """It runs again, and its library's threads before its transfer thread."""
        stuck, self._stuck = self._stuck, []
        for batch in stuck:
            if batch.batch_id in self.may_move:
                self._world.note(self.who, "goes on with", batch.batch_id)
                self._copy_late(batch)
                self.may_move[batch.batch_id] = (batch, self._world.now)

    def cancel(self, batch_id: int) -> None:
        if self.faults.settles and batch_id in self._flights:
            self._settling.add(batch_id)
        else:
            super().cancel(batch_id)

    def poll(self) -> list[Completion]:
        completions = []
        for done in super().poll():
            batch, _ = self.may_move[done.batch_id]
            if done.batch_id in self._settling:
                self._settling.remove(done.batch_id)
                done = replace(done, ok=False, error=done.error or "cancelled")
            if done.quiescent and not done.ok and self.faults.busy and self._world.chance(0.3):
                # Whatever ended it, a cancel and a timeout too: a library need not be able to call it back.
                done = replace(done, quiescent=False)
            self._world.note(self.who, "engine ends", done.batch_id, done.ok, done.quiescent, done.error)
            if done.quiescent:
                del self.may_move[done.batch_id]
            else:
                self._go_on(batch)
            completions.append(done)
        return completions

    def next_time(self) -> float | None:
        """When something may end that was submitted."""
        if not self._flights:
            return None
        times = [self.start_at(flight) for flight in self._flights.values()]
        times += [flight.deadline for flight in self._flights.values()]
        later = [time for time in times if time > self._world.now]
        return min(later, default=None)

    def die(self) -> None:
        """The process is killed: what its kernel has taken may still arrive, nothing else."""
        world = self._world
        sent = [batch for batch, _ in self.may_move.values() if world.chance(0.5)]
        self.may_move = {batch.batch_id: (batch, world.now + 1.0) for batch in sent}
        self.is_closed = True
        self.close()
        self._finished.clear()
        for batch in sent:
            world.after(0.9 * world.random.random(), functools.partial(self._land, batch))

    def _go_on(self, batch: Batch) -> None:
        """A batch that failed without being quiescent: its bytes move when nobody expects it."""
        until = self._world.now + self.faults.late_s * self._world.random.random()
        self._late.clear()
        self.may_move[batch.batch_id] = (batch, until)
        self._world.at(until, lambda: self._land(batch))

    def _land(self, batch: Batch) -> None:
        if self.may_move.pop(batch.batch_id, None) is None:
            return
        self._world.note(self.who, "late bytes land", batch.batch_id)
        self._copy_late(batch)

    def _copy_late(self, batch: Batch) -> None:
        target = self.target_of(batch)
        if isinstance(target, SimEngine) and not target.is_closed:
            self._copy_here(batch, target)

    def _copy_here(self, batch: Batch, target: MemoryEngine | None) -> str:
        if target is not None and batch.total_bytes:
            self._watch.moves(self, batch, target)
        return super()._copy_here(batch, target)

    def target_of(self, batch: Batch) -> MemoryEngine | None:
        """The engine whose memory a batch was aimed at; None if there was none."""
        return self._aimed_at[batch.batch_id]
