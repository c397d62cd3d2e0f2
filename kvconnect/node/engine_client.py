"""The engine as HTTP asks it: requests, their outputs and their end, and what the engine holds.

Made and called on one event loop's thread, where sinks are called too. The engine's thread only queues
outputs, and wakes the event loop once for all that are queued.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvconnect.errors import LocalError
from kvconnect.node.completions import CompletionBody
from kvconnect.node.engine import Engine
from kvconnect.node.metrics import NodeMetrics
from kvconnect.node.request import Failure, Output, Request

Sink = Callable[[Output], None]


@dataclass(frozen=True)
class NodeInfo:
    """What never changes of a node, and what clients may ask of it."""

    model: str
    seed: int
    vocab_size: int
    max_model_len: int


class EngineClient:
    """Passes requests to ``engine``, whose loop it starts and stops; ``model`` is what clients call it."""

    def __init__(self, engine: Engine, *, model: str, seed: int) -> None:
        vocab_size = engine.runner.model.dims.vocab_size
        self.info = NodeInfo(model, seed, vocab_size, engine.scheduler.options.max_model_len)
        self.refusal = engine.refusal
        self._engine = engine
        self._metrics = NodeMetrics(engine, model)
        self._loop = asyncio.get_running_loop()
        self._serials = itertools.count()
        # By the engine's request id; None once the client has left.
        self._sinks: dict[str, Sink | None] = {}
        self._outputs: collections.deque[tuple[str, Output]] = collections.deque()
        self._is_woken = False

    def start(self) -> None:
        """Start the engine's loop."""
        self._engine.start()

    async def stop(self) -> None:
        """End the engine's loop, and with it all requests."""
        await self._loop.run_in_executor(None, self._engine.stop)

    @property
    def num_open(self) -> int:
        """Requests that the engine has not ended; aborted ones are among them until it has."""
        return len(self._sinks)

    def submit(self, request_id: str, body: CompletionBody, sink: Sink) -> str:
        """Queue a request whose outputs, or refusal, ``sink`` gets. Returns the engine's id of it."""
        # Clients may reuse an id; the engine and the peers need one per request.
        engine_id = f"{request_id}-{next(self._serials)}"
        self._sinks[engine_id] = sink
        queue = functools.partial(self._queue, engine_id)
        request = Request(engine_id, body.prompt_token_ids, body.max_tokens, queue, body.kv_transfer_params)
        try:
            self._engine.submit(request)
        except LocalError as error:
            queue(Output(failure=Failure(503, str(error), "invalid_request_error")))
        return engine_id

    def abort(self, engine_id: str) -> None:
        """End a request whose client left, and call its sink no more. One that has ended is left alone."""
        if engine_id in self._sinks:
            self._sinks[engine_id] = None
            self._engine.abort(engine_id)

    @property
    def alive(self) -> bool:
        """The engine's loop runs and has not failed."""
        return self._engine.alive

    def metrics(self) -> tuple[bytes, str]:
        """The metrics of the process and of the node, and their content type."""
        return self._metrics.render()

    def state(self) -> str:
        """What the engine and its connector hold, as JSON."""
        snapshot = self._engine.snapshot
        body: dict[str, Any] = {
            "model": self.info.model,
            "blocks": snapshot.blocks,
            "requests": snapshot.requests,
            "counts": snapshot.counts,
            "steps": snapshot.steps,
        }
        state = getattr(self._engine.worker, "state", None)
        if state is not None:
            body["connector"] = state()
        if self._engine.offload_state is not None:
            body["offload"] = self._engine.offload_state()
        return json.dumps(body, default=str)

    def _queue(self, engine_id: str, output: Output) -> None:
        """Called on the engine's thread."""
        self._outputs.append((engine_id, output))
        if not self._is_woken:
            self._is_woken = True
            # A loop that was closed has no client left.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        # First: what is queued from here on may miss this round, and wakes the loop again.
        self._is_woken = False
        while self._outputs:
            engine_id, output = self._outputs.popleft()
            sink = self._sinks.get(engine_id)
            if output.is_last:
                self._sinks.pop(engine_id, None)
            if sink is not None:
                sink(output)
