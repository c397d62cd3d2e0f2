"""One rank of a simulated node: a real transfer thread with its memory, its engine and its channel.

It steps when something arrives, when something it waits for is over, and when it asked to.
"""

from __future__ import annotations

import functools
import logging
import random
from typing import TYPE_CHECKING

import torch

from kvconnect.cache.identity import Prefix
from kvconnect.config import TransferConfig
from kvconnect.engine.base import Span
from kvconnect.halves.worker_half import WorkerHalf
from kvconnect.halves.worker_transfers import WorkerTransfers
from kvconnect.metrics import Metrics
from kvconnect.offload.worker.prefix_blocks import PrefixBlocks
from kvconnect.pack.batches import StagedChunk
from kvconnect.peer.messages import CacheMeaning, Introduction
from kvconnect.prefill.prefill_side import STOPPING
from kvconnect.transfer.kept import Kept, KeptByName
from kvconnect.transfer.orders import Orders, Reports, Results
from kvconnect.transfer.slots import SlotPool
from tests.identities import named
from tests.simulator.device import SimLocal, Stream
from tests.simulator.engine import SimEngine
from tests.simulator.memory import RankMemory
from tests.simulator.network import SimChannel
from tests.simulator.stranger import Liar, LyingChannel
from tests.simulator.tiers import SimTiers, make_requirements
from tests.simulator.world import Pace

if TYPE_CHECKING:
    from tests.simulator.checks import Checks
    from tests.simulator.node import SimNode

_POLL_S = 0.1
_LEAST_SLEEP_S = 1e-3

logger = logging.getLogger(__name__)


class SimPrefixBlocks(PrefixBlocks):
    """It counts what it gives."""

    checks: Checks

    def hold(self, prefix: Prefix, num_tokens: int) -> Kept | None:
        kept = super().hold(prefix, num_tokens)
        if kept is not None and kept.on_device:
            self.checks.count("pinned on the device")
        return kept


class SimWorker:
    """One rank, which listens at ``port``, or at a free one if that is 0."""

    def __init__(self, node: SimNode, rank: int, port: int) -> None:
        self.node, self.rank = node, rank
        world, plan = node.world, node.plan
        self.world, self.checks, self.plan, self.config = world, node.checks, plan, plan.extra
        self.who = f"{node.name}.{rank}"
        self.is_dead = False
        self.is_drained = False
        self._pace = Pace(world, self.step)
        self._is_polling = True
        self._results: list[Results] = []
        self._stopped_at = 0.0
        self._stopped_s = 0.0
        self._given_up: list[StagedChunk] = []
        self._ratio = plan.shape.block_tokens // plan.shape.kernel_tokens
        self.memory = RankMemory(plan, rank)
        self.slot_bytes = self.memory.slot_bytes
        self.packing = Stream(world, plan.kernel_s, self.device_moved)
        self.engine = SimEngine(world, self.who, plan, self.checks, self.wake)
        self.engine.register([Span(self.memory.address, self.memory.length_bytes)])
        first = world.random.randrange(1, 1 << 61)
        self.landing = SlotPool(self.memory.landing, self.slot_bytes, first)
        self.send = SlotPool(self.memory.send, self.slot_bytes, first + (1 << 40))
        self.is_strange = plan.is_stranger
        make = functools.partial(LyingChannel, liar=self._liar()) if plan.is_stranger else SimChannel
        self.channel = node.network.channel(plan.host, self.wake, port, make)
        self.channel.grants.granted = lambda address: self.checks.landing_slot_is_quiet(self, address)
        self.metrics = Metrics()
        self.reports = Reports(rank)
        self.reports.wake = node.wake
        self.tiers: SimTiers | None = None
        self.shared: SimPrefixBlocks | None = None
        if plan.keeps is not None and node.naming is not None:
            self.tiers = SimTiers(self, plan.keeps, node.naming)
        self.transfers = self._make_transfers()
        assert self.transfers.prefill is not None
        assert self.transfers.decode is not None
        self.prefill, self.decode = self.transfers.prefill, self.transfers.decode
        # In place of the part that has threads and sockets.
        self._half = WorkerHalf(self.transfers, self.tiers)  # type: ignore[arg-type]
        self.checks.begin(self)

    def _liar(self) -> Liar:
        transfers = tuple(f"transfer:t{number}" for number in range(6))
        return Liar(random.Random(f"{self.world.seed} {self.who} lies"), transfers)

    def _make_transfers(self) -> WorkerTransfers:
        local = SimLocal(
            self._introduction(),
            self.engine,
            self.memory.table,
            torch.device("cpu"),
            self.landing,
            self.send,
            packing=self.packing,
            fills=lambda address: self.checks.send_slot_is_quiet(self, address),
            takes=lambda address: self.checks.slot_is_granted(self, address),
        )
        kept: KeptByName | None = None if self.tiers is None else self.tiers.names
        if self.plan.keeps is not None and self.plan.keeps.shares and self.node.naming is not None:
            needs, table = make_requirements(self), self.memory.table
            kept = self.shared = SimPrefixBlocks(self.node.naming, needs, table, self.plan.num_blocks, kept)
            self.shared.checks = self.checks
        if kept is not None:
            local.keep(kept)
        if self.tiers is not None and self.tiers.load_rows is not None:
            local.park(self.tiers.load_rows)
        # Of any role: what a node does not do its halves do not order.
        config = TransferConfig(kv_role="kv_both", kv_connector_extra_config=self.config)
        return WorkerTransfers(
            config,
            self.channel,
            local,
            self.reports,
            self.metrics,
            random.Random(self.world.random.getrandbits(64)),
            shared=self.shared,
            record=lambda: self.node.device.mark(),
        )

    def _introduction(self) -> Introduction:
        weights = "" if self.plan.keeps is None else str(self.plan.keeps.weights)
        return Introduction(
            engine_id=self.node.config.engine_id,
            incarnation=f"{self.node.number}.{self.rank}",
            rank=self.rank,
            meaning=CacheMeaning(
                named("simulated", weights), self.plan.model.num_heads, self.plan.world_size
            ),
            engine="memory",
            engine_card=b"",
            table=self.memory.table,
            slot_bytes=self.slot_bytes,
            scratch_address=self.memory.scratch_address,
            scratch_bytes=self.memory.scratch_bytes,
        )

    @property
    def stopped_s(self) -> float:
        """How long its process has been stopped so far."""
        now_s = self.world.now - self._stopped_at if self.channel.stopped else 0.0
        return self._stopped_s + now_s

    @property
    def awake_s(self) -> float:
        """A clock that stands still while its process is stopped."""
        return self.world.now - self.stopped_s

    def packing_touches(self, blocks: frozenset[int], side: str) -> bool:
        """Whether a kernel that was launched and has not run packs from these blocks, or unpacks to them."""
        return any(
            blocks & self._touched(staged)
            for kind, staged in self.packing.pending
            if kind == side and not any(staged is given_up for given_up in self._given_up)
        )

    def give_up(self, blocks: frozenset[int]) -> None:
        """A prefill lost these blocks: whatever is being packed from them alone is thrown away."""
        packing = [staged for kind, staged in self.packing.pending if kind == "source"]
        self._given_up = [staged for staged in self._given_up if staged in packing]
        self._given_up += [staged for staged in packing if self._touched(staged) <= blocks]

    def _touched(self, staged: StagedChunk) -> set[int]:
        """The logical blocks of a chunk, without the null block."""
        touched = {int(block) for blocks in staged.blocks.values() for block in blocks // self._ratio}
        return touched - {0}

    def order(self, orders: Orders) -> None:
        """A step is about to be launched: take its orders, and remember what must be reported."""
        self.checks.ordered(self, orders)
        self._half.before_step(orders)

    def take_results(self) -> list[Results]:
        """What the transfer thread reported since the last call."""
        results, self._results = self._results, []
        if self.tiers is not None and (restored := self.tiers.results()):
            self.checks.restored(self, restored)
            results.append(restored)
        return results

    def wake(self) -> None:
        """Step soon, if the process can."""
        self._pace.at(self.world.now)

    def device_moved(self) -> None:
        """A kernel has run: nobody is told, but who looks all the time sees it, or looks just now."""
        if self._is_polling or self.prefill.book.expected:
            self.wake()

    def step(self) -> None:
        sleep_s = self.transfers.step(self.world.now)
        self._is_polling = sleep_s < _LEAST_SLEEP_S
        results = self.reports.take()
        if results:
            self.world.note(self.who, "reports", results.sent, results.received, tuple(results.failed))
            self.checks.reported(self, results)
            self._results.append(results)
        self.checks.stepped(self)
        times = [self.world.now + (_POLL_S if self._is_polling else sleep_s)]
        ends = self.engine.next_time()
        if ends is not None:
            times.append(ends)
        self._pace.at(min(times))

    def drain(self) -> None:
        """Begin no lease any more."""

        def over() -> None:
            self.is_drained = True

        self.transfers.quiesce(over, STOPPING, self.config.drain_s)

    def stop(self) -> None:
        """The process is stopped where it is."""
        self.channel.stopped, self._stopped_at = True, self.world.now
        self._pace.halt()
        if self.tiers is not None:
            self.tiers.stop()
        self.engine.stop()

    def go_on(self) -> None:
        self._stopped_s = self.stopped_s
        self._pace.halted = self.is_dead
        if self.tiers is not None and not self.is_dead:
            self.tiers.go_on()
        self.engine.go_on()
        self.channel.go_on()
        self.wake()

    def kill(self) -> None:
        """The process is gone."""
        self.is_dead = True
        self._pace.halt()
        self.packing.is_dead = True
        if self.tiers is not None:
            self.tiers.stop()
        self.engine.die()
        self.channel.close()
