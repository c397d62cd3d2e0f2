"""Accepts connections: no more than so many, and none that has nothing to say."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from kvconnect.node.front.limits import FrontLimits

logger = logging.getLogger(__name__)

_BACKLOG = 1024
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\nRetry-After: 1\r\n\r\n"
)


class _Full(asyncio.Protocol):
    """A connection too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(_FULL)
        transport.close()


class Listener:
    """Gives connections to ``server``. ``spoke`` is to be called with the protocol of every request."""

    def __init__(self, server: web.Server, limits: FrontLimits) -> None:
        self._server = server
        self._limits = limits
        self._listening: list[asyncio.Server] = []
        self._spoken: set[int] = set()
        self._silent_since: dict[Any, float] = {}
        self._sweeping: asyncio.Task[None] | None = None
        self._was_full = False

    async def open(self, host: str, port: int) -> int:
        """Listen. Returns the port, which the system chose if ``port`` is 0.

        Raises:
            OSError: the address cannot be listened on.
        """
        loop = asyncio.get_running_loop()
        self._began(await loop.create_server(self._accept, host, port, backlog=_BACKLOG))
        return int(self._listening[0].sockets[0].getsockname()[1])

    async def open_on(self, sockets: Sequence[socket.socket]) -> None:
        """Listen on sockets that are bound."""
        loop = asyncio.get_running_loop()
        for one in sockets:
            self._began(await loop.create_server(self._accept, sock=one, backlog=_BACKLOG))

    def close(self) -> None:
        """Accept nothing any more. What is open stays open."""
        for one in self._listening:
            one.close()
        if self._sweeping is not None:
            self._sweeping.cancel()

    def spoke(self, protocol: object) -> None:
        """A request came over this connection."""
        self._spoken.add(id(protocol))

    def _began(self, server: asyncio.Server) -> None:
        self._listening.append(server)
        if self._sweeping is None:
            self._sweeping = asyncio.get_running_loop().create_task(self._sweep_forever())

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
                self._sweep()

    def _sweep(self) -> None:
        now = asyncio.get_running_loop().time()
        connections = self._server.connections
        # By id, so that a connection that is gone is not kept; only those that are open count.
        self._spoken &= {id(one) for one in connections}
        self._silent_since = {
            one: self._silent_since.get(one, now) for one in connections if id(one) not in self._spoken
        }
        for one, since in self._silent_since.items():
            if now - since >= self._limits.first_request_timeout_s:
                one.force_close()
