"""Which contents the lower tiers have, as the scheduler half knows it: those that every rank has.

Each rank reports what its own disk has got and lost. A content can be restored where all of them have it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import repeat

from kvconnect.offload.tier_events import TierEvents
from kvconnect.transfer.orders import TierChange


class LowerIndex:
    """Contents by tier and cache group, and on which ranks they are.

    Those of rank 0 are noted as ``events``, if events are published: all ranks are given the same orders.
    """

    def __init__(self, num_ranks: int) -> None:
        # A rank is a bit: a rank that reports the same twice changes nothing.
        self._all = (1 << num_ranks) - 1
        self._ranks: dict[tuple[str, int], dict[bytes, int]] = {}
        self._complete: Counter[tuple[str, int]] = Counter()
        self.events: TierEvents | None = None

    def update(self, rank: int, changes: Iterable[TierChange]) -> None:
        """What a rank's tiers have got, or have no more. What is both added and removed is removed."""
        bit, every = 1 << rank, self._all
        for change in changes:
            key = (change.tier, change.group)
            if self.events is not None and not rank:
                self._note(self.events, change)
            ranks = self._ranks.setdefault(key, {})
            for content in change.added:
                before = ranks.get(content, 0)
                ranks[content] = after = before | bit
                self._complete[key] += (after == every) - (before == every)
            for content in change.removed:
                before = ranks.pop(content, 0)
                self._complete[key] -= before == every
                if before & ~bit:
                    ranks[content] = before & ~bit

    def has(self, tier: str, group: int, hashes: Sequence[bytes]) -> list[bool]:
        """Of each hash, whether every rank has it in a tier."""
        ranks, every = self._ranks.get((tier, group), {}), self._all
        return [known == every for known in map(ranks.get, hashes, repeat(0))]

    def drop(self, tier: str, group: int, hashes: Sequence[bytes]) -> None:
        """Contents that turned out not to be there, on some rank: forgotten for all, until reported anew."""
        ranks = self._ranks.get((tier, group), {})
        self._lose(tier, group, hashes)
        for content in hashes:
            self._complete[tier, group] -= ranks.pop(content, 0) == self._all

    def _note(self, events: TierEvents, change: TierChange) -> None:
        """Before a change of rank 0 is made."""
        tier, group = change.tier, change.group
        ranks = self._ranks.get((tier, group), {})
        gone = set(change.removed)
        new = [name for name in change.added if not ranks.get(name, 0) & 1 and name not in gone]
        if change.footers:
            events.learn(tier, group, dict(zip(change.added, change.footers, strict=False)), new)
        else:
            events.stored(tier, group, new)
        self._lose(tier, group, change.removed)

    def _lose(self, tier: str, group: int, hashes: Iterable[bytes]) -> None:
        if self.events is not None:
            ranks = self._ranks.get((tier, group), {})
            self.events.removed(tier, group, [name for name in hashes if ranks.get(name, 0) & 1])

    def clear(self) -> None:
        for (tier, group), ranks in self._ranks.items():
            self._lose(tier, group, ranks)
        self._ranks.clear()
        self._complete.clear()

    def counts(self) -> dict[str, dict[int, int]]:
        """Contents that every rank has, by tier and cache group."""
        found: dict[str, dict[int, int]] = {}
        for tier, group in self._ranks:
            found.setdefault(tier, {})[group] = self._complete[tier, group]
        return found
