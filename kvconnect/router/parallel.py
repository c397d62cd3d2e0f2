"""Both nodes at once: the decode node waits for KV while the prefill node computes it.

The two get one transfer id; the decode node also gets the address from which to fetch. Only the prefill
node itself knows that: its first request runs sequentially, and every answer of it is read for the address
that it gives, so that a restarted node is found again. P's answer is the truth: where it contradicts what D
was sent, D's request is given up before the client has seen anything of it, and goes on as a sequential one.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from kvconnect.router import bodies
from kvconnect.router.bodies import SideChannel
from kvconnect.router.flow import Begun, Exchange, Flow, Handed, Refused
from kvconnect.router.pool import Lease
from kvconnect.router.upstream import UpstreamError

_NO_KV = (500, 502)
"""Statuses of a decode node that did not get the KV."""
_NO_KV_IN_A_STREAM = b'data: {"error"'


class ParallelFlow(Flow):
    """Asks both nodes at once, where the address to fetch from the prefill node is known.

    Remembers that by node, and nothing of a request.
    """

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._channels: dict[str, SideChannel] = {}

    async def _run_both(self, exchange: Exchange) -> web.StreamResponse:
        lease = self._prefill.take(self._clock())
        if lease is None:
            return await super()._run_both(exchange)
        channel = self._channels.get(lease.url)
        assert exchange.body is not None
        if channel is not None and (channel.handle or not bodies.is_several(exchange.body)):
            return await self._run_at_once(exchange, lease, channel)
        self._metrics.flows.labels("sequential").inc()
        return await self._go_on(exchange, self._prefill_at(lease, exchange))

    async def _prefill_at(self, lease: Lease, exchange: Exchange) -> Handed | Refused:
        """Prefill of a sequential request, at one node first. Gives the lease back."""
        try:
            return await self._run_prefill(exchange, self._prefill_params(exchange), lent=lease)
        finally:
            self._prefill.release(lease)

    async def _run_prefill(
        self,
        exchange: Exchange,
        params: Mapping[str, Any],
        *,
        lent: Lease | None = None,
        only_lent: bool = False,
    ) -> Handed | Refused:
        outcome = await super()._run_prefill(exchange, params, lent=lent, only_lent=only_lent)
        if isinstance(outcome, Handed):
            channel = bodies.side_channel(outcome.params)
            if channel is None:
                self._channels.pop(outcome.url, None)
            else:
                self._channels[outcome.url] = channel
        return outcome

    async def _run_at_once(
        self, exchange: Exchange, lease: Lease, channel: SideChannel
    ) -> web.StreamResponse:
        """Serve a request from both nodes; ``lease`` is given back when prefill ends."""
        self._metrics.flows.labels("parallel").inc()
        # Never the client's own id: it would choose whose KV a decode node is given.
        transfer_id = uuid.uuid4().hex
        prefill = asyncio.create_task(
            self._run_prefill(exchange, bodies.announced_prefill(transfer_id), lent=lease, only_lent=True)
        )
        prefill.add_done_callback(lambda _: self._prefill.release(lease))
        try:
            async with contextlib.AsyncExitStack() as stack:
                decode = asyncio.create_task(
                    self._begin_decode(stack, exchange, bodies.announced_decode(transfer_id, channel))
                )
                try:
                    await _until_clear(prefill, decode, channel)
                    if decode.done() and (not _lacks_kv(decode) or _is_as_announced(prefill, channel)):
                        return await self._pass_on(exchange, decode.result())
                finally:
                    await _end(decode)
            # Only P's answer is left, and D's connection is closed.
            self._metrics.flows.labels("resumed").inc()
            error = prefill.exception()
            if isinstance(error, UpstreamError):
                self._channels.pop(lease.url, None)
                if not error.was_reached:
                    # It does not have the request: another node may take it.
                    return await super()._run_both(exchange)
            return await self._go_on(exchange, prefill)
        finally:
            # P's request may outlast D's first byte, and is void after D's last.
            await _end(prefill)


async def _until_clear(
    prefill: asyncio.Task[Handed | Refused], decode: asyncio.Task[Begun], channel: SideChannel
) -> None:
    """Wait until one of the nodes decides what the client gets."""
    await asyncio.wait({prefill, decode}, return_when=asyncio.FIRST_COMPLETED)
    if not prefill.done() and _lacks_kv(decode):
        await asyncio.wait({prefill})
    if not decode.done() and _is_as_announced(prefill, channel):
        await asyncio.wait({decode})


def _lacks_kv(decode: asyncio.Task[Begun]) -> bool:
    """D answered that it has no KV; only P knows why."""
    if decode.cancelled() or decode.exception() is not None:
        return False
    begun = decode.result()
    return begun.answer.status in _NO_KV or begun.first.startswith(_NO_KV_IN_A_STREAM)


def _is_as_announced(prefill: asyncio.Task[Handed | Refused], channel: SideChannel) -> bool:
    """P answered, and holds the KV where D fetches it."""
    if not prefill.done() or prefill.cancelled() or prefill.exception() is not None:
        return False
    outcome = prefill.result()
    return isinstance(outcome, Handed) and bodies.side_channel(outcome.params) == channel


async def _end(task: asyncio.Task[Any]) -> None:
    """Cancel a task if it runs, and wait for it. What it raised is void."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
