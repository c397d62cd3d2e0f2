"""What tiers have got and lost, with the tokens that it stands for: what routers index blocks by.

A request's tokens are copied once, when its blocks are about to be kept, and let go when these are published
and their orders are over. What has come and gone between two calls is no event.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

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


class Described(NamedTuple):
    """Tokens of a request that fill blocks, and what else distinguishes these: extra keys of each, if any."""

    token_ids: Sequence[int]
    extra_keys: Sequence[tuple[Any, ...] | None] | None = None
    lora_id: int | None = None
    lora_name: str | None = None
    session_id: str | None = None


_NOT_KNOWN = Described(())

Describe = Callable[[RequestView, int, int, int], Described]
"""Of a request the tokens from one to before another, which fill blocks of so many. Copies them."""


@dataclass(eq=False, slots=True)
class Run:
    """Blocks of a cache group that follow one another in a request. ``parent``: the hash before the first."""

    group: int
    hashes: Sequence[bytes]
    parent: bytes | None = None
    block_tokens: int = 0
    described: Described = _NOT_KNOWN


class Stored(NamedTuple):
    """A tier has got the blocks ``first`` to ``end - 1`` of a run."""

    tier: str
    run: Run
    first: int
    end: int


class Removed(NamedTuple):
    """A tier has these contents no more."""

    tier: str
    group: int
    hashes: list[bytes]


_Place = tuple[Run, int]
_LOST = (Run(-1, ()), 0)
_UNKNOWN = (Run(-1, ()), 1)


class TierEvents:
    """What all tiers have got and lost since it was taken last, as events that ``make`` makes of it.

    Takes time for what changes alone.
    """

    def __init__(
        self, describe: Describe, make: Callable[[Stored | Removed], Any] = lambda event: event
    ) -> None:
        self._describe, self._make = describe, make
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
        names = hashes[part.start : part.stop]
        places = [at for at, name in enumerate(names) if name in wanted]
        if not places:
            return
        first, end, size = places[0], places[-1] + 1, group.block_tokens
        start, before = part.start + first, part.start + first - 1
        parent = hashes[before] if before >= 0 else None
        described = self._describe(view, start * size, (part.start + end) * size, size)
        run = Run(group.group, names[first:end], parent, size, described)
        for at in places:
            self._places[group.group, names[at]] = run, at - first

    def forget(self, group: int, hashes: Iterable[bytes]) -> None:
        """Nothing more will be heard of contents that were described."""
        for name in hashes:
            self._places.pop((group, name), None)

    def stored(self, tier: str, contents: Iterable[Content]) -> None:
        changes, places = self._changes[tier], self._places
        for content in contents:
            if changes.pop(content, None) is not _LOST:
                changes[content] = places.get(content, _UNKNOWN)

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
                count = min(left, len(changes))
                left -= count
                oldest = [changes.popitem(last=False) for _ in range(count)]
                taken += map(self._make, _grouped(tier, oldest))
        return taken


def _grouped(tier: str, changes: Sequence[tuple[Content, _Place]]) -> Iterator[Stored | Removed]:
    by_run: dict[Run, list[int]] = {}
    lost: dict[int, list[bytes]] = {}
    unknown: dict[int, list[bytes]] = {}
    for (group, name), place in changes:
        if place is _LOST:
            lost.setdefault(group, []).append(name)
        elif place is _UNKNOWN:
            unknown.setdefault(group, []).append(name)
        else:
            by_run.setdefault(place[0], []).append(place[1])
    for run, places in by_run.items():
        # A disk writes the end of a sequence first.
        places.sort()
        ends = [at for at, (one, other) in enumerate(pairwise(places), 1) if other > one + 1]
        for begin, end in pairwise([0, *ends, len(places)]):
            yield Stored(tier, run, places[begin], places[end - 1] + 1)
    for group, names in unknown.items():
        yield Stored(tier, Run(group, names), 0, len(names))
    for group, names in lost.items():
        yield Removed(tier, group, names)


class EventMaker:
    """Makes events of vLLM's classes, or of classes like them, with those fields that they have.

    ``groups`` has what is the same for all blocks of a cache group; ``name`` is how a hash is published.
    """

    def __init__(
        self,
        stored: Callable[..., Any],
        removed: Callable[..., Any],
        groups: Sequence[Mapping[str, Any]],
        name: Callable[[bytes], Any] = bytes,
    ) -> None:
        self._stored, self._removed, self._name = stored, removed, name
        self._of_stored = _constants(stored, groups)
        self._of_removed = _constants(removed, [{} for _ in groups])
        self._more = [field for field in ("extra_keys", "session_id") if field in _fields(stored)]

    def make(self, event: Stored | Removed) -> Any:
        """The event of a release that knows it: what the release does not know is left out."""
        if isinstance(event, Removed):
            constant = self._of_removed[event.tier, event.group]
            return self._removed(block_hashes=list(map(self._name, event.hashes)), **constant)
        tier, run, first, end = event
        size, told = run.block_tokens, run.described
        parent = run.hashes[first - 1] if first else run.parent
        keys = told.extra_keys and list(told.extra_keys[first:end])
        more = {"extra_keys": keys, "session_id": told.session_id}
        return self._stored(
            block_hashes=list(map(self._name, run.hashes[first:end])),
            parent_block_hash=None if parent is None else self._name(parent),
            token_ids=list(told.token_ids[first * size : end * size]),
            block_size=size,
            lora_id=told.lora_id,
            lora_name=told.lora_name,
            **{field: more[field] for field in self._more},
            **self._of_stored[tier, run.group],
        )


def _fields(made: Callable[..., Any]) -> Collection[str]:
    return getattr(made, "__struct_fields__", ())


def _constants(
    made: Callable[..., Any], groups: Sequence[Mapping[str, Any]]
) -> dict[tuple[str, int], dict[str, Any]]:
    """By tier and cache group what all events have, as far as the class has such fields."""
    return {
        (tier, index): {
            field: value
            for field, value in {**place, **group, "group_idx": index}.items()
            if field in _fields(made)
        }
        for tier, place in _PLACES.items()
        for index, group in enumerate(groups)
    }
