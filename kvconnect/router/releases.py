"""Releases on prefill nodes what no decode node will fetch.

A client may leave between the two legs, or the decode node may fail: then a prefill node would hold the
prompt's blocks until its lease is over. The router names each request to it by a secret, and sends that name
once more with a request that vLLM refuses before it computes anything; vLLM passes the parameters of such a
request on to the connector (``notify_kv_transfer_request_rejected``).
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from dataclasses import dataclass, field

from kvconnect.router import bodies
from kvconnect.router.upstream import Headers, Upstream

logger = logging.getLogger("kvconnect.router")

NO_MODEL = "kvconnect-releases-and-computes-nothing"
"""The model of a release: no server has it."""
_TIMEOUT_S = 5.0


@dataclass(slots=True, eq=False)
class Holding:
    """What a prefill node may hold for one request, under the secret ``name``.

    ``asked``: the node that may have the request; empty once it refused. ``is_taken``: a decode node has
    answered that was given the parameters, and fetched or will release by itself.
    """

    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    asked: list[str] = field(default_factory=list)
    is_taken: bool = False


class Releases:
    """Releases holdings in the background. Owned by one event loop."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._tasks: set[asyncio.Task[None]] = set()

    def release(self, holding: Holding, headers: Headers) -> None:
        """Begin to release what the node that was asked last holds. ``headers``: the request's."""
        task = asyncio.create_task(self._release(holding.asked[-1], holding.name, headers), name="release")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def ended(self) -> None:
        """Wait until all releases were sent, each for a few seconds at most."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _release(self, url: str, name: str, headers: Headers) -> None:
        body = {"model": NO_MODEL, "prompt": [0], "max_tokens": 1, bodies.PARAMS: bodies.release(name)}
        answer = await self._upstream.ask(
            url, "/v1/completions", body, timeout_s=_TIMEOUT_S, headers=bodies.of_the_client(headers)
        )
        self._upstream.metrics.releases.labels("failed" if answer is None else "sent").inc()
        if answer is None:
            logger.info("prefill node %s did not answer a release: a lease has to expire there", url)
