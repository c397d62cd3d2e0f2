"""Which node has how much of a prompt, from what nodes publish of their blocks.

A prefix is known by a number of its tokens and their extra keys, and not by the publisher's own hash, so
that nodes with other hash functions, seeds and block sizes are compared. It places requests only: of two
prefixes with one number, which chance makes once in 2**64, a request goes to a node that has to compute it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np
from xxhash import xxh3_64_intdigest

from kvconnect.router.hash_table import HashTable, Numbers, mixed

ExtraKeys = Sequence[Any] | None
"""What a block's KV depends on besides its tokens: adapter, images, salt."""

MAX_BLOCKS = 10_000_000
"""Most blocks that are known of all nodes together, in 64 bytes each and twice that while a table grows."""

_BASE = 0x9E3779B97F4A7C15
_BASE_INVERSE = pow(_BASE, -1, 1 << 64)
_ALL_ONES = (1 << 64) - 1


class StoredRun(NamedTuple):
    """Blocks that follow one another, the first of them after ``parent``, or at the beginning."""

    hashes: Sequence[int | bytes]
    parent: int | bytes | None
    token_ids: Sequence[int]
    block_tokens: int
    extra_keys: Sequence[ExtraKeys] | None = None

    @property
    def is_whole(self) -> bool:
        """It has a number of tokens that fills its blocks, and keys of each or none."""
        count = len(self.hashes)
        has_keys = self.extra_keys is None or len(self.extra_keys) == count
        return count > 0 < self.block_tokens and len(self.token_ids) == count * self.block_tokens and has_keys


class Hit(NamedTuple):
    """Tokens of a prompt that a node has on its device, and with the tiers below."""

    device_tokens: int = 0
    num_tokens: int = 0


@dataclass
class _Tier:
    """``prefixes`` by the publisher's hash of a block, and which of them are ``held``."""

    prefixes: HashTable = field(default_factory=HashTable)
    held: HashTable = field(default_factory=HashTable)


@dataclass
class _Known:
    """What is known of one node. ``group`` is the cache group that counts; None until one was published."""

    device: _Tier = field(default_factory=_Tier)
    lower: _Tier = field(default_factory=_Tier)
    block_tokens: int = 0
    group: int | None = None

    def __len__(self) -> int:
        return len(self.device.prefixes) + len(self.lower.prefixes)


class PrefixIndex:
    """All nodes by name, at most ``most`` blocks. Blocks beyond that, and those whose parent is not known,
    are counted in ``num_left_out``. ``adapters`` are the names of those that blocks were computed with."""

    def __init__(self, most: int = MAX_BLOCKS) -> None:
        self._most = most
        self.adapters: set[str] = set()
        self._nodes: dict[str, _Known] = {}
        self.num_left_out = 0

    def __len__(self) -> int:
        return sum(map(len, self._nodes.values()))

    def stored(
        self, node: str, runs: Iterable[StoredRun], *, on_device: bool = True, group: int | None = None
    ) -> None:
        """A node has got blocks. Of several cache groups the first that is published counts.

        Much faster for many runs at once.
        """
        known = self._nodes.setdefault(node, _Known())
        if known.group is None:
            known.group = group
        runs = [run for run in runs if run.is_whole] if group == known.group else []
        tier = known.device if on_device else known.lower
        for size, some in itertools.groupby(runs, key=lambda run: run.block_tokens):
            known.block_tokens = size
            self._add(known, tier, size, list(some))

    def _add(self, known: _Known, tier: _Tier, size: int, runs: Sequence[StoredRun]) -> None:
        keys = _keys([name for run in runs for name in run.hashes])
        values = _block_numbers([token for run in runs for token in run.token_ids], size)
        parents = _keys([run.parent for run in runs if run.parent is not None])
        found: dict[int, int] = {}
        for each in (known.lower, known.device):
            prefixes, is_known = each.prefixes.get(parents)
            found.update(zip(parents[is_known].tolist(), prefixes[is_known].tolist(), strict=True))
        names, blocks, parent = keys.tolist(), values.tolist(), iter(parents.tolist())
        step, at, room = pow(_BASE, size, 1 << 64), 0, self._most - len(self)
        taken: list[int] = []
        prefixes_taken: list[int] = []
        for run in runs:
            end = at + len(run.hashes)
            before = 0 if run.parent is None else found.get(next(parent))
            if before is None or len(taken) + end - at > room:
                self.num_left_out += end - at
                at = end
                continue
            for block, extra in zip(range(at, end), run.extra_keys or itertools.repeat(None), strict=False):
                before = (before * step + blocks[block] + _number_of(extra)) & _ALL_ONES
                found[names[block]] = before
                prefixes_taken.append(before)
            taken += range(at, end)
            at = end
        prefixes = np.array(prefixes_taken, dtype=np.uint64)
        tier.prefixes.put(keys[taken], prefixes)
        tier.held.put(mixed(prefixes), prefixes)

    def removed(
        self, node: str, hashes: Sequence[int | bytes], *, on_device: bool = True, group: int | None = None
    ) -> None:
        """A node has blocks no more."""
        known = self._nodes.get(node)
        if known is None or group != known.group:
            return
        tier, keys = known.device if on_device else known.lower, _keys(hashes)
        prefixes, is_known = tier.prefixes.get(keys)
        tier.prefixes.remove(keys)
        tier.held.remove(mixed(prefixes[is_known]))

    def cleared(self, node: str, *, on_device: bool | None = None) -> None:
        """A node has nothing any more; of its device, or below it, where that is told."""
        known = self._nodes.get(node)
        if known is None or on_device is None:
            self._nodes.pop(node, None)
        elif on_device:
            known.device = _Tier()
        else:
            known.lower = _Tier()

    def hits(
        self, nodes: Iterable[str], token_ids: Sequence[int], extra_keys: Sequence[ExtraKeys] = ()
    ) -> dict[str, Hit]:
        """How much of a prompt each node has.

        ``extra_keys`` are of its first blocks, the last of them of all others too.
        """
        by_size: dict[int, Numbers] = {}
        found = {}
        for node in nodes:
            known = self._nodes.get(node)
            if known is None or not known.block_tokens:
                found[node] = Hit()
                continue
            size = known.block_tokens
            if size not in by_size:
                count = len(token_ids) // size
                keys = [*extra_keys[:count], *list(extra_keys[-1:]) * (count - len(extra_keys))]
                by_size[size] = mixed(prefixes_of(token_ids[: count * size], size, keys or None))
            _, on_device = known.device.held.get(by_size[size])
            _, below = known.lower.held.get(by_size[size])
            counts = (_run(on_device), _run(on_device | below))
            found[node] = Hit(*(count * size for count in counts))
        return found


def prefixes_of(
    token_ids: Sequence[int],
    block_tokens: int,
    extra_keys: Sequence[ExtraKeys] | None = None,
    before: int = 0,
) -> Numbers:
    """The number of the prefix up to the end of each whole block, after a prefix with the number ``before``.

    A polynomial of the tokens modulo 2**64, so that all blocks are worked out at once.
    """
    blocks = _block_numbers(token_ids, block_tokens)
    count = len(blocks)
    if extra_keys is not None:
        blocks += np.fromiter(map(_number_of, extra_keys), dtype=np.uint64, count=count)
    # Prefix j is step**j * (before + the sum of block i / step**i, for i from 1 to j).
    step = pow(_BASE, block_tokens, 1 << 64)
    inverses = _powers(pow(_BASE_INVERSE, block_tokens, 1 << 64), count)[1:]
    sums = np.cumsum(blocks * inverses, dtype=np.uint64) + np.uint64(before)
    return sums * _powers(step, count)[1:]


def _block_numbers(token_ids: Sequence[int], block_tokens: int) -> Numbers:
    """What each whole block adds to the number of the prefix before it."""
    count = len(token_ids) // block_tokens
    tokens = np.asarray(token_ids[: count * block_tokens], dtype=np.int64).astype(np.uint64)
    values = mixed(tokens + np.uint64(1)).reshape(count, block_tokens)
    found: Numbers = (values * _powers(_BASE, block_tokens)[:-1][::-1]).sum(axis=1, dtype=np.uint64)
    return found


def _powers(base: int, count: int) -> Numbers:
    """``base`` to the power of 0 to ``count``, modulo 2**64."""
    factors = np.full(count + 1, base, dtype=np.uint64)
    factors[0] = 1
    return np.multiply.accumulate(factors)


def _number_of(extra: ExtraKeys) -> int:
    return xxh3_64_intdigest(msgspec.msgpack.encode(extra)) if extra else 0


def _keys(hashes: Sequence[int | bytes]) -> Numbers:
    numbers = [int.from_bytes(one[-8:], "big") if isinstance(one, bytes) else one for one in hashes]
    return mixed(np.array([number & _ALL_ONES for number in numbers], dtype=np.uint64))


def _run(flags: np.ndarray[Any, np.dtype[np.bool_]]) -> int:
    return len(flags) if flags.all() else int(flags.argmin())
