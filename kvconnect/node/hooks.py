"""The two halves of a connector as the node calls them, and the blocks that transfers keep alive.

``Transfers`` is the node's side of the contract: it calls the scheduler half's hooks, remembers which
ended requests a peer may still read or write, and says which blocks become free. It knows nothing of
queues or tensors; all calls come from the engine loop thread. What a connector that keeps blocks in other
memory is told besides is in ``keeping``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvconnect.cache.region_table import CacheTensor
from kvconnect.node.keeping import Keeping
from kvconnect.node.request import Request
from kvconnect.orders import Orders, RequestView, Results

logger = logging.getLogger(__name__)


class SchedulerHooks(Protocol):
    """The half of a connector that lives with the scheduler."""

    def new_request(self, request: RequestView) -> None:
        """A request arrived; asked before anything else. Raises nothing."""
        ...

    def prefill_tokens(self, request: RequestView) -> int:
        """How many of the prompt's tokens to compute."""
        ...

    def matched_tokens(self, request: RequestView, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens beyond those computed that can be loaded, and whether asynchronously; None: ask again."""
        ...

    def update_after_alloc(
        self, request: RequestView, block_ids: tuple[list[int], ...], num_external_tokens: int
    ) -> None:
        """The request was admitted with these blocks."""
        ...

    @property
    def streaming(self) -> Collection[str]:
        """Requests whose progress is of interest."""
        ...

    def progress(
        self, request_id: str, num_computed_tokens: int, new_block_ids: Sequence[Sequence[int]] | None
    ) -> None:
        """One of these has so many tokens now, and got these blocks since it was last told of."""
        ...

    def preempted(self, request_id: str) -> None:
        """A running request lost its blocks."""
        ...

    def build_orders(self) -> Orders:
        """This step's orders."""
        ...

    def request_finished(
        self, request: RequestView, block_ids: tuple[list[int], ...], *, delivered: bool
    ) -> tuple[bool, dict[str, Any] | None]:
        """The request ended. Whether its blocks must be kept, and parameters for the client."""
        ...

    def update_results(self, results: Results) -> None:
        """What the other half reported."""
        ...

    def drain(self) -> None:
        """Hold nothing any more. The only hook that any thread may call."""
        ...


class WorkerHooks(Protocol):
    """The half of a connector that lives with the tensors."""

    def register_kv_caches(self, tensors: Mapping[str, CacheTensor]) -> None:
        """The cache that transfers read and write."""
        ...

    def start(self, orders: Orders) -> None:
        """Begin what was ordered."""
        ...

    def results(self) -> Results:
        """What ended since the last call."""
        ...

    def on_results(self, wake: Callable[[], None]) -> None:
        """Call ``wake``, from any thread, when results are waiting."""
        ...

    def drain(self) -> bool:
        """Wait, within a bound, until nothing is held any more. From any thread but the engine loop's."""
        ...

    def close(self) -> None:
        """End all transfers."""
        ...


@dataclass
class Settled:
    """Requests whose blocks are free now, those whose load succeeded, and those whose load failed.

    Of the last, ``computed_here`` begin anew, and ``failed`` end, with the reason.
    """

    freed: list[Request] = field(default_factory=list)
    loaded: list[Request] = field(default_factory=list)
    computed_here: list[Request] = field(default_factory=list)
    failed: list[tuple[Request, str]] = field(default_factory=list)


class Transfers:
    """The requests whose blocks a transfer keeps: loads under way, and finished prefills not yet sent.

    ``keeping`` is None where blocks are kept nowhere else.
    """

    def __init__(
        self, hooks: SchedulerHooks, *, recompute_failed_loads: bool, keeping: Keeping | None = None
    ) -> None:
        self.hooks = hooks
        self.keeping = keeping
        self.loading: dict[str, Request] = {}
        self._recompute_failed_loads = recompute_failed_loads
        self._abandoned: dict[str, Request] = {}
        self._unsent: dict[str, Request] = {}
        self._warned = False

    @property
    def num_abandoned(self) -> int:
        """Loads under way whose request was aborted."""
        return len(self._abandoned)

    @property
    def num_unsent(self) -> int:
        """Ended requests whose blocks wait to be fetched."""
        return len(self._unsent)

    @property
    def num_outstanding(self) -> int:
        """Requests that a result is awaited for."""
        return len(self.loading) + self.num_abandoned + self.num_unsent

    def end(
        self, request: Request, block_ids: tuple[list[int], ...], *, delivered: bool
    ) -> tuple[bool, dict[str, Any] | None]:
        """Tell the connector that a request ended. Whether its blocks are free now, and parameters."""
        keep, params = self.hooks.request_finished(request, block_ids, delivered=delivered)
        if self.loading.pop(request.request_id, None) is not None:
            self._abandoned[request.request_id] = request
            return False, params
        if keep:
            self._unsent[request.request_id] = request
        return not keep, params

    def settle(self, results: Results) -> Settled:
        """What became of the requests that results came for."""
        settled = Settled()
        keeper = self.keeping.keeper if self.keeping is not None else None
        self.hooks.update_results(results)
        for request_id in results.sent:
            request = self._unsent.pop(request_id, None)
            if request is None:
                self._report_unknown("sent", request_id)
            else:
                settled.freed.append(request)
        for request_id in results.received:
            if request_id in self._abandoned:
                settled.freed.append(self._abandoned.pop(request_id))
                continue
            request = self.loading.pop(request_id, None)
            if request is None:
                self._report_unknown("received", request_id)
            elif request_id not in results.failed:
                settled.loaded.append(request)
            elif self._recompute_failed_loads or (keeper is not None and keeper.is_restored(request_id)):
                logger.warning(
                    "loading %s failed, it is computed here: %s", request_id, results.failed[request_id]
                )
                settled.computed_here.append(request)
            else:
                settled.failed.append((request, results.failed[request_id]))
        return settled

    def _report_unknown(self, what: str, request_id: str) -> None:
        if not self._warned:
            self._warned = True
            logger.error(
                "the connector reported request %r as %s, but nothing is awaited for it; "
                "further reports like this are not logged",
                request_id,
                what,
            )
