"""Which blocks a hit of a certain length needs, and from that which blocks are worth keeping.

A hit ends at a boundary: a multiple of ``align_tokens``. Up to there it needs every block of a group that
sees the whole sequence, the tail of a window, and of a recurrent state exactly the one after the boundary's
last token. What is kept is derived from what a hit needs, so that nothing is kept that no hit can use. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvconnect.arithmetic import div_ceil
from kvconnect.cache.specs import KVCacheGroup
from kvconnect.errors import ConfigError

Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class HitGroup:
    """What a hit needs of one cache group.

    ``window`` in tokens, None for a group that sees the whole sequence. What a draft layer keeps of a token
    depends on the token after it: a block of such a group is known by the name of the block after it, which
    covers that token.
    """

    group: int
    block_tokens: int
    window: int | None = None
    is_state: bool = False
    is_draft: bool = False

    @property
    def is_whole(self) -> bool:
        """A hit needs every block from the first on."""
        return self.window is None and not self.is_state

    def first_needed(self, num_tokens: int) -> int:
        """The first position whose block is read when token ``num_tokens`` is computed."""
        if self.is_state:
            return max(0, num_tokens // self.block_tokens - 1)
        if self.window is None:
            return 0
        return min(max(0, num_tokens - self.window + 1), num_tokens) // self.block_tokens

    def num_named(self, num_tokens: int) -> int:
        """How many positions have a name once ``num_tokens`` tokens are known."""
        return max(0, num_tokens // self.block_tokens - self.is_draft)

    def names(self, hashes: Sequence[bytes], first: int, end: int) -> Sequence[bytes]:
        """What the blocks at ``first`` to ``end - 1`` are known by, as far as ``hashes`` of blocks go."""
        return hashes[first + self.is_draft : max(0, end + self.is_draft)]


def hit_groups(
    groups: Sequence[KVCacheGroup], kept: Iterable[int], align_tokens: int, draft_groups: Iterable[int] = ()
) -> tuple[HitGroup, ...]:
    """The groups of a cache that are kept. A state is known by the hash at its token count."""
    drafts = frozenset(draft_groups)
    made = []
    for index in sorted(kept):
        spec = groups[index]
        block_tokens = align_tokens if spec.is_state else spec.block_size
        made.append(HitGroup(index, block_tokens, spec.sliding_window, spec.is_state, index in drafts))
    return tuple(made)


class HitRequirements:
    """What hits need, and what is kept for them.

    Args:
        groups: the cache groups that are kept.
        align_tokens: hits end at multiples of this.

    Raises:
        ConfigError: a group's blocks do not fit in ``align_tokens``, or there is no group.
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

    def last_boundary(self, num_tokens: int) -> int:
        """The last boundary that a hit can end at when ``num_tokens`` tokens are known; 0 for none."""
        return max(0, num_tokens - self.ahead_tokens) // self.align_tokens * self.align_tokens

    def needed(self, boundary: int, start_tokens: int = 0) -> dict[int, range]:
        """By group the positions that a hit of this length needs, of which ``start_tokens`` are at hand."""
        return {
            group.group: range(
                max(group.first_needed(boundary), start_tokens // group.block_tokens),
                boundary // group.block_tokens,
            )
            for group in self.groups
        }

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
        """By group, of those with windows and states, the positions that hits at these boundaries need.

        Ranges are in order and apart.
        """
        found: dict[int, tuple[range, ...]] = {}
        for group in self.partial:
            ranges: list[range] = []
            for boundary in sorted(boundaries):
                first, end = group.first_needed(boundary), boundary // group.block_tokens
                if ranges and first <= ranges[-1].stop:
                    first = ranges.pop().start
                if first < end:
                    ranges.append(range(first, end))
            found[group.group] = tuple(ranges)
        return found

    def lasts(self, group: HitGroup, position: int) -> bool:
        """Whether a block is still needed at the first boundary after it."""
        boundary = div_ceil((position + 1) * group.block_tokens, self.align_tokens) * self.align_tokens
        return group.first_needed(boundary) <= position

    def longest(self, start_tokens: int, limit_tokens: int, flags: Mapping[int, Flags]) -> int:
        """The longest hit up to ``limit_tokens``; ``start_tokens`` if none is longer than that.

        ``flags`` say, for every group with a window or a state, which positions are known, from the one that
        holds token ``start_tokens`` on; whatever is before that is at hand.
        """
        align = self.align_tokens
        ends = np.arange(start_tokens // align + 1, limit_tokens // align + 1, dtype=np.int64) * align
        for group in self.partial:
            if not len(ends):
                break
            known, size = flags[group.group], group.block_tokens
            offset = start_tokens // size
            last = ends // size - offset - 1
            inside = last < len(known)
            ends, last = ends[inside], last[inside]
            if group.is_state:
                ends = ends[known[last]]
                continue
            missing = np.where(known, -1, np.arange(len(known)))
            first = np.maximum(offset, np.maximum(0, ends - (group.window or 1) + 1) // size) - offset
            ends = ends[np.maximum.accumulate(missing)[last] < first] if len(known) else ends
        return int(ends[-1]) if len(ends) else start_tokens

    def hit(
        self,
        start_tokens: int,
        max_tokens: int,
        run: Callable[[HitGroup, int, int], int],
        known: Callable[[HitGroup, int, int], Sequence[bool]],
    ) -> tuple[int, int]:
        """The longest hit, and how long it could be if all windows and states were known.

        At most ``max_tokens``, of which ``start_tokens`` are at hand. ``known`` says of a group, from one
        position to before another, which blocks are known, and ``run`` how many are, from the first on.
        """
        limit = self.last_boundary(max_tokens)
        for group in self.whole:
            first = start_tokens // group.block_tokens
            limit = min(limit, (first + run(group, first, limit // group.block_tokens)) * group.block_tokens)
        limit = limit // self.align_tokens * self.align_tokens
        if limit <= start_tokens:
            return start_tokens, start_tokens
        if not self.partial:
            return limit, limit
        flags = {}
        for group in self.partial:
            first, end = start_tokens // group.block_tokens, limit // group.block_tokens
            flags[group.group] = np.array(known(group, first, end), dtype=np.bool_)
        return self.longest(start_tokens, limit, flags), limit

    def least_rows(self, min_tokens: int = 1) -> dict[int, int]:
        """By group the rows without which there can be no hit at all, of at least ``min_tokens``."""
        shortest = div_ceil(max(1, min_tokens), self.align_tokens) * self.align_tokens
        return {
            group.group: max(
                1,
                *(
                    boundary // group.block_tokens - group.first_needed(boundary)
                    for boundary in self._boundaries_of(group, shortest)
                ),
            )
            for group in self.groups
        }

    def most_tokens(self, limits: Mapping[int, int]) -> int:
        """The longest hit that can be kept with so many rows by group."""
        most = [limits[group.group] * group.block_tokens for group in self.whole]
        return min(most) // self.align_tokens * self.align_tokens if most else 1 << 62

    def _boundaries_of(self, group: HitGroup, shortest: int) -> tuple[int, ...]:
        """Boundaries at which a group needs the most that it ever must."""
        if group.window is None:
            return (shortest,)
        return (shortest, div_ceil(group.window, self.align_tokens) * self.align_tokens)
