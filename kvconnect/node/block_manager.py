"""The blocks of all requests: a pool shared by all cache groups, and each request's blocks.

Blocks that no later token reads are freed, and the null block takes their place in the table. A state group
has one block per request.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvconnect.cache.specs import KVCacheConfig, div_ceil
from kvconnect.errors import ConfigError, LocalError

if TYPE_CHECKING:
    from kvconnect.node.request import Request

NULL_BLOCK = 0
HASH_SCHEME = "blake2b-128 of all int32 tokens so far"
_DIGEST_BYTES = 16
# A block's content is identified by its cache group and the hash of all tokens up to its end.
ContentKey = tuple[int, bytes]


class PrefixHashes(list[bytes]):
    """The hashes of a request's whole blocks, each over all tokens up to the end of its block.

    So hashes at the same token are equal for any block size, also on another node, for requests of one
    ``salt``.
    """

    def __init__(self, block_tokens: int, salt: str = "") -> None:
        self._block_tokens = block_tokens
        self._so_far = hashlib.blake2b(salt.encode(), digest_size=_DIGEST_BYTES)

    def extend_to(self, token_ids: Sequence[int]) -> None:
        """Add the missing hashes of all whole blocks of ``token_ids``."""
        first, stop = (
            count * self._block_tokens for count in (len(self), len(token_ids) // self._block_tokens)
        )
        if first >= stop:
            return
        added = np.asarray(token_ids[first:stop], dtype=np.int32).tobytes()
        width = self._block_tokens * 4
        for start in range(0, len(added), width):
            self._so_far.update(added[start : start + width])
            self.append(self._so_far.copy().digest())


class BlockPool:
    """Ids ``1 + reserved .. num_blocks - 1``; 0 is the null block, and the next ``reserved`` are never used.

    Reserving makes the ids of two nodes differ, so that a mix-up of both cannot go unnoticed. A block is
    held, or free: then it has no references, and perhaps content that a later request may reuse.

    Raises ``ConfigError`` if no usable block is left.
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
        # Least recently freed first. Blocks without content go to the front: reusing them loses nothing.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(self._first, num_blocks))
        self.reused: list[int] = []
        """Watched blocks that were allocated again, until ``take_reused``."""
        self._watched: set[int] = set()
        self._block_of: dict[ContentKey, int] = {}
        self._key_of: dict[int, ContentKey] = {}

    @property
    def total(self) -> int:
        """The number of blocks that requests can have."""
        return len(self._references) - self._first

    @property
    def num_free(self) -> int:
        """The number of blocks without references."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        """The number of blocks with references."""
        return self.total - len(self._free)

    def is_free(self, block_id: int) -> bool:
        """Whether the block has no references."""
        return block_id in self._free

    def has_one_holder(self, block_id: int) -> bool:
        """Whether one release would free the block."""
        return self._references[block_id] == 1

    def allocate(self, count: int) -> list[int]:
        """Take free blocks and drop their old content.

        Raises ``LocalError`` if fewer than ``count`` are free; then none is taken.
        """
        if count > len(self._free):
            raise LocalError(f"{count} blocks wanted, {len(self._free)} of {self.total} are free")
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block_id in taken:
            if key := self._key_of.pop(block_id, None):
                del self._block_of[key]
                if block_id in self._watched:
                    self._watched.remove(block_id)
                    self.reused.append(block_id)
            self._references[block_id] = 1
        return taken

    def hold(self, block_ids: Iterable[int]) -> None:
        """Add a reference to blocks whose content is reused; null blocks are skipped."""
        for block_id in block_ids:
            if block_id != NULL_BLOCK:
                self._free.pop(block_id, None)
                self._references[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop one reference of each block; null blocks are skipped. Later blocks are reused first.

        Raises ``LocalError`` for a block without references.
        """
        for block_id in reversed(block_ids):
            if block_id == NULL_BLOCK:
                continue
            if self._references[block_id] < 1:
                raise LocalError(f"block {block_id} is released but has no holder")
            self._references[block_id] -= 1
            if self._references[block_id] == 0:
                self._free[block_id] = None
                if block_id not in self._key_of:
                    self._free.move_to_end(block_id, last=False)

    def remember(self, key: ContentKey, block_id: int) -> None:
        """Record a held block's content if the content is new."""
        if key not in self._block_of and block_id not in self._key_of:
            self._block_of[key] = block_id
            self._key_of[block_id] = key

    def watch(self, group: int, hashes: Sequence[bytes]) -> Sequence[int]:
        """See ``PrefixPool``."""
        found = [self._block_of.get((group, name), NULL_BLOCK) for name in hashes]
        self._watched.update(filter(None, found))
        return found

    def take_reused(self) -> Sequence[int]:
        """See ``PrefixPool``."""
        if not self.reused:
            return ()
        reused, self.reused = self.reused, []
        return reused

    def refresh(self, block_ids: Sequence[int]) -> None:
        """See ``PrefixPool``."""
        for block_id in reversed(block_ids):
            if block_id in self._free and block_id in self._key_of:
                self._free.move_to_end(block_id)

    def find(self, key: ContentKey) -> int | None:
        """A block with this content, free or held; None without one."""
        return self._block_of.get(key)


@dataclass(frozen=True)
class CacheHit:
    """A reusable prefix: its length in tokens, and its blocks by group and position."""

    num_tokens: int
    blocks: tuple[tuple[int, ...], ...]


@dataclass
class RequestBlocks:
    """The blocks of one request: ids by group and position, and the content hashes of its full blocks.

    By group, ``left`` counts the leading positions that no later token reads, and ``remembered`` those whose
    content was recorded in the pool.
    """

    ids: list[list[int]]
    left: list[int]
    remembered: list[int]
    hashes: dict[int, PrefixHashes] = field(default_factory=dict)
    salt: str = ""

    def snapshot(self) -> tuple[list[int], ...]:
        """Copies of the id lists, one per group."""
        return tuple(list(ids) for ids in self.ids)

    def content_hashes(self, token_ids: Sequence[int], block_tokens: int) -> Sequence[bytes]:
        """The hashes of all whole blocks of ``block_tokens``. ``token_ids`` must extend earlier calls'."""
        hashes = self.hashes.get(block_tokens)
        if hashes is None:
            hashes = self.hashes[block_tokens] = PrefixHashes(block_tokens, self.salt)
        hashes.extend_to(token_ids)
        return hashes


@dataclass(frozen=True)
class Grown:
    """The blocks that an allocation added: all ids by group, and those of attention groups to be zeroed."""

    new_ids: tuple[list[int], ...]
    new_block_ids_to_zero: list[int]


class BlockManager:
    """Gives blocks of ``pool`` to requests, and reports the blocks to be zeroed.

    A state group turns prefix reuse off: its block holds the state after one certain token only.
    ``max_step_tokens`` bounds the blocks that a window needs.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        pool: BlockPool,
        max_step_tokens: int,
        *,
        enable_prefix_caching: bool = True,
    ) -> None:
        self.pool = pool
        self.groups = config.groups
        self._sizes = sorted({group.block_size for group in config.groups})
        self._max_step_tokens = max_step_tokens
        self.reuses_prefixes = enable_prefix_caching and not any(group.is_state for group in config.groups)

    def new_request(self, salt: str = "") -> RequestBlocks:
        """A request without blocks. It reuses only blocks of requests with the same ``salt``."""
        count = len(self.groups)
        return RequestBlocks([[] for _ in range(count)], [0] * count, [0] * count, salt=salt)

    def most_blocks(self, num_tokens: int) -> int:
        """The most blocks that computing ``num_tokens`` positions can hold at once."""
        return sum(group.most_blocks(num_tokens, self._max_step_tokens) for group in self.groups)

    def find_hit(self, blocks: RequestBlocks, token_ids: Sequence[int]) -> CacheHit:
        """The longest reusable prefix. At least one token always remains to be computed."""
        nothing = CacheHit(0, tuple(() for _ in self.groups))
        if not self.reuses_prefixes:
            return nothing
        size = self._sizes[-1]
        limit = (len(token_ids) - 1) // size * size
        for block_tokens in self._sizes:
            blocks.content_hashes(token_ids, block_tokens)
        for index, group in enumerate(self.groups):
            if group.retention.sees_all:
                hashes = blocks.hashes[group.block_size][: limit // group.block_size]
                known = 0
                while known < len(hashes) and self.pool.find((index, hashes[known])) is not None:
                    known += 1
                limit = min(limit, known * group.block_size // size * size)
        # A window needs only its tail, so a longer prefix may be reusable where a shorter one is not.
        for num_tokens in range(limit, 0, -size):
            found = [self._known_blocks(index, blocks, num_tokens) for index in range(len(self.groups))]
            if all(ids is not None for ids in found):
                return CacheHit(num_tokens, tuple(tuple(ids or ()) for ids in found))
        return nothing

    def _known_blocks(self, index: int, blocks: RequestBlocks, num_tokens: int) -> list[int] | None:
        """The group's known blocks of a prefix, null where no later token reads; None if one is missing."""
        size = self.groups[index].block_size
        first = self._first_kept(index, num_tokens)
        found = [self.pool.find((index, name)) for name in blocks.hashes[size][first : num_tokens // size]]
        known = [block_id for block_id in found if block_id is not None]
        return [NULL_BLOCK] * first + known if len(known) == len(found) else None

    def _first_kept(self, index: int, next_position: int) -> int:
        """The first block of a group that computing ``next_position`` and later tokens can read."""
        group = self.groups[index]
        if group.is_state or group.retention.sees_all:
            return 0
        return group.retention.num_freed(next_position, group.block_size)

    def fits_whole(self, blocks: RequestBlocks, hit: CacheHit, num_tokens: int) -> bool:
        """Whether all ``num_tokens`` can be computed, step by step, without other requests freeing blocks."""
        needed = min(self._missing(blocks, hit, hit.num_tokens, num_tokens), self.most_blocks(num_tokens))
        return needed <= self.pool.num_free

    def _missing(
        self, blocks: RequestBlocks, hit: CacheHit | None, num_computed: int, num_tokens: int
    ) -> int:
        missing = 0
        for index, ids in enumerate(blocks.ids):
            kept = self._first_kept(index, num_computed)
            reused = hit.blocks[index] if hit else ()
            missing += sum(1 for block_id in reused[kept:] if self.pool.is_free(block_id))
            missing += max(
                0, self.groups[index].num_positions(num_tokens) - max(len(ids) + len(reused), kept)
            )
            leaving = ids[blocks.left[index] : kept]
            missing -= sum(1 for b in leaving if b != NULL_BLOCK and self.pool.has_one_holder(b))
        return missing

    def grow(
        self,
        blocks: RequestBlocks,
        hit: CacheHit | None,
        num_computed: int,
        num_tokens: int,
        *,
        num_loaded: int = 0,
    ) -> Grown | None:
        """Give the request room for ``num_tokens``, of which ``num_computed`` need no computing.

        ``hit`` is a prefix to reuse, for a request that has no blocks yet. The first ``num_loaded`` tokens
        are reused or will be written by a load. Blocks that no later token reads are freed first.
        Returns None, and changes nothing, if too few blocks are free.
        """
        if self._missing(blocks, hit, num_computed, num_tokens) > self.pool.num_free:
            return None
        first_kept = [self._first_kept(index, num_computed) for index in range(len(self.groups))]
        # Reused blocks are taken before new ones, so that no reused block is allocated as a new one.
        for index, (ids, kept) in enumerate(zip(blocks.ids, first_kept, strict=True)):
            self._free_left(blocks, index, min(kept, len(ids)))
            for position, block_id in enumerate(hit.blocks[index] if hit else ()):
                ids.append(block_id if position >= kept else NULL_BLOCK)
                self.pool.hold(ids[-1:])
        added: list[list[int]] = []
        to_zero: list[int] = []
        for index, group in enumerate(self.groups):
            ids, kept = blocks.ids[index], first_kept[index]
            wanted = group.num_positions(num_tokens)
            skipped = max(0, min(wanted, kept) - len(ids))
            fresh = self.pool.allocate(max(0, wanted - len(ids) - skipped))
            first = len(ids) + skipped
            added.append([NULL_BLOCK] * skipped + fresh)
            ids.extend(added[-1])
            if not group.is_state:
                # A load overwrites the blocks that it fills whole, but only a part of its last block.
                to_zero.extend(fresh[max(0, num_loaded // group.block_size - first) :])
        return Grown(tuple(added), to_zero)

    def _free_left(self, blocks: RequestBlocks, index: int, end: int) -> None:
        """Free a group's blocks before the position ``end``."""
        ids, left = blocks.ids[index], blocks.left[index]
        if end > left:
            self.pool.release(ids[left:end])
            ids[left:end] = [NULL_BLOCK] * (end - left)
            blocks.left[index] = end

    def remember(self, blocks: RequestBlocks, request: Request, num_computed: int) -> None:
        """Let later requests reuse the request's full blocks among the first ``num_computed`` tokens."""
        if not self.reuses_prefixes:
            return
        for index, group in enumerate(self.groups):
            hashes, ids = blocks.content_hashes(request.token_ids, group.block_size), blocks.ids[index]
            full = min(num_computed // group.block_size, len(ids))
            for position in range(blocks.remembered[index], full):
                if ids[position] != NULL_BLOCK:
                    self.pool.remember((index, hashes[position]), ids[position])
            blocks.remembered[index] = max(full, blocks.remembered[index])

    def leave_out_windows(self, blocks: RequestBlocks, num_loaded: int) -> None:
        """A load may have filled window blocks in part: keep other requests from reusing any of them."""
        for index, group in enumerate(self.groups):
            if not group.retention.sees_all:
                blocks.remembered[index] = div_ceil(num_loaded, group.block_size)

    def free(self, blocks: RequestBlocks) -> None:
        """Release all blocks of a request; its hash chains stay."""
        for index, ids in enumerate(blocks.ids):
            self.pool.release(ids)
            ids.clear()
            blocks.left[index] = blocks.remembered[index] = 0
