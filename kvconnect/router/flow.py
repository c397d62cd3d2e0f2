"""How one request runs: prefill leg, then decode leg, then the answer to the client.

The prefill node's ``kv_transfer_params`` travel to the decode node verbatim. Nothing is sent to the
client before the decode node's first byte is here (the commit point), so every failure up to then has
its own status; after it a failure can only break the connection, and does. A client that leaves
cancels the task that runs ``Flow.run``, which closes the connection of whichever leg is open.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web

from kvconnect.router import bodies
from kvconnect.router.legs import Clock, Legs
from kvconnect.router.limits import RouterLimits
from kvconnect.router.metrics import RouterMetrics
from kvconnect.router.pool import Pool

logger = logging.getLogger("kvconnect.router")


@dataclass(frozen=True, slots=True)
class Refused:
    """A node's own refusal, to be passed to the client as it is."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes


class Flow:
    """Runs requests against two pools. Holds no state of a request between calls."""

    def __init__(
        self,
        prefill: Pool,
        decode: Pool,
        legs: Legs,
        limits: RouterLimits,
        metrics: RouterMetrics,
        clock: Clock = time.monotonic,
    ) -> None:
        self._prefill = prefill
        self._decode = decode
        self._legs = legs
        self._limits = limits
        self._metrics = metrics
        self._clock = clock
        self._fallbacks_logged: set[str] = set()

    async def run(self, request: web.Request, request_id: str, started: float) -> web.StreamResponse:
        """Serve a completion request. Takes the client's body from ``request``.

        Raises:
            BadBody: the body is not a JSON object.
            LegError: a leg gave no answer, and nothing was sent to the client yet.
        """
        body = bodies.parse_body(await request.read())
        headers = bodies.leg_headers(request.headers.items(), request_id)
        reason = bodies.direct_reason(body)
        params: Mapping[str, Any] | None = None
        if reason is None:
            outcome = await self._run_prefill(request.path_qs, body, headers, request_id)
            if isinstance(outcome, Refused):
                return _response(outcome)
            params = outcome
            if params is None:
                reason = "empty_params"
        if reason is not None:
            self._fall_back(reason)
        leg = bodies.to_bytes(bodies.decode_body(body, params))
        return await self._run_decode(request, leg, headers, request_id, started)

    async def pass_to_decode(
        self, request: web.Request, request_id: str, started: float
    ) -> web.StreamResponse:
        """Serve a request that has no body from a decode node.

        Raises:
            LegError: the leg gave no answer.
        """
        headers = bodies.leg_headers(request.headers.items(), request_id)
        return await self._run_decode(request, None, headers, request_id, started)

    async def _run_prefill(
        self, path: str, body: Mapping[str, Any], headers: list[tuple[str, str]], request_id: str
    ) -> Mapping[str, Any] | Refused | None:
        leg = bodies.to_bytes(bodies.prefill_body(body))
        asked = bodies.identity_encoding(headers)
        timeout = self._legs.prefill_timeout()
        async with self._legs.open(self._prefill, "POST", path, asked, leg, timeout) as answer:
            raw = await self._read_whole(answer)
            if answer.status != 200:
                kept = bodies.answer_headers(answer.headers.items(), request_id)
                return Refused(answer.status, [(k, v) for k, v in kept if k.lower() != "content-length"], raw)
        try:
            parsed = json.loads(raw)
        except (ValueError, RecursionError):
            raise self._legs.failed(
                "prefill", "bad_answer", "the prefill node's answer is not JSON"
            ) from None
        params = parsed.get(bodies.PARAMS) if isinstance(parsed, dict) else None
        if params and not isinstance(params, dict):
            text = f"the prefill node's {bodies.PARAMS} are not an object"
            raise self._legs.failed("prefill", "bad_answer", text)
        return params or None

    async def _read_whole(self, answer: aiohttp.ClientResponse) -> bytes:
        """The prefill node's answer, within its bound.

        Raises:
            LegError: it is too long, too late, or cut off.
        """
        raw = bytearray()
        with self._legs.translated("prefill"):
            async for chunk in answer.content.iter_any():
                raw += chunk
                if len(raw) > self._limits.max_answer_bytes:
                    break
        if len(raw) > self._limits.max_answer_bytes:
            text = f"the prefill node's answer is longer than {self._limits.max_answer_bytes} bytes"
            raise self._legs.failed("prefill", "bad_answer", text)
        return bytes(raw)

    def _fall_back(self, reason: str) -> None:
        self._metrics.fallbacks.labels(reason).inc()
        if reason not in self._fallbacks_logged:
            self._fallbacks_logged.add(reason)
            why = {
                "empty_params": "the prefill node handed out no transfer parameters",
                "prompt_logprobs": "log probabilities of the prompt are asked for",
            }.get(reason, "it asks for several sequences")
            logger.warning(
                "a request is served by the decode node alone (%s: %s); "
                "further ones are only counted, in kvconnect_router_fallbacks_total",
                reason,
                why,
            )

    async def _run_decode(
        self,
        request: web.Request,
        body: bytes | None,
        headers: list[tuple[str, str]],
        request_id: str,
        started: float,
    ) -> web.StreamResponse:
        timeout = self._legs.decode_timeout()
        async with self._legs.open(
            self._decode, request.method, request.path_qs, headers, body, timeout
        ) as answer:
            with self._legs.translated("decode"):
                first = await answer.content.readany()
            if not first and answer.status == 200:
                raise self._legs.failed("decode", "empty", "the decode node's answer is empty")
            response = web.StreamResponse(status=answer.status, reason=answer.reason)
            for key, value in bodies.answer_headers(answer.headers.items(), request_id):
                response.headers.add(key, value)
            await response.prepare(request)
            self._metrics.first_byte_seconds.observe(self._clock() - started)
            await self._pass_on(first, answer, request, response, request_id)
        return response

    async def _pass_on(
        self,
        chunk: bytes,
        answer: aiohttp.ClientResponse,
        request: web.Request,
        response: web.StreamResponse,
        request_id: str,
    ) -> None:
        """Send what comes, as it comes. The status is out: a node that fails now breaks the answer off.

        Raises:
            ConnectionError: the client left.
        """
        while chunk:
            await response.write(chunk)
            try:
                with self._legs.translated("decode"):
                    chunk = await answer.content.readany()
            except Exception as error:
                logger.error("request %s was cut off in the middle of its answer: %s", request_id, error)
                if request.transport is not None:
                    # An orderly end would tell the client that this was all of it.
                    request.transport.abort()
                return
        await response.write_eof()


def _response(refused: Refused) -> web.Response:
    response = web.Response(status=refused.status, body=refused.body)
    response.headers.popall("Content-Type", None)
    for key, value in refused.headers:
        response.headers.add(key, value)
    return response
