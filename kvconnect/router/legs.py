"""One leg: an HTTP request to one node of a role, with another node tried while none can be reached.

Owns the client session and the meaning of its failures; every one becomes a ``LegError`` with the
status that the client gets. Knows nothing of prompts or transfer parameters.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass

import aiohttp

from kvconnect.router.limits import RouterLimits
from kvconnect.router.metrics import RouterMetrics
from kvconnect.router.pool import Lease, Pool

logger = logging.getLogger("kvconnect.router")

Headers = Sequence[tuple[str, str]]
Clock = Callable[[], float]

# aiohttp would add these on its own; a leg carries what the client sent and no more.
_NOT_ADDED = ("Accept", "Accept-Encoding", "User-Agent")


class LegError(Exception):
    """A leg gave no answer. ``status`` is what the client is told, ``reason`` what is counted."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Leg:
    """The node that took a leg, and its answer."""

    url: str
    answer: aiohttp.ClientResponse


class Legs:
    """Opens legs to the nodes of two roles. One event loop owns it; close it when done."""

    def __init__(self, limits: RouterLimits, metrics: RouterMetrics, clock: Clock = time.monotonic) -> None:
        self._limits = limits
        self._metrics = metrics
        self._clock = clock
        # Connections are not reused: a node may close an idle one at any moment, and then a leg that
        # was lost on the way cannot be told from one that the node began to work on. The number of
        # connections is bounded by max_in_flight. Bodies pass as they are, packed or not.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            auto_decompress=False,
            skip_auto_headers=_NOT_ADDED,
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def close(self) -> None:
        """Close every connection."""
        await self._session.close()

    def prefill_timeout(self) -> aiohttp.ClientTimeout:
        """The whole leg has one deadline: nothing is passed on before it has ended."""
        connect_s = self._limits.connect_timeout_s
        return aiohttp.ClientTimeout(
            total=self._limits.prefill_timeout_s, connect=connect_s, sock_connect=connect_s
        )

    def decode_timeout(self) -> aiohttp.ClientTimeout:
        """A stream may last: the deadline is for the first byte, and for each silence after it."""
        connect_s = self._limits.connect_timeout_s
        return aiohttp.ClientTimeout(
            total=None, connect=connect_s, sock_connect=connect_s, sock_read=self._limits.decode_timeout_s
        )

    @contextlib.asynccontextmanager
    async def open(
        self,
        pool: Pool,
        method: str,
        path: str,
        headers: Headers,
        body: bytes | None,
        timeout: aiohttp.ClientTimeout,
        *,
        lent: Lease | None = None,
        only_lent: bool = False,
    ) -> AsyncIterator[Leg]:
        """The answer of a node of ``pool``, its headers read and its body not.

        ``lent`` is a lease of the node to try first, which its owner gives back; with ``only_lent`` no
        other node is tried.

        Leaving the block closes the connection, so a node whose answer was not read to its end sees
        its client leave. The block may raise what reading raises: ``translated`` gives it a meaning.

        Raises:
            LegError: no node is in rotation, none can be reached, or the node gave no answer.
        """
        started = self._clock()
        retries = 0 if only_lent else self._limits.retries
        lease, response = await self._reach(pool, method, path, headers, body, timeout, lent, retries)
        try:
            yield Leg(lease.url, response)
        finally:
            response.close()
            if lease is not lent:
                pool.release(lease)
            self._metrics.leg_seconds.labels(pool.role).observe(self._clock() - started)

    async def _reach(
        self,
        pool: Pool,
        method: str,
        path: str,
        headers: Headers,
        body: bytes | None,
        timeout: aiohttp.ClientTimeout,
        lent: Lease | None,
        retries: int,
    ) -> tuple[Lease, aiohttp.ClientResponse]:
        tried: list[str] = []
        last = LegError(503, "none_healthy", f"no {pool.role} node is healthy")
        while len(tried) <= retries:
            lease = lent if lent is not None and not tried else pool.take(self._clock(), avoid=tried)
            if lease is None:
                break
            if tried:
                self._metrics.retries.labels(pool.role).inc()
            tried.append(lease.url)
            kept = False
            try:
                with self.translated(pool.role):
                    response = await self._session.request(
                        method,
                        lease.url + path,
                        data=body,
                        headers=headers,
                        timeout=timeout,
                        allow_redirects=False,
                    )
                if response.status < 500 and pool.answered(lease):
                    logger.info("%s node %s is in rotation", pool.role, lease.url)
                kept = True
                return lease, response
            except LegError as error:
                if error.reason not in ("unreachable", "connect_timeout"):
                    raise
                self._not_reached(pool, lease, error)
                last = error
            finally:
                if not kept and lease is not lent:
                    pool.release(lease)
        if not tried:
            self._metrics.leg_failures.labels(pool.role, last.reason).inc()
        raise last

    @contextlib.contextmanager
    def translated(self, role: str) -> Iterator[None]:
        """Turn what the HTTP client raises into a counted ``LegError``."""
        try:
            yield
        except aiohttp.ConnectionTimeoutError as error:
            after_s = self._limits.connect_timeout_s
            text = f"no connection to a {role} node within {after_s:g} s"
            raise self._counted(role, LegError(504, "connect_timeout", text)) from error
        except aiohttp.ClientConnectorError as error:
            text = f"a {role} node cannot be reached"
            raise self._counted(role, LegError(502, "unreachable", text)) from error
        except asyncio.TimeoutError as error:
            limits = self._limits
            after_s = limits.prefill_timeout_s if role == "prefill" else limits.decode_timeout_s
            text = f"the {role} node did not answer within {after_s:g} s"
            raise self._counted(role, LegError(504, "timeout", text)) from error
        except (aiohttp.ClientError, OSError) as error:
            text = f"the {role} node broke off before its answer was complete"
            raise self._counted(role, LegError(502, "broken", text)) from error

    def failed(self, role: str, reason: str, message: str) -> LegError:
        """A counted 502 for an answer that is no use."""
        return self._counted(role, LegError(502, reason, message))

    def _counted(self, role: str, error: LegError) -> LegError:
        self._metrics.leg_failures.labels(role, error.reason).inc()
        return error

    def _not_reached(self, pool: Pool, lease: Lease, error: LegError) -> None:
        if pool.unreachable(lease, self._clock()):
            logger.warning("%s node %s left rotation: %s", pool.role, lease.url, error)

    async def check(self, pool: Pool, url: str) -> None:
        """One health check of one node, and its verdict. Does nothing while the node is ejected."""
        lease = pool.take_check(url, self._clock())
        if lease is None:
            return
        try:
            problem = await self._health_problem(url)
            if problem:
                if pool.unreachable(lease, self._clock()):
                    logger.warning("%s node %s left rotation: %s", pool.role, url, problem)
            elif pool.answered(lease):
                logger.info("%s node %s is in rotation", pool.role, url)
        finally:
            pool.release(lease)

    async def _health_problem(self, url: str) -> str:
        timeout = aiohttp.ClientTimeout(total=self._limits.check_timeout_s)
        try:
            async with self._session.get(url + "/health", timeout=timeout, allow_redirects=False) as response:
                return "" if response.status == 200 else f"/health answered {response.status}"
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            return f"/health gave no answer ({type(error).__name__})"
