"""Orders to copy, as pieces of what travels at one time: pure arithmetic, in columns.

A *part* is what of a row travels as one: all of it as a rule; rows that are longer than staging memory allows
are cut every so many bytes. A *kind* is the parts of a group's rows that have the same bytes of theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvconnect.offload.copies.arena import RowArena
from kvconnect.offload.copies.rows import RowLayout
from kvconnect.orders import RowCopies
from kvconnect.pack.batches import Move, PageRange
from kvconnect.pack.lanes import Column, Lanes


@dataclass(frozen=True, eq=False)
class Piece:
    """Parts that are in staging memory at one time, in the order of their addresses in host memory.

    Part ``i`` is of ``kind[i]`` and ``block[i]``, and ``place[i]`` bytes into a span of ``total_bytes``.
    ``copies`` are host address, place and length of what must be copied.
    """

    kind: Column
    block: Column
    place: Column
    total_bytes: int
    copies: tuple[Column, Column, Column]


class RowParts:
    """The rows of an arena in parts of at most ``part_bytes``, a multiple of 64.

    Attributes:
        lanes_of: the lanes of each kind, which are those of a group with its number.
    """

    def __init__(self, layout: RowLayout, arena: RowArena, part_bytes: int) -> None:
        self._layout, self._arena = layout, arena
        self.lanes_of: list[tuple[Lanes, ...]] = []
        self._kinds: dict[int, tuple[Column, Column, Column]] = {}
        for group in arena.plan.groups:
            rows = layout.of(group)
            begin = np.arange(0, rows.row_bytes, part_bytes, dtype=np.int64)
            end = np.minimum(begin + part_bytes, rows.row_bytes)
            kind = len(self.lanes_of) + np.arange(len(begin))
            self._kinds[group] = kind, begin, end - begin
            self.lanes_of += [
                rows.lanes_of(*cut) for cut in zip(*(c.tolist() for c in (kind, begin, end)), strict=True)
            ]

    def moves(self, pages: Sequence[PageRange]) -> list[Move]:
        """How parts are moved: so many of each kind."""
        return [
            Move(lanes, slice(None), lanes.wire_offset, some, 0, some.count)
            for some in pages
            for lanes in self.lanes_of[some.group]
        ]

    def pieces(self, copies: Sequence[RowCopies], most_bytes: int) -> list[Piece]:
        """Orders in pieces of at most ``most_bytes``, or of one part where that has more.

        Raises:
            LocalError: a block or a row does not exist.
        """
        columns = [self._parts(one) for one in copies if one.block_ids or one.rows]
        if not columns:
            return []
        parts = np.concatenate(columns, axis=1)
        kind, block, address, length = parts[:, parts[2].argsort(kind="stable")]
        end = length.cumsum()
        begin = end - length
        firsts, first = [], 0
        while first < len(end):
            firsts.append(first)
            first = max(first + 1, int(end.searchsorted(begin[first] + most_bytes, "right")))
        copied = self._copies(address, begin, length, firsts)
        copies_at = [*copied[1].searchsorted(begin[firsts]).tolist(), len(copied[1])]
        pieces = []
        for index, (first, stop) in enumerate(zip(firsts, [*firsts[1:], len(end)], strict=True)):
            at, mine = begin[first], slice(first, stop)
            host, place, size = (column[copies_at[index] : copies_at[index + 1]] for column in copied)
            pieces.append(
                Piece(
                    kind[mine],
                    block[mine],
                    begin[mine] - at,
                    int(end[stop - 1] - at),
                    (host, place - at, size),
                )
            )
        return pieces

    def _parts(self, copies: RowCopies) -> Column:
        """Kind, block, address and length of an order's parts."""
        blocks, rows = self._layout.of(copies.group).columns(copies)
        addresses = self._arena.addresses(copies.group, rows)
        kind, begin, length = self._kinds[copies.group]
        columns = np.empty((4, len(blocks), len(kind)), dtype=np.int64)
        columns[0], columns[1], columns[3] = kind, blocks[:, None], length
        np.add(addresses[:, None], begin, out=columns[2])
        return columns.reshape(4, -1)

    def _copies(
        self, address: Column, begin: Column, length: Column, firsts: Sequence[int]
    ) -> tuple[Column, Column, Column]:
        """Host address, place and length of stretches that lie side by side in both memories.

        None reaches across a border of the arena, or from one piece into the next.
        """
        new = np.ones(len(begin), dtype=bool)
        np.not_equal(address[1:], address[:-1] + length[:-1], out=new[1:])
        new[firsts] = True
        (first,) = new.nonzero()
        host, place, size = address[first], begin[first], np.add.reduceat(length, first)
        cuts = [
            place[inside] + border - host[inside]
            for border in self._arena.borders
            if (inside := (host < border) & (border < host + size)).any()
        ]
        if not cuts:
            return host, place, size
        start = np.unique(np.concatenate([place, *cuts]))
        run = place.searchsorted(start, "right") - 1
        return host[run] + start - place[run], start, np.diff(start, append=begin[-1] + length[-1])


def page_numbers(piece: Piece) -> dict[PageRange, Column]:
    """The kernel's numbers of a piece's parts, by kind: blocks, and places in staging memory."""
    numbers = {}
    counts = np.bincount(piece.kind).tolist()
    for kind, count in enumerate(counts):
        if count:
            mine = slice(None) if count == len(piece.kind) else piece.kind == kind
            numbers[PageRange(kind, 0, count)] = np.concatenate([piece.block[mine], piece.place[mine]])
    return numbers
