"""Nodes that may be asked for KV by name, and whether to load it pays. Time is an argument."""

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
"""Sources that are asked for one request, one after the other."""
SLOW_REST_S = 60.0
"""How long a source is not asked from which loads took longer than to compute the same."""
MISS_S = 1.0
"""How long a source is believed to lack what it did not have."""
_FIXED_S = 0.01
"""What a pull takes besides the link: a question and its answer, and a load, each with a step or two."""
_LEAST_SHARE = 1 / 16
"""How much more than this node keeps itself is loaded though it is not known yet whether that is quicker."""
_MOST_TOKENS_PER_S = 100_000
"""As fast as this a node is taken to compute prompts until its own have shown how fast it does."""
_LEAST_MEASURED = 256
"""Tokens of a prompt from which the rate shows, and not the time of a step."""
_LEAST_NAMED = 8
"""Tokens of a name that we make for a source: names of fewer take this node too long."""
_WEIGHT = 0.2
_MOST_SOURCES, _MOST_MISSES = 256, 4096


def is_worth_it(gain_tokens: int, local_tokens: int, load_s: float, tokens_per_s: float) -> bool:
    """Whether it is quicker to load than to compute what a source has and this node does not have.

    ``local_tokens`` could be restored here instead, ``load_s`` is how long the link takes, endless if that is
    not known, and ``tokens_per_s`` how fast prompts are computed here, 0 if that is not.
    """
    if gain_tokens <= (0 if load_s and tokens_per_s else local_tokens * _LEAST_SHARE):
        return False
    if not tokens_per_s:
        return load_s - _FIXED_S < gain_tokens / _MOST_TOKENS_PER_S
    return load_s + _FIXED_S < gain_tokens / tokens_per_s


class PrefillRate:
    """How fast this node computes prompts beside all else that it does: 0 until that is known."""

    def __init__(self) -> None:
        self.tokens_per_s = 0.0

    def measured(self, num_tokens: int, seconds: float) -> None:
        """So many tokens of a request were computed, from its first step to its next token."""
        if num_tokens >= _LEAST_MEASURED and seconds > 0:
            weight = _WEIGHT if self.tokens_per_s else 1.0
            self.tokens_per_s += (num_tokens / seconds - self.tokens_per_s) * weight


class Sources:
    """The ``configured`` ones, but for ``own``, and what is known of all that were asked lately."""

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
        """Whom to ask for one request: those that it names, or the configured ones in turns."""
        if named:
            return tuple(address for address in named if address != self._own)[:MOST_ASKED]
        first = self._next if len(self.configured) > MOST_ASKED else 0
        self._next = (first + 1) % max(1, len(self.configured))
        return (self.configured[first:] + self.configured[:first])[:MOST_ASKED]

    def naming(self, source: Address, ours: Naming) -> Naming | None:
        """How names are made for a source; None: it makes them otherwise than we can."""
        found = self._namings.get(source, ours)
        is_usable = found.hashing == ours.hashing and found.tokens >= min(ours.tokens, _LEAST_NAMED)
        return found if is_usable else None

    def names_by(self, source: Address, naming: Naming) -> None:
        _remember(self._namings, source, naming, _MOST_SOURCES)

    def rest(self, source: Address, until: float) -> None:
        """Do not ask a source before then."""
        _remember(self._rests, source, until, _MOST_SOURCES)

    def loaded(self, source: Address, saved_s: float, now: float) -> bool:
        """A load took so much less than to compute the same would have.

        Whether the loads of late cost more than they saved, one late load among good ones not: it rests then.
        """
        balance_s = self._balances.pop(source, 0.0) * (1 - _WEIGHT) + saved_s
        if balance_s < 0:
            self.rest(source, now + SLOW_REST_S)
        else:
            _remember(self._balances, source, balance_s, _MOST_SOURCES)
        return balance_s < 0

    def miss(self, source: Address, name: bytes, now: float) -> None:
        """A source has nothing that begins with this name."""
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
