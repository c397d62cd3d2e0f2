"""A hash table of 64-bit numbers in arrays: 32 bytes an entry, and work on many entries at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.uint64]

_FREE, _REMOVED = np.uint64(0), np.uint64(1)
_LEAST_SLOTS = 64
_MULTIPLIERS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def mixed(numbers: Numbers) -> Numbers:
    """A permutation of 64-bit numbers, in which equal distances do not stay equal (SplitMix64's finisher)."""
    found: Numbers = numbers ^ (numbers >> np.uint64(30))
    found = found * _MULTIPLIERS[0]
    found = (found ^ (found >> np.uint64(27))) * _MULTIPLIERS[1]
    found ^= found >> np.uint64(31)
    return found


class HashTable:
    """Values by key, with open addressing. Keys should be ``mixed``; 0 and 1 count as 2 and 3."""

    def __init__(self) -> None:
        self._allocate(_LEAST_SLOTS)

    def __len__(self) -> int:
        return self._count

    def _allocate(self, slots: int) -> None:
        self._keys = np.zeros(slots, dtype=np.uint64)
        self._values = np.zeros(slots, dtype=np.uint64)
        self._mask = np.uint64(slots - 1)
        self._count = self._taken = 0

    def get(self, keys: Numbers) -> tuple[Numbers, NDArray[np.bool_]]:
        """The values of keys, and which of them are known; 0 for the others."""
        slots, is_known = self._slots(_usable(keys))
        return np.where(is_known, self._values[slots], _FREE), is_known

    def put(self, keys: Numbers, values: Numbers) -> None:
        """Add entries, or replace their values; of equal keys one counts."""
        keys, first = np.unique(_usable(keys), return_index=True)
        values = values[first]
        slots, is_known = self._slots(keys)
        self._values[slots[is_known]] = values[is_known]
        self._add(keys[~is_known], values[~is_known])

    def remove(self, keys: Numbers) -> None:
        """Forget entries, those that are known."""
        slots, is_known = self._slots(_usable(keys))
        slots = np.unique(slots[is_known])
        self._keys[slots] = _REMOVED
        self._count -= len(slots)

    def _slots(self, keys: Numbers) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Where each key is, and whether it is anywhere."""
        slots = keys & self._mask
        is_known = np.zeros(len(keys), dtype=bool)
        open_ones = np.arange(len(keys))
        while len(open_ones):
            found = self._keys[slots[open_ones].astype(np.int64)]
            is_known[open_ones[found == keys[open_ones]]] = True
            open_ones = open_ones[(found != keys[open_ones]) & (found != _FREE)]
            slots[open_ones] = (slots[open_ones] + np.uint64(1)) & self._mask
        return slots.astype(np.int64), is_known

    def _add(self, keys: Numbers, values: Numbers) -> None:
        """Add keys that are new and differ from each other."""
        if 2 * (self._taken + len(keys)) > len(self._keys):
            is_live = self._keys > _REMOVED
            old = self._keys[is_live], self._values[is_live]
            self._allocate(max(_LEAST_SLOTS, 1 << (4 * (len(old[0]) + len(keys)) - 1).bit_length()))
            self._add(*old)
        slots = (keys & self._mask).astype(np.int64)
        open_ones = np.arange(len(keys))
        while len(open_ones):
            is_free = self._keys[slots[open_ones]] <= _REMOVED
            free, first = np.unique(slots[open_ones[is_free]], return_index=True)
            placed = open_ones[is_free][first]
            self._taken += int((self._keys[free] == _FREE).sum())
            self._keys[free], self._values[free] = keys[placed], values[placed]
            # What lost its slot to another key finds it taken now.
            open_ones = open_ones[self._keys[slots[open_ones]] != keys[open_ones]]
            slots[open_ones] = (slots[open_ones] + 1) & int(self._mask)
        self._count += len(keys)


def _usable(keys: Numbers) -> Numbers:
    return np.where(keys > _REMOVED, keys, keys + np.uint64(2))
