"""How much of a prompt each node has, from the KV events that nodes publish.

A prefix is identified by a hash of its tokens and extra keys instead of the publisher's hash, so that nodes
with other hash functions, seeds and block sizes are compared. The index only places requests: after a hash
collision, one in 2**64 by chance, a request goes to a node that has to compute it.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
from xxhash import xxh3_64_intdigest

ExtraKeys = Sequence[Any] | None
"""What a block's KV depends on besides its tokens: adapter, images, salt."""

MAX_BLOCKS = 10_000_000
"""Bound of the blocks of all nodes together, at about 200 bytes each."""

_DEVICE_MEDIA = (None, "GPU")
_WHOLE_KINDS = (None, "full_attention", "mla_attention")
"""Layer kinds that need all blocks of a prefix; blocks of windows and states do not give a hit's length."""


class StoredBlocks(msgspec.Struct, tag="BlockStored"):
    """vLLM's event of stored consecutive blocks; the first follows its parent, or begins a prompt.

    Only the fields that the index reads, as in the other events.
    """

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
    def counts(self) -> bool:
        """Whether tokens fill the blocks, each block has keys or none has, and the kind needs all blocks."""
        count = len(self.block_hashes)
        has_keys = self.extra_keys is None or len(self.extra_keys) == count
        is_whole = count > 0 < self.block_size and len(self.token_ids) == count * self.block_size
        return is_whole and has_keys and self.kv_cache_spec_kind in _WHOLE_KINDS


class RemovedBlocks(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: list[int | bytes]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    pass


Event = StoredBlocks | RemovedBlocks | AllBlocksCleared


class Hit(NamedTuple):
    """Tokens of a prompt that a node has: on its device, and in all its tiers."""

    device_tokens: int = 0
    num_tokens: int = 0


@dataclass
class _Tier:
    """``prefixes`` by the publisher's block hash, and the same prefixes as a set."""

    prefixes: dict[int, int] = field(default_factory=dict)
    held: set[int] = field(default_factory=set)


@dataclass
class _Known:
    """The known blocks of one node. ``group`` is the cache group that counts; None before the first event."""

    device: _Tier = field(default_factory=_Tier)
    lower: _Tier = field(default_factory=_Tier)
    block_tokens: int = 0
    group: int | None = None

    def __len__(self) -> int:
        return len(self.device.prefixes) + len(self.lower.prefixes)

    def tier(self, medium: str | None) -> _Tier:
        return self.device if medium in _DEVICE_MEDIA else self.lower


class PrefixIndex:
    """The blocks of all nodes by name, at most ``most``. Blocks beyond that, or without a known parent, are
    counted in ``num_left_out``. ``adapters`` are the names of adapters in the events."""

    def __init__(self, most: int = MAX_BLOCKS) -> None:
        self._most = most
        self.adapters: set[str] = set()
        self._nodes: dict[str, _Known] = {}
        self.num_left_out = 0

    def __len__(self) -> int:
        return sum(map(len, self._nodes.values()))

    def apply(self, node: str, event: Event) -> None:
        """Apply a node's event. Only the first cache group that stores blocks counts."""
        known = self._nodes.setdefault(node, _Known())
        if isinstance(event, AllBlocksCleared):
            # The event clears the device's blocks only, as in vLLM.
            known.device = _Tier()
        elif isinstance(event, StoredBlocks):
            self._store(known, event)
        elif event.group_idx == known.group:
            tier = known.tier(event.medium)
            tier.held -= {tier.prefixes.pop(_key(name), 0) for name in event.block_hashes}

    def _store(self, known: _Known, event: StoredBlocks) -> None:
        if not event.counts:
            return
        if known.group is None:
            known.group = event.group_idx
        if event.group_idx != known.group:
            return
        known.block_tokens, count, before = event.block_size, len(event.block_hashes), 0
        if event.parent_block_hash is not None:
            parent = _key(event.parent_block_hash)
            before = known.device.prefixes.get(parent, 0) or known.lower.prefixes.get(parent, 0)
        if (event.parent_block_hash is not None and not before) or len(self) + count > self._most:
            self.num_left_out += count
            return
        keys = event.extra_keys or ()
        if event.lora_name:
            self.adapters.add(event.lora_name)
            keys = keys or [[event.lora_name]]
        prefixes = prefixes_of(event.token_ids, event.block_size, keys, before)
        tier = known.tier(event.medium)
        tier.prefixes.update(zip(map(_key, event.block_hashes), prefixes, strict=True))
        tier.held.update(prefixes)

    def forget(self, node: str) -> None:
        """Drop all blocks of a node."""
        self._nodes.pop(node, None)

    def hits(
        self, nodes: Iterable[str], token_ids: Sequence[int], extra_keys: Sequence[ExtraKeys] = ()
    ) -> dict[str, Hit]:
        """The tokens of a prompt that each node has. ``extra_keys`` are those of ``prefixes_of``."""
        by_size: dict[int, list[int]] = {0: []}
        found = {}
        for node in nodes:
            known = self._nodes.get(node, _Known())
            size, device, lower = known.block_tokens, known.device.held, known.lower.held
            if size not in by_size:
                by_size[size] = prefixes_of(token_ids, size, extra_keys)
            on_device = _leading(one in device for one in by_size[size])
            below = _leading(one in device or one in lower for one in by_size[size])
            found[node] = Hit(size * on_device, size * below)
        return found


def prefixes_of(
    token_ids: Sequence[int], block_tokens: int, extra_keys: Sequence[ExtraKeys] = (), before: int = 0
) -> list[int]:
    """The hash of the prefix up to the end of each whole block, after a prefix with the hash ``before``.

    ``extra_keys`` are those of the first blocks; the last entry applies to all further blocks.
    """
    raw, width, found = array("q", token_ids).tobytes(), 8 * block_tokens, []
    keys = itertools.chain(extra_keys, itertools.repeat(extra_keys[-1] if extra_keys else None))
    for at, extra in zip(range(0, len(raw) - width + 1, width), keys, strict=False):
        block = raw[at : at + width]
        if extra:
            block += msgspec.msgpack.encode(extra)
        before = xxh3_64_intdigest(block, seed=before)
        found.append(before)
    return found


def _leading(flags: Iterable[bool]) -> int:
    """The number of true flags before the first false one."""
    return sum(1 for _ in itertools.takewhile(bool, flags))


def _key(name: int | bytes) -> int:
    return int.from_bytes(name[-8:], "big") if isinstance(name, bytes) else name
