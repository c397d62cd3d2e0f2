"""One connector of two parts: handing a request's KV over, and keeping it for later.

A request whose KV is fetched from a peer takes nothing from the tiers for that admission; what it computes or
fetches is kept like that of any other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec

from kvconnect.cache.region_table import RegionTable
from kvconnect.errors import LocalError
from kvconnect.halves.transfer_scheduler import SchedulerConnector
from kvconnect.halves.transfer_worker import WorkerConnector
from kvconnect.metric_values import Changes, merge_changes
from kvconnect.offload.scheduler.half import OffloadScheduler
from kvconnect.offload.scheduler.sessions import RESULTS_KEY
from kvconnect.offload.worker.half import OffloadWorker
from kvconnect.orders import OffloadOrders, Orders, RankAddress, Results
from kvconnect.transfer.params import transfer_params
from kvconnect.transfer.stack import BlockIdsByGroup, RequestView, SchedulerHooks, Step, WorkerHooks

PEER = "peer"
"""What another node is called where hits are counted by where they came from."""


class SchedulerComposite(SchedulerHooks):
    """What lives with a request scheduler. With neither part every answer is that there is nothing to do.

    ``zeroes_loads``: the stack zeroes blocks that are loaded after ``before_step`` of the load's step.
    """

    def __init__(
        self,
        transfer: SchedulerConnector | None,
        offload: OffloadScheduler | None,
        *,
        zeroes_loads: bool = False,
    ) -> None:
        self.transfer, self.offload = transfer, offload
        self._zeroes_loads = zeroes_loads

    @property
    def _parts(self) -> Sequence[SchedulerConnector | OffloadScheduler]:
        return [part for part in (self.transfer, self.offload) if part is not None]

    def drain(self) -> None:
        if self.transfer is not None:
            self.transfer.drain()

    def new_request(self, request: RequestView, *, reads: bool = True, writes: bool = True) -> None:
        if self.transfer is not None:
            self.transfer.new_request(request, reads=reads)
        if self.offload is not None:
            self.offload.new_request(request, reads=reads, writes=writes)

    def prefill_tokens(self, request: RequestView) -> int:
        return request.num_tokens if self.transfer is None else self.transfer.prefill_tokens(request)

    def matched_tokens(self, request: RequestView, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self.transfer is not None:
            count, in_background = self.transfer.matched_tokens(request, num_computed_tokens)
            if count is None or count > 0:
                if self.offload is not None:
                    self.offload.withdraw(request.request_id)
                return count, in_background
        local: tuple[int | None, bool] = (0, False)
        if self.offload is not None:
            local = self.offload.matched_tokens(request, num_computed_tokens)
        if self.transfer is None or local[0] is None:
            return local
        pulled = self.transfer.pulled_tokens(request, num_computed_tokens, local[0])
        if pulled and self.offload is not None:
            self.offload.withdraw(request.request_id)
        return local if pulled == 0 else (pulled, bool(pulled))

    def update_after_alloc(
        self, request: RequestView, block_ids: BlockIdsByGroup, num_external_tokens: int
    ) -> None:
        offload, is_restored = self.offload, False
        if offload is not None:
            is_restored = self.transfer is None or offload.offers(request.request_id)
            offload.update_after_alloc(request, block_ids, num_external_tokens if is_restored else 0)
        if self.transfer is not None:
            self.transfer.update_after_alloc(request, block_ids, 0 if is_restored else num_external_tokens)

    def checkpoints(self, request: RequestView) -> Sequence[int]:
        return () if self.offload is None else self.offload.checkpoints(request)

    @property
    def due(self) -> Mapping[str, int]:
        sent = {} if self.transfer is None else self.transfer.due
        kept = {} if self.offload is None else self.offload.due
        if not kept or not sent:
            return kept or sent
        return {**kept, **{name: min(due, kept.get(name, due)) for name, due in sent.items()}}

    def launched(self, step: Step) -> None:
        for part in self._parts:
            part.launched(step)

    def overwritten(self, block_ids: Collection[int]) -> None:
        if self.offload is not None:
            self.offload.overwritten(block_ids)

    def preempted(self, request_id: str) -> None:
        for part in self._parts:
            part.preempted(request_id)

    def is_restored(self, request_id: str) -> bool:
        return self.offload is not None and self.offload.is_restored(request_id)

    def sources(self, request_id: str, num_external_tokens: int) -> dict[str, int]:
        """Of so many tokens that a request takes, how many come from which tier, or from a peer."""
        if self.offload is not None and self.offload.is_restored(request_id):
            return self.offload.sources(request_id, num_external_tokens)
        return {PEER: num_external_tokens} if num_external_tokens else {}

    def build_orders(self) -> Orders:
        orders = Orders() if self.transfer is None else self.transfer.build_orders()
        if self._zeroes_loads:
            orders = msgspec.structs.replace(orders, zeroes_loads=True)
        if self.offload is None:
            return orders
        offload, failures = self.offload.build_orders(), self.offload.host.take_failures()
        if offload or failures:
            orders = msgspec.structs.replace(orders, offload=offload, failures=orders.failures + failures)
        return orders

    def request_finished(
        self, request: RequestView, block_ids: BlockIdsByGroup, *, delivered: bool
    ) -> tuple[bool, dict[str, Any] | None]:
        done = None if self.offload is None else self.offload.request_finished(request, block_ids)
        is_held, params = False, None
        if self.transfer is not None:
            is_held, params = self.transfer.request_finished(request, block_ids, delivered=delivered)
        if isinstance(told := transfer_params(request).get(RESULTS_KEY), dict):
            # What came of the hints at the prefill node, as a router hands it on.
            done = {**(done or {}), "prefill": told}
        return is_held, {**(params or {}), RESULTS_KEY: done} if done and delivered else params

    def update_results(self, results: Results) -> None:
        for part in self._parts:
            part.update_results(results)

    def reset(self) -> None:
        for part in self._parts:
            part.reset()

    def take_events(self) -> Sequence[Any]:
        return () if self.offload is None else self.offload.take_events()

    @property
    def pending(self) -> bool:
        return self.offload is not None and self.offload.pending

    def state(self) -> dict[str, int]:
        return {name: count for part in self._parts for name, count in part.state().items()}


class WorkerComposite(WorkerHooks):
    """What lives with the tensors of one worker, with what each part is asked for by itself."""

    def __init__(self, transfer: WorkerConnector | None, offload: OffloadWorker | None) -> None:
        self.transfer, self.offload = transfer, offload
        if transfer is not None and offload is not None:
            transfer.tiers = offload.tiers

    @property
    def _parts(self) -> Sequence[WorkerConnector | OffloadWorker]:
        return [part for part in (self.transfer, self.offload) if part is not None]

    @property
    def table(self) -> RegionTable:
        """What was registered for transfers. Raises ``LocalError``: nothing was."""
        if self.transfer is None:
            raise LocalError("this connector hands nothing over")
        return self.transfer.table

    def address(self) -> RankAddress | None:
        return None if self.transfer is None else self.transfer.address()

    @property
    def identity_marks(self) -> bytes:
        """``Identity.marks`` of what is handed over."""
        return b"" if self.transfer is None else self.transfer.identity_marks

    def replace_weights(self, weights: Mapping[str, str]) -> None:
        for part in self._parts:
            part.replace_weights(weights)

    def before_step(self, orders: Orders) -> None:
        if self.transfer is not None:
            self.transfer.before_step(orders)
        if self.offload is not None and orders.offload:
            self.offload.before_step(orders.offload)
        # Behind that snapshot: one step's orders may store a block, and give it to a load or a restore. Not
        # behind the launch: it takes as long as a prefill where another one keeps the device's queue full.
        if not orders.zeroes_loads:
            self._start(orders)

    def after_zeroing(self, orders: Orders) -> None:
        if orders.zeroes_loads:
            self._start(orders)

    def _start(self, orders: Orders) -> None:
        if self.offload is not None and orders.offload:
            self.offload.start(orders.offload)
        if self.transfer is not None:
            alone = msgspec.structs.replace(orders, offload=_NO_OFFLOAD) if orders.offload else orders
            self.transfer.start(alone)
        elif self.offload is not None and orders.failures:
            self.offload.count_failures(orders.failures)

    def results(self) -> Results:
        sent = Results() if self.transfer is None else self.transfer.results()
        kept = Results() if self.offload is None else self.offload.results()
        received, failed = sent.received + kept.received, {**sent.failed, **kept.failed}
        return msgspec.structs.replace(sent, received=received, failed=failed, offload=kept.offload)

    def on_results(self, wake: Callable[[], None]) -> None:
        for part in self._parts:
            part.on_results(wake)

    def changes(self) -> Changes | None:
        sent = None if self.transfer is None else self.transfer.changes()
        return merge_changes(sent, None if self.offload is None else self.offload.changes())

    def state(self) -> dict[str, Any]:
        state = {"engine": "none"} if self.transfer is None else self.transfer.state()
        kept = {} if self.offload is None else self.offload.state()
        return {**state, **{f"offload_{name}": count for name, count in kept.items()}}

    def drain(self, timeout_s: float | None = None) -> bool:
        return True if self.transfer is None else self.transfer.drain(timeout_s)

    def close(self) -> None:
        for part in self._parts:
            part.close()


_NO_OFFLOAD = OffloadOrders()
