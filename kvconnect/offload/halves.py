"""One connector of two parts: handing a request's KV over, and keeping it for later.

A serving stack calls one scheduler half and one worker half, whichever of the parts it was configured with.
A request whose KV is fetched from a peer takes nothing from the tiers for that admission; whatever it
computes or fetches is kept like that of any other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec

from kvconnect.cache.region_table import CacheTensor, RegionTable, Scales
from kvconnect.cache.shard import HeadInterval
from kvconnect.errors import LocalError
from kvconnect.metrics import Changes, merge_changes
from kvconnect.offload.index.tier_index import IndexEvents
from kvconnect.offload.scheduler.half import OffloadScheduler
from kvconnect.offload.worker.half import OffloadWorker
from kvconnect.orders import OffloadOrders, Orders, RankAddress, RequestView, Results, TierChange
from kvconnect.scheduler.connector import SchedulerConnector
from kvconnect.worker.connector import WorkerConnector

BlockIdsByGroup = Sequence[Sequence[int]]

_NO_OFFLOAD = OffloadOrders()
_NOBODY: frozenset[str] = frozenset()
PEER = "peer"
"""What another node is called where hits are told by where they came from."""


class SchedulerHalf:
    """What lives with a request scheduler. See ``SchedulerConnector`` and ``OffloadScheduler`` for the hooks.

    With neither part every answer is that there is nothing to do.
    """

    def __init__(self, transfer: SchedulerConnector | None, offload: OffloadScheduler | None) -> None:
        self.transfer = transfer
        self.offload = offload
        self._restored: set[str] = set()

    def drain(self) -> None:
        """Hold nothing for peers any more. From any thread."""
        if self.transfer is not None:
            self.transfer.drain()

    def new_request(self, request: RequestView, *, reads: bool = True, writes: bool = True) -> None:
        """A request arrived; before anything else is asked about it. Raises nothing.

        ``reads`` and ``writes``: whether it may use what is kept, and whether it is kept.
        """
        if self.transfer is not None:
            self.transfer.new_request(request)
        if self.offload is not None:
            self.offload.new_request(request, reads=reads, writes=writes)

    def prefill_tokens(self, request: RequestView) -> int:
        """How many tokens of its prompt are to be computed."""
        return request.num_tokens if self.transfer is None else self.transfer.prefill_tokens(request)

    def matched_tokens(self, request: RequestView, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens beyond those computed that can be loaded, and whether asynchronously; None: ask again."""
        if self.transfer is not None:
            count, in_background = self.transfer.matched_tokens(request, num_computed_tokens)
            if count is None or count > 0:
                if self.offload is not None:
                    self.offload.withdraw(request.request_id)
                    self._restored.discard(request.request_id)
                return count, in_background
        if self.offload is None:
            return 0, False
        count, in_background = self.offload.matched_tokens(request, num_computed_tokens)
        if count:
            self._restored.add(request.request_id)
        return count, in_background

    def update_after_alloc(
        self, request: RequestView, block_ids: BlockIdsByGroup, num_external_tokens: int
    ) -> None:
        """Blocks were given to a request; ``num_external_tokens`` of what was promised are to be loaded."""
        offload = self.offload
        if offload is None:
            if self.transfer is not None:
                self.transfer.update_after_alloc(request, block_ids, num_external_tokens)
            return
        is_restored = self.transfer is None or offload.offers(request.request_id)
        offload.update_after_alloc(request, block_ids, num_external_tokens if is_restored else 0)
        if self.transfer is not None:
            self.transfer.update_after_alloc(request, block_ids, 0 if is_restored else num_external_tokens)

    @property
    def streaming(self) -> Collection[str]:
        """Requests whose ``progress`` is of interest."""
        return _NOBODY if self.transfer is None else self.transfer.streaming

    def progress(
        self, request_id: str, num_computed_tokens: int, new_block_ids: BlockIdsByGroup | None
    ) -> None:
        """A prefill that is sent while it runs went on."""
        if self.transfer is not None:
            self.transfer.progress(request_id, num_computed_tokens, new_block_ids)

    @property
    def due(self) -> Mapping[str, int]:
        """By request the token count from which ``computed`` is of interest without new blocks. A view."""
        return {} if self.offload is None else self.offload.due

    def computed(
        self, request_id: str, num_computed_tokens: int, new_block_ids: BlockIdsByGroup | None
    ) -> None:
        """What the device was given before the next orders makes so many tokens of a request."""
        if self.offload is not None:
            self.offload.computed(request_id, num_computed_tokens, new_block_ids)

    def checkpoints(self, request: RequestView) -> Sequence[int]:
        """Token counts of a request, in order, at which a chunk should end, for states to be kept there."""
        return () if self.offload is None else self.offload.checkpoints(request)

    def state_at(
        self, request_id: str, group: int, num_tokens: int, block_id: int, *, chosen: bool = False
    ) -> None:
        """A block holds, until the next orders are carried out, a group's state after so many tokens."""
        if self.offload is not None:
            self.offload.state_at(request_id, group, num_tokens, block_id, chosen=chosen)

    def overwritten(self, block_ids: Collection[int]) -> None:
        """These blocks are overwritten before the next orders are carried out."""
        if self.offload is not None:
            self.offload.overwritten(block_ids)

    def preempted(self, request_id: str) -> None:
        """A running request lost its blocks, and will be computed anew."""
        if self.transfer is not None:
            self.transfer.preempted(request_id)
        if self.offload is not None:
            self.offload.preempted(request_id)

    def is_restored(self, request_id: str) -> bool:
        """Whether what a request was promised last comes from the tiers here, not from a peer.

        True until the request ends: a serving stack also asks once its load was reported, since only then
        does it go on with what was loaded. If such a load fails the request is to be computed, whatever the
        policy for loads from peers.
        """
        return request_id in self._restored

    def sources(self, request_id: str, num_external_tokens: int) -> dict[str, int]:
        """Of so many tokens that a request takes, how many come from which tier, or from a peer."""
        if self.is_restored(request_id):
            assert self.offload is not None
            return self.offload.sources(request_id, num_external_tokens)
        return {PEER: num_external_tokens} if num_external_tokens else {}

    def build_orders(self) -> Orders:
        """The orders since the last call; once per step, also for a step without tokens."""
        orders = Orders() if self.transfer is None else self.transfer.build_orders()
        if self.offload is None:
            return orders
        offload = self.offload.build_orders()
        failures = self.offload.take_failures()
        if offload or failures:
            orders = msgspec.structs.replace(orders, offload=offload, failures=orders.failures + failures)
        return orders

    def request_finished(
        self, request: RequestView, block_ids: BlockIdsByGroup, *, delivered: bool
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request ended. Whether its blocks must be kept until it was reported sent, and parameters."""
        self._restored.discard(request.request_id)
        if self.offload is not None:
            self.offload.request_finished(request, block_ids)
        if self.transfer is None:
            return False, None
        return self.transfer.request_finished(request, block_ids, delivered=delivered)

    def update_results(self, results: Results) -> None:
        """What the workers reported, after all of them did."""
        if self.transfer is not None:
            self.transfer.update_results(results)
        if self.offload is not None:
            self.offload.update_results(results)

    def reset(self) -> None:
        """Forget everything that is kept, in every tier, and hold nothing that was begun before this."""
        if self.transfer is not None:
            self.transfer.reset()
        if self.offload is not None:
            self.offload.clear()

    def take_events(self) -> tuple[IndexEvents, tuple[TierChange, ...]]:
        """What host memory has got and lost since the last call, and what lower tiers have."""
        return (IndexEvents(), ()) if self.offload is None else self.offload.take_events()

    @property
    def pending(self) -> bool:
        """Whether the tiers are to report something yet that somebody may wait for."""
        return self.offload is not None and self.offload.pending

    def state(self) -> dict[str, int]:
        """Counts of what is remembered. All zero when idle."""
        state = {} if self.transfer is None else self.transfer.state()
        return state if self.offload is None else {**state, **self.offload.state()}


class WorkerHalf:
    """What lives with the tensors of one worker. See ``WorkerConnector`` and ``OffloadWorker``.

    Raises:
        LocalError: there is neither part.
    """

    def __init__(self, transfer: WorkerConnector | None, offload: OffloadWorker | None) -> None:
        if transfer is None and offload is None:
            raise LocalError("a connector needs an engine, or offload")
        self.transfer = transfer
        self.offload = offload

    @property
    def engine_name(self) -> str:
        """The engine that is used; ``none`` where nothing is handed over."""
        return "none" if self.transfer is None else self.transfer.engine_name

    @property
    def table(self) -> RegionTable:
        """What was registered for transfers. Raises ``LocalError``: nothing was."""
        if self.transfer is None:
            raise LocalError("this connector hands nothing over")
        return self.transfer.table

    def address(self) -> RankAddress | None:
        """Where this worker listens for peers, if it does."""
        return None if self.transfer is None else self.transfer.address()

    def register_kv_caches(
        self,
        tensors: Mapping[str, CacheTensor],
        heads: Mapping[str, HeadInterval] | None = None,
        scales: Mapping[str, Scales] | None = None,
    ) -> None:
        """Describe the caches to both parts; the tiers first, since nobody depends on them yet if that fails.

        Raises:
            LayoutError: a cache cannot be expressed.
            ConfigError: memory or a lower tier cannot be had as it is configured.
            EngineError: the engine refuses the memory.
            LocalError: it was done before.
        """
        if self.offload is not None:
            self.offload.register_kv_caches(tensors, heads, scales)
        if self.transfer is not None:
            self.transfer.register_kv_caches(tensors, heads, scales)

    def replace_weights(self, weights: str) -> None:
        """The model runs with other weights from now on. See the parts."""
        if self.transfer is not None:
            self.transfer.replace_weights(weights)
        if self.offload is not None:
            self.offload.replace_weights(weights)

    def mark(self) -> None:
        """Take note of what the device was given so far, for transfers."""
        if self.transfer is not None:
            self.transfer.mark()

    def before_step(self, orders: Orders) -> None:
        """Read what is to be stored, before anything of the step that comes with the orders is launched."""
        if self.offload is not None and orders.offload:
            self.offload.before_step(orders.offload)

    def start(self, orders: Orders) -> None:
        """Take the rest of a step's orders, after the step was launched. Never waits."""
        if self.offload is not None and orders.offload:
            self.offload.start(orders.offload)
        if self.transfer is not None:
            self.transfer.start(
                msgspec.structs.replace(orders, offload=_NO_OFFLOAD) if orders.offload else orders
            )
        elif self.offload is not None and orders.failures:
            self.offload.count_failures(orders.failures)

    def results(self) -> Results:
        """What ended since the last call."""
        if self.offload is None:
            return Results() if self.transfer is None else self.transfer.results()
        kept = self.offload.results()
        if self.transfer is None:
            return kept
        sent = self.transfer.results()
        if not kept:
            return sent
        return Results(
            sent.sent + kept.sent,
            sent.received + kept.received,
            {**sent.failed, **kept.failed},
            kept.offload,
            sent.settled,
        )

    def on_results(self, wake: Callable[[], None]) -> None:
        """Have ``wake`` called, from another thread, whenever results are waiting."""
        if self.transfer is not None:
            self.transfer.on_results(wake)
        if self.offload is not None:
            self.offload.on_results(wake)

    def changes(self) -> Changes | None:
        """What the metrics have grown by since the last call, or None. Quick when that is nothing."""
        return merge_changes(
            None if self.transfer is None else self.transfer.changes(),
            None if self.offload is None else self.offload.changes(),
        )

    def state(self) -> dict[str, Any]:
        """Counts of what is held and under way, for people and tests. All zero when idle."""
        state = {"engine": "none"} if self.transfer is None else self.transfer.state()
        if self.offload is None:
            return state
        return {**state, **{f"offload_{name}": count for name, count in self.offload.state().items()}}

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait, within a bound, until nothing is held for peers any more. From any thread but the hooks'."""
        return True if self.transfer is None else self.transfer.drain(timeout_s)

    def close(self) -> None:
        """End everything. Idempotent."""
        if self.transfer is not None:
            self.transfer.close()
        if self.offload is not None:
            self.offload.close()
