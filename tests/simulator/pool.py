"""The block pool of a simulated node: hands freed blocks out again at once, the last one freed first.

Blocks whose content is the beginning of a prompt can be reused until they are given to somebody else.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence

from kvconnect.errors import LocalError

NULL_BLOCK = 0


class Pool:
    """Block ids from 1 on.

    Args:
        num_blocks: with the null block.
        given_away: told of blocks that are somebody else's from now on.
        spoils_freed: those that nobody has are so already, and not only once somebody takes them.
    """

    def __init__(
        self, num_blocks: int, given_away: Callable[[Sequence[int]], None], spoils_freed: bool = True
    ) -> None:
        self._spoils_freed = spoils_freed
        self._references = [0] * num_blocks
        self._free = list(range(num_blocks - 1, 0, -1))
        self._given_away = given_away
        self._block_of: dict[Hashable, int] = {}
        self._key_of: dict[int, Hashable] = {}

    @property
    def total(self) -> int:
        """Blocks that requests can have."""
        return len(self._references) - 1

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def held(self) -> int:
        """Blocks that somebody holds."""
        return len(self._references) - self._references.count(0)

    def is_free(self, block: int) -> bool:
        """Nobody holds it."""
        return self._references[block] == 0

    def holders(self, block: int) -> int:
        """How many requests hold it."""
        return self._references[block]

    def take(self, count: int) -> list[int]:
        """Free blocks, whatever is in them.

        Raises:
            LocalError: there are fewer.
        """
        if count > len(self._free):
            raise LocalError(f"{count} blocks are wanted, {len(self._free)} are free")
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._references[block] = 1
            key = self._key_of.pop(block, None)
            if key is not None:
                del self._block_of[key]
        if taken:
            self._given_away(taken)
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Hold blocks for one more request, free ones too: their content is reused."""
        for block in blocks:
            if block != NULL_BLOCK:
                if not self._references[block]:
                    self._free.remove(block)
                self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """A request has no use for these any more.

        Raises:
            LocalError: nobody holds one of them.
        """
        spoiled = []
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            if not self._references[block]:
                raise LocalError(f"block {block} is released, but nobody holds it")
            self._references[block] -= 1
            if self._references[block]:
                continue
            if block in self._key_of:
                self._free.insert(0, block)
            else:
                self._free.append(block)
                spoiled.append(block)
        if spoiled and self._spoils_freed:
            self._given_away(spoiled)

    def remember(self, key: Hashable, block: int) -> None:
        """What a block holds; the first block of a content stays the one that is known."""
        if block != NULL_BLOCK and key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def find(self, key: Hashable) -> int | None:
        """A block that holds this."""
        return self._block_of.get(key)
