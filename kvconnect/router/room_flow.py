"""How a request runs through SGLang servers: both get the whole request at once, and meet in a room.

The room is a number that the router draws for each request. SGLang's servers compute no prompt in place of
another one: where either answers with a server error before the client has got anything, the request is sent
again, in another room.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from kvconnect.errors import ConfigError
from kvconnect.router.endpoints import Endpoint
from kvconnect.router.flow import Exchange, Flow, asking
from kvconnect.router.pool import NodeUse, Pool
from kvconnect.router.router_options import RouterOptions, clean_url, split_rank
from kvconnect.router.upstream import Clock, NodeAnswer, Upstream, UpstreamError

_FIELDS = ("bootstrap_host", "bootstrap_port", "bootstrap_room")
_ROOM_BITS = 62
"""SGLang reads signed integers of 64 bits, and gives the prompts of a batch rooms that follow each other."""


class RoomFlow(Flow):
    """``Flow`` for SGLang servers. Raises ``ConfigError`` for options that these do not have."""

    def __init__(
        self, prefill: Pool | None, decode: Pool, upstream: Upstream, clock: Clock, options: RouterOptions
    ) -> None:
        super().__init__(prefill, decode, upstream, clock, options)
        if prefill is None:
            raise ConfigError("bootstrap_port is given and no prefill node; name one with --prefill")
        if options.policy != "least-loaded":
            raise ConfigError(f"policy is {options.policy!r}; accepted with bootstrap_port: 'least-loaded'")
        self._nodes = prefill
        self._ports = _ports(options)
        # First tokens come from D: P's answer has no parameters that D could go on from.
        self.trials = None

    async def run(self, endpoint: Endpoint, exchange: Exchange) -> web.StreamResponse:
        body = endpoint.parse(await exchange.request.read())
        # A client must not name the node that its KV comes from.
        exchange.body = {key: value for key, value in body.items() if key not in _FIELDS}
        asked: list[str] = []
        while True:
            lease = self._nodes.take(avoid=asked) or self._nodes.take()
            if lease is None:
                raise UpstreamError(503, "none_healthy", "no prefill node is healthy")
            asked.append(lease.url)
            is_last = len(asked) > self._upstream.limits.retries
            async with contextlib.AsyncExitStack() as stack:
                try:
                    begun = await self._begin_both(stack, exchange, lease)
                except UpstreamError:
                    if is_last:
                        raise
                    continue
                if is_last or not _is_worth_another(begun):
                    return await self._pass_on(exchange, begun)
                self._metrics.retries.labels(begun.pool.role).inc()

    async def _begin_both(
        self, stack: contextlib.AsyncExitStack, exchange: Exchange, lease: NodeUse
    ) -> NodeAnswer:
        """D's answer up to its first bytes, or P's if that is an error; both are asked as long as ``stack``.

        Raises:
            UpstreamError: one of them gave no answer.
        """
        self._metrics.flows.labels("room").inc()
        try:
            sent = {**exchange.body, **self._meeting(lease.url)}
        except UpstreamError:
            self._nodes.release(lease)
            raise
        legs = self._begun(exchange, sent, lease, self._nodes, retry=False), self._begun(exchange, sent)
        prefill, decode = [await stack.enter_async_context(asking(leg)) for leg in legs]
        await asyncio.wait({prefill, decode}, return_when=asyncio.FIRST_COMPLETED)
        if not decode.done() and _is_error(prefill.result()):
            return prefill.result()
        return await decode

    def _meeting(self, url: str) -> dict[str, Any]:
        """The fields that name a room on the prefill node at ``url``."""
        port = self._ports.get(url, self._ports.get("*"))
        if port is None:
            text = f"no bootstrap_port is known of prefill node {url}; name it with --bootstrap-port"
            raise UpstreamError(502, "no_bootstrap_port", text)
        host = urlsplit(split_rank(url)[0]).hostname
        return dict(zip(_FIELDS, (host, port, secrets.randbits(_ROOM_BITS)), strict=True))


def _ports(options: RouterOptions) -> dict[str, int]:
    """Bootstrap ports by URL; "*" is that of all others."""
    found: dict[str, int] = {}
    for given in options.bootstrap_port:
        url, _, port = given.rpartition("=")
        if not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise ConfigError(f"bootstrap_port is {given!r}; accepted: PORT, or URL=PORT of a prefill node")
        found[clean_url(url) if url else "*"] = int(port)
    known = {clean_url(url) for url in options.prefill}
    if unknown := sorted(found.keys() - known - {"*"}):
        accepted = ", ".join(sorted(known))
        raise ConfigError(f"bootstrap_port names {unknown[0]}, which is no --prefill; there are {accepted}")
    return found


def _is_error(begun: NodeAnswer) -> bool:
    return begun.head.status != 200 or begun.is_error


def _is_worth_another(begun: NodeAnswer) -> bool:
    """Whether another room may help: not where the request itself was refused."""
    return _is_error(begun) and not 400 <= begun.head.status < 500
