"""What the HTTP servers of router and node share: bodies, answers to errors, drained stops. Logs no body."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import signal
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

REQUEST_ID = "X-Request-Id"
_REQUEST_ID_SHAPE = re.compile(r"[\x21-\x7e]{1,512}")
_http_logger = logging.getLogger("kvconnect.http")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class BadRequest(Exception):
    """A client's request is not served. The message states why; ``status`` is that of the answer."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


def parse_json(raw: bytes) -> dict[str, Any]:
    """A client's body as a dictionary. Raises ``BadRequest``: not JSON, or not an object."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the request body is not JSON: {error or type(error).__name__}") from None
    if not isinstance(body, dict):
        raise BadRequest(f"the request body must be a JSON object, not {type(body).__name__}")
    return body


def request_id_of(headers: Mapping[str, str]) -> str:
    """The client's request id if it is short and printable, else a new one."""
    given = headers.get(REQUEST_ID, "")
    return given if _REQUEST_ID_SHAPE.fullmatch(given) else uuid.uuid4().hex


def _is_ours(record: logging.LogRecord) -> bool:
    """False for the errors of a client that leaves or sends invalid HTTP: these are not logged."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, (HttpProcessingError, ConnectionError, web.RequestPayloadError))


def app_runner(app: web.Application, **more: Any) -> web.AppRunner:
    """A runner for an application: a client that leaves cancels its handler, without an error in the log."""
    _http_logger.addFilter(_is_ours)
    return web.AppRunner(
        app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0, logger=_http_logger, **more
    )


async def read_body(request: web.Request, timeout_s: float) -> bytes:
    """The body of a request. Raises ``BadRequest``: it did not arrive in time or whole, or is too long."""
    try:
        return await asyncio.wait_for(request.read(), timeout_s)
    except asyncio.TimeoutError:
        text = f"the request's body did not arrive within {timeout_s:g} s"
        raise BadRequest(text, status=408) from None
    except web.HTTPRequestEntityTooLarge:
        text = f"the request's body is larger than {request.client_max_size} bytes"
        raise BadRequest(text, status=413) from None
    except web.RequestPayloadError as error:
        raise BadRequest(f"the request's body cannot be read: {error}") from error


def error_body(status: int, message: str) -> dict[str, Any]:
    """An error in the shape of the OpenAI API."""
    kind = "invalid_request_error" if status < 500 else "service_unavailable"
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def error_response(status: int, message: str, request_id: str, **more: str) -> web.Response:
    """The answer to a request that fails; ``more`` are further fields of its body."""
    headers = {REQUEST_ID: request_id, **({"Retry-After": "1"} if status == 503 else {})}
    return web.json_response({**error_body(status, message), **more}, status=status, headers=headers)


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answers a request that is refused, and an unknown path as vLLM does."""
    request_id = request_id_of(request.headers)
    try:
        return await handler(request)
    except BadRequest as error:
        return error_response(error.status, str(error), request_id)
    except web.HTTPException as error:
        text = f"{request.method} {request.path} is not served here: {error.reason}"
        return error_response(error.status, text, request_id, detail=error.reason)


def on_stop_signals(call: Callable[[], None]) -> None:
    """Call on each SIGTERM and SIGINT that this process gets, in the running event loop."""
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, call)
