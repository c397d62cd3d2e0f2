"""Which blocks a hit of a certain length needs, and from that which blocks are worth keeping.

A hit ends at a boundary: a multiple of ``align_tokens``. Up to there it needs every block of a group that
sees the whole sequence, the tail of a window, and of a recurrent state the one after its last token.
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
    """What a hit needs of one cache group. A draft layer's block is known by the name of the one after it.

    What such a layer keeps of a token depends on the token after it, which that name covers.
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
        """The positions of blocks that token ``num_tokens`` reads; the first ``start_tokens`` are at hand."""
        first, parts = start_tokens // self.block_tokens, self.retention.blocks(num_tokens, self.block_tokens)
        return tuple(range(max(first, part.start), part.stop) for part in parts if part.stop > first)

    def held(self, num_tokens: int) -> tuple[range, ...]:
        """The positions whose blocks are a running request's, of which so many tokens are computed."""
        return (*self.needed(num_tokens), range(num_tokens // self.block_tokens, _NO_END))

    def num_named(self, num_tokens: int) -> int:
        """How many positions have a name once ``num_tokens`` tokens are known."""
        return max(0, num_tokens // self.block_tokens - self.is_draft)

    def names(self, hashes: Sequence[bytes], first: int, end: int) -> Sequence[bytes]:
        """What the blocks at ``first`` to ``end - 1`` are known by, as far as ``hashes`` of blocks go."""
        return hashes[first + self.is_draft : max(0, end + self.is_draft)]


class HitRequirements:
    """What hits of ``groups`` need, and what is kept for them.

    Raises ``ConfigError``: there is no group, or blocks of one do not fit in ``align_tokens``.
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
        """How far beyond a boundary tokens must be known, for the names of draft groups."""
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
        """Those of the groups that are ``kept``; ``draft_groups`` have layers that read one token ahead."""
        made = []
        for index in sorted(kept):
            rule = groups[index].retention
            # A state is known by the hash at its token count.
            block_tokens = groups[index].block_size if rule.by_position else align_tokens
            made.append(HitGroup(index, block_tokens, Draft(rule) if index in draft_groups else rule))
        return cls(made, align_tokens)

    def last_boundary(self, num_tokens: int) -> int:
        """The last boundary that a hit can end at when so many tokens are known; 0 for none."""
        return max(0, num_tokens - self.ahead_tokens) // self.align_tokens * self.align_tokens

    def boundaries(self, num_tokens: int, checkpoint_tokens: int) -> tuple[int, ...]:
        """Where windows and states are kept of a prompt, in order.

        Its last boundaries, for the same prompt (whose last token must be computed) and for a longer one,
        and every ``checkpoint_tokens`` before; 0 for none of these.
        """
        found = {self.last_boundary(num_tokens - 1), self.last_boundary(num_tokens)}
        if checkpoint_tokens:
            step = div_ceil(checkpoint_tokens, self.align_tokens) * self.align_tokens
            found.update(range(step, self.last_boundary(num_tokens), step))
        return tuple(sorted(found - {0}))

    def kept(self, boundaries: Sequence[int]) -> dict[int, tuple[range, ...]]:
        """By group with a window or a state what hits at these boundaries need; ranges in order and apart."""
        return {
            group.group: joined(part for boundary in boundaries for part in group.needed(boundary))
            for group in self.partial
        }

    def lasts(self, group: HitGroup, position: int) -> bool:
        """Whether a block is still needed at the first boundary after it."""
        boundary = div_ceil((position + 1) * group.block_tokens, self.align_tokens) * self.align_tokens
        return any(position in part for part in group.needed(boundary))

    def hit(
        self,
        start_tokens: int,
        max_tokens: int,
        known: Callable[[HitGroup, int, int], Sequence[bool]],
        run: Callable[[HitGroup, int, int], int] | None = None,
    ) -> tuple[int, int]:
        """The longest hit, and how long it could be if all windows and states were known.

        At most ``max_tokens``, of which ``start_tokens`` are at hand. ``known`` reports of a group, from one
        position to before another, which blocks are known, and ``run`` how many are, from the first on, where
        that is found faster.
        """
        limit = self.last_boundary(max_tokens)
        for group in self.whole:
            first, end = start_tokens // group.block_tokens, limit // group.block_tokens
            length = run(group, first, end) if run is not None else _run(known, group, first, end)
            limit = min(limit, (first + length) * group.block_tokens)
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
            # What is seen from here is seen from every boundary after it.
            longest = token // self.align_tokens * self.align_tokens
        return start_tokens, limit

    def _first_missing(
        self, group: HitGroup, start_tokens: int, end: int, flags: Mapping[int, bytes]
    ) -> int | None:
        """Where a block begins that is not known, and that all hits from there to ``end`` need.

        ``flags`` are 1 for each position that is known, from that of ``start_tokens`` on.
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
        """By group the rows without which there can be no hit at all, of at least ``min_tokens``."""
        shortest = div_ceil(max(1, min_tokens), self.align_tokens) * self.align_tokens
        return {
            group.group: max(1, group.retention.most_blocks_at_end(shortest, group.block_tokens))
            for group in self.groups
        }

    def most_tokens(self, limits: Mapping[int, int]) -> int:
        """The longest hit that can be kept with so many rows by group."""
        most = [limits[group.group] * group.block_tokens for group in self.whole]
        return min(most) // self.align_tokens * self.align_tokens if most else 1 << 62


def _run(known: Callable[[HitGroup, int, int], Sequence[bool]], group: HitGroup, first: int, end: int) -> int:
    """How many blocks are known, looked at in stretches that grow: most prompts are new."""
    at, stride = first, _FIRST_LOOK
    while at < end:
        flags = known(group, at, min(at + stride, end))
        if not all(flags) or not flags:
            return at - first + [*flags, False].index(False)
        at, stride = at + len(flags), stride * _GROWTH
    return at - first
