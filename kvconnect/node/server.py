"""The node's HTTP interface: completions, health, metrics and a look inside.

Owns the connections and the requests' answers, on one event loop; it reaches the engine through its client.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
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
from kvconnect.node.engine_client import EngineClient
from kvconnect.node.http_limits import MAX_BODY_BYTES, BodyReader, HttpLimits, Listener
from kvconnect.node.request import Failure, Output

logger = logging.getLogger(__name__)

REQUEST_ID_HEADER = "X-Request-Id"
DRAIN_TIMEOUT_S = 5.0
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class _NoTracebacks(logging.Filter):
    """A client that leaves, or sends what is no HTTP and gets an error for it, is no error of ours."""

    def filter(self, record: logging.LogRecord) -> bool:
        """See ``logging.Filter``."""
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, (HttpProcessingError, ConnectionError))


_http_logger = logging.getLogger("kvconnect.node.http")
_http_logger.addFilter(_NoTracebacks())


def _error(message: str, kind: str, status: int) -> web.Response:
    return web.json_response(error_body(message, kind, status), status=status)


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error is JSON, and none ends the server."""
    try:
        return await handler(request)
    except BadRequest as error:
        return _error(str(error), "invalid_request_error", error.status)
    except web.HTTPException as error:
        text = f"{request.method} {request.path}: {error.reason}"
        return _error(text, "invalid_request_error", error.status)
    except Exception as error:
        logger.exception("%s %s failed", request.method, request.path)
        return _error(f"{type(error).__name__}: {error}", "server_error", 500)


class NodeServer:
    """Serves the engine behind ``client``, within ``limits``."""

    def __init__(self, client: EngineClient, limits: HttpLimits | None = None) -> None:
        self._client = client
        self._limits = limits or HttpLimits()
        self._bodies = BodyReader(self._limits)
        self._in_flight = 0
        self._draining = False
        self._runner: web.AppRunner | None = None
        self._listener: Listener | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen, and start the engine. Returns the port, which the system chose if ``port`` is 0.

        Raises:
            OSError: the address cannot be listened on.
        """
        app = web.Application(
            client_max_size=MAX_BODY_BYTES, middlewares=[self._note_connection, _errors_as_json]
        )
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._show_metrics)
        app.router.add_get("/debug/state", self._state)
        # Cancelling the handler is how a client that left is noticed.
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0, logger=_http_logger
        )
        await self._runner.setup()
        assert self._runner.server is not None
        self._listener = Listener(self._runner.server, self._limits)
        bound = await self._listener.open(host, port)
        self._client.start()
        return bound

    def refuse(self) -> None:
        """Take no new request from now on; those in flight go on."""
        self._draining = True

    async def stop(self, drain_timeout_s: float = DRAIN_TIMEOUT_S) -> None:
        """Refuse new requests, give those in flight some time, then end everything."""
        self.refuse()
        deadline = time.monotonic() + drain_timeout_s
        while self._in_flight and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        if self._in_flight:
            logger.warning("%d requests were still in flight and are ended", self._in_flight)
        await self._client.stop()
        if self._listener is not None:
            self._listener.close()
        if self._runner is not None:
            await self._runner.cleanup()

    # --- handlers ---------------------------------------------------------------------------------

    @web.middleware
    async def _note_connection(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if self._listener is not None:
            self._listener.note_request(request.protocol)
        return await handler(request)

    async def _health(self, _: web.Request) -> web.Response:
        if self._client.alive and not self._draining:
            return web.json_response({"status": "ok"})
        return _error("the engine loop has ended or the node is stopping", "server_error", 503)

    async def _models(self, _: web.Request) -> web.Response:
        info = self._client.info
        model = {"id": info.model, "object": "model", "owned_by": "kvconnect", "seed": info.seed}
        model["max_model_len"] = info.max_model_len
        return web.json_response({"object": "list", "data": [model]})

    async def _show_metrics(self, _: web.Request) -> web.Response:
        body, content_type = self._client.metrics()
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def _state(self, _: web.Request) -> web.Response:
        return web.Response(text=self._client.state(), content_type="application/json")

    async def _completions(self, http: web.Request) -> web.StreamResponse:
        if self._draining:
            return _error("the node is stopping", "server_error", 503)
        request_id = check_request_id(http.headers.get(REQUEST_ID_HEADER) or uuid.uuid4().hex)
        try:
            decoded = json.loads(await self._bodies.read(http))
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"the body is not valid JSON: {error}") from error
        body = self._checked(decoded)
        if self._client.num_open >= self._limits.max_requests:
            text = f"the node serves {self._limits.max_requests} requests already"
            return _error(text, "server_error", 503)
        answer = Answer(
            request_id,
            self._client.info.model,
            int(time.time()),
            len(body.prompt_token_ids),
            body.return_kv_block_ids,
        )
        outputs: asyncio.Queue[Output] = asyncio.Queue()
        self._in_flight += 1
        engine_id = self._client.submit(request_id, body, outputs.put_nowait)
        try:
            return await (self._stream if body.stream else self._whole)(http, answer, outputs)
        finally:
            # A client that left before the end cancelled this; a request that has ended is left alone.
            self._client.abort(engine_id)
            self._in_flight -= 1

    def _checked(self, decoded: object) -> CompletionBody:
        """A body that the engine can serve.

        Raises:
            BadRequest: it cannot, and the text says why.
        """
        info = self._client.info
        body = parse_completion(decoded, model=info.model, vocab_size=info.vocab_size)
        refusal = self._client.refusal(len(body.prompt_token_ids), body.max_tokens)
        if refusal is None and body.kv_transfer_params is not None:
            refusal = self._params_refusal(body.kv_transfer_params)
        if refusal is not None:
            raise BadRequest(refusal)
        return body

    def _params_refusal(self, params: dict[str, Any]) -> str | None:
        # Whether they make sense is for the connector to decide: some policies serve a request all the same.
        try:
            length_bytes = len(json.dumps(params))
        except RecursionError:
            return "kv_transfer_params are nested too deeply"
        if length_bytes > self._limits.max_params_bytes:
            accepted = self._limits.max_params_bytes
            return f"kv_transfer_params have {length_bytes} bytes of JSON, accepted: {accepted}"
        return None

    async def _whole(
        self, _: web.Request, answer: Answer, outputs: asyncio.Queue[Output]
    ) -> web.StreamResponse:
        tokens: list[int] = []
        drafts: list[int] | None = None
        async for output in _until_last(outputs):
            tokens.extend(output.token_ids)
            if output.draft_token_ids is not None:
                drafts = [*(drafts or []), *output.draft_token_ids]
        if output.failure is not None:
            return _failed(answer, output.failure)
        response = web.json_response(answer.body(tokens, drafts, output, len(tokens)))
        response.headers[REQUEST_ID_HEADER] = answer.request_id
        return response

    async def _stream(
        self, http: web.Request, answer: Answer, outputs: asyncio.Queue[Output]
    ) -> web.StreamResponse:
        headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        response = web.StreamResponse(headers={**headers, REQUEST_ID_HEADER: answer.request_id})
        generated = 0
        async for output in _until_last(outputs):
            failure = output.failure
            if failure is not None and not response.prepared:
                return _failed(answer, failure)
            generated += len(output.token_ids)
            if failure is not None:
                body = error_body(failure.message, failure.kind, failure.status)
            elif output.is_last:
                body = answer.body(output.token_ids, output.draft_token_ids, output, generated)
            else:
                body = answer.chunk(output.token_ids, output.draft_token_ids)
            try:
                if not response.prepared:
                    await response.prepare(http)
                end = "data: [DONE]\n\n" if output.is_last else ""
                await response.write(f"data: {json.dumps(body)}\n\n{end}".encode())
                if output.is_last:
                    await response.write_eof()
            except ConnectionError:
                break  # the client left
        return response


async def _until_last(outputs: asyncio.Queue[Output]) -> AsyncIterator[Output]:
    while True:
        output = await outputs.get()
        yield output
        if output.is_last:
            return


def _failed(answer: Answer, failure: Failure) -> web.Response:
    response = _error(failure.message, failure.kind, failure.status)
    response.headers[REQUEST_ID_HEADER] = answer.request_id
    return response
