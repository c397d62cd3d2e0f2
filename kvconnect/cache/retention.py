"""Which earlier tokens a token sees, and hence which blocks a cache group must keep.

Plan, streaming, offload and block managers ask this module, and compute with no window of their own. A new
kind of attention is a subclass of ``Retention`` with one method, and a spec whose ``retention`` it is.

Positions count from 0. With ``num_tokens`` computed, the next token to be computed is at position
``num_tokens``. What it sees is kept, and what it does not see no later token does: so vLLM frees blocks of a
running request (``get_num_skipped_tokens`` of ``single_type_kv_cache_manager.py``). A window of W tokens
counts the token itself, so that after n tokens ``n - W + 1`` is the first that is kept. Where the last token
of a prompt is computed again, as a decode node does whose peer computed all of it, the next position is
n - 1, and the first that is kept is ``n - W``: that is ``replay=1`` below.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields

from kvconnect.errors import LayoutError

_MOST = 2**31
"""Sizes in a rule are below this: a peer must not make us compute with what no cache has."""


class Retention(ABC):
    """What the layers of one cache group see. A frozen dataclass of positive whole numbers of tokens.

    ``seen`` is monotone: a token that is seen from a position is seen from every position between the two.

    Attributes:
        sees_all: no token is ever out of sight.
        sees_previous: every token sees the one before it; False where that is not so, or not known.
        by_position: blocks hold tokens by position. False: one block holds what is left of all tokens.
        ahead: how many tokens after a position what is kept for it depends on.
    """

    sees_all: bool = False
    sees_previous: bool = False
    by_position: bool = True
    ahead: int = 0

    @abstractmethod
    def seen(self, position: int) -> tuple[range, ...]:
        """The tokens before ``position`` that the token there reads: ranges in order, not empty, apart."""

    def widest(self, num_tokens: int) -> int:
        """A position up to ``num_tokens`` from which most tokens are seen."""
        return num_tokens

    def kept(self, num_tokens: int, replay: int = 0) -> tuple[range, ...]:
        """The first ``num_tokens`` tokens, as far as the next one computed, or a later one, reads them.

        The last ``replay`` of them are computed again: the next one computed is that much earlier.
        """
        begin = max(0, num_tokens - replay)
        return joined((*self.seen(begin), range(begin, num_tokens)))

    def blocks(self, num_tokens: int, block_tokens: int, replay: int = 0) -> tuple[range, ...]:
        """The positions of blocks that hold something of ``kept``."""
        kept = self.kept(num_tokens, replay) if replay else self.seen(num_tokens)
        made = [range(part.start // block_tokens, -(-part.stop // block_tokens)) for part in kept]
        return tuple(made) if len(made) < 2 else joined(made)

    def num_freed(self, num_tokens: int, block_tokens: int) -> int:
        """How many blocks at the beginning the next token and all later ones have no use for."""
        parts = self.seen(num_tokens)
        return (parts[0].start if parts else num_tokens) // block_tokens

    def only_kept(
        self, block_ids: Sequence[int], first: int, num_tokens: int, block_tokens: int, replay: int = 0
    ) -> Sequence[int]:
        """Block ids from position ``first`` on, with 0 for those of which nothing is in ``kept``."""
        if self.sees_all or not self.by_position:
            return block_ids
        made = [0] * len(block_ids)
        for part in self.blocks(num_tokens, block_tokens, replay):
            within = slice(max(0, part.start - first), max(0, part.stop - first))
            made[within] = block_ids[within]
        return made

    def most_blocks(self, num_tokens: int, block_tokens: int, step_tokens: int = 0) -> int:
        """Blocks that a sequence of ``num_tokens`` can hold at once, ``step_tokens`` of it computed in one
        step: what is out of sight is freed before a step, and not while it runs."""
        counts = []
        # At the end too: what is seen may lie apart from the step there, as sinks without a window do.
        for position in (self.widest(num_tokens), num_tokens):
            parts, step = [*self.seen(position)], range(position, position + step_tokens)
            if parts and parts[-1].stop == position:
                step = range(parts.pop().start, step.stop)
            # Plus one: what is seen may begin inside a block.
            counts.append(sum(-(-len(part) // block_tokens) + 1 for part in (*parts, step) if part))
        return min(max(counts), -(-num_tokens // block_tokens))

    def most_blocks_at_end(self, num_tokens: int, block_tokens: int) -> int:
        """The most blocks that are seen from the end of a block; where all are, from ``num_tokens``."""
        position = num_tokens if self.sees_all else self.widest(_MOST)
        return sum(-(-len(part) // block_tokens) for part in self.seen(position))

    @property
    def text(self) -> str:
        """The rule as peers and namespaces know it; ``parse`` reads it."""
        return " ".join((type(self).__name__, *map(str, astuple(self))))  # type: ignore[call-overload]


@dataclass(frozen=True)
class Full(Retention):
    """Every token sees all before it."""

    sees_all = sees_previous = True

    def seen(self, position: int) -> tuple[range, ...]:
        return _span(0, position)


FULL = Full()


@dataclass(frozen=True)
class Window(Retention):
    """A token sees the last ``tokens``, itself among them."""

    tokens: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "sees_previous", self.tokens > 1)

    def seen(self, position: int) -> tuple[range, ...]:
        return _span(position - self.tokens + 1, position)


@dataclass(frozen=True)
class Chunked(Retention):
    """The sequence is cut into chunks of ``tokens``; a token sees its own chunk as far as itself."""

    tokens: int

    def seen(self, position: int) -> tuple[range, ...]:
        return _span(position // self.tokens * self.tokens, position)

    def widest(self, num_tokens: int) -> int:
        return max(min(num_tokens, self.tokens - 1), (num_tokens + 1) // self.tokens * self.tokens - 1)


@dataclass(frozen=True)
class State(Retention):
    """A recurrent state: of all tokens the one before matters, with which the state was updated last."""

    sees_previous = True
    by_position = False

    def seen(self, position: int) -> tuple[range, ...]:
        return _span(position - 1, position)


@dataclass(frozen=True)
class Draft(Retention):
    """A draft model's layers (Eagle): they see as ``of``, and are fed with the token after each position."""

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
    """The rule that a text stands for, by the name of its subclass. Raises ``LayoutError``."""
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
    # As we write it ourselves: no other digits, no leading zeros.
    return text.isdecimal() and len(text) < 11 and text == str(int(text)) and 0 < int(text) < _MOST


def _span(start: int, stop: int) -> tuple[range, ...]:
    start = max(0, start)
    return (range(start, stop),) if start < stop else ()


def joined(parts: Iterable[range]) -> tuple[range, ...]:
    """Ranges in order, those that overlap or touch as one, and none that is empty."""
    made: list[range] = []
    for part in sorted(parts, key=lambda part: part.start):
        if made and part.start <= made[-1].stop:
            made[-1] = range(made[-1].start, max(made[-1].stop, part.stop))
        elif part:
            made.append(part)
    return tuple(made)
