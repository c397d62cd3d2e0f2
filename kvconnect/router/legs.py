"""What the two nodes answered, and which of the answers decides when both were asked at once."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web

from kvconnect.router import bodies
from kvconnect.router.bodies import SideChannel

_NO_KV = (500, 502)
"""Statuses of a decode node that did not get the KV."""
_NO_KV_IN_A_STREAM = b'data: {"error"'


Prefilled = Mapping[str, Any] | None | web.Response
"""What a prefill node handed out, if that was anything, or its own refusal as the client gets it."""


@dataclass(frozen=True, slots=True)
class Begun:
    """A decode node's answer, as far as it is read: nothing of it has been sent to the client."""

    answer: aiohttp.ClientResponse
    first: bytes


async def until_clear(
    prefill: asyncio.Task[Prefilled], decode: asyncio.Task[Begun], channel: SideChannel
) -> None:
    """Wait until one of the nodes decides what the client gets."""
    await asyncio.wait({prefill, decode}, return_when=asyncio.FIRST_COMPLETED)
    if not prefill.done() and lacks_kv(decode):
        await asyncio.wait({prefill})
    if not decode.done() and is_as_announced(prefill, channel):
        await asyncio.wait({decode})


def lacks_kv(decode: asyncio.Task[Begun]) -> bool:
    """D answered that it has no KV; only P knows why."""
    if decode.cancelled() or decode.exception() is not None:
        return False
    begun = decode.result()
    return begun.answer.status in _NO_KV or begun.first.startswith(_NO_KV_IN_A_STREAM)


def is_as_announced(prefill: asyncio.Task[Prefilled], channel: SideChannel) -> bool:
    """P answered, and holds the KV where D fetches it."""
    if not prefill.done() or prefill.cancelled() or prefill.exception() is not None:
        return False
    outcome = prefill.result()
    return not isinstance(outcome, web.Response) and bodies.side_channel(outcome) == channel


async def end(task: asyncio.Task[Any]) -> None:
    """Cancel a task if it runs, and wait for it. What it raised is void."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
