"""The cells of the contents that an index knows, by hash.

Contents that follow one another in a sequence get neighbouring cells where they can. So the cells of a long
prompt are found by comparing stretches of hashes, most of the time, and by looking up single ones only where
a stretch begins.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from operator import eq, itemgetter

import numpy as np
from numpy.typing import NDArray

from kvconnect.errors import LocalError
from kvconnect.offload.index.columns import FEW, Cells, as_list
from kvconnect.offload.index.shards import SHARD_MASK, make_shards

_SHORTEST_STRETCH, _LONGEST_STRETCH = 8, 2048
_MOST_SINGLES = 128


class CellTable:
    """Up to ``num_cells`` contents of one cache group, and their cells."""

    def __init__(self, num_cells: int) -> None:
        self.num_cells = num_cells
        self._shards = make_shards()
        # By cell; as long as the cells that were ever used.
        self._hashes: list[bytes | None] = []
        self._free = array("q")

    def __len__(self) -> int:
        return len(self._hashes) - len(self._free)

    @property
    def num_free(self) -> int:
        """How many can be added."""
        return self.num_cells - len(self)

    def find(self, hashes: Sequence[bytes]) -> Cells:
        """The cell of each hash, -1 for those that have none."""
        if len(hashes) <= FEW:
            shards = self._shards
            return [shards[hash(content) & SHARD_MASK].get(content, -1) for content in hashes]
        return self._find_many(hashes if isinstance(hashes, list) else list(hashes))

    def _find_many(self, hashes: list[bytes]) -> NDArray[np.int64]:
        shards, count = self._shards, len(hashes)
        cells = np.empty(count, dtype=np.int64)
        place, singles, stretch = 0, 1, _SHORTEST_STRETCH
        while place < count:
            end = min(place + singles, count)
            cells[place:end] = [
                shards[hash(content) & SHARD_MASK].get(content, -1) for content in hashes[place:end]
            ]
            place, cell = end, int(cells[end - 1]) + 1
            length = self._stretch(hashes, place, cell, stretch) if cell else 0
            cells[place : place + length] = np.arange(cell, cell + length)
            place += length
            # Where there are no stretches, more are looked up one by one before another try.
            singles = 1 if length else min(2 * singles, _MOST_SINGLES)
            stretch = min(max(_SHORTEST_STRETCH, length), _LONGEST_STRETCH)
        return cells

    def _stretch(self, hashes: list[bytes], place: int, cell: int, length: int) -> int:
        """How many hashes from ``place`` on have the cells from ``cell`` on, one after the other."""
        by_cell, first, count = self._hashes, place, len(hashes)
        while place < count:
            theirs = by_cell[cell : cell + length]
            ours = hashes[place : place + length]
            if theirs != ours:
                same = list(map(eq, theirs, ours))
                return place - first + (same.index(False) if False in same else len(same))
            place += len(ours)
            cell += len(ours)
            length = min(2 * length, _LONGEST_STRETCH)
        return place - first

    def hashes_of(self, cells: Cells) -> list[bytes]:
        """The hashes of cells that have one."""
        if len(cells) < 2:
            return [self._hashes[cell] for cell in as_list(cells)]  # type: ignore[misc]
        return list(itemgetter(*as_list(cells))(self._hashes))

    def add(self, hashes: Sequence[bytes]) -> list[int]:
        """New cells for hashes that have none, in rising order as far as they are neighbours.

        Raises:
            LocalError: there are not as many free cells.
        """
        if len(hashes) > self.num_free:
            raise LocalError(f"{len(hashes)} cells are wanted, {self.num_free} of {self.num_cells} are free")
        reused = min(len(hashes), len(self._free))
        cells = sorted(self._free[len(self._free) - reused :])
        del self._free[len(self._free) - reused :]
        first = len(self._hashes)
        fresh = len(hashes) - reused
        if fresh:
            cells.extend(range(first, first + fresh))
            self._hashes.extend([None] * fresh)
        shards, by_cell = self._shards, self._hashes
        for content, cell in zip(hashes, cells, strict=True):
            shards[hash(content) & SHARD_MASK][content] = cell
            by_cell[cell] = content
        return cells

    def remove(self, cells: Cells) -> None:
        """Free the cells of hashes that need not be known any more."""
        shards, by_cell = self._shards, self._hashes
        for cell in as_list(cells):
            content = by_cell[cell]
            if content is None:
                raise LocalError(f"cell {cell} is free already")
            del shards[hash(content) & SHARD_MASK][content]
            by_cell[cell] = None
            self._free.append(cell)

    def check(self) -> None:
        """Prove that hashes and cells belong together.

        Raises:
            LocalError: they do not.
        """
        free = set(self._free)
        if len(free) != len(self._free):
            raise LocalError("a cell is free twice")
        for cell, content in enumerate(self._hashes):
            if (content is None) != (cell in free):
                raise LocalError(f"cell {cell} is free and has a hash, or is neither")
            if content is not None and self._shards[hash(content) & SHARD_MASK].get(content) != cell:
                raise LocalError(f"cell {cell} has {content.hex()}, whose cell is another")
        if sum(map(len, self._shards)) != len(self):
            raise LocalError("more hashes have cells than cells have hashes")
