"""Compares what a request's layers see in the caches with the reference, word by word."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.vllm_bench.model import Caches
from tests.vllm_bench.reference import Text, Words

if TYPE_CHECKING:
    from tests.vllm_bench.runner import Row


class WrongBytes(AssertionError):
    """A layer would have read something that is not the KV of its request."""


class Checker:
    """Of one worker's caches."""

    def __init__(self, caches: Caches) -> None:
        self._caches = caches
        self._sights = caches.model.sights
        self._block_sizes = [group.block_size for group in caches.model.groups]
        self._is_aligned = caches.model.mamba_mode == "align"

    def slots(self, row: Row, group: int, first: int, end: int) -> tuple[Any, Any]:
        """The blocks and the offsets in them of positions ``first`` to ``end - 1``."""
        positions = np.arange(first, end)
        index, offsets = np.divmod(positions, self._block_sizes[group])
        return np.asarray(row.blocks[group])[index], offsets

    def check(self, request_id: str, row: Row, first: int, end: int) -> Callable[[int], list[int]]:
        """Read what queries at ``first`` to ``end - 1`` see. Returns what each of them makes of it.

        Raises:
            WrongBytes: a word differs; the text names the request, the group and the position.
        """
        found = [
            None if sight.is_state else self._read(request_id, row, group, sight.first_visible(first), end)
            for group, sight in enumerate(self._sights)
        ]

        def seen(position: int) -> list[int]:
            parts = []
            for group, (sight, sums) in enumerate(zip(self._sights, found, strict=True)):
                if sums is None:
                    # Just written; the next step reads it from its block.
                    parts.append(row.text.seen(group, position))
                else:
                    start, first_visible = sight.first_visible(first), sight.first_visible(position)
                    parts.append(int(sums[position + 1 - start] ^ sums[first_visible - start]))
            return parts

        return seen

    def _read(self, request_id: str, row: Row, group: int, start: int, stop: int) -> Words:
        blocks, offsets = self.slots(row, group, start, stop)
        expected = row.text.words(group, start, stop)
        sums = np.zeros(stop - start + 1, np.uint64)
        for layer, memory in enumerate(self._caches.words[group]):
            words = memory[blocks, offsets]
            if not np.array_equal(words, expected[layer]):
                wrong = np.flatnonzero((words != expected[layer]).any(axis=1))
                raise WrongBytes(
                    f"request {request_id}, group {group}, layer {layer}: positions "
                    f"{_ranges(wrong + start)} of {start} to {stop - 1} are wrong "
                    f"(computed before {row.computed}; blocks {row.blocks[group]})"
                )
            sums[1:] ^= np.bitwise_xor.accumulate(np.bitwise_xor.reduce(words, axis=1))
        return sums

    def check_stores(self, stores: Iterable[Any], named: Mapping[bytes, tuple[Text, int]]) -> None:
        """What is kept under a hash must be the KV of the tokens that the hash stands for.

        ``named`` are, by hash, a text and the number of its tokens that end with the block.

        Raises:
            WrongBytes: it is not, and who restores it would compute with it.
        """
        for store in stores:
            group = store.copies.group
            for block, name in zip(store.copies.block_ids, store.hashes, strict=True):
                text, end = named[name]
                first = end - self._block_sizes[group]
                is_state = self._sights[group].is_state
                expected = text.state(group, end)[:, None] if is_state else text.words(group, first, end)
                for layer, memory in enumerate(self._caches.words[group]):
                    words = memory[block]
                    if not np.array_equal(words[: expected.shape[1]], expected[layer]):
                        raise WrongBytes(
                            f"group {group}, layer {layer}: block {block} is kept as "
                            f"{'the state after' if is_state else f'tokens {first} to'} {end} of "
                            f"{text.tokens[:4]}..., and is not that"
                        )

    # States

    def advance(self, row: Row, group: int, first: int, end: int, num_known: int) -> None:
        """Read the state after ``first`` tokens, and write those after the ones that are computed now.

        With drafts the state after each of them has a block of its own: which of them came true is known
        afterwards. Where states are kept by position, the running one lies where the step ends.
        """
        blocks, size = row.blocks[group], self._block_sizes[group]
        column = -(-end // size) - 1 if self._is_aligned else 0
        if first:
            before = (
                (first - 1) // size if row.state_column is None and self._is_aligned else row.state_column
            )
            source = blocks[(before or 0) + row.state_slot]
            for layer, memory in enumerate(self._caches.words[group]):
                if not np.array_equal(memory[source, 0], row.text.state(group, first)[layer]):
                    raise WrongBytes(
                        f"group {group}, layer {layer}: block {source} does not hold the state after "
                        f"{first} tokens (blocks {blocks}, column {before}, slot {row.state_slot})"
                    )
        num_drafts = max(0, end - num_known)
        for slot in range(num_drafts + 1):
            self._write_state(row, group, blocks[column + slot], end - num_drafts + slot)

    def settle(self, row: Row, end: int, num_drafts: int, num_made: int) -> None:
        """A step's tokens are known: which block holds the state, and which that of a whole block."""
        row.state_slot = max(0, num_made - 1)
        if not self._is_aligned:
            row.state_column = 0
            return
        for group, sight in enumerate(self._sights):
            if not sight.is_state:
                continue
            size, running = self._block_sizes[group], end - num_drafts
            row.state_column = -(-end // size) - 1
            whole = (running + row.state_slot) // size * size
            if whole < running or not num_drafts:
                continue
            blocks, target = row.blocks[group], whole // size - 1
            for memory in self._caches.words[group]:
                memory[blocks[target]] = memory[blocks[row.state_column + whole - running]]
            if target == row.state_column:
                row.state_slot = 0

    def _write_state(self, row: Row, group: int, block: int, num_tokens: int) -> None:
        if not block:
            raise WrongBytes(
                f"group {group}: the state after {num_tokens} tokens has no block ({row.blocks})"
            )
        for layer, memory in enumerate(self._caches.words[group]):
            memory[block, 0] = row.text.state(group, num_tokens)[layer]


def _ranges(positions: Words) -> str:
    """Positions in words, neighbours as ranges."""
    parts: list[list[int]] = []
    for position in positions.tolist():
        if parts and parts[-1][1] == position - 1:
            parts[-1][1] = position
        else:
            parts.append([position, position])
    return ", ".join(f"{first}-{last}" if first != last else str(first) for first, last in parts)
