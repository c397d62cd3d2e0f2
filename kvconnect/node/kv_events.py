"""A node's KV events, of the device and all lower tiers, in vLLM's format."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from kvconnect.cache.specs import (
    ChunkedLocalSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    MLASpec,
    SlidingWindowSpec,
    StateSpec,
)
from kvconnect.node.request import Request
from kvconnect.offload.tier_events import Described, EventMaker, TierEvents, last_64_bits
from kvconnect.peer.feed import Feed
from kvconnect.plan.blocks import Count
from kvconnect.reading import json_object, read_struct

_KINDS = {
    FullAttentionSpec: "full_attention",
    SlidingWindowSpec: "sliding_window",
    ChunkedLocalSpec: "chunked_local_attention",
    MLASpec: "mla_attention",
    StateSpec: "mamba",
}


class KVEventsConfig(msgspec.Struct, frozen=True):
    """The same keys as vLLM's; see ``Feed`` for the bounds that they set."""

    enable_kv_cache_events: bool = False
    publisher: Literal["null", "zmq"] = "zmq"
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: Count = 10_000
    hwm: Count = 100_000
    topic: str = ""


class BlockStored(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """A tier stored these consecutive blocks of a prompt."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """A tier removed these blocks."""

    block_hashes: list[int]
    medium: str
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    """The changes of one step, at ``ts``, a Unix time in seconds."""

    ts: float
    events: list[BlockStored | BlockRemoved]


def tier_events(config: KVCacheConfig) -> TierEvents:
    """The event log of a node with these caches."""
    groups = [_group_facts(group) for group in config.groups]
    return TierEvents(EventMaker(BlockStored, BlockRemoved, groups, _describe, last_64_bits))


def _group_facts(group: KVCacheGroup) -> Mapping[str, Any]:
    spec = next((spec for _, spec in group.layer_specs()), None)
    window = spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None
    return {
        "kv_cache_spec_kind": _KINDS.get(type(spec), "unknown"),
        "kv_cache_spec_sliding_window": window,
    }


def _describe(request: Request, first: int, count: int, size: int) -> Described:
    tokens = request.token_ids[first * size : (first + count) * size]
    if not request.cache_salt or first:
        return {"token_ids": tokens}
    # As vLLM has it: the salt is a key of the first block, and so names all that follow.
    return {"token_ids": tokens, "extra_keys": [(request.cache_salt,), *[None] * (count - 1)]}


class Publisher:
    """Publishes the events recorded in ``events``."""

    def __init__(self, events: TierEvents, feed: Feed) -> None:
        self.events, self._feed = events, feed

    def publish(self) -> None:
        """Publish the changes since the last call, up to a bound per step."""
        if taken := self.events.take():
            self._feed.publish(msgspec.msgpack.encode(EventBatch(time.time(), taken)))

    def close(self) -> None:
        """Close the sockets."""
        self._feed.close()


def configured_publisher(text: str | None, config: KVCacheConfig) -> Publisher | None:
    """The publisher that ``--kv-events-config`` configures, or None. Raises ``ConfigError``."""
    if text is None:
        return None
    wanted = read_struct(json_object(text, "kv_events_config"), KVEventsConfig, "kv_events_config")
    if not wanted.enable_kv_cache_events or wanted.publisher == "null":
        return None
    feed = Feed(
        wanted.endpoint, wanted.replay_endpoint, wanted.topic, most=wanted.hwm, kept=wanted.buffer_steps
    )
    return Publisher(tier_events(config), feed)
