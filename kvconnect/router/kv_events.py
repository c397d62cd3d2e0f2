"""Follows what nodes publish of their blocks, as vLLM does: batches of events in numbered messages.

What was missed is asked for, where the node answers that; what is lost for good makes the index poorer.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Sequence
from typing import Any

import msgspec

from kvconnect.peer.feed import FeedReader
from kvconnect.router.metrics import RouterMetrics
from kvconnect.router.prefix_index import PrefixIndex, StoredRun

logger = logging.getLogger("kvconnect.router")

_DEVICE_MEDIA = (None, "GPU")
_WHOLE_KINDS = (None, "full_attention", "mla_attention")
"""Kinds of layers whose blocks are all needed: a window's and a state's do not tell how long a hit is."""
_MOST_AT_ONCE = 256


class BlockStored(msgspec.Struct, tag=True):
    """As far as it counts here, as all of these."""

    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None

    @property
    def run(self) -> StoredRun:
        keys = self.extra_keys
        if keys is None and self.lora_name:
            keys = [[self.lora_name]] * len(self.block_hashes)
        return StoredRun(self.block_hashes, self.parent_block_hash, self.token_ids, self.block_size, keys)


class BlockRemoved(msgspec.Struct, tag=True):
    block_hashes: list[int | bytes]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    pass


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[Event]


_decoder = msgspec.msgpack.Decoder(EventBatch)


def apply(index: PrefixIndex, node: str, events: Sequence[Event]) -> None:
    """Change what the index has of a node."""
    for (kind, medium, group), same in itertools.groupby(events, key=_likeness):
        on_device = medium in _DEVICE_MEDIA
        if kind is BlockStored:
            stored = [event for event in same if isinstance(event, BlockStored)]
            index.adapters.update(event.lora_name for event in stored if event.lora_name)
            index.stored(node, [event.run for event in stored], on_device=on_device, group=group)
        elif kind is BlockRemoved:
            gone = [name for event in same if isinstance(event, BlockRemoved) for name in event.block_hashes]
            index.removed(node, gone, on_device=on_device, group=group)
        elif kind is AllBlocksCleared:
            index.cleared(node, on_device=True)


def _likeness(event: Event) -> tuple[type | None, str | None, int | None]:
    if isinstance(event, AllBlocksCleared):
        return AllBlocksCleared, None, None
    if isinstance(event, BlockStored) and event.kv_cache_spec_kind not in _WHOLE_KINDS:
        return None, None, None
    return type(event), event.medium, event.group_idx


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
                await self._take(await self._reader.receive(_MOST_AT_ONCE))

    async def _take(self, messages: Sequence[tuple[int, bytes]]) -> None:
        events: list[Event] = []
        for number, payload in messages:
            if number < self._next:
                # The publisher has begun anew.
                self._index.cleared(self._node)
                events, self._next = [], 0
            if number > self._next:
                self._apply(events)
                events = []
                await self._catch_up(before=number)
            if number == self._next:
                self._next += 1
                events += self._read(payload)
        self._apply(events)

    async def _catch_up(self, before: int | None = None) -> None:
        """Take the messages that were missed, as far as the node still has them."""
        async with contextlib.aclosing(self._reader.missed(self._next)) as missed:
            async for number, payload in missed:
                if before is not None and number >= before:
                    break
                self._skip_to(number)
                self._next += 1
                self._apply(self._read(payload))
        if before is not None:
            self._skip_to(before)

    def _skip_to(self, number: int) -> None:
        self._metrics.kv_events_missed.inc(max(0, number - self._next))
        self._next = max(self._next, number)

    def _read(self, payload: bytes) -> list[Event]:
        try:
            return _decoder.decode(payload).events
        except (msgspec.MsgspecError, ValueError) as error:
            self._count_unread(error)
            return []

    def _apply(self, events: Sequence[Event]) -> None:
        left_out = self._index.num_left_out
        try:
            apply(self._index, self._node, events)
        except (ArithmeticError, TypeError, ValueError) as error:
            # Tokens or keys that no publisher has must not end what follows the node.
            self._count_unread(error)
        self._metrics.blocks_left_out.inc(self._index.num_left_out - left_out)
        self._metrics.known_blocks.set(len(self._index))

    def _count_unread(self, error: Exception) -> None:
        if not self._is_unread:
            self._is_unread = True
            logger.warning("KV events of %s cannot be read: %s", self._node, error)
        self._metrics.kv_events_unread.labels(self._node).inc()
