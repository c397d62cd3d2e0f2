"""One simulated serving node: requests, blocks and steps around the real halves of the connector.

A small scheduler in the terms of vLLM's contract, on the virtual clock. Freed blocks belong to somebody else
at once, and what it computes is in memory only when the device has run.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from unittest import mock

import msgspec

from kvconnect.addresses import RankAddress
from kvconnect.config import TransferConfig
from kvconnect.halves import building
from kvconnect.halves.building import Trust
from kvconnect.outcome import Reason
from kvconnect.peer.allow_list import AllowList
from kvconnect.peer.handles import Handles, PeerTrust
from kvconnect.transfer.parts import DeviceSteps
from kvconnect.transfer.stack import Computed, StateBlock, Step
from tests.simulator.blocks import Blocks
from tests.simulator.device import Stream
from tests.simulator.keeping import kept_blocks, naming_of, tell_rate, traits_of
from tests.simulator.pace import Pace
from tests.simulator.pledges import WatchedOffload
from tests.simulator.pool import Pool
from tests.simulator.reports import RankReports
from tests.simulator.request import Request, Stage
from tests.simulator.worker import SimWorker

if TYPE_CHECKING:
    from tests.simulator.checks import Checks
    from tests.simulator.network import Network
    from tests.simulator.scenario import NodePlan

_ASK_AGAIN_S = 0.25


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
        self.config = TransferConfig(
            kv_role=plan.role, engine_id=engine_id, kv_connector_extra_config=plan.extra
        )
        self.naming = naming_of(plan.keeps)
        self.workers = [SimWorker(self, rank, ports[rank] if ports else 0) for rank in range(plan.world_size)]
        self.ports = tuple(worker.channel.port for worker in self.workers)
        directory = [RankAddress(rank, plan.host, port) for rank, port in enumerate(self.ports)]
        for worker in self.workers:
            worker.transfers.know_ranks(tuple(directory))
        cache = self.workers[0].memory.config
        self.pool = Pool(plan.num_blocks, self._spoil, spoils_freed=plan.keeps is None)
        self._states = [index for index, group in enumerate(cache.groups) if group.is_state]
        self.blocks = Blocks(self.pool, cache.groups, plan.model.reuses_prefixes)
        handles = iter(range(1 << 40))
        if self.workers[0].tiers is not None:
            extra = msgspec.structs.replace(plan.extra, offload=self.workers[0].tiers.config)
            self.config = msgspec.structs.replace(self.config, kv_connector_extra_config=extra)
        with mock.patch.object(building, "OffloadScheduler", WatchedOffload):
            self.connector = building.build_scheduler_half(
                self.config,
                cache,
                traits_of(self),
                directory=directory,
                trust=self._trust(),
                kept=kept_blocks(self),
                new_handle=lambda: f"{self.name}-{next(handles)}",
            )
        tell_rate(self.connector, plan.keeps)
        if isinstance(self.connector.offload, WatchedOffload):
            self.connector.offload.watch(self)
        self.device = Stream(world, plan.kernel_s, self._device_moved)
        self.steps = DeviceSteps(self.device.mark)
        self.requests: dict[str, Request] = {}
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.loading: dict[str, Request] = {}
        self.abandoned: dict[str, Request] = {}
        self.unsent: dict[str, Request] = {}
        self._inbox: list[Request] = []
        self._aborts: list[str] = []
        # What the last step completed, and what the one before it did: results that a stack has not seen.
        self._last_step: list[Request] = []
        self._step_before: list[Request] = []
        self._reports = RankReports(plan.world_size)
        self._spoilt = 0
        self.wake()

    def _trust(self) -> Trust | None:
        """How it makes and reads handles, and whom it fetches from."""
        handles, world = self.plan.handles, self.world
        if handles is None:
            return None
        ahead_s = handles.skew_s[self.plan.host]
        made = Handles(handles.secret, lambda: world.now + ahead_s)
        if not handles.secret:
            return Trust(made)
        allowed = AllowList(handles.skew_s if handles.is_listed else ())
        return Trust(made, PeerTrust(allowed, self.plan.extra.max_peers))

    # What clients do

    def submit(self, request: Request) -> None:
        """A request arrives."""
        request.num_prompt = request.prompt.num_tokens
        self._inbox.append(request)
        self.wake()

    def abort(self, request_id: str) -> None:
        """Its client left."""
        self._aborts.append(request_id)
        self.wake()

    # Time

    def wake(self) -> None:
        """Step soon."""
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
        """They run again."""
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
        lost = [*self.requests.values(), *self._inbox]
        self.requests.clear()
        self._inbox.clear()
        for request in lost:
            self._answer(request, "failed", "the node is gone")

    # One step

    def step(self) -> None:
        """Results, arrivals, a plan, the device, orders."""
        self._take_results()
        ended, self._step_before, self._last_step = self._step_before, self._last_step, []
        for request in ended:
            if request.request_id in self.requests:
                self._end(request, "done")
        arrived, self._inbox = self._inbox, []
        for request in arrived:
            self._arrive(request)
        aborts, self._aborts = self._aborts, []
        for request_id in aborts:
            if request_id in self.requests:
                self._abort(self.requests[request_id])
        self._send_orders()
        budget = self.plan.step_tokens
        for request in list(self.running):
            if request.stage is Stage.RUNNING:
                budget = self._continue(request, budget)
        self._admit(budget)
        self._send_orders()
        self.checks.node_stepped(self)
        if self.running or self._last_step or self._step_before:
            self._pace.at(self.world.now + self.plan.step_s)
        elif self.waiting:
            self._pace.at(self.world.now + _ASK_AGAIN_S)

    def _send_orders(self) -> None:
        orders = self.connector.build_orders()
        self.steps.begin(orders.step)
        if orders:
            for worker in self.workers:
                worker.order(orders, self.steps.finished)

    def _arrive(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.blocks.begin(request)
        self.connector.new_request(request)
        request.num_prompt = min(request.num_prompt, self.connector.prefill_tokens(request))
        self.waiting.append(request)

    def _abort(self, request: Request) -> None:
        if request in self.running:
            self.running.remove(request)
        if request in self.waiting:
            self.waiting.remove(request)
        self._end(request, "aborted")

    def _continue(self, request: Request, budget: int) -> int:
        """Compute the next tokens of a running request; what is left of the budget."""
        count = request.cut(min(request.num_tokens - request.computed, self.plan.chunk_tokens, budget))
        if count <= 0:
            return budget
        while (new := self.blocks.grow(request, request.computed, request.computed + count)) is None:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return budget
        self._compute(request, count, new if any(new) else None)
        return budget - count

    def _preempt(self, request: Request) -> None:
        self.world.note(self.name, "preempts", request.request_id)
        self.checks.count("preemptions")
        self.running.remove(request)
        for worker in self.workers:
            worker.give_up(frozenset(block for ids in request.ids for block in ids))
        self._begin_anew(request)

    def _begin_anew(self, request: Request) -> None:
        self.blocks.free(request)
        request.computed, request.loaded, request.stage = 0, False, Stage.WAITING
        self.connector.preempted(request.request_id)
        self.waiting.appendleft(request)

    def _admit(self, budget: int) -> None:
        blocked = False
        for request in list(self.waiting):
            if budget <= 0:
                return
            if not blocked or request.loaded:
                taken = self._admit_one(request, budget)
                blocked = blocked or taken is None
                budget -= taken or 0

    def _admit_one(self, request: Request, budget: int) -> int | None:
        """Start or load a request. What it takes of the budget; None: there is no room."""
        reused: list[list[int]] = []
        if request.computed == 0 and not request.loaded:
            request.computed, reused = self.blocks.hit(request)
            external, _ = self.connector.matched_tokens(request, request.computed)
            if external is None:
                request.computed = 0
                return 0
            if external:
                return self._load(request, external, reused)
        count = min(request.num_tokens - request.computed, self.plan.chunk_tokens, budget)
        has_room = request.loaded or self.pool.free >= self.blocks.most(request)
        if (
            not has_room
            or self.blocks.grow(request, request.computed, request.computed + count, reused) is None
        ):
            request.computed = request.computed if request.loaded else 0
            return None
        self.waiting.remove(request)
        self.running.append(request)
        request.stage = Stage.RUNNING
        self.connector.update_after_alloc(request, request.blocks(), 0)
        request.checkpoints = tuple(self.connector.checkpoints(request))
        count = request.cut(count)
        self._compute(request, count, [list(ids) for ids in request.ids])
        return count

    def _load(self, request: Request, external: int, reused: list[list[int]]) -> int | None:
        loaded, request.computed = request.computed + external, 0
        computed = min(loaded, request.num_tokens - 1)
        if self.blocks.grow(request, computed, request.num_tokens, reused) is None:
            return None
        self.waiting.remove(request)
        request.stage, request.computed = Stage.LOADING, computed
        self.loading[request.request_id] = request
        self.checks.loads(self, request, loaded)
        self.connector.update_after_alloc(request, request.blocks(), external)
        return 0

    def _compute(self, request: Request, count: int, new: list[list[int]] | None) -> None:
        start, stop = request.computed, request.computed + count
        ids, prompt = request.blocks(), request.prompt

        def kernel() -> None:
            for worker in self.workers:
                worker.memory.compute(prompt, ids, start, stop)

        self.device.launch(kernel, cost=count)
        self.checks.moved()
        request.computed, request.is_computed = stop, self.device.mark()
        self.blocks.remember(request)
        if request.request_id in self.connector.due:
            states = [
                StateBlock(request.request_id, group, stop, request.ids[group][-1]) for group in self._states
            ]
            self.connector.launched(Step([Computed(request.request_id, stop, new)], states))
        if stop == request.num_tokens:
            request.generated += 1
            if request.generated >= request.max_tokens:
                self.running.remove(request)
                if self.plan.runs_ahead:
                    self._last_step.append(request)
                else:
                    self._end(request, "done")

    # Ends

    def _end(self, request: Request, outcome: str, error: str = "") -> None:
        del self.requests[request.request_id]
        request.stage = Stage.ENDED
        delivered = outcome == "done"
        keep, params = self.connector.request_finished(request, request.blocks(), delivered=delivered)
        if delivered:
            self.checks.served(self, request)
        if self.loading.pop(request.request_id, None) is not None:
            self.abandoned[request.request_id] = request
        elif keep:
            self.unsent[request.request_id] = request
        else:
            self.blocks.free(request)
        self._answer(request, outcome, error, params if delivered else None)

    def _answer(
        self, request: Request, outcome: str, error: str, params: Mapping[str, Any] | None = None
    ) -> None:
        request.outcome, request.error, request.answer = outcome, error, params
        self.checks.moved()
        self.world.note(self.name, "ends", request.request_id, outcome, error)
        request.done(request)

    def _take_results(self) -> None:
        said = [results for worker in self.workers for results in worker.take_results()]
        results = self._reports.take(said)
        if not results:
            return
        self.connector.update_results(results)
        for name in results.sent:
            self.checks.freed(self, name)
            self.blocks.free(self.unsent.pop(name))
        for name in results.received:
            self._received(name, results.failed.get(name))

    def _received(self, name: str, failure: Reason | None) -> None:
        request = self.abandoned.pop(name, None)
        if request is not None:
            self.blocks.free(request)
            return
        request = self.loading.pop(name)
        if failure is None:
            self.checks.committed(self, request)
            request.stage, request.loaded = Stage.WAITING, True
            self.blocks.remember(request)
            self.waiting.appendleft(request)
        elif self.plan.recomputes:
            self.checks.load_failed(self, request, failure.text)
            self._begin_anew(request)
        else:
            self.checks.load_failed(self, request, failure.text)
            self._end(request, "failed", failure.text)

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
