"""Releases on prefill nodes what no decode node will fetch.

A client may leave between the two legs, or the decode node may fail: then a prefill node would hold the
prompt's blocks until its lease is over. The router names each request to it by a secret, and sends that name
once more with a request that vLLM refuses before it computes anything; vLLM passes the parameters of such a
request on to the connector (``notify_kv_transfer_request_rejected``).
"""

from __future__ import annotations

import asyncio
import logging

from kvconnect.config import RELEASE_KEY
from kvconnect.router import bodies
from kvconnect.router.upstream import Headers, Upstream

logger = logging.getLogger("kvconnect.router")

NO_MODEL = "kvconnect-releases-and-computes-nothing"
"""The model of a release: no server has it."""
_TIMEOUT_S = 5.0


class Releases:
    """Sends releases in the background. Owned by one event loop."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._tasks: set[asyncio.Task[None]] = set()

    def release(self, url: str, name: str, headers: Headers) -> None:
        """Begin to release what a node holds for the request of this secret name and these headers."""
        task = asyncio.create_task(self._release(url, name, headers), name="release")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def ended(self) -> None:
        """Wait until all releases were sent, each for a few seconds at most."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _release(self, url: str, name: str, headers: Headers) -> None:
        params = {"do_remote_prefill": True, "do_remote_decode": False, RELEASE_KEY: name}
        body = {"model": NO_MODEL, "prompt": [0], "max_tokens": 1, bodies.PARAMS: params}
        answer = await self._upstream.ask(
            url, "/v1/completions", body, timeout_s=_TIMEOUT_S, headers=bodies.of_the_client(headers)
        )
        self._upstream.metrics.releases.labels("failed" if answer is None else "sent").inc()
        if answer is None:
            logger.info("prefill node %s did not answer a release: a lease has to expire there", url)
