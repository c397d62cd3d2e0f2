"""Which blocks each request has in each cache group, and which of its prefix can be reused.

Owns the lists of block ids by position in the sequence. Full attention groups keep every block, sliding
groups free what left the window (its place becomes the null block), state groups have one block per
request. This file knows nothing of queues, connectors or tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvconnect.cache.specs import KVCacheConfig
from kvconnect.node.block_pool import NULL_BLOCK, BlockPool
from kvconnect.node.hashes import extend_chain
from kvconnect.node.limits import Footprint


@dataclass(frozen=True)
class Hit:
    """A reusable prefix: its length in tokens, and its blocks by group and position."""

    num_tokens: int
    blocks: tuple[tuple[int, ...], ...]


@dataclass
class RequestBlocks:
    """The blocks of one request: ids by group and position, and the content hashes of its full blocks.

    ``left`` and ``remembered`` count, by group, the positions that left the window and those whose
    content the pool was told of.
    """

    ids: list[list[int]]
    left: list[int]
    remembered: list[int]
    hashes: dict[int, list[bytes]] = field(default_factory=dict)

    def snapshot(self) -> tuple[list[int], ...]:
        """Copies of the id lists, one per group."""
        return tuple(list(ids) for ids in self.ids)

    def content_hashes(self, token_ids: Sequence[int], block_tokens: int) -> Sequence[bytes]:
        """The hashes of all whole blocks of so many tokens; ``token_ids`` begin as they did before."""
        chain = self.hashes.setdefault(block_tokens, [])
        extend_chain(chain, token_ids, block_tokens)
        return chain


@dataclass(frozen=True)
class Grown:
    """What an allocation added: ids by group, and those of them that must be zeroed.

    ``zero_blocks`` are fresh state blocks by group, ``new_block_ids_to_zero`` fresh attention blocks.
    """

    new_ids: tuple[list[int], ...]
    zero_blocks: dict[int, list[int]]
    new_block_ids_to_zero: list[int]


class BlockManager:
    """Gives blocks of ``pool`` to requests.

    Args:
        config: the cache; a state group in it turns prefix reuse off, because a state block holds the
            state after one certain token only.
        max_step_tokens: most tokens that one step computes, which bounds what a window needs.
        zeroes_new_blocks: report fresh attention blocks for zeroing.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        pool: BlockPool,
        max_step_tokens: int,
        *,
        enable_prefix_caching: bool = True,
        zeroes_new_blocks: bool = False,
    ) -> None:
        self.pool = pool
        self._groups = config.groups
        self.footprint = Footprint(config.groups, max_step_tokens)
        self._zeroes_new_blocks = zeroes_new_blocks
        self.reuses_prefixes = enable_prefix_caching and not any(group.is_state for group in config.groups)

    def new_request(self) -> RequestBlocks:
        """A request without blocks."""
        count = len(self._groups)
        return RequestBlocks([[] for _ in range(count)], [0] * count, [0] * count)

    def most_blocks(self, num_tokens: int) -> int:
        """The most blocks that computing ``num_tokens`` positions can hold at once."""
        return self.footprint.most_blocks(num_tokens)

    def find_hit(self, blocks: RequestBlocks, token_ids: Sequence[int]) -> Hit:
        """The longest reusable prefix. At least one token always remains to be computed."""
        if not self.reuses_prefixes:
            return Hit(0, tuple(() for _ in self._groups))
        size = max(group.block_size for group in self._groups)
        limit = (len(token_ids) - 1) // size * size
        self._hash_blocks(blocks, token_ids)
        for index, group in enumerate(self._groups):
            if group.retention.sees_all:
                hashes = blocks.hashes[group.block_size][: limit // group.block_size]
                known = 0
                while known < len(hashes) and self.pool.find((index, hashes[known])) is not None:
                    known += 1
                limit = min(limit, known * group.block_size // size * size)
        # A window needs only its tail, so a longer prefix may be reusable where a shorter one is not.
        while limit > 0:
            found = [self._window_tail(index, blocks, limit) for index in range(len(self._groups))]
            if all(ids is not None for ids in found):
                return Hit(limit, tuple(tuple(ids or ()) for ids in found))
            limit -= size
        return Hit(0, tuple(() for _ in self._groups))

    def _window_tail(self, index: int, blocks: RequestBlocks, num_tokens: int) -> list[int] | None:
        """The group's known blocks of a prefix, null where the window does not reach; None if one lacks."""
        group = self._groups[index]
        ids = []
        for position in range(num_tokens // group.block_size):
            if position < self._first_kept(index, num_tokens):
                ids.append(NULL_BLOCK)
                continue
            block_id = self.pool.find((index, blocks.hashes[group.block_size][position]))
            if block_id is None:
                return None
            ids.append(block_id)
        return ids

    def _first_kept(self, index: int, next_position: int) -> int:
        """The first block of a group that computing ``next_position`` and later tokens can read."""
        group = self._groups[index]
        return 0 if group.is_state else group.retention.num_freed(next_position, group.block_size)

    def fits(self, blocks: RequestBlocks, hit: Hit | None, num_computed: int, num_tokens: int) -> bool:
        """Whether ``grow`` with the same arguments would succeed."""
        return self._missing(blocks, hit, num_computed, num_tokens) <= self.pool.num_free

    def fits_whole(self, blocks: RequestBlocks, hit: Hit, num_tokens: int) -> bool:
        """Whether all ``num_tokens`` can be computed, step by step, without any other block being freed."""
        needed = min(self._missing(blocks, hit, hit.num_tokens, num_tokens), self.most_blocks(num_tokens))
        return needed <= self.pool.num_free

    def _missing(self, blocks: RequestBlocks, hit: Hit | None, num_computed: int, num_tokens: int) -> int:
        missing = 0
        for index, group in enumerate(self._groups):
            kept = self._first_kept(index, num_computed)
            reused = hit.blocks[index] if hit else ()
            missing += sum(1 for block_id in reused[kept:] if self.pool.is_free(block_id))
            have = len(blocks.ids[index]) + len(reused)
            wanted = group.num_positions(num_tokens)
            missing += max(0, wanted - max(have, kept))
            leaving = blocks.ids[index][blocks.left[index] : kept]
            missing -= sum(1 for b in leaving if b != NULL_BLOCK and self.pool.has_one_holder(b))
        return missing

    def grow(
        self,
        blocks: RequestBlocks,
        hit: Hit | None,
        num_computed: int,
        num_tokens: int,
        *,
        num_loaded: int = 0,
    ) -> Grown | None:
        """Give the request room for ``num_tokens``, of which ``num_computed`` need no computing.

        ``hit`` is a prefix to reuse, for a request that has no blocks yet. The first ``num_loaded``
        tokens are reused or will be written by a load. Blocks that no later token reads are freed first.
        Returns None, and changes nothing, if there are not enough free blocks.
        """
        if not self.fits(blocks, hit, num_computed, num_tokens):
            return None
        for index in range(len(self._groups)):
            self._leave_window(index, blocks, num_computed)
        # Every reused block is taken before any new one, or a new one could be a reused one.
        for index in range(len(self._groups)):
            kept = self._first_kept(index, num_computed)
            for position, block_id in enumerate(hit.blocks[index] if hit else ()):
                keep = position >= kept
                blocks.ids[index].append(block_id if keep else NULL_BLOCK)
                self.pool.hold([block_id] if keep else [])
        added, zero_blocks, to_zero = [], {}, []
        for index, group in enumerate(self._groups):
            ids = blocks.ids[index]
            wanted = group.num_positions(num_tokens)
            skipped = max(0, min(wanted, self._first_kept(index, num_computed)) - len(ids))
            fresh = self.pool.allocate(max(0, wanted - len(ids) - skipped))
            first = len(ids) + skipped
            added.append([NULL_BLOCK] * skipped + fresh)
            ids.extend(added[-1])
            if group.is_state and fresh:
                zero_blocks[index] = fresh
            elif self._zeroes_new_blocks:
                # A load writes every byte of the blocks that it fills whole, and no more of the last one
                # than it needs.
                to_zero.extend(fresh[max(0, num_loaded // group.block_size - first) :])
        return Grown(tuple(added), zero_blocks, to_zero)

    def _leave_window(self, index: int, blocks: RequestBlocks, num_computed: int) -> None:
        ids, left = blocks.ids[index], blocks.left[index]
        kept = min(self._first_kept(index, num_computed), len(ids))
        if kept > left:
            self.pool.release(ids[left:kept])
            ids[left:kept] = [NULL_BLOCK] * (kept - left)
            blocks.left[index] = kept

    def remember(self, blocks: RequestBlocks, token_ids: Sequence[int], num_computed: int) -> None:
        """Let later requests reuse the request's full blocks among the first ``num_computed`` tokens."""
        if not self.reuses_prefixes:
            return
        self._hash_blocks(blocks, token_ids)
        for index, group in enumerate(self._groups):
            hashes = blocks.hashes[group.block_size]
            full = min(num_computed // group.block_size, len(blocks.ids[index]))
            for position in range(blocks.remembered[index], full):
                block_id = blocks.ids[index][position]
                if block_id != NULL_BLOCK:
                    self.pool.remember((index, hashes[position]), block_id)
            blocks.remembered[index] = max(full, blocks.remembered[index])

    def _hash_blocks(self, blocks: RequestBlocks, token_ids: Sequence[int]) -> None:
        for size in {group.block_size for group in self._groups}:
            blocks.content_hashes(token_ids, size)

    def free(self, blocks: RequestBlocks) -> None:
        """Release all blocks of a request; its hash chains stay."""
        for index, ids in enumerate(blocks.ids):
            self.pool.release(ids)
            ids.clear()
            blocks.left[index] = blocks.remembered[index] = 0
