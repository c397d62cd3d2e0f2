"""What may be asked of an engine in this process: the one place that makes requests of what clients want.

For any thread. Sinks are called on the engine loop's thread.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

from kvconnect.errors import LocalError
from kvconnect.node.engine import Engine
from kvconnect.node.front.port import NodeInfo, Submission
from kvconnect.node.metrics import NodeMetrics
from kvconnect.node.output import Failure, Output
from kvconnect.node.request import Request


class EngineDesk:
    """Passes requests to ``engine`` and looks into it; ``model`` is what clients call it."""

    def __init__(self, engine: Engine, *, model: str, seed: int, vocab_size: int) -> None:
        self.engine = engine
        self.info = NodeInfo(model, seed, vocab_size, engine.request_limits)
        self.front_restarts = 0
        self._metrics = NodeMetrics(engine, model, lambda: self.front_restarts)
        self._serials = itertools.count()

    def name(self, submission: Submission) -> str:
        """What the engine is to call a request."""
        # Clients may reuse an id; the engine's and the peers' books need one per request.
        return f"{submission.request_id}-{next(self._serials)}"

    def submit(
        self, request_id: str, submission: Submission, sink: Callable[[Output], None]
    ) -> Output | None:
        """Queue a request under a name made for it. Returns what refuses it; its sink hears nothing then."""
        request = Request(
            request_id=request_id,
            prompt_token_ids=submission.prompt_token_ids,
            max_tokens=submission.max_tokens,
            sink=sink,
            kv_transfer_params=submission.kv_transfer_params,
        )
        try:
            self.engine.submit(request)
        except LocalError as error:
            return Output(failure=Failure(503, str(error), "invalid_request_error"))
        return None

    def abort(self, request_id: str) -> None:
        """End a request at whatever stage it is."""
        self.engine.abort(request_id)

    @property
    def alive(self) -> bool:
        """The engine loop runs and has not failed."""
        return self.engine.alive

    def metrics(self) -> tuple[bytes, str]:
        """The metrics of the process and of the node, and their content type."""
        return self._metrics.render()

    def state(self) -> str:
        """What the engine and its connector hold, as JSON."""
        snapshot = self.engine.snapshot
        body: dict[str, Any] = {
            "model": self.info.model,
            "blocks": snapshot.blocks,
            "requests": snapshot.requests,
            "counts": snapshot.counts,
            "steps": snapshot.steps,
        }
        state = getattr(self.engine.worker, "state", None)
        if state is not None:
            body["connector"] = state()
        if self.engine.offload_state is not None:
            body["offload"] = self.engine.offload_state()
        return json.dumps(body, default=str)
