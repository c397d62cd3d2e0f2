"""What one simulated rank keeps: the real worker half of the offload, with copies that take their time.

Its thread is a step on the virtual clock, its disk a tier in memory. Deadlines of copies count the machine's
time, so none is ever late.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from kvconnect.cache.identity import Naming
from kvconnect.config import OffloadConfig
from kvconnect.halves.scheduler_half import SchedulerHalf
from kvconnect.metrics import OffloadMetrics
from kvconnect.offload.copies.copier import Copier, CopyTicket
from kvconnect.offload.copies.rows import RowArena, RowLayout, RowParts
from kvconnect.offload.disk.folder import bytes_on_disk
from kvconnect.offload.index.budgets import aligned_row_bytes, plan_for
from kvconnect.offload.scheduler.hit_requirements import HitRequirements
from kvconnect.offload.scheduler.host import KeptBlocks
from kvconnect.offload.scheduler.shared_prefixes import SharedPrefixes
from kvconnect.offload.tier import DISK, Content, Kind
from kvconnect.offload.worker.jobs import RankJobs
from kvconnect.offload.worker.named_rows import NamedRows
from kvconnect.offload.worker.offload_worker import OffloadWorker
from kvconnect.offload.worker.tier_loop import TierLoop
from kvconnect.transfer.orders import OrdersDraft, RowCopies
from kvconnect.transfer.stack import LongestRequest, StackTraits
from tests.identities import named
from tests.offload.memory_tier import MemoryTier
from tests.simulator.device import Stream
from tests.simulator.memory import names_of
from tests.simulator.pledges import WatchedOffload
from tests.simulator.world import Pace

if TYPE_CHECKING:
    from tests.simulator.node import SimNode
    from tests.simulator.request import SimRequest
    from tests.simulator.scenario import KeepPlan
    from tests.simulator.worker import SimWorker

_AGAIN_S = 0.3


class SimDisk(MemoryTier):
    """What was written once is there after a restart. Rows have ``row_bytes`` at most."""

    def __init__(self, worker: SimWorker, keeps: KeepPlan, row_bytes: int) -> None:
        super().__init__(keeps.disk_bytes // bytes_on_disk(row_bytes) * row_bytes, name=DISK, threads={})
        self._worker, self._world = worker, worker.world
        self._kept = keeps.on_disk.setdefault(worker.rank, OrderedDict())
        self._kept_bytes = sum(map(len, self._kept.values()))
        self.tracker.add(list(self._kept))

    @property
    def contents(self) -> Collection[Content]:
        """What is on it."""
        return self._kept.keys()

    def _submit(self, kind: Kind, work: Callable[[], object]) -> None:
        late_s = self._world.random.choice((0.002, 0.02, 0.5)) * self._world.random.random()
        self._world.after(late_s, lambda: self._later(work))

    def _later(self, work: Callable[[], object]) -> None:
        if self._worker.channel.stopped:
            self._world.after(_AGAIN_S, lambda: self._later(work))
        elif not self._worker.is_dead:
            work()


_LOOKS_S = 0.002
_SNAPSHOT = 0.2
"""What a copy takes of the device, in kernels."""


def make_requirements(worker: SimWorker) -> HitRequirements:
    """What hits need: all groups are kept, and have blocks of one size."""
    groups = worker.memory.config.groups
    return HitRequirements.of(groups, range(len(groups)), worker.plan.shape.block_tokens)


class SimTiers(OffloadWorker):
    """The rows of a rank: as many of each cache group as its plan has."""

    def __init__(self, worker: SimWorker, keeps: KeepPlan, naming: Naming) -> None:
        memory, requirements = worker.memory, make_requirements(worker)
        layout = RowLayout.build(memory.table)
        sizes = {group: aligned_row_bytes(row_bytes) for group, row_bytes in layout.row_bytes.items()}
        rows = max(keeps.rows, *requirements.least_rows().values())
        total = sum(sizes.values())
        # A little more, so that no share is rounded to one row less.
        shares = tuple(size / total for size in sizes.values())
        self.config = OffloadConfig(
            cpu_bytes=rows * total + len(sizes),
            shares=shares,
            checkpoint_tokens=keeps.checkpoint,
            disk_path="simulated" if keeps.disk_bytes else "",
            disk_bytes=keeps.disk_bytes,
            pin_quota=keeps.pin_quota,
            tenant_key=keeps.tenant_key,
            park_share=keeps.park_share,
            park_after_s=keeps.park_after_s,
        )
        self.disk = SimDisk(worker, keeps, max(sizes.values())) if keeps.disk_bytes else None
        self.plan = plan = plan_for(
            self.config, memory.config.groups, layout.row_bytes, requirements.least_rows()
        )
        self._table, self._rank, self._identity, self.load_rows = memory.table, worker.rank, named(), None
        self._metrics, self._jobs = OffloadMetrics(), RankJobs(worker.rank)
        self._arena = arena = RowArena(plan)
        copier = SimCopier(worker, Copier(RowParts(layout, arena), arena))
        self._own_loop = loop = SimLoop(worker, copier, arena, self)
        self._copier, self._loop = copier, loop  # type: ignore[assignment]
        self._jobs.wake = worker.node.wake
        self._jobs.names = NamedRows(naming, requirements, memory.table, arena, self._jobs)
        if keeps.park_share:
            self.open_for_loads()

    def stop(self) -> None:
        """The process is stopped where it is, or gone."""
        self._own_loop.pace.halt()

    def go_on(self) -> None:
        self._own_loop.pace.halted = False
        self._own_loop.wake()


class SimLoop(TierLoop):
    """Its thread is a step on the virtual clock."""

    is_alive = True

    def __init__(self, worker: SimWorker, copier: SimCopier, arena: RowArena, tiers: SimTiers) -> None:
        below = () if tiers.disk is None else (tiers.disk,)
        self._world = worker.world
        self.pace = Pace(worker.world, self._turn)
        cpu = torch.device("cpu")
        super().__init__(copier, arena, below, tiers._jobs, tiers._metrics, cpu)  # type: ignore[arg-type]
        copier.wake = self.wake
        if below:
            # What is on it already is reported without having been asked for.
            self.wake()

    def wake(self) -> None:
        late_s = self._world.random.choice((_LOOKS_S, _LOOKS_S, 0.1))
        self.pace.at(self._world.now + late_s * self._world.random.random())

    def _count_bug(self) -> None:
        raise

    def _turn(self) -> None:
        if self.step(time.monotonic()) == 0:
            self.wake()


class SimTicket(CopyTicket):
    """A copy that ends when it has run."""

    def __init__(self) -> None:
        super().__init__()
        self.is_over = False

    @property
    def done(self) -> bool:
        return self.is_over


class SimCopier:
    """Snapshots run on the device in order; restores on a stream of their own, after a mark of the device."""

    def __init__(self, worker: SimWorker, copier: Copier) -> None:
        self.wake: Callable[[], None] = lambda: None
        self._worker, self._copier, self._world = worker, copier, worker.world
        self.restoring = Stream(worker.world, worker.plan.kernel_s, lambda: None)

    def snapshot(self, copies: Sequence[RowCopies]) -> CopyTicket:
        ticket = SimTicket()
        run = partial(self._run, ticket, self._copier.snapshot, copies)
        self._worker.node.device.launch(run, cost=_SNAPSHOT)
        return ticket

    def mark(self) -> Any:
        return self._worker.node.device.mark()

    def restore(self, copies: Sequence[RowCopies], after: Any = None) -> CopyTicket:
        ticket = SimTicket()
        run = partial(self._run, ticket, self._copier.restore, copies)

        def begin() -> None:
            if after():
                self.restoring.launch(run)
            elif not self._worker.is_dead:
                self._world.after(_LOOKS_S, begin)

        begin()
        return ticket

    def _run(self, ticket: SimTicket, copy: Callable[..., CopyTicket], copies: Sequence[RowCopies]) -> None:
        made = copy(copies)
        ticket.error, ticket.is_over = made.error, True
        self.wake()


_MANY_TOKENS = 1 << 20


def naming_of(keeps: KeepPlan | None) -> Naming | None:
    """How a node names KV; None for not at all."""
    return None if keeps is None else Naming(f"simulated {keeps.hashing}", keeps.name_tokens)


def traits_of(node: SimNode) -> StackTraits:
    """What the stack of a node states of itself."""
    plan = node.plan
    longest = LongestRequest(plan.longest_tokens, plan.longest_tokens) if plan.longest_tokens else None
    if plan.keeps is None:
        return StackTraits(longest=longest)
    names = partial(_names, plan.keeps.hashing)
    return StackTraits(longest=longest, clock=node.world.clock, naming=node.naming, names=names)


def tell_rate(half: SchedulerHalf, keeps: KeepPlan | None) -> None:
    """Have a node know how fast it computes prompts: those of a simulation are too short to show it."""
    if keeps is not None and keeps.tokens_per_s and half.pulls is not None:
        half.pulls._rate.measured(_MANY_TOKENS, _MANY_TOKENS / keeps.tokens_per_s)


def kept_blocks(node: SimNode) -> KeptBlocks | None:
    """What a node states of the blocks that it keeps, beside what its workers have."""
    keeps, tiers = node.plan.keeps, node.workers[0].tiers
    if keeps is None or tiers is None:
        return None
    return KeptBlocks(
        node.workers[0].memory.config.groups,
        make_requirements(node.workers[0]),
        hashes=partial(_names, keeps.hashing),
        row_bytes=tiers.row_bytes,
        clock=node.world.clock,
        num_ranks=node.plan.world_size,
        parks=tiers.load_rows is not None,
    )


def shared_blocks(node: SimNode) -> Callable[[OrdersDraft], SharedPrefixes] | None:
    """What makes the names of a node's prefix cache, if it shares that."""
    keeps = node.plan.keeps
    if keeps is None or not keeps.shares:
        return None
    hashes = partial(_content_names, keeps.hashing)
    return partial(SharedPrefixes, make_requirements(node.workers[0]).groups, hashes, node.pool)


class _ContentName(bytes):
    """A name for others, with the ``key`` of the content in the node's own pool."""

    key: bytes


def _content_names(hashing: int, request: SimRequest, tokens: int) -> Sequence[bytes]:
    made = [_ContentName(name) for name in _names(hashing, request, tokens)]
    # The prompt of a notice is cut after it was hashed.
    for name, key in zip(made, request.blocks.content_hashes(request.token_ids, tokens), strict=False):
        name.key = key
    return made


def nothing_stays_pinned(node: SimNode) -> None:
    """When all is over, and much time has passed."""
    half = node.connector.offload
    if isinstance(half, WatchedOffload) and not node.is_dead:
        half.pledges.over()


def _names(hashing: int, request: SimRequest, tokens: int) -> Sequence[bytes]:
    # By another hash a name stands for another prompt.
    return names_of(request.prompt.moved(hashing), request.num_tokens, tokens)
