"""The half that lives with the tensors of one rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from kvconnect.cache.region_table import RegionTable
from kvconnect.errors import LocalError
from kvconnect.halves.transfer_worker import TransferWorker
from kvconnect.metric_values import Changes, merge_changes
from kvconnect.offload.worker.offload_worker import OffloadWorker
from kvconnect.orders import OffloadOrders, Orders, RankAddress, Results
from kvconnect.transfer.stack import WorkerHooks


class WorkerHalf(WorkerHooks):
    """What lives with the tensors of one rank: what hands its KV over, and what keeps it for later.

    See ``building.build_worker_half``.
    """

    def __init__(self, transfer: TransferWorker | None = None, offload: OffloadWorker | None = None) -> None:
        self.transfer, self.offload = transfer, offload
        if transfer is not None and offload is not None:
            transfer.tiers = offload.tiers

    @property
    def _parts(self) -> Sequence[TransferWorker | OffloadWorker]:
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
