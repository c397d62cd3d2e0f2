"""Which blocks a simulated request has: given, reused, and freed when they leave a window."""

from __future__ import annotations

from collections.abc import Sequence

from kvconnect.cache.specs import KVCacheGroup
from tests.simulator.pool import NULL_BLOCK, Pool
from tests.simulator.request import Request


class Blocks:
    """Gives blocks of a pool to requests, group by group.

    Args:
        reuses_prefixes: the beginning of a prompt is taken from blocks that hold it.
    """

    def __init__(self, pool: Pool, groups: Sequence[KVCacheGroup], reuses_prefixes: bool) -> None:
        self.pool = pool
        self._groups = groups
        self._sizes = [group.block_size for group in groups]
        self._reuses_prefixes = reuses_prefixes

    def begin(self, request: Request) -> None:
        """A request without blocks."""
        request.ids = [[] for _ in self._sizes]
        request.left = [0] * len(self._sizes)

    def hit(self, request: Request) -> tuple[int, list[list[int]]]:
        """The tokens of the prompt that are in blocks already, at most all but one, and these blocks."""
        found: list[list[int]] = [[] for _ in self._sizes]
        if not self._reuses_prefixes:
            return 0, found
        size = self._sizes[0]
        for index in range((request.num_tokens - 1) // size):
            name = request.prompt.name_of_block((index + 1) * size)
            blocks = [self.pool.find((group, name, index)) for group in range(len(self._sizes))]
            if None in blocks:
                break
            for ids, block in zip(found, blocks, strict=True):
                ids.append(block or 0)
        return len(found[0]) * size, found

    def remember(self, request: Request) -> None:
        """What a request's full blocks hold."""
        if not self._reuses_prefixes:
            return
        for group, ids in enumerate(request.ids):
            size = self._sizes[group]
            for index in range(min(request.computed, request.num_prompt) // size):
                self.pool.remember(
                    (group, request.prompt.name_of_block((index + 1) * size), index), ids[index]
                )

    def grow(
        self, request: Request, computed: int, num_tokens: int, reused: Sequence[Sequence[int]] = ()
    ) -> list[list[int]] | None:
        """Room for so many tokens, of which ``computed`` are there. The new blocks; None: no room."""
        wanted = []
        kept = [self._first_kept(index, computed) for index in range(len(self._sizes))]
        for index in range(len(self._sizes)):
            have = len(request.ids[index]) + len(reused[index] if reused else ())
            total = self._needed(index, num_tokens)
            skipped = max(0, min(total, kept[index]) - have)
            wanted.append((skipped, max(0, total - have - skipped)))
        taken_back = sum(self.pool.is_free(block) for ids in reused for block in ids)
        if sum(count for _, count in wanted) + taken_back > self.pool.free + self._leaving(request, kept):
            return None
        new: list[list[int]] = []
        for index in range(len(self._sizes)):
            self._leave_window(request, index, kept[index])
            if reused:
                self.pool.share(reused[index])
                request.ids[index].extend(reused[index])
        for index, (skipped, count) in enumerate(wanted):
            new.append([NULL_BLOCK] * skipped + self.pool.take(count))
            request.ids[index].extend(new[-1])
        return new

    def most(self, request: Request) -> int:
        """The blocks that a request needs if nothing leaves a window."""
        return sum(self._needed(index, request.num_tokens) for index in range(len(self._sizes)))

    def free(self, request: Request) -> None:
        """A request gives all its blocks back."""
        for ids in request.ids:
            self.pool.release(ids)
        self.begin(request)

    def _needed(self, index: int, num_tokens: int) -> int:
        return self._groups[index].num_positions(num_tokens)

    def _first_kept(self, index: int, next_token: int) -> int:
        rule = self._groups[index].retention
        return rule.num_freed(next_token, self._sizes[index]) if rule.by_position else 0

    def _leaving(self, request: Request, kept: Sequence[int]) -> int:
        leaving = 0
        for ids, left, first in zip(request.ids, request.left, kept, strict=True):
            if first > left:
                leaving += sum(block != NULL_BLOCK for block in ids[left:first])
        return leaving

    def _leave_window(self, request: Request, index: int, kept: int) -> None:
        ids, left = request.ids[index], request.left[index]
        kept = min(kept, len(ids))
        if kept > left:
            self.pool.release(ids[left:kept])
            ids[left:kept] = [NULL_BLOCK] * (kept - left)
            request.left[index] = kept
