"""The sources that D may ask for KV by name, and whether a load pays. Time is an argument."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import TypeVar

from kvconnect.addresses import split_address
from kvconnect.cache.identity import Naming

Address = tuple[str, int]
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

MOST_ASKED = 3
"""The most sources that D asks for one request, one after the other."""
SLOW_REST_S = 60.0
"""Seconds that D asks a source no more whose loads took longer than computing the same tokens."""
MISS_S = 1.0
"""Seconds that a source is taken to lack a prefix after a miss."""
_FIXED_S = 0.01
"""Seconds that a pull takes besides the link: a lookup and a load, each with a step or two."""
_LEAST_SHARE = 1 / 16
"""With rates unknown, D loads only a gain above this share of its own restorable tokens."""
_MOST_TOKENS_PER_S = 100_000
"""Prefill rate that D assumes for itself until it has measured its own, in tokens per second."""
_LEAST_MEASURED = 256
"""The fewest tokens of a prompt that measure the rate, and not the time of a step."""
_LEAST_NAMED = 8
"""The fewest tokens per name that D makes for a source: shorter names take D too long."""
_WEIGHT = 0.2
_MOST_SOURCES, _MOST_MISSES = 256, 4096


def is_worth_it(gain_tokens: int, local_tokens: int, load_s: float, tokens_per_s: float) -> bool:
    """Whether loading ``gain_tokens`` is quicker than computing them.

    ``local_tokens``: tokens that D could restore itself instead. ``load_s``: seconds on the link, infinite if
    unknown, 0 before a lookup. ``tokens_per_s``: D's prefill rate, 0 if unknown.
    """
    if gain_tokens <= (0 if load_s and tokens_per_s else local_tokens * _LEAST_SHARE):
        return False
    if not tokens_per_s:
        return load_s - _FIXED_S < gain_tokens / _MOST_TOKENS_PER_S
    return load_s + _FIXED_S < gain_tokens / tokens_per_s


class PrefillRate:
    """This node's prefill rate under its present load, in tokens per second; 0 until it is measured."""

    def __init__(self) -> None:
        self.tokens_per_s = 0.0

    def measured(self, num_tokens: int, seconds: float) -> None:
        """Take one prompt: its computed tokens, and the seconds from its first step to its next token."""
        if num_tokens >= _LEAST_MEASURED and seconds > 0:
            weight = _WEIGHT if self.tokens_per_s else 1.0
            self.tokens_per_s += (num_tokens / seconds - self.tokens_per_s) * weight


class Sources:
    """The ``configured`` sources without ``own``, and the state of all sources asked lately."""

    def __init__(self, configured: Sequence[str], own: Address) -> None:
        known = (split_address(address) for address in configured)
        self._own = own
        self.configured = tuple(address for address in known if address is not None and address != own)
        self._next = 0
        self._namings: OrderedDict[Address, Naming] = OrderedDict()
        self._rests: OrderedDict[Address, float] = OrderedDict()
        self._balances: OrderedDict[Address, float] = OrderedDict()
        self._misses: OrderedDict[tuple[Address, bytes], float] = OrderedDict()

    def chosen(self, named: Sequence[Address]) -> tuple[Address, ...]:
        """The sources to ask for a request: those that it names, or the configured ones in turn."""
        if named:
            return tuple(address for address in named if address != self._own)[:MOST_ASKED]
        first = self._next if len(self.configured) > MOST_ASKED else 0
        self._next = (first + 1) % max(1, len(self.configured))
        return (self.configured[first:] + self.configured[:first])[:MOST_ASKED]

    def naming(self, source: Address, ours: Naming) -> Naming | None:
        """How to make names for a source; None if the source makes them in a way that D cannot."""
        found = self._namings.get(source, ours)
        is_usable = found.hashing == ours.hashing and found.tokens >= min(ours.tokens, _LEAST_NAMED)
        return found if is_usable else None

    def names_by(self, source: Address, naming: Naming) -> None:
        _remember(self._namings, source, naming, _MOST_SOURCES)

    def rest(self, source: Address, until: float) -> None:
        """Do not ask a source before ``until``."""
        _remember(self._rests, source, until, _MOST_SOURCES)

    def loaded(self, source: Address, saved_s: float, now: float) -> bool:
        """Take a load that saved ``saved_s`` seconds against computing the same tokens (negative: lost).

        Returns whether recent loads, not just one, cost more than they saved: the source rests then.
        """
        balance_s = self._balances.pop(source, 0.0) * (1 - _WEIGHT) + saved_s
        if balance_s < 0:
            self.rest(source, now + SLOW_REST_S)
        else:
            _remember(self._balances, source, balance_s, _MOST_SOURCES)
        return balance_s < 0

    def miss(self, source: Address, name: bytes, now: float) -> None:
        """Note that a source keeps no content under this name."""
        _remember(self._misses, (source, name), now + MISS_S, _MOST_MISSES)

    def is_resting(self, source: Address, now: float) -> bool:
        return now < self._rests.get(source, now)

    def lacks(self, source: Address, name: bytes, now: float) -> bool:
        return now < self._misses.get((source, name), now)


def _remember(known: OrderedDict[K, V], key: K, value: V, most: int) -> None:
    known[key] = value
    known.move_to_end(key)
    if len(known) > most:
        known.popitem(last=False)
