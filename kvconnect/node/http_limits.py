"""What clients can make a node's HTTP server hold: connections, bodies, requests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
from dataclasses import dataclass, replace
from typing import Any

from aiohttp import web

from kvconnect.node.completions import BadRequest

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 8 * 1024 * 1024
_BACKLOG = 1024
# Of the engine, peers and tiers, beside the clients' connections.
_OTHER_FILES = 512
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\nRetry-After: 1\r\n\r\n"
)


@dataclass(frozen=True)
class HttpLimits:
    """Bounds of the HTTP server.

    Attributes:
        max_connections: open at once; more are answered with 503 and closed.
        max_requests: given to the engine and not ended by it; more are answered with 503.
        max_bodies_bytes: of bodies being read, beyond ``free_body_bytes`` of each; more gets 503.
        max_params_bytes: of a request's transfer parameters, as JSON.
        body_timeout_s: for a client to send its whole body.
        first_request_timeout_s: for a new connection to send a first request; afterwards it is closed.
    """

    max_connections: int = 4096
    max_requests: int = 2048
    max_bodies_bytes: int = 256 << 20
    free_body_bytes: int = 64 << 10
    max_params_bytes: int = 64 << 10
    body_timeout_s: float = 30.0
    first_request_timeout_s: float = 60.0

    def within_open_files(self) -> HttpLimits:
        """As many connections as the system lets this process have; raises its soft limit of open files."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = self.max_connections + _OTHER_FILES
        if soft == resource.RLIM_INFINITY or soft >= wanted:
            return self
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return replace(self, max_connections=max(1, soft - _OTHER_FILES))


class BodyReader:
    """Reads bodies, and counts the bytes of all that are being read."""

    def __init__(self, limits: HttpLimits) -> None:
        self._limits = limits
        self._held_bytes = 0

    async def read(self, http: web.Request) -> bytes:
        """A request's whole body.

        Raises:
            BadRequest: it did not arrive in time, or too much is being read from others.
            web.HTTPRequestEntityTooLarge: it is longer than any may be.
        """
        try:
            return await asyncio.wait_for(self._read(http), self._limits.body_timeout_s)
        except asyncio.TimeoutError:
            text = f"the body did not arrive within {self._limits.body_timeout_s:g} s"
            raise BadRequest(text, status=408) from None

    async def _read(self, http: web.Request) -> bytes:
        body, counted = bytearray(), 0
        try:
            while chunk := await http.content.readany():
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    raise web.HTTPRequestEntityTooLarge(MAX_BODY_BYTES, len(body))
                more = max(0, len(body) - self._limits.free_body_bytes) - counted
                if self._held_bytes + more > self._limits.max_bodies_bytes:
                    text = f"the node reads {self._held_bytes} bytes of large bodies already"
                    raise BadRequest(text, status=503)
                counted += more
                self._held_bytes += more
            return bytes(body)
        finally:
            self._held_bytes -= counted


class _Full(asyncio.Protocol):
    """A connection too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(_FULL)
        transport.close()


class Listener:
    """Accepts connections for ``server``: a bounded number, and none that never sends a request."""

    def __init__(self, server: web.Server, limits: HttpLimits) -> None:
        self._server = server
        self._limits = limits
        self._listening: asyncio.Server | None = None
        self._sweeping: asyncio.Task[None] | None = None
        self._with_requests: set[int] = set()
        self._silent_since: dict[Any, float] = {}
        self._was_full = False

    async def open(self, host: str, port: int) -> int:
        """Listen. Returns the port, which the system chose if ``port`` is 0.

        Raises:
            OSError: the address cannot be listened on.
        """
        loop = asyncio.get_running_loop()
        self._listening = await loop.create_server(self._accept, host, port, backlog=_BACKLOG)
        self._sweeping = loop.create_task(self._sweep_forever())
        return int(self._listening.sockets[0].getsockname()[1])

    def close(self) -> None:
        """Accept nothing any more. What is open stays open."""
        if self._listening is not None:
            self._listening.close()
        if self._sweeping is not None:
            self._sweeping.cancel()

    def note_request(self, protocol: object) -> None:
        """A request came over this connection."""
        self._with_requests.add(id(protocol))

    def _accept(self) -> asyncio.Protocol:
        if len(self._server.connections) < self._limits.max_connections:
            return self._server()
        if not self._was_full:
            self._was_full = True
            logger.warning(
                "%d connections are open: more are refused, and this is not logged again",
                self._limits.max_connections,
            )
        return _Full()

    async def _sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(self._limits.first_request_timeout_s / 4)
            with contextlib.suppress(ConnectionError):
                self._close_silent()

    def _close_silent(self) -> None:
        now = asyncio.get_running_loop().time()
        connections = self._server.connections
        # By id, so that a connection that is gone is not kept; only those that are open count.
        self._with_requests &= {id(one) for one in connections}
        self._silent_since = {
            one: self._silent_since.get(one, now) for one in connections if id(one) not in self._with_requests
        }
        for one, since in self._silent_since.items():
            if now - since >= self._limits.first_request_timeout_s:
                one.force_close()
