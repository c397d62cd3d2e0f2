"""What tiers have got and lost, with the tokens that it stands for: what routers index blocks by.

A request's tokens are copied once, when its blocks are about to be kept, and let go when these are published
and their orders are over. What has come and gone between two calls is no event.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Any

import msgspec

from kvconnect.offload.scheduler.hit_requirements import HitGroup
from kvconnect.offload.tier import DISK, HOST, STORE, Content
from kvconnect.orders import CHANGES_AT_ONCE
from kvconnect.scheduler.stack import RequestView

DEVICE = "device"
"""What the tier above host memory is called."""

_PLACES: dict[str, dict[str, Any]] = {
    DEVICE: {"medium": "GPU"},
    HOST: {"medium": "CPU"},
    DISK: {"medium": "STORAGE", "locality": "LOCAL", "ownership": DISK},
    STORE: {"medium": "STORAGE", "locality": "REMOTE", "ownership": STORE},
}
"""By tier where vLLM's events say that a block is."""


# Structs that the collector does not track: some are made in every step, and none is part of a cycle.


class Described(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Tokens of a request that fill blocks, and what else distinguishes these: extra keys of each, if any."""

    token_ids: Sequence[int]
    extra_keys: Sequence[tuple[Any, ...] | None] | None = None
    lora_id: int | None = None
    lora_name: str | None = None
    session_id: str | None = None


_NOT_KNOWN = Described(())

Describe = Callable[[RequestView, int, int, int], Described]
"""Of a request the tokens from one to before another, which fill blocks of so many. Copies them."""


class Run(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Blocks of a cache group that follow one another in a request. ``parent``: the hash before the first."""

    group: int
    hashes: Sequence[bytes]
    parent: bytes | None = None
    block_tokens: int = 0
    described: Described = _NOT_KNOWN


_OF_STORED = (
    *("block_hashes", "parent_block_hash", "token_ids", "block_size"),
    *("lora_id", "lora_name", "extra_keys", "session_id"),
)
_Place = tuple[Run, int]


class _Footer(msgspec.Struct, array_like=True, gc=False):
    """What is kept of a content: ``tokens`` are numbers of 4 bytes. Ids and sessions end with a process."""

    tokens: bytes
    parent: bytes | None
    extra_keys: tuple[Any, ...] | None
    lora_name: str | None


_FOOTERS = msgspec.msgpack.Decoder(_Footer)
_ENCODER = msgspec.msgpack.Encoder()


def _footer(run: Run, at: int, tokens: bytes) -> bytes:
    described, length = run.described, 4 * run.block_tokens
    return _ENCODER.encode(
        _Footer(
            tokens[at * length : (at + 1) * length],
            run.hashes[at - 1] if at else run.parent,
            described.extra_keys[at] if described.extra_keys else None,
            described.lora_name,
        )
    )


_LOST = (Run(-1, ()), 0)
_UNKNOWN = (Run(-1, ()), 1)


class TierEvents:
    """What all tiers have got and lost since it was taken last, as events that ``maker`` makes of it.

    Takes time for what changes alone.
    """

    def __init__(self, describe: Describe, maker: EventMaker) -> None:
        self._describe, self._maker = describe, maker
        # Of what is about to be kept, or being written.
        self._places: dict[Content, _Place] = {}
        self._changes: dict[str, OrderedDict[Content, _Place]] = {tier: OrderedDict() for tier in _PLACES}

    def __bool__(self) -> bool:
        return any(self._changes.values())

    @property
    def num_described(self) -> int:
        """Contents of which the tokens are remembered; 0 when idle."""
        return len(self._places)

    def describe(
        self,
        view: RequestView,
        group: HitGroup,
        hashes: Sequence[bytes],
        part: range,
        wanted: Collection[bytes],
    ) -> None:
        """Copy what contents stand for: of the blocks at these places of ``hashes``, those ``wanted``."""
        names, size = hashes[part.start : part.stop], group.block_tokens
        places = [at for at, name in enumerate(names) if name in wanted]
        if not places:
            return
        first, end = places[0], places[-1] + 1
        start = part.start + first
        run = Run(
            group.group,
            names[first:end],
            hashes[start - 1] if start else None,
            size,
            self._describe(view, start * size, (part.start + end) * size, size),
        )
        for at in places:
            self._places[group.group, names[at]] = run, at - first

    def footers(self, group: int, hashes: Iterable[bytes]) -> tuple[bytes, ...]:
        """What contents stand for that were described, in the form that is kept with their rows."""
        made, run, tokens = [], None, b""
        for name in hashes:
            place = self._places.get((group, name))
            if place is None:
                made.append(b"")
                continue
            if place[0] is not run:
                run = place[0]
                tokens = array("i", run.described.token_ids).tobytes()
            made.append(_footer(run, place[1], tokens))
        return tuple(made)

    def learn(self, tier: str, group: int, footers: Mapping[bytes, bytes], hashes: Sequence[bytes]) -> None:
        """A tier had these contents from before, and what they stand for was kept with some of them."""
        for name in hashes:
            try:
                footer = _FOOTERS.decode(footers[name])
                tokens = array("i", footer.tokens).tolist()
            except (msgspec.MsgspecError, ValueError):
                self.stored(tier, [(group, name)])
                continue
            described = Described(
                tokens, [footer.extra_keys] if footer.extra_keys else None, None, footer.lora_name
            )
            self.stored_run(tier, Run(group, (name,), footer.parent, len(tokens), described), (0,))

    def forget(self, group: int, hashes: Iterable[bytes]) -> None:
        """The contents that were described come nowhere any more."""
        for name in hashes:
            self._places.pop((group, name), None)

    def stored(self, tier: str, contents: Iterable[Content]) -> None:
        changes, places = self._changes[tier], self._places
        for content in contents:
            if changes.pop(content, None) is not _LOST:
                changes[content] = places.get(content, _UNKNOWN)

    def stored_run(self, tier: str, run: Run, places: Iterable[int]) -> None:
        """A tier has got those blocks of a run that are at these places."""
        changes = self._changes[tier]
        for at in places:
            if changes.pop((run.group, run.hashes[at]), None) is not _LOST:
                changes[run.group, run.hashes[at]] = run, at

    def removed(self, tier: str, contents: Iterable[Content]) -> None:
        changes = self._changes[tier]
        for content in contents:
            if changes.pop(content, _LOST) is _LOST:
                changes[content] = _LOST

    def take(self) -> list[Any]:
        """About ``CHANGES_AT_ONCE`` changes, the oldest; of each tier what it has got comes first."""
        taken: list[Any] = []
        left = CHANGES_AT_ONCE
        for tier, changes in self._changes.items():
            if changes and left > 0:
                if len(changes) <= left:
                    oldest = list(changes.items())
                    changes.clear()
                else:
                    oldest = [changes.popitem(last=False) for _ in range(left)]
                left -= len(oldest)
                self._make_all(tier, oldest, taken.append)
        return taken

    def _make_all(
        self, tier: str, changes: Sequence[tuple[Content, _Place]], add: Callable[[Any], object]
    ) -> None:
        by_run: dict[Run, list[int]] = {}
        lost: dict[int, list[bytes]] = {}
        unknown: dict[int, list[bytes]] = {}
        for (group, name), place in changes:
            run, at = place
            if place is _LOST:
                lost.setdefault(group, []).append(name)
            elif place is _UNKNOWN:
                unknown.setdefault(group, []).append(name)
            elif run in by_run:
                by_run[run].append(at)
            else:
                by_run[run] = [at]
        stored, removed = self._maker.stored, self._maker.removed
        for run, places in by_run.items():
            for first, end in _stretches(places):
                add(stored(tier, run, first, end))
        for group, names in unknown.items():
            add(stored(tier, Run(group, names), 0, len(names)))
        for group, names in lost.items():
            add(removed(tier, group, names))


def _stretches(places: list[int]) -> Iterable[tuple[int, int]]:
    """Places that follow one another, as the first and the one after the last. A disk begins with the end."""
    if len(places) == 1:
        return ((places[0], places[0] + 1),)
    places.sort()
    ends = [at for at, (one, other) in enumerate(pairwise(places), 1) if other > one + 1]
    return [(places[begin], places[end - 1] + 1) for begin, end in pairwise([0, *ends, len(places)])]


class EventMaker:
    """Makes events of vLLM's classes, or of classes like them, with those fields that they have.

    ``groups`` has what is the same for all blocks of a cache group; ``name`` is how a hash is published.
    """

    def __init__(
        self,
        stored: type[msgspec.Struct],
        removed: type[msgspec.Struct],
        groups: Sequence[Mapping[str, Any]],
        name: Callable[[bytes], Any] = bytes,
    ) -> None:
        self._name = name
        self._stored = _Template(stored, _OF_STORED, groups)
        self._removed = _Template(removed, ("block_hashes",), [{} for _ in groups])

    def stored(self, tier: str, run: Run, first: int, end: int) -> Any:
        """A tier has got the blocks ``first`` to ``end - 1`` of a run."""
        name, described, size = self._name, run.described, run.block_tokens
        parent = run.hashes[first - 1] if first else run.parent
        return self._stored.made(
            tier,
            run.group,
            [name(each) for each in run.hashes[first:end]],
            None if parent is None else name(parent),
            described.token_ids[first * size : end * size],
            size,
            described.lora_id,
            described.lora_name,
            described.extra_keys and described.extra_keys[first:end],
            described.session_id,
        )

    def removed(self, tier: str, group: int, hashes: list[bytes]) -> Any:
        """A tier has these contents no more."""
        return self._removed.made(tier, group, [self._name(each) for each in hashes])


class _Template:
    """Makes a struct by position, which takes a third of the time that keywords take.

    ``given`` are the fields that differ from event to event; what the class does not have is left out.
    """

    def __init__(
        self, made: type[msgspec.Struct], given: Sequence[str], groups: Sequence[Mapping[str, Any]]
    ) -> None:
        self._made, fields = made, msgspec.structs.fields(made)
        self._order = itemgetter(
            *(
                given.index(field.name) if field.name in given else len(given) + at
                for at, field in enumerate(fields)
            )
        )
        self._constants = {
            (tier, index): tuple(
                {**place, **group, "group_idx": index}.get(
                    field.name, None if field.required else field.default
                )
                for field in fields
            )
            for tier, place in _PLACES.items()
            for index, group in enumerate(groups)
        }

    def made(self, tier: str, group: int, *given: Any) -> Any:
        """The struct with these values, in the order of ``given``."""
        return self._made(*self._order(given + self._constants[tier, group]))
