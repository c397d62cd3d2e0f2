"""How one request runs: to a prefill node, then to a decode node, then the answer to the client.

The prefill node's ``kv_transfer_params`` travel to the decode node verbatim. Nothing is sent to the
client before the decode node's first byte is here (the commit point), so every failure up to then has
its own status; after it a failure can only break the connection, and does. With ``decode_fallback`` a failure
of prefill is no answer: the decode node computes the prompt instead. A client that leaves cancels the task
that runs ``Flow.run``, which closes every connection to a node.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
import uuid
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web

from kvconnect.router import bodies
from kvconnect.router.limits import RouterLimits
from kvconnect.router.metrics import RouterMetrics
from kvconnect.router.pool import Lease, Pool
from kvconnect.router.upstream import Clock, Headers, Upstream, UpstreamError, UpstreamRequest

logger = logging.getLogger("kvconnect.router")


@dataclass(frozen=True, slots=True)
class Exchange:
    """One client's request. ``body`` is None where it has none."""

    request: web.Request
    request_id: str
    started: float
    headers: Headers
    body: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class Refused:
    """A node's own refusal, to be passed to the client as it is."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes

    @property
    def is_of_the_request(self) -> bool:
        """Every node would refuse this request; otherwise this one cannot serve it, or not now."""
        return 400 <= self.status < 500 and self.status not in (408, 429)


@dataclass(frozen=True, slots=True)
class Handed:
    """What the prefill node at ``url`` handed out; ``params`` is None if that was nothing."""

    url: str
    params: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class Begun:
    """A decode node's answer, as far as it is read: nothing of it has been sent to the client."""

    answer: aiohttp.ClientResponse
    first: bytes


class Flow:
    """Runs requests against two pools, one after the other. Holds no state of a request between calls."""

    def __init__(
        self,
        prefill: Pool,
        decode: Pool,
        upstream: Upstream,
        limits: RouterLimits,
        metrics: RouterMetrics,
        clock: Clock = time.monotonic,
        *,
        decode_fallback: bool = True,
    ) -> None:
        self._prefill = prefill
        self._decode = decode
        self._upstream = upstream
        self._limits = limits
        self._metrics = metrics
        self._clock = clock
        self._decode_fallback = decode_fallback
        self._fallbacks_logged: set[str] = set()

    async def run(self, request: web.Request, request_id: str, started: float) -> web.StreamResponse:
        """Serve a completion request. Takes the client's body from ``request``.

        Raises:
            BadBody: the body is not a JSON object.
            UpstreamError: a node gave no answer, and nothing was sent to the client yet.
        """
        body = bodies.parse_body(await request.read())
        headers = bodies.request_headers(request.headers.items(), request_id)
        exchange = Exchange(request, request_id, started, headers, body)
        reason = bodies.direct_reason(body)
        if reason is not None:
            return await self._run_alone(exchange, reason, bodies.DIRECT[reason])
        return await self._run_both(exchange)

    async def pass_to_decode(
        self, request: web.Request, request_id: str, started: float
    ) -> web.StreamResponse:
        """Serve a request that has no body from a decode node.

        Raises:
            UpstreamError: no node gave an answer.
        """
        headers = bodies.request_headers(request.headers.items(), request_id)
        return await self._run_decode(Exchange(request, request_id, started, headers, None), None)

    async def _run_both(self, exchange: Exchange) -> web.StreamResponse:
        """Serve a request that is split between two nodes."""
        self._metrics.flows.labels("sequential").inc()
        return await self._go_on(exchange, self._run_prefill(exchange, self._prefill_params(exchange)))

    def _prefill_params(self, exchange: Exchange) -> Mapping[str, Any]:
        assert exchange.body is not None
        # Never the client's own id: it would choose whose KV a decode node is given.
        return bodies.prefill_params(exchange.body, uuid.uuid4().hex)

    async def _go_on(self, exchange: Exchange, prefill: Awaitable[Handed | Refused]) -> web.StreamResponse:
        """What follows prefill: decode, or why there is none.

        Raises:
            UpstreamError: a node gave no answer, and nothing was sent to the client yet.
        """
        try:
            outcome = await prefill
        except UpstreamError as error:
            if not self._decode_fallback:
                raise
            return await self._run_alone(exchange, f"prefill_{error.reason}", str(error))
        if isinstance(outcome, Refused):
            if outcome.is_of_the_request or not self._decode_fallback:
                return _response(outcome)
            why = f"the prefill node answered {outcome.status}"
            return await self._run_alone(exchange, "prefill_refused", why)
        if outcome.params is None:
            why = "the prefill node handed out no transfer parameters"
            return await self._run_alone(exchange, "empty_params", why)
        assert exchange.body is not None
        params = bodies.decode_params(exchange.body, outcome.params)
        if params is None:
            why = "several prompts or answers cannot share what the prefill node handed out"
            return await self._run_alone(exchange, "several", why)
        return await self._run_decode(exchange, params)

    async def _run_alone(self, exchange: Exchange, reason: str, why: str) -> web.StreamResponse:
        """Have the decode node compute the prompt too. Counted by ``reason``; each is logged once."""
        self._metrics.fallbacks.labels(reason).inc()
        if reason not in self._fallbacks_logged:
            self._fallbacks_logged.add(reason)
            logger.warning(
                "a request is served by the decode node alone (%s: %s); "
                "further ones are only counted, in kvconnect_router_fallbacks_total",
                reason,
                why,
            )
        return await self._run_decode(exchange, None)

    async def _run_prefill(
        self,
        exchange: Exchange,
        params: Mapping[str, Any],
        *,
        lent: Lease | None = None,
        only_lent: bool = False,
    ) -> Handed | Refused:
        """Prefill with these parameters; ``lent`` and ``only_lent`` as ``Upstream.send`` has them."""
        assert exchange.body is not None
        body = bodies.to_bytes(bodies.prefill_body(exchange.body, params))
        headers = bodies.identity_encoding(exchange.headers)
        request = UpstreamRequest("POST", exchange.request.path_qs, headers, body)
        async with self._upstream.send(self._prefill, request, lent=lent, only_lent=only_lent) as (
            url,
            answer,
        ):
            raw = await self._read_whole(answer)
            if answer.status != 200:
                kept = bodies.answer_headers(answer.headers.items(), exchange.request_id)
                return Refused(answer.status, [(k, v) for k, v in kept if k.lower() != "content-length"], raw)
        try:
            parsed = json.loads(raw)
        except (ValueError, RecursionError):
            text = "the prefill node's answer is not JSON"
            raise self._upstream.failed("prefill", "bad_answer", text) from None
        handed = parsed.get(bodies.PARAMS) if isinstance(parsed, dict) else None
        if handed and not isinstance(handed, dict):
            text = f"the prefill node's {bodies.PARAMS} are not an object"
            raise self._upstream.failed("prefill", "bad_answer", text)
        return Handed(url, handed or None)

    async def _read_whole(self, answer: aiohttp.ClientResponse) -> bytes:
        """The prefill node's answer, within its bound.

        Raises:
            UpstreamError: it is too long, too late, or cut off.
        """
        raw = bytearray()
        with self._upstream.translated("prefill"):
            async for chunk in answer.content.iter_any():
                raw += chunk
                if len(raw) > self._limits.max_answer_bytes:
                    break
        if len(raw) > self._limits.max_answer_bytes:
            text = f"the prefill node's answer is longer than {self._limits.max_answer_bytes} bytes"
            raise self._upstream.failed("prefill", "bad_answer", text)
        return bytes(raw)

    async def _run_decode(self, exchange: Exchange, params: Mapping[str, Any] | None) -> web.StreamResponse:
        async with contextlib.AsyncExitStack() as stack:
            return await self._pass_on(exchange, await self._begin_decode(stack, exchange, params))

    async def _begin_decode(
        self, stack: contextlib.AsyncExitStack, exchange: Exchange, params: Mapping[str, Any] | None
    ) -> Begun:
        """Decode up to the answer's first byte. Its connection stays open for as long as ``stack`` does.

        Raises:
            UpstreamError: there is none.
        """
        body = None
        if exchange.body is not None:
            body = bodies.to_bytes(bodies.decode_body(exchange.body, params))
        client = exchange.request
        request = UpstreamRequest(client.method, client.path_qs, exchange.headers, body)
        _, answer = await stack.enter_async_context(self._upstream.send(self._decode, request))
        with self._upstream.translated("decode"):
            first = await answer.content.readany()
        if not first and answer.status == 200:
            raise self._upstream.failed("decode", "empty", "the decode node's answer is empty")
        return Begun(answer, first)

    async def _pass_on(self, exchange: Exchange, begun: Begun) -> web.StreamResponse:
        """Send the client what comes, as it comes. From here on a node that fails breaks the answer off.

        Raises:
            ConnectionError: the client left.
        """
        answer, chunk, request = begun.answer, begun.first, exchange.request
        response = web.StreamResponse(status=answer.status, reason=answer.reason)
        for key, value in bodies.answer_headers(answer.headers.items(), exchange.request_id):
            response.headers.add(key, value)
        await response.prepare(request)
        self._metrics.first_byte_seconds.observe(self._clock() - exchange.started)
        while chunk:
            await response.write(chunk)
            try:
                with self._upstream.translated("decode"):
                    chunk = await answer.content.readany()
            except Exception as error:
                logger.error(
                    "request %s was cut off in the middle of its answer: %s", exchange.request_id, error
                )
                if request.transport is not None:
                    # An orderly end would tell the client that this was all of it.
                    request.transport.abort()
                return response
        await response.write_eof()
        return response


def _response(refused: Refused) -> web.Response:
    response = web.Response(status=refused.status, body=refused.body)
    response.headers.popall("Content-Type", None)
    for key, value in refused.headers:
        response.headers.add(key, value)
    return response
