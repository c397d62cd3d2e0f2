"""Every unanswered request, what its client is to be told, and what becomes of its blocks at the end.

Owns the requests by id, the queue of outputs and the totals. Queues and steps are the scheduler's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvconnect.errors import LocalError
from kvconnect.node.blocks import BlockManager
from kvconnect.node.request import Failure, Output, Request, RequestState
from kvconnect.node.transfers import Transfers


@dataclass
class Counts:
    """Totals since the start."""

    preemptions: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0


class RequestBook:
    """Requests from their arrival to their last output. ``transfers`` is None without a connector."""

    def __init__(self, manager: BlockManager, transfers: Transfers | None) -> None:
        self.counts = Counts()
        self._manager = manager
        self._transfers = transfers
        self._requests: dict[str, Request] = {}
        self._outputs: list[tuple[Request, Output]] = []

    def add(self, request: Request) -> None:
        """Take in a request.

        Raises:
            LocalError: a request with this id is already here.
        """
        if request.request_id in self._requests:
            raise LocalError(f"request id {request.request_id!r} is already in use")
        request.blocks = self._manager.new_request()
        self._requests[request.request_id] = request

    def find(self, request_id: str) -> Request | None:
        """The unanswered request with this id."""
        return self._requests.get(request_id)

    def tell(self, request: Request, output: Output) -> None:
        """Queue an output that is not the last."""
        self._outputs.append((request, output))

    def finish(self, request: Request, output: Output) -> None:
        """The request has all its tokens. ``output`` carries the last of them and the reason."""
        self.counts.finished += 1
        self._end(request, output, delivered=True)

    def fail(self, request: Request, failure: Failure) -> None:
        """The request ends with an error."""
        self.counts.failed += 1
        self._end(request, Output(failure=failure), delivered=False)

    def abort(self, request: Request) -> None:
        """The client left."""
        self.counts.aborted += 1
        self._end(request, Output(finish_reason="abort"), delivered=False)

    def _end(self, request: Request, output: Output, *, delivered: bool) -> None:
        """Settle the request's blocks with the connector, then queue its last output."""
        assert request.blocks is not None
        block_ids = request.blocks.snapshot()
        request.state = RequestState.FINISHED
        del self._requests[request.request_id]
        free, params = True, None
        if self._transfers is not None:
            free, params = self._transfers.end(request, block_ids, delivered=delivered)
        if free:
            self._manager.free(request.blocks)
        last = replace(
            output,
            kv_transfer_params=params if delivered else None,
            kv_block_ids=block_ids,
            cached_tokens=request.cached_tokens,
        )
        self._outputs.append((request, last))

    def fail_all(self, failure: Failure) -> None:
        """End every request with the same error, and tell no connector: the engine loop is over."""
        self._outputs.extend((request, Output(failure=failure)) for request in self._requests.values())
        self._requests.clear()

    def count_cached(self, request: Request, num_tokens: int) -> None:
        """The first ``num_tokens`` of the request were not computed here."""
        self.counts.cached_tokens += num_tokens - request.cached_tokens
        request.cached_tokens = num_tokens

    def take_outputs(self) -> list[tuple[Request, Output]]:
        """What clients are to be told, in order. Empties the queue."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def by_state(self) -> dict[str, int]:
        """How many requests are in each state, and how many ended ones still hold blocks."""
        counts = {state.value: 0 for state in RequestState if state is not RequestState.FINISHED}
        for request in self._requests.values():
            counts[request.state.value] += 1
        transfers = self._transfers
        counts["waiting_to_be_fetched"] = transfers.num_unsent if transfers else 0
        counts["aborted_while_loading"] = transfers.num_abandoned if transfers else 0
        return counts
