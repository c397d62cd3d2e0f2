"""The engine loop, one thread that turns requests into steps; and the runner of a step on the model.

Other threads put requests into its inbox. It answers through requests' sinks and a published snapshot.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import msgspec
import torch

from kvconnect.errors import LocalError
from kvconnect.node.attention import Segment, StepContext
from kvconnect.node.kv_cache import NodeCache
from kvconnect.node.models import Model
from kvconnect.node.node_connector import Connector
from kvconnect.node.request import EngineStep, Failure, Output, Request
from kvconnect.node.scheduler import Scheduler
from kvconnect.runner_kit.zeroing import KVBlockZeroer
from kvconnect.transfer.orders import Orders

logger = logging.getLogger(__name__)

# Every wait has a bound. Transfers wake the loop; the bounds cover a lost wake-up.
IDLE_WAIT_S = 5.0
OUTSTANDING_WAIT_S = 0.5
# The connector deferred its answer: it waits for a peer and does not wake the loop.
DEFERRED_WAIT_S = 0.01
STOP_TIMEOUT_S = 10.0


class Runner:
    """Executes steps. Blocks are addressed through ``cache.tables`` only."""

    def __init__(self, model: Model, cache: NodeCache) -> None:
        self.model = model
        self.cache = cache
        self.zeroer = KVBlockZeroer(cache.region_table(), device=cache.device)

    def prepare(self, step: EngineStep) -> None:
        """Bring the block tables up to date, then zero fresh blocks. Loads need both as well."""
        for row, block_ids in step.new_rows:
            self.cache.tables.append_block_ids(row, block_ids, overwrite=True)
        for row, block_ids in step.grown_rows:
            self.cache.tables.append_block_ids(row, block_ids)
        self.cache.tables.apply()
        self.zeroer.zero_block_ids(step.new_block_ids_to_zero)

    @torch.inference_mode()
    def execute(self, step: EngineStep) -> dict[str, tuple[int, int | None]]:
        """Run the step's chunks, and wait for the device.

        Returns token and draft token of each request whose chunk samples.
        """
        segments: list[Segment] = []
        token_ids: list[int] = []
        sampled: list[int] = []
        names: list[str] = []
        offset = 0
        for chunk in step.chunks:
            segments.append(Segment(chunk.row, chunk.start, len(chunk.token_ids), offset))
            token_ids.extend(chunk.token_ids)
            offset += len(chunk.token_ids)
            if chunk.samples:
                sampled.append(offset - 1)
                names.append(chunk.request_id)
        tokens, drafts = self.model.forward(
            torch.tensor(token_ids, device=self.cache.device),
            StepContext(self.cache, segments),
            torch.tensor(sampled, dtype=torch.long, device=self.cache.device),
        )
        proposed = [None] * len(names) if drafts is None else drafts.tolist()
        return dict(zip(names, zip(tokens.tolist(), proposed, strict=True), strict=True))

    def synchronize(self) -> None:
        """Wait for all work queued on the device, so that peers and engines may read the cache."""
        if self.cache.device.type == "cuda":
            torch.cuda.current_stream(self.cache.device).synchronize()


class NodeEngine:
    """Runs ``scheduler`` and ``runner`` in a thread, with the worker half of ``connector``."""

    def __init__(self, scheduler: Scheduler, runner: Runner, connector: Connector) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.options = scheduler.options
        self.worker = connector.worker
        self.offload_state = connector.offload_state
        self.snapshot = self._take_snapshot(steps=0)
        # A request that arrived, the id of an aborted one, or None to wake the loop.
        self._inbox: queue.SimpleQueue[Request | str | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._stopping = False
        self._failed: str | None = None
        self._thread = threading.Thread(target=self._run, name="kvconnect-node-engine", daemon=True)

    @property
    def alive(self) -> bool:
        """Whether the loop runs and has not failed."""
        return self._thread.is_alive() and self._failed is None

    def start(self) -> None:
        """Start the loop."""
        self.worker.on_results(self.wake)
        self._thread.start()

    def stop(self) -> None:
        """End the loop after its current step, and close the connector. Requests fail."""
        with self._lock:
            self._stopping = True
        self.wake()
        if self._thread.ident is not None:
            self._thread.join(STOP_TIMEOUT_S)
            if self._thread.is_alive():
                logger.error("the engine loop did not end within %g s, and is left behind", STOP_TIMEOUT_S)
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
        """Queue a request, whose sink the loop's thread calls. ``LocalError`` if the loop has ended."""
        with self._lock:
            if self._failed is not None or self._stopping:
                raise LocalError(f"the engine loop has ended: {self._failed or 'the node is stopping'}")
            self._inbox.put(request)

    def abort(self, request_id: str) -> None:
        """End a request at any stage. For any thread."""
        self._inbox.put(request_id)

    def wake(self) -> None:
        """Wake the loop to take results. The connector calls it from any thread."""
        self._inbox.put(None)

    def state(self) -> dict[str, Any]:
        """The state of the engine and its connector, for ``/debug/state``. For any thread."""
        state = {"model": self.options.model, **self.snapshot, "connector": self.worker.state()}
        if (offload := self.offload_state()) is not None:
            state["offload"] = offload
        return state

    # --- the loop's thread ------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                wait_s = self.run_once()
                if wait_s > 0:
                    self.sleep(wait_s)
            self._end("the node is stopping", status=503)
        except Exception as error:
            logger.exception("internal error in the engine loop: the node answers no request until a restart")
            self._end(f"the engine loop failed: {type(error).__name__}: {error}", status=500)

    def sleep(self, wait_s: float) -> None:
        """Sleep until an item arrives in the inbox, at most ``wait_s``, and take it."""
        with contextlib.suppress(queue.Empty):
            self._take(self._inbox.get(timeout=wait_s))

    def _take(self, item: Request | str | None) -> None:
        """Pass an inbox item to the scheduler."""
        if isinstance(item, Request):
            try:
                self.scheduler.add(item)
            except Exception:
                # ``_end`` must find it once: a request that was taken is answered, also on failure.
                self.scheduler.requests.setdefault(item.request_id, item)
                raise
        elif item is not None:
            self.scheduler.abort(item)

    def take_arrived(self) -> None:
        """Pass all inbox items to the scheduler."""
        for item in self._drained():
            self._take(item)

    def _drained(self) -> Iterator[Request | str | None]:
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._inbox.get_nowait()

    def run_once(self) -> float:
        """Take the inbox, and do one step: results, plan, compute, orders, answers.

        Returns how long to sleep, in seconds. The loop's thread calls it; tests call it without a thread.
        """
        self.take_arrived()
        scheduler = self.scheduler
        if results := self.worker.results():
            scheduler.update_results(results)
        # Orders for new and aborted requests name no block, and peers wait for them: they go out before a
        # step that may take long.
        self._send_orders()
        step = scheduler.schedule()
        if scheduler.manager.pool.reused:
            self._prepare_reused(step)
        else:
            self.runner.prepare(step)
        sampled = self.runner.execute(step) if step.chunks else {}
        scheduler.update(step, sampled)
        self._send_orders()
        self.snapshot = self._take_snapshot(self.snapshot["steps"] + 1)
        self._deliver()
        if step.chunks or scheduler.running:
            return 0.0
        if step.deferred:
            return DEFERRED_WAIT_S
        if scheduler.requests or scheduler.kept:
            return OUTSTANDING_WAIT_S
        return IDLE_WAIT_S

    def _send_orders(self) -> None:
        orders = self.scheduler.hooks.build_orders()
        self._settle_cache(orders)
        # Blocks to be stored are computed by now, and no other request has got them yet.
        self.worker.before_step(orders)

    def _settle_cache(self, orders: Orders) -> None:
        if orders.holds or orders.loads or orders.progress:
            # From here on a peer or an engine may access the cache: computing and zeroing must be over.
            self.runner.synchronize()

    def _prepare_reused(self, step: EngineStep) -> None:
        """Prepare a step that overwrites blocks which peers may be reading: the worker must know before."""
        orders = self.scheduler.hooks.build_orders()
        orders = msgspec.structs.replace(orders, zeroes_loads=True)
        self.worker.before_step(orders)
        self.runner.prepare(step)
        self._settle_cache(orders)
        self.worker.after_zeroing(orders)

    def _deliver(self) -> None:
        outputs, self.scheduler.outputs = self.scheduler.outputs, []
        for request, output in outputs:
            try:
                request.sink(output)
            except Exception:
                logger.exception("internal error in the delivery of request %s", request.request_id)

    def _end(self, reason: str, status: int) -> None:
        with self._lock:
            self._failed = reason
        failure = Failure(status, reason)
        self.scheduler.fail_all(failure)
        unanswered = [item for item in self._drained() if isinstance(item, Request)]
        self.scheduler.outputs += [(request, Output(failure=failure)) for request in unanswered]
        self._deliver()

    def _take_snapshot(self, steps: int) -> Mapping[str, Any]:
        """The state after a step. Blocks: ``free + held == total``; ``reserved`` is not in total."""
        pool = self.scheduler.manager.pool
        blocks = {"free": pool.num_free, "held": pool.num_held}
        return {
            "blocks": {**blocks, "total": pool.total, "reserved": pool.reserved},
            "requests": self.scheduler.by_state(),
            "counts": asdict(self.scheduler.counts),
            "steps": steps,
        }
