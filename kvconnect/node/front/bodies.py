"""Reads the bodies of requests, within bounds of size, of time and of all of them together."""

from __future__ import annotations

import asyncio

from aiohttp import web

from kvconnect.node.completions import BadRequest
from kvconnect.node.front.limits import MAX_BODY_BYTES, FrontLimits


class BodyReader:
    """Counts the bytes of all bodies that are being read."""

    def __init__(self, limits: FrontLimits) -> None:
        self._limits = limits
        self._held_bytes = 0

    async def read(self, http: web.Request) -> bytes:
        """A request's whole body.

        Raises:
            BadRequest: it did not arrive in time, or too much is being read from others.
            web.HTTPRequestEntityTooLarge: it is longer than any may be.
        """
        if http.content.is_eof():
            # All of it arrived with the head: there is nothing to wait for.
            return await self._read(http)
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
