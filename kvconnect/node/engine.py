"""The engine loop: one thread that turns requests into steps, and sleeps when there is nothing to do.

Owns the thread. Everything else talks to it through ``submit`` and ``abort``, which only put something in
an inbox and wake it; it answers through the requests' sinks and a published snapshot.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvconnect.errors import LocalError
from kvconnect.node.request import Failure, Output, Request
from kvconnect.node.request_book import Counts
from kvconnect.node.runner import Runner
from kvconnect.node.scheduler import Scheduler
from kvconnect.orders import Results
from kvconnect.scheduler.stack import WorkerHooks

logger = logging.getLogger(__name__)

# Nothing waits without a bound. Transfers wake the loop; the bounds cover a wake-up that got lost.
IDLE_WAIT_S = 5.0
OUTSTANDING_WAIT_S = 0.5
# The connector said "ask again": it is waiting for a peer and does not call us.
DEFERRED_WAIT_S = 0.01
STOP_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Snapshot:
    """The engine's state after a step. Blocks: ``free + held == total``, ``reserved`` come on top."""

    blocks: Mapping[str, int]
    requests: Mapping[str, int]
    counts: Mapping[str, int]
    steps: int


@dataclass
class _Inbox:
    """What other threads want of the loop. Guarded by the engine's condition."""

    requests: list[Request] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    woken: bool = False
    stopping: bool = False

    def __bool__(self) -> bool:
        return bool(self.requests or self.aborted or self.woken or self.stopping)


class Engine:
    """Runs ``scheduler`` and ``runner`` in a thread; ``worker`` is the connector's other half, if any.

    ``offload_state`` tells any thread what is kept.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        worker: WorkerHooks | None = None,
        offload_state: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        if (worker is None) != (scheduler.transfers is None):
            raise LocalError("a connector has two halves: the scheduler's and the worker's")
        self.scheduler = scheduler
        self.runner = runner
        self.worker = worker
        self.offload_state = offload_state
        self.snapshot = self._take_snapshot(0)
        self._condition = threading.Condition()
        self._inbox = _Inbox()
        self._arrived: list[Request] = []
        self._failed: str | None = None
        self._thread = threading.Thread(target=self._run, name="kvconnect-node-engine", daemon=True)

    @property
    def alive(self) -> bool:
        """The loop runs and has not failed."""
        return self._thread.is_alive() and self._failed is None

    def start(self) -> None:
        """Start the loop."""
        if self.worker is not None:
            self.worker.on_results(self.wake)
        self._thread.start()

    def stop(self) -> None:
        """End the loop after its current step, and close the connector. Requests end with an error."""
        with self._condition:
            self._inbox.stopping = True
            self._condition.notify()
        if self._thread.ident is not None:
            self._thread.join(STOP_TIMEOUT_S)
            if self._thread.is_alive():
                logger.error("the engine loop did not end within %.0f s", STOP_TIMEOUT_S)
        if self.worker is not None:
            self.worker.close()

    def refusal(self, num_prompt_tokens: int, max_tokens: int) -> str | None:
        """Why a request of this size can never run here, or None. For any thread."""
        wanted, longest = num_prompt_tokens + max_tokens, self.scheduler.options.max_model_len
        request = f"prompt of {num_prompt_tokens} tokens plus max_tokens {max_tokens}"
        if wanted > longest:
            return f"{request} is {wanted} tokens, max_model_len is {longest}"
        # The last generated token is returned but never computed.
        manager = self.scheduler.manager
        needed, total = manager.most_blocks(wanted - 1), manager.pool.total
        return f"{request} needs {needed} cache blocks, the node has {total}" if needed > total else None

    def submit(self, request: Request) -> None:
        """Queue a request. Its sink hears of it from the loop's thread.

        Raises:
            LocalError: the loop has ended.
        """
        with self._condition:
            if self._failed is not None or self._inbox.stopping:
                raise LocalError(f"the engine loop has ended: {self._failed or 'the node is stopping'}")
            self._inbox.requests.append(request)
            self._condition.notify()

    def abort(self, request_id: str) -> None:
        """End a request at whatever stage it is."""
        with self._condition:
            self._inbox.aborted.append(request_id)
            self._condition.notify()

    def wake(self) -> None:
        """Results are waiting. Called by the connector, from any thread."""
        with self._condition:
            self._inbox.woken = True
            self._condition.notify()

    # --- the loop's thread ------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._take_inbox():
                wait_s = self._step()
                if wait_s > 0:
                    self._sleep(wait_s)
            self._end("the node is stopping", status=503)
        except Exception as error:
            logger.exception("the engine loop failed; the node answers no more requests")
            self._end(f"the engine loop failed: {type(error).__name__}: {error}", status=500)

    def _take_inbox(self) -> bool:
        """Hand what arrived to the scheduler. True: the loop is to end."""
        with self._condition:
            inbox, self._inbox = self._inbox, _Inbox(stopping=self._inbox.stopping)
        # Kept where ``_end`` finds them: a request that was taken must be answered, whatever happens.
        self._arrived = inbox.requests
        while self._arrived:
            self.scheduler.add(self._arrived[0])
            self._arrived.pop(0)
        for request_id in inbox.aborted:
            self.scheduler.abort(request_id)
        return inbox.stopping

    def run_once(self) -> float:
        """Take what arrived and do one step. The loop's thread does this; tests may do it without one."""
        self._take_inbox()
        return self._step()

    def _step(self) -> float:
        """One step: results, plan, compute, orders, answers. Returns how long to sleep, in seconds."""
        scheduler, transfers = self.scheduler, self.scheduler.transfers
        results = self.worker.results() if self.worker is not None else Results()
        if results:
            scheduler.update_results(results)
        # What came of requests that arrived or were aborted names no block, and peers wait for it: it
        # goes out before a step that may take long.
        self._send_orders()
        step = scheduler.schedule()
        self.runner.prepare(step)
        sampled = self.runner.execute(step) if step.chunks else {}
        scheduler.update(step, sampled)
        self._send_orders()
        self.snapshot = self._take_snapshot(self.snapshot.steps + 1)
        self._deliver()
        if step.chunks or scheduler.running:
            return 0.0
        if step.deferred:
            return DEFERRED_WAIT_S
        if (transfers is not None and transfers.num_outstanding) or scheduler.waiting:
            return OUTSTANDING_WAIT_S
        return IDLE_WAIT_S

    def _send_orders(self) -> None:
        transfers = self.scheduler.transfers
        if self.worker is None or transfers is None:
            return
        orders = transfers.hooks.build_orders()
        if not orders:
            return
        if orders.holds or orders.loads or orders.progress:
            # A peer or an engine may touch the cache from here on: computing and zeroing are over.
            self.runner.synchronize()
        # What is kept was computed by now, and no other request has been given the blocks yet.
        self.worker.before_step(orders)
        self.worker.start(orders)

    def _sleep(self, wait_s: float) -> None:
        """Sleep until something arrives, at most ``wait_s``."""
        with self._condition:
            if not self._inbox:
                self._condition.wait(wait_s)

    def _deliver(self) -> None:
        for request, output in self.scheduler.book.take_outputs():
            try:
                request.sink(output)
            except Exception:
                logger.exception("the output of request %s could not be delivered", request.request_id)

    def _end(self, reason: str, status: int) -> None:
        with self._condition:
            self._failed = reason
            inbox, self._inbox = self._inbox, _Inbox(stopping=True)
        self.scheduler.fail_all(Failure(status, reason, "server_error"))
        self._deliver()
        for request in [*self._arrived, *inbox.requests]:
            request.sink(Output(failure=Failure(status, reason, "server_error")))

    def _take_snapshot(self, steps: int) -> Snapshot:
        pool, counts = self.scheduler.manager.pool, self.scheduler.book.counts
        return Snapshot(
            blocks={
                "free": pool.num_free,
                "held": pool.num_held,
                "total": pool.total,
                "reserved": pool.reserved,
            },
            requests=self.scheduler.book.by_state(),
            counts={name: getattr(counts, name) for name in Counts.__dataclass_fields__},
            steps=steps,
        )
