"""A router in miniature: what it knows of tiers from events alone, which must be what these hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvconnect.offload.index.class_rows import READY
from kvconnect.offload.tier import HOST
from kvconnect.offload.tier_events import DEVICE


class Stored(NamedTuple):
    """A tier has got blocks of ``size`` tokens that follow one another, and that of the hash ``parent``."""

    tier: str
    group: int
    hashes: Sequence[bytes]
    parent: bytes | None
    size: int
    tokens: Sequence[int]


class Removed(NamedTuple):
    """A tier has these contents no more."""

    tier: str
    group: int
    hashes: Sequence[bytes]


class Plain:
    """Stands for an ``EventMaker``: events are what it is given. Requests have tokens alone."""

    removed = Removed

    def describe(self, view, first, count, size):
        if isinstance(view, dict):
            return view
        tokens = view.token_ids if hasattr(view, "token_ids") else view.tokens
        return {"token_ids": tokens[first * size : (first + count) * size]}

    def stored(self, tier, group, runs):
        return [
            Stored(
                tier, group, names, parent, size, self.describe(view, first, len(names), size)["token_ids"]
            )
            for (first, view, parent, size), names in runs
        ]


class Replay:
    """``chain`` extends a hash by the tokens of one block; ``roots`` is the hash before the first."""

    def __init__(self, chain, root) -> None:
        self.chain, self.root = chain, root
        self.held: dict[tuple[str, int], set[bytes]] = {}
        self.num_unknown = 0

    def apply(self, events) -> None:
        for event in events:
            if isinstance(event, Removed):
                held = self.held[event.tier, event.group]
                assert held.issuperset(event.hashes), "what was never announced is taken back"
                assert len(set(event.hashes)) == len(event.hashes)
                held.difference_update(event.hashes)
                continue
            assert isinstance(event, Stored)
            held, names = self.held.setdefault((event.tier, event.group), set()), event.hashes
            assert names
            assert len(set(names)) == len(names)
            assert held.isdisjoint(names), "announced twice"
            held.update(names)
            self._check(event, names)

    def _check(self, event, names) -> None:
        size, before = event.size, event.parent
        if not size:
            self.num_unknown += len(names)
            return
        for at, name in enumerate(names):
            tokens = event.tokens[at * size : (at + 1) * size]
            assert len(tokens) == size
            before = self.chain(self.root if before is None else before, tokens)
            assert before == name, "the tokens are not those of the block"

    def check(self, half) -> None:
        """What was heard is what the scheduler half knows to be there."""
        index, lower = half.host.index, half.host.lower
        there = {(HOST, group): set() for group in half.plan.groups}
        for rows in index.classes:
            for group, names in rows.row_of.items():
                there[HOST, group] = {name for name, row in names.items() if rows.state[row] == READY}
        for (tier, group), ranks in lower._ranks.items():
            there[tier, group] = {name for name, bits in ranks.items() if bits & 1}
        for key in {*there, *self.held}:
            if key[0] != DEVICE:
                assert self.held.get(key, set()) == there.get(key, set()), key
