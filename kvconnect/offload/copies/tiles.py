"""What a kernel must know to move blocks to rows and back: pure arithmetic, in columns.

A *kind* is a part of a group's rows that travels as one. Rows are in one part as a rule; those longer than
staging memory allows are cut every so many bytes. A *tile* is what a program of the kernel moves at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvconnect.errors import LocalError
from kvconnect.offload.copies.rows import Column, GroupRows

TILE_FIELDS = 4
BATCH_FIELDS = 4
UNITS = (16, 8, 4, 2, 1)
_MOST_TILE_BYTES = {16: 16 << 10, 8: 8 << 10, 4: 4 << 10, 2: 2 << 10, 1: 1 << 10}


@dataclass(frozen=True, eq=False)
class Kind:
    """Lanes of one kind: see ``GroupRows``. ``offset`` counts from the start of the part."""

    length_bytes: int
    address: Column
    stride: Column
    length: Column
    offset: Column
    unit: Column

    @classmethod
    def plain(cls, length_bytes: int) -> Kind:
        """One whose "block" is the address of as many bytes, a multiple of 16: to copy from row to row."""
        numbers = (0, 1, length_bytes, 0, 16)
        return cls(length_bytes, *(np.array([number], dtype=np.int64) for number in numbers))

    def packed(self) -> Kind:
        """The same lanes side by side: its "block" is the address of a part that is packed."""
        return Kind(
            self.length_bytes, self.offset, np.ones_like(self.stride), self.length, self.offset, self.unit
        )


def kinds_of(rows: GroupRows, part_bytes: int) -> list[Kind]:
    """The kinds of a group, each of at most ``part_bytes``, which is a multiple of 64."""
    kinds = []
    for first in range(0, rows.row_bytes, part_bytes):
        stop = min(first + part_bytes, rows.row_bytes)
        begin = np.maximum(rows.offset, first)
        length = np.minimum(rows.offset + rows.length, stop) - begin
        inside = length > 0
        kinds.append(
            Kind(
                stop - first,
                (rows.address + begin - rows.offset)[inside],
                rows.stride[inside],
                length[inside],
                (begin - first)[inside],
                rows.unit[inside],
            )
        )
    return kinds


class TileTable:
    """The tiles of all kinds, and what a launch needs of them.

    ``numbers`` are ``TILE_FIELDS`` for each tile: address, stride, place in the part, length. ``tile_bytes``
    is by unit the longest tile, rounded up to a power of two; units that no lane has are left out.
    """

    def __init__(self, kinds: Sequence[Kind]) -> None:
        made: list[NDArray[np.int64]] = []
        self.tile_bytes: dict[int, int] = {}
        self._num_kinds = len(kinds)
        self._of_kind: dict[int, list[tuple[int, int, int]]] = {}
        self._first: dict[int, Column] = {}
        self._count: dict[int, Column] = {}
        at = 0
        for unit in UNITS:
            first, count = np.zeros((2, len(kinds)), dtype=np.int64)
            longest = 0
            for index, kind in enumerate(kinds):
                tiles = _tiles(kind, unit)
                made.append(tiles)
                first[index], count[index] = at, len(tiles)
                at += len(tiles)
                longest = max(longest, int(tiles[:, 3].max(initial=0)))
            if longest:
                self.tile_bytes[unit] = max(unit, 1 << (longest - 1).bit_length())
                self._first[unit], self._count[unit] = first, count
        self.numbers: Column = np.concatenate([*made, np.zeros((1, TILE_FIELDS), dtype=np.int64)]).reshape(-1)

    @property
    def units(self) -> tuple[int, ...]:
        """Accesses that some lane has, widest first: one launch each."""
        return tuple(self.tile_bytes)

    def launches(
        self, kind: Column, block: Column, place: Column, numbers_at: int = 0
    ) -> tuple[Column, list[Launch]]:
        """The numbers of a launch for each unit, in one column, which is to lie at ``numbers_at``.

        A part of a row belongs to block ``block[i]``, is of ``kind[i]``, and lies ``place[i]`` bytes after an
        address that is told at the launch.
        """
        if len(kind) and bool((kind == kind[0]).all()):
            return self._alike(int(kind[0]), block, place, numbers_at)
        counts = np.bincount(kind, minlength=self._num_kinds)
        (found,) = counts.nonzero()
        if len(found) > 1:
            order = np.argsort(kind, kind="stable")
            block, place = block[order], place[order]
        rows = counts[found]
        start = np.cumsum(rows) - rows
        numbers = np.empty(2 * len(kind) + len(self.units) * len(found) * BATCH_FIELDS, dtype=np.int64)
        at = 2 * len(kind)
        numbers[0:at:2], numbers[1:at:2] = block, place
        made = []
        for unit in self.units:
            tiles = self._count[unit][found]
            used = tiles > 0
            num_batches = int(used.sum())
            if not num_batches:
                continue
            items = tiles * rows
            batches = numbers[at : at + num_batches * BATCH_FIELDS].reshape(num_batches, BATCH_FIELDS)
            for field, column in enumerate(
                (np.cumsum(items) - items, tiles, self._first[unit][found], 2 * start)
            ):
                batches[:, field] = column[used]
            made.append(Launch(unit, numbers_at, at, num_batches, _checked(int(items.sum()))))
            at += num_batches * BATCH_FIELDS
        return numbers[:at], made

    def _alike(self, kind: int, block: Column, place: Column, numbers_at: int) -> tuple[Column, list[Launch]]:
        """The same for parts of one kind, as most are: a few microseconds, which a step waits for."""
        units = self._of_kind.get(kind)
        if units is None:
            counts = (
                (unit, int(self._count[unit][kind]), int(self._first[unit][kind])) for unit in self.units
            )
            self._of_kind[kind] = units = [found for found in counts if found[1]]
        at = 2 * len(block)
        numbers = np.empty(at + len(units) * BATCH_FIELDS, dtype=np.int64)
        numbers[0:at:2], numbers[1:at:2] = block, place
        made = []
        for unit, tiles, first in units:
            numbers[at : at + BATCH_FIELDS] = (0, tiles, first, 0)
            made.append(Launch(unit, numbers_at, at, 1, _checked(tiles * len(block))))
            at += BATCH_FIELDS
        return numbers, made


@dataclass(frozen=True)
class Launch:
    """One launch: where its numbers lie, where among them its batches, and how many items of work they are.

    A batch has ``BATCH_FIELDS``: its first item, the tiles of a part, the first of them in the table, and
    where the pairs of block and place of its parts lie among the numbers.
    """

    unit: int
    numbers_at: int
    batches_at: int
    num_batches: int
    num_items: int


def _checked(num_items: int) -> int:
    if num_items >= 2**31:
        raise LocalError(f"one launch has {num_items} tiles; accepted: less than 2**31")
    return num_items


def _tiles(kind: Kind, unit: int) -> NDArray[np.int64]:
    """The tiles of lanes with this access, of about equal length within a lane."""
    mine = kind.unit == unit
    length = kind.length[mine]
    parts = -(-length // _MOST_TILE_BYTES[unit])
    units = length // unit
    step = -(-units // np.maximum(parts, 1)) * unit
    parts = -(-length // np.maximum(step, 1))
    lane = np.repeat(np.arange(len(length)), parts)
    within = (np.arange(len(lane)) - (np.cumsum(parts) - parts)[lane]) * step[lane]
    return np.stack(
        [
            kind.address[mine][lane] + within,
            kind.stride[mine][lane],
            kind.offset[mine][lane] + within,
            np.minimum(length[lane] - within, step[lane]),
        ],
        axis=1,
    )


@dataclass(frozen=True, eq=False)
class Parts:
    """Parts of rows that travel, in the order of their addresses in host memory."""

    kind: Column
    block: Column
    address: Column
    length: Column

    @classmethod
    def sorted(cls, kind: Column, block: Column, address: Column, length: Column) -> Parts:
        """Parts in any order."""
        order = address.argsort(kind="stable")
        return cls(kind[order], block[order], address[order], length[order])

    @property
    def total_bytes(self) -> int:
        """All of them together."""
        return int(self.length.sum())

    def pieces(self, most_bytes: int, borders: Sequence[int]) -> list[Piece]:
        """Cut into pieces of at most ``most_bytes``, or of one part where that has more.

        No copy of theirs reaches across a border.
        """
        if not len(self.length):
            return []
        ends = self.length.cumsum()
        begins = ends - self.length
        firsts, first = [], 0
        while first < len(ends):
            firsts.append(first)
            most = int(begins[first]) + most_bytes
            first = len(ends) if ends[-1] <= most else max(first + 1, int(ends.searchsorted(most, "right")))
        host, place, length = self._copies(begins, firsts, borders)
        if len(firsts) == 1:
            copies = (host, place, length)
            total_bytes = int(ends[-1])
            return [Piece(self.kind, self.block, self.address, self.length, begins, total_bytes, copies)]
        copies_at = [*place.searchsorted(begins[firsts]).tolist(), len(place)]
        pieces = []
        for index, (first, stop) in enumerate(zip(firsts, [*firsts[1:], len(ends)], strict=True)):
            begin, mine = int(begins[first]), slice(copies_at[index], copies_at[index + 1])
            pieces.append(
                Piece(
                    self.kind[first:stop],
                    self.block[first:stop],
                    self.address[first:stop],
                    self.length[first:stop],
                    begins[first:stop] - begin,
                    int(ends[stop - 1]) - begin,
                    (host[mine], place[mine] - begin, length[mine]),
                )
            )
        return pieces

    def _copies(
        self, begins: Column, firsts: Sequence[int], borders: Sequence[int]
    ) -> tuple[Column, Column, Column]:
        """Host address, place and length of stretches that lie side by side in both memories."""
        new = np.ones(len(begins), dtype=bool)
        np.not_equal(self.address[1:], self.address[:-1] + self.length[:-1], out=new[1:])
        new[firsts] = True
        (first,) = new.nonzero()
        host, place = self.address[first], begins[first]
        end = begins[-1] + self.length[-1]
        length = np.empty_like(place)
        np.subtract(place[1:], place[:-1], out=length[:-1])
        length[-1] = end - place[-1]
        cuts = [
            place[inside] + border - host[inside]
            for border in borders
            if (inside := (host < border) & (border < host + length)).any()
        ]
        if not cuts:
            return host, place, length
        start = np.unique(np.concatenate([place, *cuts]))
        run = place.searchsorted(start, "right") - 1
        return host[run] + start - place[run], start, np.append(start[1:], end) - start


@dataclass(frozen=True, eq=False)
class Piece:
    """Parts that are in staging memory at one time, ``place`` bytes into their span of ``total_bytes``.

    ``copies`` are host address, place and length of what must be copied between the two.
    """

    kind: Column
    block: Column
    address: Column
    length: Column
    place: Column
    total_bytes: int
    copies: tuple[Column, Column, Column]
