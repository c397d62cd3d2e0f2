"""Sends requests to the nodes of a role, and tries another node while none can be reached.

Every failure of the HTTP client becomes an ``UpstreamError`` with the status that the router's client gets.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import aiohttp
from aiohttp import web

from kvconnect.router.bodies import to_bytes
from kvconnect.router.pool import NodeUse, Pool
from kvconnect.router.router_metrics import RouterMetrics
from kvconnect.router.router_options import RouterLimits, split_rank

logger = logging.getLogger("kvconnect.router")

Headers = Sequence[tuple[str, str]]
Clock = Callable[[], float]

# aiohttp would add these headers on its own; a request carries only the client's.
_NOT_ADDED = ("Accept", "Accept-Encoding", "User-Agent")
_RANK = "x-data-parallel-rank"
_NOT_REACHED = ("unreachable", "connect_timeout")


class UpstreamError(Exception):
    """A node gave no answer, or refused. ``status`` is for the client, ``reason`` for the metrics.

    ``refusal`` is the node's own answer, which the client gets.
    """

    def __init__(self, status: int, reason: str, message: str, refusal: web.Response | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.refusal = refusal

    @property
    def was_reached(self) -> bool:
        """Whether the node may have begun to work on the request."""
        return self.reason not in _NOT_REACHED


@dataclass(frozen=True, slots=True)
class UpstreamRequest:
    """A request to a node, and what became of it.

    ``asked`` gets the node that may have the request. Nodes in ``broken`` are asked last, and one that breaks
    its answer off is added.
    """

    method: str
    path: str
    headers: Headers
    body: Mapping[str, Any] | bytes | None
    asked: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class NodeAnswer:
    """The answer of a node of ``pool`` under ``lease``: ``head`` has its status and headers.

    ``first``: the beginning of the body, where that was read before the client got any of it. ``is_error``:
    the node had an error of its own, aborted the request, or ended a stream without a token.
    """

    pool: Pool
    lease: NodeUse
    head: aiohttp.ClientResponse
    reading: Callable[[], contextlib.AbstractContextManager[None]]
    first: bytes = b""
    is_error: bool = False

    async def read(self) -> bytes:
        """The body's next bytes; empty at its end. Raises ``UpstreamError``."""
        with self.reading():
            return await self.head.content.readany()


class Upstream:
    """Sends requests to the nodes of two roles, within an ``async with`` block of one event loop.

    ``api_key``: the nodes' key for requests that the router makes by itself; empty without one.
    """

    def __init__(
        self,
        limits: RouterLimits,
        metrics: RouterMetrics,
        clock: Clock = time.monotonic,
        api_key: str = "",
    ) -> None:
        self._own_headers: Headers = [("Authorization", f"Bearer {api_key}")] if api_key else []
        self.limits = limits
        self.metrics = metrics
        self._clock = clock
        connect_s = limits.connect_timeout_s
        self._timeouts = {
            # One deadline for the whole answer: the router passes nothing on before its end.
            "prefill": aiohttp.ClientTimeout(
                total=limits.prefill_timeout_s, connect=connect_s, sock_connect=connect_s
            ),
            # A stream may last: the deadline is for the first byte, and for each pause after it.
            "decode": aiohttp.ClientTimeout(
                connect=connect_s, sock_connect=connect_s, sock_read=limits.decode_timeout_s
            ),
        }

    async def __aenter__(self) -> None:
        # Connections are not reused: a node may close an idle one at any moment, and a request that is lost
        # then looks like one that the node began to work on. max_in_flight bounds the number of connections.
        # Compressed bodies are passed on as they are.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            auto_decompress=False,
            skip_auto_headers=_NOT_ADDED,
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    @contextlib.asynccontextmanager
    async def send(
        self,
        pool: Pool,
        request: UpstreamRequest,
        lease: NodeUse | None = None,
        *,
        retry: bool = True,
    ) -> AsyncIterator[NodeAnswer]:
        """The answer of a node of ``pool``, with the headers read and the body not.

        ``lease`` is the node to try first, and is released like any other. Leaving the block closes the
        connection: a node whose answer was not read to its end sees its client leave.

        Raises:
            UpstreamError: no node is in rotation, none can be reached, or the node gave no answer.
            BadRequest: the body cannot be written.
        """
        started = self._clock()
        answer = await self._reach(pool, request, lease, self.limits.retries if retry else 0)
        try:
            yield answer
        finally:
            answer.head.close()
            pool.release(answer.lease)
            self.metrics.node_request_seconds.labels(pool.role).observe(self._clock() - started)

    async def _reach(
        self, pool: Pool, request: UpstreamRequest, lease: NodeUse | None, retries: int
    ) -> NodeAnswer:
        tried: list[str] = []
        last = UpstreamError(503, "none_healthy", f"no {pool.role} node is healthy")
        while len(tried) <= retries:
            if lease is None or tried:
                lease = pool.take(avoid=[*tried, *request.broken]) or pool.take(avoid=tried)
            if lease is None and not tried and (unseen := pool.unseen()):
                # A node that is being started may have come up since the last check.
                await asyncio.gather(*(self.check(pool, url) for url in unseen))
                lease = pool.take()
            if lease is None:
                break
            if tried:
                self.metrics.retries.labels(pool.role).inc()
            tried.append(lease.url)
            request.asked.append(lease.url)
            with contextlib.ExitStack() as leased:
                leased.callback(pool.release, lease)
                base, rank = split_rank(lease.url)
                data = to_bytes(request.body) if isinstance(request.body, Mapping) else request.body
                headers = [pair for pair in request.headers if not rank or pair[0].lower() != _RANK]
                reading = partial(self._translated, pool.role, lease.url, request.broken)
                try:
                    with reading():
                        response = await self._session.request(
                            request.method,
                            base + request.path,
                            data=data,
                            headers=[*headers, (_RANK, rank)] if rank else headers,
                            timeout=self._timeouts[pool.role],
                            allow_redirects=False,
                        )
                except UpstreamError as error:
                    if error.was_reached:
                        raise
                    request.asked.pop()
                    self._note_unreachable(pool, lease.url, str(error))
                    last = error
                    continue
                if response.status < 500:
                    self._note_answer(pool, lease.url)
                leased.pop_all()
                return NodeAnswer(pool, lease, response, reading)
        if not tried:
            self.metrics.node_request_failures.labels(pool.role, last.reason).inc()
        raise last

    @contextlib.contextmanager
    def _translated(self, role: str, url: str, broken: list[str]) -> Iterator[None]:
        """Turn the HTTP client's exceptions into counted ``UpstreamError``."""
        limits = self.limits
        try:
            yield
        except aiohttp.ConnectionTimeoutError as error:
            text = f"no connection to a {role} node within {limits.connect_timeout_s:g} s"
            raise self.failed(role, "connect_timeout", text, status=504) from error
        except aiohttp.ClientConnectorError as error:
            raise self.failed(role, "unreachable", f"a {role} node cannot be reached") from error
        except asyncio.TimeoutError as error:
            after_s = limits.prefill_timeout_s if role == "prefill" else limits.decode_timeout_s
            text = f"the {role} node did not answer within {after_s:g} s"
            raise self.failed(role, "timeout", text, status=504) from error
        except (aiohttp.ClientError, OSError) as error:
            broken.append(url)
            text = f"the {role} node broke off before its answer was complete"
            raise self.failed(role, "broken", text) from error

    async def read_whole(self, answer: NodeAnswer) -> bytes:
        """A whole body. Raises ``UpstreamError``: longer than ``max_answer_bytes``, too late, or cut off."""
        raw, most, role = bytearray(), self.limits.max_answer_bytes, answer.pool.role
        while read := await answer.read():
            raw += read
            if len(raw) > most:
                raise self.failed(role, "bad_answer", f"the {role} node's answer is longer than {most} bytes")
        return bytes(raw)

    def failed(self, role: str, reason: str, message: str, status: int = 502) -> UpstreamError:
        """Count and return an error for an answer that is missing or not usable."""
        self.metrics.node_request_failures.labels(role, reason).inc()
        return UpstreamError(status, reason, message)

    def _note_answer(self, pool: Pool, url: str) -> None:
        if pool.answered(url):
            logger.info("%s node %s is in rotation", pool.role, url)

    def _note_unreachable(self, pool: Pool, url: str, problem: str) -> None:
        if pool.unreachable(url):
            text = "%s node %s left rotation: %s"
            if url in pool.unseen():
                text = "%s node %s is not there yet, and is asked again: %s"
            logger.warning(text, pool.role, url, problem)

    async def ask(
        self,
        url: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout_s: float,
        headers: Headers = (),
    ) -> Any:
        """A node's JSON answer to the router itself; ``{}`` without 200 or JSON, None without an answer."""
        base, rank = split_rank(url)
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session.request(
                "GET" if body is None else "POST",
                base + path,
                json=body,
                headers=[*(headers or self._own_headers), *([(_RANK, rank)] if rank else ())],
                timeout=timeout,
                allow_redirects=False,
            ) as answer:
                return await answer.json() if answer.status == 200 else {}
        except ValueError:
            return {}
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError):
            return None

    async def check(self, pool: Pool, url: str) -> None:
        """Check a node's health once, and record the result in its pool. Raises nothing."""
        timeout = aiohttp.ClientTimeout(total=self.limits.check_timeout_s)
        problem = ""
        try:
            health = split_rank(url)[0] + "/health"
            async with self._session.get(health, timeout=timeout, allow_redirects=False) as response:
                if response.status != 200:
                    problem = f"/health answered {response.status}"
        except Exception as error:
            # Also a name that cannot be one: the other nodes are checked all the same.
            problem = f"/health gave no answer ({type(error).__name__})"
        if problem:
            self._note_unreachable(pool, url, problem)
        else:
            self._note_answer(pool, url)
