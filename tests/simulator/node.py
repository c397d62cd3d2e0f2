"""One simulated serving node: the reference node's scheduler around the real halves of the connector.

On the virtual clock. Freed blocks belong to somebody else at once, and what is computed is in memory only
when the device has run.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from unittest import mock

import msgspec

from kvconnect.addresses import RankAddress
from kvconnect.config import TransferConfig
from kvconnect.halves.building import Trust, build_scheduler_half
from kvconnect.halves.scheduler_half import SchedulerHalf
from kvconnect.node.block_manager import BlockManager, BlockPool, CacheHit
from kvconnect.node.node_options import NodeOptions
from kvconnect.node.request import EngineStep, Failure, Output, Request, RequestState, ScheduledChunk
from kvconnect.node.scheduler import Scheduler
from kvconnect.offload.scheduler import offload_scheduler
from kvconnect.outcome import Reason
from kvconnect.peer.allow_list import AllowList
from kvconnect.peer.handles import Handles, PeerTrust
from kvconnect.transfer.orders import Results, joined
from tests.simulator.device import Stream
from tests.simulator.pledges import WatchedOffload
from tests.simulator.request import SimRequest
from tests.simulator.tiers import kept_blocks, naming_of, shared_blocks, tell_rate, traits_of
from tests.simulator.worker import SimWorker
from tests.simulator.world import Pace

if TYPE_CHECKING:
    from tests.simulator.checks import Checks
    from tests.simulator.network import Network
    from tests.simulator.scenario import NodePlan

_ASK_AGAIN_S = 0.25
_MOST_REQUESTS = 64


class RankReports:
    """What the ranks of a node report, put together as a serving stack does: over when every rank said so."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._said: Counter[tuple[str, str]] = Counter()
        self._failed: dict[str, Reason] = {}

    def take(self, reports: Sequence[Results]) -> Results:
        """Add what was reported. What is over at every rank by now; failed, if it failed at one."""
        every = joined(reports)
        sent = tuple(name for name in every.sent if self._is_over("sent", name))
        received = tuple(name for name in every.received if self._is_over("received", name))
        self._failed = {**every.failed, **self._failed}
        failed = {name: self._failed.pop(name) for name in received if name in self._failed}
        return msgspec.structs.replace(every, sent=sent, received=received, failed=failed)

    def _is_over(self, what: str, name: str) -> bool:
        self._said[what, name] += 1
        if self._said[what, name] < self._world_size:
            return False
        del self._said[what, name]
        return True


class SimPool(BlockPool):
    """The pool of a node, of which it is told when blocks change hands.

    Args:
        num_blocks: with the null block.
        given_away: told of blocks that are somebody else's from now on.
        spoils_freed: those that nobody has are so already, and not only once somebody takes them.
    """

    def __init__(
        self, num_blocks: int, given_away: Callable[[Sequence[int]], None], spoils_freed: bool
    ) -> None:
        super().__init__(num_blocks)
        self._given_away, self._spoils_freed = given_away, spoils_freed

    @property
    def held(self) -> int:
        """Blocks that somebody holds, counted one by one."""
        return len(self._references) - self._references.count(0)

    def watch(self, group: int, hashes: Sequence[bytes]) -> Sequence[int]:
        # What a node calls a content for others is not what its pool does.
        return super().watch(group, [getattr(name, "key", b"") for name in hashes])

    def allocate(self, count: int) -> list[int]:
        taken = super().allocate(count)
        if taken:
            self._given_away(taken)
        return taken

    def release(self, block_ids: Sequence[int]) -> None:
        super().release(block_ids)
        spoiled = [
            block for block in block_ids if block and block in self._free and block not in self._key_of
        ]
        if spoiled and self._spoils_freed:
            self._given_away(spoiled)


class SimScheduler(Scheduler):
    """The reference node's scheduler, which computes so many tokens of a request at most in a step.

    What it does is shown to the checks. Where it ``runs_ahead`` requests end two steps late, as where a stack
    begins a step before it has the results of the last.
    """

    def __init__(self, node: SimNode, manager: BlockManager, hooks: SchedulerHalf) -> None:
        plan = node.plan
        super().__init__(
            NodeOptions(max_num_seqs=_MOST_REQUESTS, max_num_batched_tokens=plan.step_tokens),
            manager,
            hooks,
            recompute_failed_loads=plan.recomputes,
        )
        self._node, self._plan = node, plan
        # What the last step completed, and what the one before it did: results that a stack has not seen.
        self.last_step: list[tuple[Request, Output]] = []
        self.step_before: list[tuple[Request, Output]] = []

    def end_late(self) -> None:
        """A step begins: those that it hears of have ended."""
        ended, self.step_before, self.last_step = self.step_before, self.last_step, []
        for request, output in ended:
            if request.request_id in self.requests:
                self._end_now(request, output)

    def _chunk_tokens(self, request: Request, budget: int) -> int:
        return super()._chunk_tokens(request, min(budget, self._plan.chunk_tokens))

    def _admit_one(self, request: Request, budget: int, step: EngineStep) -> int | None:
        return super()._admit_one(request, min(budget, self._plan.chunk_tokens), step)

    def _start_load(
        self, request: Request, hit: CacheHit | None, external: int, step: EngineStep
    ) -> int | None:
        taken = super()._start_load(request, hit, external, step)
        if taken is not None:
            assert isinstance(request, SimRequest)
            self._node.checks.loads(self._node, request, (hit.num_tokens if hit else 0) + external)
        return taken

    def _preempt(self, request: Request) -> None:
        node = self._node
        node.world.note(node.name, "preempts", request.request_id)
        node.checks.count("preemptions")
        for worker in node.workers:
            worker.give_up(frozenset(block for ids in request.blocks.ids for block in ids))
        super()._preempt(request)

    def _end(self, request: Request, output: Output, *, delivered: bool = True) -> None:
        if delivered and self._plan.runs_ahead:
            request.state = RequestState.FINISHED
            self.last_step.append((request, output))
        else:
            self._end_now(request, output, delivered=delivered)

    def _end_now(self, request: Request, output: Output, *, delivered: bool = True) -> None:
        if delivered:
            assert isinstance(request, SimRequest)
            self._node.checks.served(self._node, request)
        super()._end(request, output, delivered=delivered)


class SimNode:
    """A node from its start to its end; what is started again is another one.

    Args:
        number: which start of this host it is.
        ports: where the ranks listen; empty for free ones.
    """

    def __init__(
        self, network: Network, checks: Checks, plan: NodePlan, number: int, ports: tuple[int, ...] = ()
    ) -> None:
        self.network, self.checks, self.plan, self.number = network, checks, plan, number
        self.world = world = network.world
        self.name = f"{plan.host}.{number}"
        self.is_dead = False
        self.is_stopped = False
        self._pace = Pace(world, self.step)
        engine_id = plan.host if plan.keeps_engine_id else self.name
        # Of every other seed all requests have receipts.
        plan_extra = msgspec.structs.replace(plan.extra, receipts=world.seed % 2 == 0)
        self.config = TransferConfig(
            kv_role=plan.role, engine_id=engine_id, kv_connector_extra_config=plan_extra
        )
        self.naming = naming_of(plan.keeps)
        self.workers = [SimWorker(self, rank, ports[rank] if ports else 0) for rank in range(plan.world_size)]
        self.ports = tuple(worker.channel.port for worker in self.workers)
        directory = [RankAddress(rank, plan.host, port) for rank, port in enumerate(self.ports)]
        for worker in self.workers:
            worker.transfers.know_ranks(tuple(directory))
        cache = self.workers[0].memory.config
        handles = iter(range(1 << 40))
        if self.workers[0].tiers is not None:
            extra = msgspec.structs.replace(plan_extra, offload=self.workers[0].tiers.config)
            self.config = msgspec.structs.replace(self.config, kv_connector_extra_config=extra)
        self.pool = SimPool(plan.num_blocks, self._spoil, spoils_freed=plan.keeps is None)
        with mock.patch.object(offload_scheduler, "OffloadScheduler", WatchedOffload):
            self.connector = build_scheduler_half(
                self.config,
                cache,
                traits_of(self),
                directory=directory,
                trust=self._trust()._replace(new_handle=lambda: f"{self.name}-{next(handles)}"),
                kept=kept_blocks(self),
                shared=shared_blocks(self),
            )
        tell_rate(self.connector, plan.keeps)
        if isinstance(self.connector.offload, WatchedOffload):
            self.connector.offload.watch(self)
        reuses = plan.reuses_windows or not plan.model.has("window")
        manager = BlockManager(cache, self.pool, plan.step_tokens, enable_prefix_caching=reuses)
        self.scheduler = SimScheduler(self, manager, self.connector)
        self.device = Stream(world, plan.kernel_s, self._device_moved)
        self._inbox: list[SimRequest] = []
        self._aborts: list[str] = []
        self._reports = RankReports(plan.world_size)
        self._spoilt = 0
        self.wake()

    def _trust(self) -> Trust:
        """How it reads handles, and whom it fetches from."""
        handles, world = self.plan.handles, self.world
        if handles is None:
            return Trust(Handles())
        ahead_s = handles.skew_s[self.plan.host]
        made = Handles(handles.secret, lambda: world.now + ahead_s)
        if not handles.secret:
            return Trust(made)
        allowed = AllowList(handles.skew_s if handles.is_listed else ())
        return Trust(made, PeerTrust(allowed, self.plan.extra.max_peers))

    # What clients do

    def submit(self, request: SimRequest) -> None:
        self._inbox.append(request)
        self.wake()

    def abort(self, request_id: str) -> None:
        self._aborts.append(request_id)
        self.wake()

    # Time

    def wake(self) -> None:
        self._pace.at(self.world.now + self.plan.step_s * 0.1)

    def _device_moved(self) -> None:
        for worker in self.workers:
            worker.device_moved()

    def stop(self) -> None:
        """Its processes are stopped where they are."""
        self.is_stopped = True
        self._pace.halt()
        for worker in self.workers:
            worker.stop()

    def go_on(self) -> None:
        self.is_stopped = self._pace.halted = False
        for worker in self.workers:
            worker.go_on()
        self.wake()

    def stall(self, seconds: float) -> None:
        """Its step loop hangs for a while; its workers go on."""
        self._pace.hang(self.world.now + seconds)

    def drain(self) -> None:
        """It shall end: nothing more is held, and what is held must be over within a bound."""
        self.connector.drain()
        for worker in self.workers:
            worker.drain()
        bound_s = self.checks.drain_bound_s(self)
        self.world.after(bound_s, lambda: self.checks.drained_in_time(self))

    def kill(self) -> None:
        """All its processes are gone, and so is what it owed its clients."""
        self.is_dead = True
        self._pace.halt()
        self.device.is_dead = True
        for worker in self.workers:
            worker.kill()
        self.scheduler.fail_all(Failure(503, "the node is gone"))
        self._deliver()
        lost, self._inbox = self._inbox, []
        for request in lost:
            request.end("failed")

    # One step

    def step(self) -> None:
        """Results, arrivals, a plan, the device, orders."""
        scheduler = self.scheduler
        self._take_results()
        scheduler.end_late()
        arrived, self._inbox = self._inbox, []
        for request in arrived:
            scheduler.add(request)
        aborts, self._aborts = self._aborts, []
        for request_id in aborts:
            scheduler.abort(request_id)
        self._deliver()
        self._send_orders()
        step = scheduler.schedule()
        sampled: dict[str, tuple[int, int | None]] = {}
        for chunk in step.chunks:
            sampled[chunk.request_id] = self._compute(chunk), None
        scheduler.update(step, sampled)
        self._deliver()
        self._send_orders()
        self.checks.node_stepped(self)
        if scheduler.running or scheduler.last_step or scheduler.step_before:
            self._pace.at(self.world.now + self.plan.step_s)
        elif scheduler.waiting:
            self._pace.at(self.world.now + _ASK_AGAIN_S)

    def _send_orders(self) -> None:
        orders = self.connector.build_orders()
        for worker in self.workers:
            worker.order(orders)

    def _compute(self, chunk: ScheduledChunk) -> int:
        """Launch what computes some tokens; the next one."""
        request = self.scheduler.requests[chunk.request_id]
        assert isinstance(request, SimRequest)
        start, stop = chunk.start, chunk.start + len(chunk.token_ids)
        ids, prompt = [list(ids) for ids in request.ids], request.prompt

        def kernel() -> None:
            for worker in self.workers:
                worker.memory.compute(prompt, ids, start, stop)

        self.device.launch(kernel, cost=len(chunk.token_ids))
        self.checks.moved()
        request.is_computed = self.device.mark()
        return prompt.text

    def _deliver(self) -> None:
        outputs, self.scheduler.outputs = self.scheduler.outputs, []
        for request, output in outputs:
            if output.is_last:
                self.checks.moved()
                why = output.finish_reason or output.failure
                self.world.note(self.name, "ends", request.request_id, why)
                request.sink(output)

    def _take_results(self) -> None:
        said = [results for worker in self.workers for results in worker.take_results()]
        results = self._reports.take(said)
        if not results:
            return
        for name in results.sent:
            self.checks.freed(self, name)
        for name in results.received:
            request = self.scheduler.requests.get(name)
            if request is not None:
                assert isinstance(request, SimRequest)
                self.checks.load_ended(self, request, results.failed.get(name))
        self.scheduler.update_results(results)

    def _spoil(self, blocks: Any) -> None:
        """Blocks change hands: what was in them is gone."""
        self._spoilt += 7
        for worker in self.workers:
            spoil = functools.partial(worker.memory.spoil, blocks, self._spoilt)
            if self.plan.keeps is None:
                spoil()
            else:
                # Behind the copies of what was in them to host memory.
                self.device.launch(spoil, cost=0.0)
        if self.plan.keeps is not None:
            self.connector.overwritten(blocks)
