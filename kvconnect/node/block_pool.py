"""The pool of block ids that all cache groups share, and which free blocks still hold known content.

Owns reference counts, the free list and the prefix map. A block is free (no references, possibly with
content that a later request may reuse) or held. Block 0 is the null block and is never given out. This
file knows nothing of requests, tokens or tensors.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from kvconnect.errors import ConfigError, LocalError

NULL_BLOCK = 0
# A block's content is known by its cache group and the hash of all tokens up to its end.
ContentKey = tuple[int, bytes]


class BlockPool:
    """Ids ``1 + reserved .. num_blocks - 1``; the first ``reserved`` ids after 0 are never used.

    Reserving makes the ids of two nodes differ, so that mixing up theirs and ours cannot go unnoticed.

    Raises:
        ConfigError: nothing would be left.
    """

    def __init__(self, num_blocks: int, reserved: int = 0) -> None:
        if reserved < 0 or num_blocks - 1 - reserved < 1:
            raise ConfigError(
                f"num_blocks is {num_blocks} and reserved_blocks {reserved}: with the null block that leaves "
                f"{num_blocks - 1 - reserved} usable blocks, at least 1 is needed"
            )
        self.reserved = reserved
        self._references = [0] * num_blocks
        self._first = 1 + reserved
        # Least recently freed first. Blocks without content are put in front: they cost nothing to reuse.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(self._first, num_blocks))
        self._block_of: dict[ContentKey, int] = {}
        self._key_of: dict[int, ContentKey] = {}

    @property
    def total(self) -> int:
        """Blocks that requests can have."""
        return len(self._references) - self._first

    @property
    def num_free(self) -> int:
        """Blocks without references."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        """Blocks with references."""
        return self.total - len(self._free)

    def is_free(self, block_id: int) -> bool:
        """The block has no references."""
        return block_id in self._free

    def has_one_holder(self, block_id: int) -> bool:
        """Releasing the block once would make it free."""
        return self._references[block_id] == 1

    def allocate(self, count: int) -> list[int]:
        """Take free blocks; their old content is forgotten.

        Raises:
            LocalError: fewer than ``count`` are free. None is taken then.
        """
        if count > len(self._free):
            raise LocalError(f"{count} blocks wanted, {len(self._free)} of {self.total} are free")
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block_id in taken:
            self._forget(block_id)
            self._references[block_id] = 1
        return taken

    def hold(self, block_ids: Iterable[int]) -> None:
        """Add a reference to blocks whose content is reused."""
        for block_id in block_ids:
            if block_id != NULL_BLOCK:
                self._free.pop(block_id, None)
                self._references[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop one reference of each block; null blocks are skipped. The last ones are reused first.

        Raises:
            LocalError: a block has no reference.
        """
        for block_id in reversed(block_ids):
            if block_id == NULL_BLOCK:
                continue
            if self._references[block_id] < 1:
                raise LocalError(f"block {block_id} is released but nobody holds it")
            self._references[block_id] -= 1
            if self._references[block_id] == 0:
                self._free[block_id] = None
                if block_id not in self._key_of:
                    self._free.move_to_end(block_id, last=False)

    def remember(self, key: ContentKey, block_id: int) -> None:
        """Record a held block's content. The first block with a content stays the known one."""
        if key not in self._block_of and block_id not in self._key_of:
            self._block_of[key] = block_id
            self._key_of[block_id] = key

    def find(self, key: ContentKey) -> int | None:
        """A block with this content, free or held."""
        return self._block_of.get(key)

    def _forget(self, block_id: int) -> None:
        key = self._key_of.pop(block_id, None)
        if key is not None:
            del self._block_of[key]

    def check(self) -> None:
        """Prove the pool's invariants.

        Raises:
            LocalError: one does not hold; the text says which.
        """
        for block_id in range(self._first):
            if self._references[block_id] or block_id in self._free or block_id in self._key_of:
                raise LocalError(f"block {block_id} is null or reserved, but is in use")
        for block_id in range(self._first, len(self._references)):
            if (self._references[block_id] == 0) != (block_id in self._free):
                raise LocalError(
                    f"block {block_id} has {self._references[block_id]} references and is "
                    f"{'free' if block_id in self._free else 'not free'}"
                )
        held = sum(1 for count in self._references if count)
        if held + len(self._free) != self.total:
            raise LocalError(f"{held} blocks held and {len(self._free)} free make not {self.total}")
        if {key: block for block, key in self._key_of.items()} != self._block_of:
            raise LocalError("the prefix map and its inverse differ")
