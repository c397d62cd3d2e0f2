"""The node's HTTP interface: completions, health, metrics and a look inside.

Owns the connections and the requests' answers. It reaches the engine through a port only, and runs where that
runs: in the engine's process, or in one of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from kvconnect.node.completions import (
    Answer,
    BadRequest,
    CompletionBody,
    check_request_id,
    error_body,
    parse_completion,
)
from kvconnect.node.front.bodies import BodyReader
from kvconnect.node.front.limits import DRAIN_TIMEOUT_S, MAX_BODY_BYTES, FrontLimits
from kvconnect.node.front.listener import Listener
from kvconnect.node.front.port import EnginePort, Submission
from kvconnect.node.output import Failure, Output

logger = logging.getLogger(__name__)

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
    """Serves the engine behind ``port``, within ``limits``."""

    def __init__(self, port: EnginePort, limits: FrontLimits | None = None) -> None:
        self._port = port
        self._limits = limits or FrontLimits()
        self._bodies = BodyReader(self._limits)
        self._in_flight = 0
        self._draining = False
        self._runner: web.AppRunner | None = None
        self._listener: Listener | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen. Returns the port, which the system chose if ``port`` is 0.

        Raises:
            OSError: the address cannot be listened on.
        """
        return await (await self._prepare()).open(host, port)

    async def start_on(self, sockets: Sequence[socket.socket]) -> None:
        """Listen on sockets that are bound."""
        await (await self._prepare()).open_on(sockets)

    async def _prepare(self) -> Listener:
        app = web.Application(
            client_max_size=MAX_BODY_BYTES, middlewares=[self._note_connection, _errors_as_json]
        )
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._show_metrics)
        app.router.add_get("/debug/state", self._state)
        self._port.start()
        # Cancelling the handler is how a client that left is noticed.
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0, logger=_http_logger
        )
        await self._runner.setup()
        assert self._runner.server is not None
        self._listener = Listener(self._runner.server, self._limits)
        return self._listener

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
        await self._port.stop()
        if self._listener is not None:
            self._listener.close()
        if self._runner is not None:
            await self._runner.cleanup()

    # --- handlers ---------------------------------------------------------------------------------

    @web.middleware
    async def _note_connection(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if self._listener is not None:
            self._listener.spoke(request.protocol)
        return await handler(request)

    async def _health(self, _: web.Request) -> web.Response:
        if not self._draining and await self._port.alive():
            return _json({"status": "ok"})
        return _error("the engine loop has ended or the node is stopping", "server_error", 503)

    async def _models(self, _: web.Request) -> web.Response:
        info = self._port.info
        model = {"id": info.model, "object": "model", "owned_by": "kvconnect", "seed": info.seed}
        model["max_model_len"] = info.limits.max_model_len
        return _json({"object": "list", "data": [model]})

    async def _show_metrics(self, _: web.Request) -> web.Response:
        body, content_type = await self._port.metrics()
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def _state(self, _: web.Request) -> web.Response:
        return web.Response(text=await self._port.state(), content_type="application/json")

    async def _completions(self, http: web.Request) -> web.StreamResponse:
        if self._draining:
            return _error("the node is stopping", "server_error", 503)
        request_id = check_request_id(http.headers.get(REQUEST_ID_HEADER) or uuid.uuid4().hex)
        try:
            decoded = json.loads(await self._bodies.read(http))
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"the body is not valid JSON: {error}") from error
        body = self._checked(decoded)
        if self._port.num_open >= self._limits.max_requests:
            text = f"the node serves {self._limits.max_requests} requests already"
            return _error(text, "server_error", 503)
        answer = Answer(
            request_id,
            self._port.info.model,
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

    def _checked(self, decoded: object) -> CompletionBody:
        """A body that the engine can serve.

        Raises:
            BadRequest: it cannot, and the text says why.
        """
        info = self._port.info
        body = parse_completion(decoded, model=info.model, vocab_size=info.vocab_size)
        refusal = info.limits.refusal(len(body.prompt_token_ids), body.max_tokens)
        if refusal is None and body.kv_transfer_params is not None:
            refusal = self._params_refusal(body.kv_transfer_params)
        if refusal is not None:
            raise BadRequest(refusal)
        return body

    def _params_refusal(self, params: dict[str, Any]) -> str | None:
        # Whether they make sense is for the connector to say: some policies serve a request all the same.
        try:
            length_bytes = len(json.dumps(params))
        except RecursionError:
            return "kv_transfer_params are nested too deeply"
        if length_bytes > self._limits.max_params_bytes:
            accepted = self._limits.max_params_bytes
            return f"kv_transfer_params have {length_bytes} bytes of JSON, accepted: {accepted}"
        return None

    @contextlib.asynccontextmanager
    async def _running(self, request_id: str, body: CompletionBody) -> AsyncIterator[asyncio.Queue[Output]]:
        """Submit the request; abort it if the client leaves before the end."""
        outputs: asyncio.Queue[Output] = asyncio.Queue()
        submission = Submission(request_id, body.prompt_token_ids, body.max_tokens, body.kv_transfer_params)
        number = self._port.submit(submission, outputs.put_nowait)
        try:
            yield outputs
        finally:
            # Nothing happens to a request that has ended.
            self._port.abort(number)

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
