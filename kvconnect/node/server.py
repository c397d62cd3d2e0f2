"""The node's HTTP interface: completions, health, metrics and debug state.

Owns connections and answers, on one event loop; the engine's thread queues outputs there.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import logging
import resource
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec
from aiohttp import web
from msgspec import Meta, Struct
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

from kvconnect.errors import LocalError
from kvconnect.metrics import PREFIX, Series
from kvconnect.node.engine import NodeEngine
from kvconnect.node.http_server import (
    REQUEST_ID,
    BadRequest,
    Handler,
    app_runner,
    error_body,
    error_response,
    errors_as_json,
    parse_json,
    read_body,
    request_id_of,
)
from kvconnect.node.models import VOCAB
from kvconnect.node.request import Failure, Output, Request
from kvconnect.transfer.params import is_release

logger = logging.getLogger(__name__)

DRAIN_TIMEOUT_S = 5.0
_ADD_S = 10.0
"""Seconds between two looks at a worker's numbers where nobody asks for them: each costs 80 calls."""
# The longest body in bytes: a fixed part, and a part for each token that the model can take.
_BODY_BYTES, _TOKEN_BYTES = 256 << 10, 16
_BACKLOG = 1024
# Open files of the engine, peers and tiers, beside client connections.
_OTHER_FILES = 512
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\nRetry-After: 1\r\n\r\n"
)
DEFAULT_MAX_TOKENS = 16
_ACCEPTED: Mapping[str, tuple[Any, ...]] = {
    "temperature": (0,),
    "n": (1,),
    "best_of": (1,),
    **dict.fromkeys(("echo", "logprobs", "stop", "suffix"), (False, "", [])),
}
"""For fields that this node does not support: the values that ask for nothing. Absent is always accepted."""


@dataclass(frozen=True)
class HttpLimits:
    """Bounds of the HTTP server.

    Attributes:
        max_connections: open connections; more are answered with 503 and closed.
        max_requests: requests in the engine; more are answered with 503.
        body_timeout_s: for a client to send its whole body.
        idle_timeout_s: after which a connection without a request is closed.
    """

    max_connections: int = 4096
    max_requests: int = 2048
    body_timeout_s: float = 30.0
    idle_timeout_s: float = 60.0

    def within_open_files(self) -> HttpLimits:
        """Limit connections to the process's open files; raises the soft limit as far as needed."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = self.max_connections + _OTHER_FILES
        if soft == resource.RLIM_INFINITY or soft >= wanted:
            return self
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return replace(self, max_connections=max(1, soft - _OTHER_FILES))


class CompletionBody(Struct, kw_only=True):
    """A checked request body. This node decodes greedily, and gives one choice per request."""

    prompt: str | list[Annotated[int, Meta(ge=0)]]
    model: str | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    stream: bool | None = None
    kv_transfer_params: dict[str, Any] | None = None
    session_id: str | None = None
    cache_salt: str | None = None
    temperature: float | None = None
    n: int | None = None
    best_of: int | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    echo: Any = None
    logprobs: Any = None
    stop: Any = None
    suffix: Any = None

    def prompt_token_ids(self) -> list[int]:
        """The prompt as token ids; a text's token ids are its bytes.

        Raises ``BadRequest`` for an empty prompt, or an unknown token.
        """
        try:
            ids = list(self.prompt.encode()) if isinstance(self.prompt, str) else self.prompt
        except UnicodeEncodeError as error:
            raise BadRequest(f"prompt is not valid Unicode: {error}") from error
        if not ids:
            raise BadRequest("prompt is empty, it must have at least one token")
        if max(ids) >= VOCAB:
            raise BadRequest(f"prompt has token {max(ids)}, token ids are from 0 to {VOCAB - 1}")
        return ids


def parse_completion(body: object, *, model: str, session_id: str | None = None) -> CompletionBody:
    """Check a decoded JSON body, whose session id takes precedence over the header's.

    Raises ``BadRequest`` if a field is wrong or not supported.
    """
    try:
        parsed = msgspec.convert(body, CompletionBody)
    except ValueError as error:
        raise BadRequest(f"the body cannot be used: {error}") from error
    parsed.session_id = parsed.session_id or session_id
    if parsed.model not in (None, model) and not is_release(parsed.kv_transfer_params or {}):
        raise BadRequest(f"model {parsed.model!r} is not served here, this is {model!r}", status=404)
    for name, accepted in _ACCEPTED.items():
        value = getattr(parsed, name)
        if value is not None and value not in accepted:
            shown = value if isinstance(value, (int, float)) else str(value)[:80]
            raise BadRequest(f"{name} is {shown!r}, which is not supported by this node: leave it out")
    return parsed


def answer_body(head: Mapping[str, Any], request: Request, output: Output) -> dict[str, Any]:
    """A whole answer or a chunk of a streamed one; the last body has usage and transfer parameters.

    ``head`` are the fields that all bodies of one answer have.
    """
    if output.failure is not None:
        return error_body(output.failure.status, output.failure.message)
    choice = {
        "index": 0,
        "text": "".join(f" {token}" for token in output.token_ids),
        "token_ids": output.token_ids,
        "logprobs": None,
        "finish_reason": output.finish_reason,
    }
    body: dict[str, Any] = {**head, "choices": [choice]}
    if output.draft_token_ids is not None:
        body["draft_token_ids"] = output.draft_token_ids
    if output.is_last:
        num_prompt, num_generated = len(request.prompt_token_ids), request.num_generated_tokens
        body["usage"] = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_generated,
            "total_tokens": num_prompt + num_generated,
            "prompt_tokens_details": {"cached_tokens": output.cached_tokens},
        }
        body["kv_transfer_params"] = output.kv_transfer_params
    return body


Answer = Callable[[Output], dict[str, Any]]
"""``answer_body`` of one request."""


@web.middleware
async def _failures_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answers an internal error as JSON; no error ends the server."""
    try:
        return await handler(request)
    except (BadRequest, web.HTTPException):
        raise
    except Exception as error:
        logger.exception("internal error in %s %s", request.method, request.path)
        raise BadRequest(f"{type(error).__name__}: {error}", status=500) from error


class NodeServer:
    """Serves ``engine``, whose loop it starts and stops, within ``limits``."""

    def __init__(self, engine: NodeEngine, limits: HttpLimits | None = None) -> None:
        self._engine = engine
        self._limits = limits or HttpLimits()
        self._serials = itertools.count()
        # The queues of requests that the engine has not ended, by engine id.
        self._outputs: dict[str, asyncio.Queue[Output]] = {}
        self._in_flight = 0
        self._draining = False
        # What ``start`` has opened, for ``stop`` to close.
        self._opened = contextlib.AsyncExitStack()
        self._registry = CollectorRegistry()
        kinds = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}
        self._series = Series(PREFIX, kinds, registry=self._registry)

    async def start(self, host: str, port: int) -> int:
        """Listen, and start the engine. Returns the port, which the system chose if ``port`` is 0.

        Raises ``OSError`` if the address cannot be bound.
        """
        self._loop = asyncio.get_running_loop()
        max_body_bytes = _BODY_BYTES + _TOKEN_BYTES * self._engine.options.max_model_len
        app = web.Application(client_max_size=max_body_bytes, middlewares=[errors_as_json, _failures_as_json])
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/debug/state", self._state)
        runner = app_runner(app, keepalive_timeout=self._limits.idle_timeout_s)
        await runner.setup()
        self._opened.push_async_callback(runner.cleanup)
        assert runner.server is not None
        listening = await _listen(runner.server, host, port, self._limits.max_connections)
        self._opened.callback(listening.close)
        self._engine.start()
        self._opened.callback(asyncio.create_task(self._add_regularly()).cancel)
        return int(listening.sockets[0].getsockname()[1])

    def refuse(self) -> None:
        """Refuse new requests; those in flight go on."""
        self._draining = True

    async def stop(self, drain_timeout_s: float = DRAIN_TIMEOUT_S) -> None:
        """Refuse new requests, wait for those in flight at most ``drain_timeout_s``, then end all."""
        self.refuse()
        deadline = time.monotonic() + drain_timeout_s
        while self._in_flight and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        if self._in_flight:
            text = "%d requests are cut off: they did not end within the %g s that a stopping node waits"
            logger.warning(text, self._in_flight, drain_timeout_s)
        await asyncio.get_running_loop().run_in_executor(None, self._engine.stop)
        await self._opened.aclose()

    # --- handlers ---------------------------------------------------------------------------------

    async def _health(self, _: web.Request) -> web.Response:
        if self._engine.alive and not self._draining:
            return web.json_response({"status": "ok"})
        raise BadRequest("the engine loop has ended or the node is stopping", status=503)

    async def _models(self, _: web.Request) -> web.Response:
        options = self._engine.options
        model = {"id": options.model, "object": "model", "owned_by": "kvconnect", "seed": options.seed}
        model["max_model_len"] = options.max_model_len
        return web.json_response({"object": "list", "data": [model]})

    async def _metrics(self, _: web.Request) -> web.Response:
        self._add_changes()
        body = generate_latest() + generate_latest(self._registry)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _add_regularly(self) -> None:
        """Add changes also while nobody asks for them: the worker keeps a bounded number of observations."""
        while True:
            self._add_changes()
            await asyncio.sleep(_ADD_S)

    def _add_changes(self) -> None:
        if changes := self._engine.worker.changes():
            self._series.add(changes.counters, {"": changes.gauges}, changes.observed)

    async def _state(self, _: web.Request) -> web.Response:
        text = json.dumps(self._engine.state(), default=str)
        return web.Response(text=text, content_type="application/json")

    async def _completions(self, http: web.Request) -> web.StreamResponse:
        if self._draining:
            raise BadRequest("the node is stopping", status=503)
        request_id = request_id_of(http.headers)
        body = await self._read(http)
        if len(self._outputs) >= self._limits.max_requests:
            raise BadRequest(f"the node serves {self._limits.max_requests} requests already", status=503)
        # Clients may reuse an id; the engine and the peers need a unique one per request.
        engine_id = f"{request_id}-{next(self._serials)}"
        self._in_flight += 1
        try:
            request = self._request(engine_id, body)
            made = {"created": int(time.time()), "model": self._engine.options.model}
            head = {"id": f"cmpl-{request_id}", "object": "text_completion", **made}
            answer = functools.partial(answer_body, head, request)
            respond = functools.partial(_stream, http) if body.stream else _whole
            return await respond(request_id, answer, self._until_last(request))
        finally:
            self._in_flight -= 1
            # A client that left cancelled this handler; a request that has ended is not aborted.
            if engine_id in self._outputs:
                self._engine.abort(engine_id)

    async def _read(self, http: web.Request) -> CompletionBody:
        decoded = parse_json(await read_body(http, self._limits.body_timeout_s))
        session_id = http.headers.get("X-Session-ID")
        return parse_completion(decoded, model=self._engine.options.model, session_id=session_id)

    def _request(self, engine_id: str, body: CompletionBody) -> Request:
        """A request that the engine can serve. Raises ``BadRequest`` with the reason if it cannot."""
        prompt = body.prompt_token_ids()
        max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        if refusal := self._engine.refusal(len(prompt), max_tokens):
            raise BadRequest(refusal)
        # The connector decides whether these are valid: some policies serve a request all the same.
        sink = functools.partial(self._deliver, engine_id)
        kept = body.kv_transfer_params, body.session_id, body.cache_salt
        return Request(engine_id, prompt, max_tokens, sink, *kept)

    # --- answers ----------------------------------------------------------------------------------

    def _deliver(self, engine_id: str, output: Output) -> None:
        """Queue an output for the event loop. For any thread."""
        # If the loop is closed, no client is left.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._queue, engine_id, output)

    def _queue(self, engine_id: str, output: Output) -> None:
        outputs = self._outputs.pop(engine_id, None) if output.is_last else self._outputs.get(engine_id)
        if outputs is not None:
            outputs.put_nowait(output)

    async def _until_last(self, request: Request) -> AsyncIterator[Output]:
        """The engine's outputs, or its refusal as a failure."""
        outputs = self._outputs[request.request_id] = asyncio.Queue[Output]()
        try:
            self._engine.submit(request)
        except LocalError as error:
            request.sink(Output(failure=Failure(503, str(error))))
        is_last = False
        while not is_last:
            output = await outputs.get()
            is_last = output.is_last
            yield output


async def _whole(request_id: str, answer: Answer, outputs: AsyncIterator[Output]) -> web.StreamResponse:
    made = [output async for output in outputs]
    last = made[-1]
    if last.failure is not None:
        return error_response(last.failure.status, last.failure.message, request_id)
    tokens = tuple(token for output in made for token in output.token_ids)
    drafts = tuple(token for output in made for token in output.draft_token_ids or ())
    body = answer(replace(last, token_ids=tokens, draft_token_ids=drafts or None))
    return web.json_response(body, headers={REQUEST_ID: request_id})


async def _stream(
    http: web.Request, request_id: str, answer: Answer, outputs: AsyncIterator[Output]
) -> web.StreamResponse:
    headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
    response = web.StreamResponse(headers={**headers, REQUEST_ID: request_id})
    async for output in outputs:
        if output.failure is not None and not response.prepared:
            return error_response(output.failure.status, output.failure.message, request_id)
        try:
            if not response.prepared:
                await response.prepare(http)
            end = "data: [DONE]\n\n" if output.is_last else ""
            await response.write(f"data: {json.dumps(answer(output))}\n\n{end}".encode())
            if output.is_last:
                await response.write_eof()
        except ConnectionError:
            break  # the client left
    return response


class _Full(asyncio.Protocol):
    """Answers 503 to a connection beyond the bound."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(_FULL)
        transport.close()


async def _listen(server: web.Server, host: str, port: int, max_connections: int) -> asyncio.Server:
    """Let ``server`` accept at most ``max_connections`` connections.

    Raises ``OSError`` if the address cannot be bound.
    """
    was_full = False

    def accept() -> asyncio.Protocol:
        nonlocal was_full
        if len(server.connections) < max_connections:
            return server()
        if not was_full:
            was_full = True
            logger.warning(
                "%d HTTP connections are open, and more are refused without a further line: raise the limit "
                "of open files (ulimit -n), or use fewer clients",
                max_connections,
            )
        return _Full()

    return await asyncio.get_running_loop().create_server(accept, host, port, backlog=_BACKLOG)
