"""Hit requirements: the blocks that a hit of a given length needs, hence the blocks that are worth keeping.

A hit, a prompt prefix to restore, ends at a boundary: a multiple of ``align_tokens``. It needs every block
of a full-attention group, the tail of a window, and the recurrent state after its last token. The module
knows neither requests nor where blocks are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvconnect.cache.retention import Draft, Retention, joined
from kvconnect.cache.specs import KVCacheGroup, div_ceil
from kvconnect.errors import ConfigError

_NO_END = 1 << 62
_FIRST_LOOK, _GROWTH = 16, 8


@dataclass(frozen=True)
class HitGroup:
    """The blocks of one cache group that a hit needs, and their names.

    A draft layer's KV of a token depends on the next token too, so a draft group names each block by the hash
    of the next block, which covers that token.
    """

    group: int
    block_tokens: int
    retention: Retention

    @property
    def is_whole(self) -> bool:
        return self.retention.sees_all

    @property
    def is_state(self) -> bool:
        return not self.retention.by_position

    @property
    def is_draft(self) -> bool:
        return self.retention.ahead > 0

    def needed(self, num_tokens: int, start_tokens: int = 0) -> tuple[range, ...]:
        """Positions of blocks that token ``num_tokens`` reads, without those before ``start_tokens``."""
        first, parts = start_tokens // self.block_tokens, self.retention.blocks(num_tokens, self.block_tokens)
        return tuple(range(max(first, part.start), part.stop) for part in parts if part.stop > first)

    def held(self, num_tokens: int) -> tuple[range, ...]:
        """Positions whose blocks a running request still holds once ``num_tokens`` are computed."""
        return (*self.needed(num_tokens), range(num_tokens // self.block_tokens, _NO_END))

    def num_named(self, num_tokens: int) -> int:
        """The number of positions that have a name once ``num_tokens`` tokens are known."""
        return max(0, num_tokens // self.block_tokens - self.is_draft)

    def names(self, hashes: Sequence[bytes], first: int, end: int) -> Sequence[bytes]:
        """The names of the blocks ``first`` to ``end - 1``, fewer if ``hashes`` ends before."""
        return hashes[first + self.is_draft : max(0, end + self.is_draft)]


class HitRequirements:
    """The hit requirements of ``groups``, and the boundaries at which windows and states are kept.

    Raises ``ConfigError``: there is no group, or a group's block size does not divide ``align_tokens``.
    """

    def __init__(self, groups: Sequence[HitGroup], align_tokens: int) -> None:
        if not groups or align_tokens < 1:
            raise ConfigError(
                f"offload needs cache groups and an alignment; it has {len(groups)} groups, "
                f"and align_tokens is {align_tokens}"
            )
        for group in groups:
            if align_tokens % group.block_tokens:
                raise ConfigError(
                    f"cache group {group.group} has blocks of {group.block_tokens} tokens, and hits are "
                    f"aligned to {align_tokens}: the block size must divide it. Hybrid models (for example "
                    "Mamba and attention) need prefix caching enabled so that block sizes are aligned"
                )
        self.groups = tuple(groups)
        self.align_tokens = align_tokens
        self.ahead_tokens = max((group.block_tokens for group in groups if group.is_draft), default=0)
        """The tokens that must be known beyond a boundary, for the names of draft groups."""
        self.whole = tuple(group for group in groups if group.is_whole)
        self.partial = tuple(group for group in groups if not group.is_whole)

    @classmethod
    def of(
        cls,
        groups: Sequence[KVCacheGroup],
        kept: Iterable[int],
        align_tokens: int,
        draft_groups: Collection[int] = (),
    ) -> HitRequirements:
        """The requirements of the ``kept`` indexes of ``groups``; ``draft_groups`` hold draft layers."""
        made = []
        for index in sorted(kept):
            rule = groups[index].retention
            # A state is named by the hash of the tokens that it covers.
            block_tokens = groups[index].block_size if rule.by_position else align_tokens
            made.append(HitGroup(index, block_tokens, Draft(rule) if index in draft_groups else rule))
        return cls(made, align_tokens)

    def last_boundary(self, num_tokens: int) -> int:
        """The last boundary at which a hit can end when ``num_tokens`` tokens are known; 0 for none."""
        return max(0, num_tokens - self.ahead_tokens) // self.align_tokens * self.align_tokens

    def boundaries(self, num_tokens: int, checkpoint_tokens: int) -> tuple[int, ...]:
        """The boundaries at which windows and states of a prompt are kept, in order.

        They are the last boundary for the same prompt (whose last token must be computed), the last one for a
        longer prompt, and one every ``checkpoint_tokens`` before; 0 for none of the latter.
        """
        found = {self.last_boundary(num_tokens - 1), self.last_boundary(num_tokens)}
        if checkpoint_tokens:
            step = div_ceil(checkpoint_tokens, self.align_tokens) * self.align_tokens
            found.update(range(step, self.last_boundary(num_tokens), step))
        return tuple(sorted(found - {0}))

    def kept(self, boundaries: Sequence[int]) -> dict[int, tuple[range, ...]]:
        """By window or state group the positions that hits at these boundaries need, as disjoint ranges."""
        return {
            group.group: joined(part for boundary in boundaries for part in group.needed(boundary))
            for group in self.partial
        }

    def lasts(self, group: HitGroup, position: int) -> bool:
        """Whether a hit at the first boundary after a block needs the block."""
        boundary = div_ceil((position + 1) * group.block_tokens, self.align_tokens) * self.align_tokens
        return any(position in part for part in group.needed(boundary))

    def hit(
        self,
        start_tokens: int,
        max_tokens: int,
        known: Callable[[HitGroup, int, int], Sequence[bool]],
    ) -> tuple[int, int]:
        """The longest hit, and its length if all windows and states were known; both in tokens.

        At most ``max_tokens``; ``start_tokens``, which the request has already, stand for no hit.
        ``known(group, first, end)`` returns a flag for each position.
        """
        limit = self.last_boundary(max_tokens)
        for group in self.whole:
            first, end = start_tokens // group.block_tokens, limit // group.block_tokens
            limit = min(limit, (first + _run(known, group, first, end)) * group.block_tokens)
        limit = limit // self.align_tokens * self.align_tokens
        if limit <= start_tokens:
            return start_tokens, start_tokens
        flags = {}
        for group in self.partial:
            first, end = start_tokens // group.block_tokens, limit // group.block_tokens
            flags[group.group] = bytes(known(group, first, end)).ljust(end - first, b"\0")
        longest = limit
        while longest > start_tokens:
            missing = (self._first_missing(group, start_tokens, longest, flags) for group in self.partial)
            token = next((token for token in missing if token is not None), None)
            if token is None:
                return longest, limit
            # Every longer hit, up to the one just tried, needs the missing block too.
            longest = token // self.align_tokens * self.align_tokens
        return start_tokens, limit

    def _first_missing(
        self, group: HitGroup, start_tokens: int, end: int, flags: Mapping[int, bytes]
    ) -> int | None:
        """The first token of an unknown block that all hits from there to ``end`` need; None for none.

        ``flags`` has a byte for each position from that of ``start_tokens`` on: 1 if the block is known.
        """
        offset, known = start_tokens // group.block_tokens, flags[group.group]
        last = end // group.block_tokens - offset
        if group.retention.sees_previous and not known[last - 1]:
            return (offset + known.rfind(1, 0, last) + 1) * group.block_tokens
        for part in group.needed(end, start_tokens):
            at = known.find(0, part.start - offset, part.stop - offset)
            if at >= 0:
                return (offset + at) * group.block_tokens
        return None

    def least_rows(self, min_tokens: int = 1) -> dict[int, int]:
        """By group the rows that the shortest hit of at least ``min_tokens`` needs."""
        shortest = div_ceil(max(1, min_tokens), self.align_tokens) * self.align_tokens
        return {
            group.group: max(1, group.retention.most_blocks_at_end(shortest, group.block_tokens))
            for group in self.groups
        }

    def most_tokens(self, limits: Mapping[int, int]) -> int:
        """The longest hit, in tokens, that ``limits`` rows by group can hold."""
        most = [limits[group.group] * group.block_tokens for group in self.whole]
        return min(most) // self.align_tokens * self.align_tokens if most else 1 << 62


def _run(known: Callable[[HitGroup, int, int], Sequence[bool]], group: HitGroup, first: int, end: int) -> int:
    """The number of known blocks from ``first`` on, in growing stretches, since most prompts are new."""
    at, stride = first, _FIRST_LOOK
    while at < end:
        flags = known(group, at, min(at + stride, end))
        if not all(flags) or not flags:
            return at - first + [*flags, False].index(False)
        at, stride = at + len(flags), stride * _GROWTH
    return at - first
