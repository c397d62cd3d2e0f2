"""Retention: which earlier tokens a token sees, and hence which blocks a cache group must keep.

The only place that computes which blocks a window keeps: plan, streaming, offload and block managers call it.
A new kind of attention is a subclass of ``Retention`` with one method.

Positions count from 0. With ``num_tokens`` computed, the next token to compute is at position ``num_tokens``.
Tokens that it sees are kept. A token that it does not see is seen by no later token either; vLLM frees blocks
of a running request by the same rule (``get_num_skipped_tokens`` of ``single_type_kv_cache_manager.py``). A
window of W tokens includes the token itself, so that after n tokens the first kept token is ``n - W + 1``.
Where D computes the last token of a prompt again although P computed the whole prompt, the next position is
n - 1 and the first kept token is ``n - W``: this is ``replay=1`` below.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields

from kvconnect.errors import LayoutError

_MOST = 2**31
"""Exclusive bound of sizes in a rule: a peer must not make this node compute with impossible sizes."""


class Retention(ABC):
    """The rule of which tokens a cache group's layers see: a frozen dataclass of positive numbers of tokens.

    ``seen`` is monotone: a token that is seen from a position is seen from every position between the two.

    Attributes:
        sees_all: every token sees all tokens before it.
        sees_previous: every token sees the token before it; False also if this is unknown.
        by_position: blocks hold tokens by position. False: one block holds the state after all tokens.
        ahead: the KV of a position also depends on this many tokens after the position.
    """

    sees_all: bool = False
    sees_previous: bool = False
    by_position: bool = True
    ahead: int = 0

    @abstractmethod
    def seen(self, position: int) -> tuple[range, ...]:
        """The tokens before ``position`` that the token there reads: ordered, disjoint, non-empty ranges."""

    def widest(self, num_tokens: int) -> int:
        """A position, at most ``num_tokens``, from which the most tokens are seen."""
        return num_tokens

    def kept(self, num_tokens: int, replay: int = 0) -> tuple[range, ...]:
        """The tokens among the first ``num_tokens`` that the next computed token or a later one reads.

        The last ``replay`` of them are computed again, so the next computed position is that much earlier.
        """
        begin = max(0, num_tokens - replay)
        return joined((*self.seen(begin), range(begin, num_tokens)))

    def blocks(self, num_tokens: int, block_tokens: int, replay: int = 0) -> tuple[range, ...]:
        """The positions of the blocks that hold a token of ``kept``, as ranges."""
        kept = self.kept(num_tokens, replay) if replay else self.seen(num_tokens)
        made = [range(part.start // block_tokens, -(-part.stop // block_tokens)) for part in kept]
        return tuple(made) if len(made) < 2 else joined(made)

    def num_freed(self, num_tokens: int, block_tokens: int) -> int:
        """The number of leading blocks that neither the next token nor a later one reads."""
        parts = self.seen(num_tokens)
        return (parts[0].start if parts else num_tokens) // block_tokens

    def only_kept(
        self, block_ids: Sequence[int], first: int, num_tokens: int, block_tokens: int, replay: int = 0
    ) -> Sequence[int]:
        """The block ids, from position ``first`` on, with 0 for blocks that hold no token of ``kept``."""
        if self.sees_all or not self.by_position:
            return block_ids
        made = [0] * len(block_ids)
        for part in self.blocks(num_tokens, block_tokens, replay):
            within = slice(max(0, part.start - first), max(0, part.stop - first))
            made[within] = block_ids[within]
        return made

    def most_blocks(self, num_tokens: int, block_tokens: int, step_tokens: int = 0) -> int:
        """The most blocks that a sequence of ``num_tokens`` holds at once, with ``step_tokens`` computed per
        step. Blocks that are no longer seen are freed before a step, not while it runs."""
        counts = []
        # The end is checked too: the seen tokens may be apart from the step there, as with sinks.
        for position in (self.widest(num_tokens), num_tokens):
            parts, step = [*self.seen(position)], range(position, position + step_tokens)
            if parts and parts[-1].stop == position:
                step = range(parts.pop().start, step.stop)
            # Plus one: the seen tokens may begin inside a block.
            counts.append(sum(-(-len(part) // block_tokens) + 1 for part in (*parts, step) if part))
        return min(max(counts), -(-num_tokens // block_tokens))

    def most_blocks_at_end(self, num_tokens: int, block_tokens: int) -> int:
        """The most blocks seen from the end of any block; from ``num_tokens`` if the rule sees all tokens."""
        position = num_tokens if self.sees_all else self.widest(_MOST)
        return sum(-(-len(part) // block_tokens) for part in self.seen(position))

    @property
    def text(self) -> str:
        """The rule as text for peers and namespaces; ``parse`` reads it."""
        return " ".join((type(self).__name__, *map(str, astuple(self))))  # type: ignore[call-overload]


@dataclass(frozen=True)
class Full(Retention):
    """A token sees all tokens before it."""

    sees_all = sees_previous = True

    def seen(self, position: int) -> tuple[range, ...]:
        return _span(0, position)


FULL = Full()


@dataclass(frozen=True)
class Window(Retention):
    """A token sees the last ``tokens`` tokens, itself included."""

    tokens: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "sees_previous", self.tokens > 1)

    def seen(self, position: int) -> tuple[range, ...]:
        return _span(position - self.tokens + 1, position)


@dataclass(frozen=True)
class Chunked(Retention):
    """The sequence is cut into chunks of ``tokens``; a token sees its own chunk up to itself."""

    tokens: int

    def seen(self, position: int) -> tuple[range, ...]:
        return _span(position // self.tokens * self.tokens, position)

    def widest(self, num_tokens: int) -> int:
        return max(min(num_tokens, self.tokens - 1), (num_tokens + 1) // self.tokens * self.tokens - 1)


@dataclass(frozen=True)
class State(Retention):
    """A recurrent state. It was last updated with the previous token, the only token that counts as seen."""

    sees_previous = True
    by_position = False

    def seen(self, position: int) -> tuple[range, ...]:
        return _span(position - 1, position)


@dataclass(frozen=True)
class Draft(Retention):
    """A draft model's layers (Eagle). They see as ``of`` does; their KV also depends on the next token."""

    of: Retention
    ahead = 1

    def __post_init__(self) -> None:
        for fact in ("sees_all", "sees_previous", "by_position"):
            object.__setattr__(self, fact, getattr(self.of, fact))

    def seen(self, position: int) -> tuple[range, ...]:
        return self.of.seen(position)

    def widest(self, num_tokens: int) -> int:
        return self.of.widest(num_tokens)


@functools.lru_cache(maxsize=256)
def parse(text: str) -> Retention:
    """The rule of a ``text``. Raises ``LayoutError``: no rule has this name, or its sizes are invalid."""
    name, *sizes = text.split(" ")
    kinds = {kind.__name__: kind for kind in Retention.__subclasses__() if kind is not Draft}
    kind = kinds.get(name)
    if (
        kind is None
        or len(sizes) != len(fields(kind))  # type: ignore[arg-type]
        or not all(_is_size(size) for size in sizes)
    ):
        raise LayoutError(f"no rule {text[:100]!r} of what layers see; known: {', '.join(sorted(kinds))}")
    return kind(*map(int, sizes))


def _is_size(text: str) -> bool:
    # Only the form that ``text`` writes: no other digits, no leading zeros.
    return text.isdecimal() and len(text) < 11 and text == str(int(text)) and 0 < int(text) < _MOST


def _span(start: int, stop: int) -> tuple[range, ...]:
    start = max(0, start)
    return (range(start, stop),) if start < stop else ()


def joined(parts: Iterable[range]) -> tuple[range, ...]:
    """The ranges in order; ranges that overlap or touch are merged, and empty ones dropped."""
    made: list[range] = []
    for part in sorted(parts, key=lambda part: part.start):
        if made and part.start <= made[-1].stop:
            made[-1] = range(made[-1].start, max(made[-1].stop, part.stop))
        elif part:
            made.append(part)
    return tuple(made)
