"""The node's HTTP interface: completions, health, metrics and a look inside.

Owns the sockets and the requests' sinks. It reaches the engine through ``submit``, ``abort`` and the
published snapshot only.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from kvconnect.errors import LocalError
from kvconnect.node.completions import (
    Answer,
    BadRequest,
    CompletionBody,
    check_request_id,
    error_body,
    parse_completion,
)
from kvconnect.node.engine import Engine
from kvconnect.node.metrics import NodeMetrics
from kvconnect.node.request import Failure, Output, Request

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 8 * 1024 * 1024
DRAIN_TIMEOUT_S = 5.0
REQUEST_ID_HEADER = "X-Request-Id"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class _NoTracebacks(logging.Filter):
    """A client that leaves, or sends what is no HTTP and is told so, is no error of ours."""

    def filter(self, record: logging.LogRecord) -> bool:
        """See ``logging.Filter``."""
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, (HttpProcessingError, ConnectionError))


_http_logger = logging.getLogger("kvconnect.node.http")
_http_logger.addFilter(_NoTracebacks())


def _json(body: Any, status: int = 200) -> web.Response:
    return web.json_response(body, status=status)


def _error(message: str, kind: str, status: int) -> web.Response:
    return _json(error_body(message, kind, status), status)


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error is JSON, and none ends the server."""
    try:
        return await handler(request)
    except BadRequest as error:
        return _error(str(error), "invalid_request_error", error.status)
    except web.HTTPException as error:
        return _error(
            f"{request.method} {request.path}: {error.reason}", "invalid_request_error", error.status
        )
    except Exception as error:
        logger.exception("%s %s failed", request.method, request.path)
        return _error(f"{type(error).__name__}: {error}", "server_error", 500)


class NodeServer:
    """Serves ``engine``, which it starts and stops, under the name ``model``."""

    def __init__(self, engine: Engine, *, model: str, seed: int, vocab_size: int) -> None:
        self.engine = engine
        self.model = model
        self._seed = seed
        self._vocab_size = vocab_size
        self._metrics = NodeMetrics(engine, model)
        self._serials = itertools.count()
        self._in_flight = 0
        self._draining = False
        self._runner: web.AppRunner | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen. Returns the port, which the system chose if ``port`` is 0."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_errors_as_json])
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._show_metrics)
        app.router.add_get("/debug/state", self._state)
        self.engine.start()
        # Cancelling the handler is how a client that left is noticed.
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0, logger=_http_logger
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port).start()
        return int(self._runner.addresses[0][1])

    def refuse(self) -> None:
        """Take no new request from now on; those in flight go on."""
        self._draining = True

    async def stop(self, drain_timeout_s: float = DRAIN_TIMEOUT_S) -> None:
        """Refuse new requests, give those in flight some time, then end everything."""
        self._draining = True
        deadline = time.monotonic() + drain_timeout_s
        while self._in_flight and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        if self._in_flight:
            logger.warning("%d requests were still in flight and are ended", self._in_flight)
        await asyncio.get_running_loop().run_in_executor(None, self.engine.stop)
        if self._runner is not None:
            await self._runner.cleanup()

    # --- handlers ---------------------------------------------------------------------------------

    async def _health(self, _: web.Request) -> web.Response:
        if self.engine.alive and not self._draining:
            return _json({"status": "ok"})
        return _error("the engine loop has ended or the node is stopping", "server_error", 503)

    async def _models(self, _: web.Request) -> web.Response:
        model = {"id": self.model, "object": "model", "owned_by": "kvconnect", "seed": self._seed}
        model["max_model_len"] = self.engine.scheduler.limits.max_model_len
        return _json({"object": "list", "data": [model]})

    async def _show_metrics(self, _: web.Request) -> web.Response:
        body, content_type = self._metrics.render()
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def _state(self, _: web.Request) -> web.Response:
        snapshot = self.engine.snapshot
        body: dict[str, Any] = {
            "model": self.model,
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
        return web.Response(text=json.dumps(body, default=str), content_type="application/json")

    async def _completions(self, http: web.Request) -> web.StreamResponse:
        if self._draining:
            return _error("the node is stopping", "server_error", 503)
        request_id = check_request_id(http.headers.get(REQUEST_ID_HEADER) or uuid.uuid4().hex)
        try:
            decoded = json.loads(await http.read())
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"the body is not valid JSON: {error}") from error
        body = parse_completion(decoded, model=self.model, vocab_size=self._vocab_size)
        refusal = self.engine.refusal(len(body.prompt_token_ids), body.max_tokens)
        if refusal is not None:
            raise BadRequest(refusal)
        answer = Answer(
            request_id,
            self.model,
            int(time.time()),
            len(body.prompt_token_ids),
            body.return_kv_block_ids,
        )
        self._in_flight += 1
        try:
            async with self._running(request_id, body) as outputs:
                if body.stream:
                    return await self._stream(http, answer, outputs)
                return await self._whole(answer, outputs)
        finally:
            self._in_flight -= 1

    @contextlib.asynccontextmanager
    async def _running(self, request_id: str, body: CompletionBody) -> AsyncIterator[asyncio.Queue[Output]]:
        """Submit the request; abort it if the client leaves before the end."""
        loop = asyncio.get_running_loop()
        outputs: asyncio.Queue[Output] = asyncio.Queue()
        ended = False

        def sink(output: Output) -> None:
            nonlocal ended
            ended = ended or output.is_last
            # A loop that was closed has no client left to tell.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(outputs.put_nowait, output)

        # Clients may reuse an id; the engine's and the peers' books need one per request.
        request = Request(
            request_id=f"{request_id}-{next(self._serials)}",
            prompt_token_ids=body.prompt_token_ids,
            max_tokens=body.max_tokens,
            sink=sink,
            kv_transfer_params=body.kv_transfer_params,
        )
        try:
            self.engine.submit(request)
        except LocalError as error:
            raise BadRequest(str(error), status=503) from error
        try:
            yield outputs
        finally:
            if not ended:
                self.engine.abort(request.request_id)

    async def _whole(self, answer: Answer, outputs: asyncio.Queue[Output]) -> web.Response:
        tokens: list[int] = []
        drafts: list[int] | None = None
        while True:
            output = await outputs.get()
            tokens.extend(output.token_ids)
            if output.draft_token_ids is not None:
                drafts = [*(drafts or []), *output.draft_token_ids]
            if output.failure is not None:
                return self._failed(answer, output.failure)
            if output.is_last:
                response = _json(answer.body(tokens, drafts, output, len(tokens)))
                response.headers[REQUEST_ID_HEADER] = answer.request_id
                return response

    async def _stream(
        self, http: web.Request, answer: Answer, outputs: asyncio.Queue[Output]
    ) -> web.StreamResponse:
        first = await outputs.get()
        if first.failure is not None:
            return self._failed(answer, first.failure)
        response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                REQUEST_ID_HEADER: answer.request_id,
            }
        )
        await response.prepare(http)
        output, generated = first, 0
        while True:
            generated += len(output.token_ids)
            if output.failure is not None:
                failure = output.failure
                body = error_body(failure.message, failure.kind, failure.status)
            elif output.is_last:
                body = answer.body(output.token_ids, output.draft_token_ids, output, generated)
            else:
                body = answer.chunk(output.token_ids, output.draft_token_ids)
            data = f"data: {json.dumps(body)}\n\n"
            if output.is_last:
                data += "data: [DONE]\n\n"
            try:
                await response.write(data.encode())
            except ConnectionError:
                # The client left; the request is aborted on the way out.
                return response
            if output.is_last:
                await response.write_eof()
                return response
            output = await outputs.get()

    def _failed(self, answer: Answer, failure: Failure) -> web.Response:
        response = _error(failure.message, failure.kind, failure.status)
        response.headers[REQUEST_ID_HEADER] = answer.request_id
        return response
