"""Follows what nodes publish of their blocks, as vLLM does: batches of events in numbered messages.

What was missed is asked for, where the node answers that; what is lost for good makes the index poorer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

import msgspec

from kvconnect.peer.feed import FeedReader
from kvconnect.router.prefix_index import Event, PrefixIndex
from kvconnect.router.router_metrics import RouterMetrics

logger = logging.getLogger("kvconnect.router")


class ReadBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[Event]


_decoder = msgspec.msgpack.Decoder(ReadBatch)


class KVEvents:
    """Follows one node's events into an index, until its task is cancelled."""

    def __init__(self, index: PrefixIndex, node: str, reader: FeedReader, metrics: RouterMetrics) -> None:
        self._index, self._node, self._reader, self._metrics = index, node, reader, metrics
        self._next = 0
        self._is_unread = False

    async def run(self) -> None:
        """Follow. A message that cannot be read is counted, and logged once."""
        with self._reader:
            await self._catch_up()
            while True:
                await self._take(*await self._reader.receive())
                # A backlog must not keep requests waiting.
                await asyncio.sleep(0)

    async def _take(self, number: int, payload: bytes) -> None:
        if number < self._next:
            # The publisher has begun anew.
            self._index.forget(self._node)
            self._next = 0
        if number > self._next:
            await self._catch_up(before=number)
        if number == self._next:
            self._apply(payload)

    async def _catch_up(self, before: int | None = None) -> None:
        """Take the messages that were missed, as far as the node still has them."""
        async with contextlib.aclosing(self._reader.missed(self._next)) as missed:
            async for number, payload in missed:
                if before is not None and number >= before:
                    break
                self._skip_to(number)
                self._apply(payload)
        if before is not None:
            self._skip_to(before)

    def _skip_to(self, number: int) -> None:
        self._metrics.kv_events_missed.inc(max(0, number - self._next))
        self._next = max(self._next, number)

    def _apply(self, payload: bytes) -> None:
        """Take the next message."""
        self._next += 1
        left_out = self._index.num_left_out
        try:
            for event in _decoder.decode(payload).events:
                self._index.apply(self._node, event)
        except (msgspec.MsgspecError, ArithmeticError, TypeError, ValueError) as error:
            # Tokens or keys that no publisher has must not end what follows the node.
            if not self._is_unread:
                self._is_unread = True
                logger.warning("KV events of %s cannot be read: %s", self._node, error)
            self._metrics.kv_events_unread.labels(self._node).inc()
        self._metrics.blocks_left_out.inc(self._index.num_left_out - left_out)
        self._metrics.known_blocks.set(len(self._index))
