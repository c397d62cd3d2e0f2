"""What clients can make a node's HTTP server hold: connections, bodies, requests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
from dataclasses import dataclass, replace

from aiohttp import web

logger = logging.getLogger(__name__)

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
        max_requests: whose bodies are read, or that the engine has not ended; more are answered with 503.
        max_params_bytes: of a request's transfer parameters, as JSON.
        body_timeout_s: for a client to send its whole body.
        idle_timeout_s: after which a connection without a request is closed.
    """

    max_connections: int = 4096
    max_requests: int = 2048
    max_params_bytes: int = 64 << 10
    body_timeout_s: float = 30.0
    idle_timeout_s: float = 60.0

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


class _Full(asyncio.Protocol):
    """A connection too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(_FULL)
        transport.close()


async def listen(server: web.Server, host: str, port: int, max_connections: int) -> asyncio.Server:
    """Have ``server`` accept a bounded number of connections.

    Raises:
        OSError: the address cannot be listened on.
    """
    was_full = False

    def accept() -> asyncio.Protocol:
        nonlocal was_full
        if len(server.connections) < max_connections:
            return server()
        if not was_full:
            was_full = True
            logger.warning(
                "%d connections are open: more are refused, and this is not logged again", max_connections
            )
        return _Full()

    return await asyncio.get_running_loop().create_server(accept, host, port, backlog=_BACKLOG)
