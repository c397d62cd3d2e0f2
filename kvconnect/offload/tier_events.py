"""What tiers have got and lost, with the tokens that it stands for: what routers index blocks by.

Of a block that is about to be kept it is noted whose it is. Its tokens are copied once there is an event of
it, from the request itself. What has come and gone between two calls is no event.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import msgspec

from kvconnect.errors import LocalError
from kvconnect.offload.scheduler.hit_requirements import HitGroup
from kvconnect.offload.tier import DISK, HOST, STORE
from kvconnect.transfer.orders import CHANGES_AT_ONCE

DEVICE = "device"
"""What the tier above host memory is called."""

_PLACES: dict[str, dict[str, Any]] = {
    DEVICE: {"medium": "GPU"},
    HOST: {"medium": "CPU"},
    DISK: {"medium": "STORAGE", "locality": "LOCAL", "ownership": DISK},
    STORE: {"medium": "STORAGE", "locality": "REMOTE", "ownership": STORE},
}
"""By tier where a block is, in the words of vLLM's events."""

Described = Mapping[str, Any]
"""What blocks stand for, as fields of their event: ``token_ids``, and what else distinguishes them, if any.

Of ``extra_keys`` there is one for each block.
"""

Describe = Callable[[Any, int, int, int], Described]
"""Of a request the blocks from a number on, so many, of so many tokens. Copies the tokens."""

# Plain tuples, since one is made of every block.
Origin = tuple[int, Any, bytes | None, int]
"""A block's number in a request, the request, the hash before it, and its tokens.

Where it is known without a request what the block stands for, that is in its place.
"""
Part = tuple[Any, Sequence[bytes], int, int]
"""A request, its hashes, and positions of blocks: the first, and the one after the last."""
Run = tuple[Origin, list[bytes]]
"""Blocks of a request that follow one another: the origin of the first, and the hashes of all."""


class _Footer(msgspec.Struct, array_like=True, gc=False):
    """What is kept of a content: ``tokens`` are numbers of 4 bytes. Ids and sessions end with a process."""

    tokens: bytes
    parent: bytes | None
    extra_keys: tuple[Any, ...] | None
    lora_name: str | None


_FOOTERS = msgspec.msgpack.Decoder(_Footer)
_ENCODER = msgspec.msgpack.Encoder()


class TierEvents:
    """What all tiers have got and lost since it was taken last, as events that ``maker`` makes of it.

    Takes time for what changes alone, and the least where a call has all of a step.
    """

    def __init__(self, maker: EventMaker) -> None:
        self._maker = maker
        # By group, of what is about to be kept, or being written.
        self._origins: dict[int, dict[bytes, Origin]] = defaultdict(dict)
        # By tier and group what came and what went; no content is in both.
        self._changes: dict[str, dict[int, tuple[dict[bytes, Origin | None], dict[bytes, None]]]]
        self._changes = {tier: defaultdict(lambda: ({}, {})) for tier in _PLACES}

    def __bool__(self) -> bool:
        return any(any(map(any, by_group.values())) for by_group in self._changes.values())

    @property
    def num_described(self) -> int:
        """Contents of which it is remembered what they are; 0 when idle."""
        return sum(map(len, self._origins.values()))

    def describe(self, group: HitGroup, parts: Iterable[Part], wanted: Collection[bytes]) -> None:
        """Note what those of the contents at these positions are that are ``wanted``."""
        origins, size = self._origins[group.group], group.block_tokens
        # A draft's block is known by the hash of the block after it.
        ahead = int(group.is_draft)
        for view, hashes, first, end in parts:
            for at in range(first + ahead, min(end + ahead, len(hashes))):
                if (name := hashes[at]) in wanted:
                    origins[name] = at, view, hashes[at - 1] if at else None, size

    def footers(self, group: int, hashes: Sequence[bytes]) -> tuple[bytes, ...]:
        """What contents stand for that were described, in the form that is kept with their rows."""
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

    def learn(self, tier: str, group: int, footers: Mapping[bytes, bytes], hashes: Sequence[bytes]) -> None:
        """A tier had these contents from before, and what they stand for was kept with some of them."""
        origins: list[Origin | None] = []
        for name in hashes:
            try:
                footer = _FOOTERS.decode(footers.get(name, b""))
                tokens = array("i", footer.tokens).tolist()
            except (msgspec.MsgspecError, ValueError):
                origins.append(self._origins[group].get(name))
                continue
            described: dict[str, Any] = {"token_ids": tokens, "lora_name": footer.lora_name}
            if footer.extra_keys:
                described["extra_keys"] = [footer.extra_keys]
            origins.append((0, described, footer.parent, len(tokens)))
        self.gained(tier, group, hashes, origins)

    def forget(self, group: int, hashes: Iterable[bytes]) -> None:
        """The contents that were described come nowhere any more."""
        origins = self._origins[group]
        for name in hashes:
            origins.pop(name, None)

    def stored(self, tier: str, group: int, hashes: Collection[bytes]) -> None:
        """A tier has got contents. Without tokens, unless they were described."""
        self.gained(tier, group, hashes, map(self._origins[group].get, hashes))

    def gained(
        self, tier: str, group: int, hashes: Collection[bytes], origins: Iterable[Origin | None]
    ) -> None:
        """A tier has got contents, and this is what they are."""
        gained, lost = self._changes[tier][group]
        if not lost or lost.keys().isdisjoint(hashes):
            gained.update(zip(hashes, origins, strict=True))
            return
        for name, origin in zip(hashes, origins, strict=True):
            if lost.pop(name, gained) is gained:
                gained[name] = origin

    def removed(self, tier: str, group: int, hashes: Collection[bytes]) -> None:
        gained, lost = self._changes[tier][group]
        if gained:
            hashes = [name for name in hashes if gained.pop(name, lost) is lost]
        lost.update(dict.fromkeys(hashes))

    def take(self) -> list[Any]:
        """About ``CHANGES_AT_ONCE`` changes, the oldest; of each tier what it has got comes first."""
        taken: list[Any] = []
        left = CHANGES_AT_ONCE
        for tier, by_group in self._changes.items():
            for group, (gained, lost) in by_group.items():
                if gained and left > 0:
                    came = _oldest(gained, left)
                    left -= len(came)
                    # A disk begins with the end of what comes together.
                    each = came.items() if tier in (DEVICE, HOST) else sorted(came.items(), key=_place)
                    taken += self._maker.stored(tier, group, _runs(each))
                if lost and left > 0:
                    went = _oldest(lost, left)
                    left -= len(went)
                    taken.append(self._maker.removed(tier, group, list(went)))
        return taken


_NOT_KNOWN: Origin = (0, {"token_ids": ()}, None, 0)


def _oldest(changes: dict[bytes, Any], most: int) -> dict[bytes, Any]:
    """So many, which are no changes any more."""
    oldest = dict(islice(changes.items(), most))
    if len(oldest) == len(changes):
        changes.clear()
    for name in oldest if changes else ():
        del changes[name]
    return oldest


def _runs(came: Iterable[tuple[bytes, Origin | None]]) -> list[Run]:
    """What belongs to one request and follows one another shares a run. What is not known is one more."""
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


def last_64_bits(name: bytes) -> int:
    """As vLLM publishes hashes where nothing else is set."""
    return int.from_bytes(name[-8:], "big")


def _place(one: tuple[bytes, Origin | None]) -> tuple[int, int]:
    """By which blocks of one request are together, in their sequence there."""
    return (0, 0) if one[1] is None else (id(one[1][1]), one[1][0])


class EventMaker:
    """Makes events of vLLM's classes, or of classes like them, with those fields that they have.

    ``groups`` has what is the same for all blocks of a cache group; ``name`` is how a hash is published.
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
        self._of_requests = frozenset(stored.__struct_fields__) - {*_OF_STORED}
        self._of_stored = _constants(stored, _OF_STORED, groups)
        self._of_removed = _constants(removed, _OF_REMOVED, [{} for _ in groups])

    def stored(self, tier: str, group: int, runs: Iterable[Run]) -> list[Any]:
        """A tier has got these blocks: an event of each run."""
        name, make, constants, events = self._name, self._stored, self._of_stored[tier, group], []
        for (first, view, parent, size), hashes in runs:
            described = view if isinstance(view, dict) else self.describe(view, first, len(hashes), size)
            published = None if parent is None else name(parent)
            # By position, which takes a fraction of the time that keywords take.
            event = make(list(map(name, hashes)), published, described["token_ids"], size, *constants)
            if len(described) > 1:
                for field in self._of_requests & described.keys():
                    setattr(event, field, described[field])
            events.append(event)
        return events

    def removed(self, tier: str, group: int, hashes: Iterable[bytes]) -> Any:
        """A tier has these contents no more."""
        return self._removed([self._name(each) for each in hashes], *self._of_removed[tier, group])


_OF_STORED = ("block_hashes", "parent_block_hash", "token_ids", "block_size")
_OF_REMOVED = ("block_hashes",)


def _constants(
    made: type[msgspec.Struct], given: Sequence[str], groups: Sequence[Mapping[str, Any]]
) -> dict[tuple[str, int], tuple[Any, ...]]:
    """By tier and group the fields after those that are ``given``, as far as they do not differ by event."""
    fields = msgspec.structs.fields(made)
    if tuple(field.name for field in fields[: len(given)]) != tuple(given):
        raise LocalError(f"{made.__name__} begins with {made.__struct_fields__}, and must begin with {given}")
    constants = {}
    for tier, place in _PLACES.items():
        for index, group in enumerate(groups):
            known = {**place, **group, "group_idx": index}
            constants[tier, index] = tuple(
                known.get(field.name, None if field.required else field.default)
                for field in fields[len(given) :]
            )
    return constants
