"""KV cache events of the tiers: blocks stored and removed, with their tokens, for the index of a router.

Before a block is kept, ``TierEvents`` notes the request that it belongs to, and copies the tokens from that
request only when it makes an event of the block. A block that is stored and removed between two calls of
``take`` makes no event. The module knows the event classes only by their fields.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import islice, product
from types import MappingProxyType
from typing import Any

import msgspec

from kvconnect.offload.scheduler.hit_requirements import HitGroup
from kvconnect.offload.tier import DISK, HOST, STORE
from kvconnect.transfer.orders import CHANGES_AT_ONCE

_PLACES: dict[str, dict[str, Any]] = {
    HOST: {"medium": "CPU"},
    DISK: {"medium": "STORAGE", "locality": "LOCAL", "ownership": DISK},
    STORE: {"medium": "STORAGE", "locality": "REMOTE", "ownership": STORE},
}
"""By tier the fields of vLLM's events that state where a block is."""

Described = Mapping[str, Any]
"""Event fields of some blocks: ``token_ids``, optionally ``lora_name`` and ``extra_keys`` (one per block)."""

Describe = Callable[[Any, int, int, int], Described]
"""Describes blocks of a request: request, number of the first, count, tokens per block. Copies the tokens."""

# Plain tuples for speed: one is made for every block.
Origin = tuple[int, Any, bytes | None, int]
"""A block's number in its request, the request, the parent block's hash, and the block's token count.

For a block that a footer describes, the second item is a ``Described`` in place of the request.
"""
Part = tuple[Any, Sequence[bytes], int, int]
"""A request, its block hashes, and an interval of block positions: the first, and the one after the last."""
Run = tuple[Origin, list[bytes]]
"""Consecutive blocks of one request: the origin of the first, and the hashes of all."""


class _Footer(msgspec.Struct, array_like=True, gc=False):
    """The description of a content that the disk keeps with its row; ``tokens`` are 4-byte integers."""

    tokens: bytes
    parent: bytes | None
    extra_keys: tuple[Any, ...] | None
    lora_name: str | None


_FOOTERS = msgspec.msgpack.Decoder(_Footer)
_ENCODER = msgspec.msgpack.Encoder()


class TierEvents:
    """Changes of all tiers since the last ``take``, which has ``maker`` turn them into events.

    A call costs time in proportion to its changes; one call with all changes of a step is fastest.
    """

    def __init__(self, maker: EventMaker) -> None:
        self._maker = maker
        # By group and hash, for contents that are about to be kept, or being written.
        self._origins: dict[int, dict[bytes, Origin]] = defaultdict(dict)
        # By tier and group the contents stored and those removed; no content is in both.
        self._changes: dict[str, dict[int, tuple[dict[bytes, Origin | None], dict[bytes, None]]]]
        self._changes = {tier: defaultdict(lambda: ({}, {})) for tier in _PLACES}

    def __bool__(self) -> bool:
        return any(any(map(any, by_group.values())) for by_group in self._changes.values())

    @property
    def num_described(self) -> int:
        """The number of contents with a noted origin; 0 when idle."""
        return sum(map(len, self._origins.values()))

    def describe(self, group: HitGroup, parts: Iterable[Part], wanted: Collection[bytes]) -> None:
        """Note the origins of those blocks in ``parts`` whose hashes are in ``wanted``."""
        origins, size = self._origins[group.group], group.block_tokens
        # A draft group names each block by the hash of the next block.
        ahead = int(group.is_draft)
        for view, hashes, first, end in parts:
            for at in range(first + ahead, min(end + ahead, len(hashes))):
                if (name := hashes[at]) in wanted:
                    origins[name] = at, view, hashes[at - 1] if at else None, size

    def footers(self, group: int, hashes: Sequence[bytes]) -> tuple[bytes, ...]:
        """The footer of each content, for the disk to keep with its row; empty without a noted origin."""
        origins, made = self._origins[group], dict[bytes, bytes]()
        for origin, names in _runs((name, origins[name]) for name in hashes if name in origins):
            first, view, parent, size = origin
            described, width = self._maker.describe(view, first, len(names), size), 4 * size
            tokens, keys = array("i", described["token_ids"]).tobytes(), described.get("extra_keys")
            for at, name in enumerate(names):
                own = tokens[at * width : (at + 1) * width]
                footer = _Footer(own, parent, keys[at] if keys else None, described.get("lora_name"))
                made[name] = _ENCODER.encode(footer)
                parent = name
        return tuple(made.get(name, b"") for name in hashes)

    def forget(self, group: int, hashes: Iterable[bytes]) -> None:
        """Drop the origins of contents that no tier will store any more."""
        origins = self._origins[group]
        for name in hashes:
            origins.pop(name, None)

    def stored(
        self,
        tier: str,
        group: int,
        hashes: Collection[bytes],
        footers: Mapping[bytes, bytes] = MappingProxyType({}),
    ) -> None:
        """A tier stored contents. Events have tokens of those with a footer, or whose origin was noted."""
        origins: Iterable[Origin | None] = map(self._origins[group].get, hashes)
        if footers:
            found = (_read_footer(footers.get(name, b"")) for name in hashes)
            origins = [own or origin for own, origin in zip(found, origins, strict=True)]
        gained, lost = self._changes[tier][group]
        for name, origin in zip(hashes, origins, strict=True):
            if lost.pop(name, gained) is gained:
                gained[name] = origin

    def removed(self, tier: str, group: int, hashes: Collection[bytes]) -> None:
        gained, lost = self._changes[tier][group]
        lost.update(dict.fromkeys(name for name in hashes if gained.pop(name, lost) is lost))

    def take(self) -> list[Any]:
        """Events of about ``CHANGES_AT_ONCE`` changes, oldest first; in a group stores precede removals."""
        taken: list[Any] = []
        left = CHANGES_AT_ONCE
        for tier, by_group in self._changes.items():
            for group, (gained, lost) in by_group.items():
                if gained and left > 0:
                    came = _oldest(gained, left)
                    left -= len(came)
                    # A disk stores the end of a sequence first.
                    each = came.items() if tier == HOST else sorted(came.items(), key=_place)
                    taken += self._maker.stored(tier, group, _runs(each))
                if lost and left > 0:
                    went = _oldest(lost, left)
                    left -= len(went)
                    taken.append(self._maker.removed(tier, group, list(went)))
        return taken


def _read_footer(data: bytes) -> Origin | None:
    """What a footer describes, as the first block of a request; None if it cannot be read."""
    try:
        footer = _FOOTERS.decode(data)
        tokens = array("i", footer.tokens).tolist()
    except (msgspec.MsgspecError, ValueError):
        return None
    described: dict[str, Any] = {"token_ids": tokens, "lora_name": footer.lora_name}
    if footer.extra_keys:
        described["extra_keys"] = [footer.extra_keys]
    return 0, described, footer.parent, len(tokens)


_NOT_KNOWN: Origin = (0, {"token_ids": ()}, None, 0)


def _oldest(changes: dict[bytes, Any], most: int) -> dict[bytes, Any]:
    """Take at most ``most`` changes out of a dictionary, the oldest first."""
    oldest = dict(islice(changes.items(), most))
    if len(oldest) == len(changes):
        changes.clear()
    for name in oldest if changes else ():
        del changes[name]
    return oldest


def _runs(came: Iterable[tuple[bytes, Origin | None]]) -> list[Run]:
    """Group consecutive contents of one request into runs; contents without an origin form one more run."""
    runs: list[Run] = []
    unknown: list[bytes] = []
    last, end = None, 0
    for name, origin in came:
        if origin is None:
            unknown.append(name)
            continue
        if origin[1] is last and origin[0] == end:
            runs[-1][1].append(name)
        else:
            runs.append((origin, [name]))
        last, end = origin[1], origin[0] + 1
    return [*runs, (_NOT_KNOWN, unknown)] if unknown else runs


def _place(one: tuple[bytes, Origin | None]) -> tuple[int, int]:
    """A sort key that puts the blocks of one request together, in their order there."""
    return (0, 0) if one[1] is None else (id(one[1][1]), one[1][0])


class EventMaker:
    """Makes events of vLLM's classes, and fills the fields that a class has.

    ``groups`` has, by cache group, the fields that are equal for all its blocks. ``name`` converts a hash to
    its published form.
    """

    def __init__(
        self,
        stored: type[msgspec.Struct],
        removed: type[msgspec.Struct],
        groups: Sequence[Mapping[str, Any]],
        describe: Describe,
        name: Callable[[bytes], Any] = bytes,
    ) -> None:
        self.describe, self._name = describe, name
        self._stored, self._removed = stored, removed
        self._fields = frozenset(stored.__struct_fields__)
        self._of_stored = _constants(stored, groups)
        self._of_removed = _constants(removed, [{} for _ in groups])

    def stored(self, tier: str, group: int, runs: Iterable[Run]) -> list[Any]:
        """Events for blocks that a tier stored, one for each run."""
        events = []
        for (first, view, parent, size), hashes in runs:
            described = view if isinstance(view, dict) else self.describe(view, first, len(hashes), size)
            made = {name: value for name, value in described.items() if name in self._fields}
            made["block_hashes"], made["block_size"] = list(map(self._name, hashes)), size
            made["parent_block_hash"] = None if parent is None else self._name(parent)
            events.append(self._stored(**{**self._of_stored[tier, group], **made}))
        return events

    def removed(self, tier: str, group: int, hashes: Iterable[bytes]) -> Any:
        """An event for blocks that a tier removed."""
        names = list(map(self._name, hashes))
        return self._removed(**{**self._of_removed[tier, group], "block_hashes": names})


def _constants(
    made: type[msgspec.Struct], groups: Sequence[Mapping[str, Any]]
) -> dict[tuple[str, int], dict[str, Any]]:
    """By tier and group the fields that are the same for every event; None for required, unknown ones."""
    constants = {}
    for (tier, place), (index, group) in product(_PLACES.items(), enumerate(groups)):
        known = {**place, **group, "group_idx": index}
        fields = [field for field in msgspec.structs.fields(made) if field.required or field.name in known]
        constants[tier, index] = {field.name: known.get(field.name) for field in fields}
    return constants
