"""Orders to copy, as parts of rows: what they are, where in host memory, and how long."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvconnect.offload.copies.arena import RowArena
from kvconnect.offload.copies.copier import columns_of
from kvconnect.offload.copies.rows import Column, RowLayout
from kvconnect.offload.copies.tiles import Kind, Parts, Piece, kinds_of
from kvconnect.orders import RowCopies


class RowParts:
    """What copies are in kinds and parts: see ``tiles``.

    Attributes:
        kinds: those of all groups, and those that copy from row to row.
        tried_group: the cache group whose rows have most memory.
        tried_bytes: the length of the first part of its rows.
        tried_kind: a kind that is cut as that part is, but lies side by side at an address, its "block".
    """

    def __init__(self, layout: RowLayout, arena: RowArena, part_bytes: int) -> None:
        self._layout, self._arena = layout, arena
        self.kinds: list[Kind] = []
        self._lengths: dict[int, Column] = {}
        self._first: dict[int, int] = {}
        for group in arena.plan.groups:
            made = kinds_of(layout.of(group), part_bytes)
            self._first[group] = len(self.kinds)
            self._lengths[group] = np.array([kind.length_bytes for kind in made], dtype=np.int64)
            self.kinds += made
        lengths = sorted({kind.length_bytes for kind in self.kinds})
        self._plain_lengths = np.array(lengths, dtype=np.int64)
        self._first_plain = len(self.kinds)
        self.kinds += [Kind.plain(length) for length in lengths]
        plan = arena.plan
        sizes = {
            group: plan.row_class(group).num_rows * plan.row_class(group).row_bytes for group in self._first
        }
        self.tried_group = max(sizes, key=lambda group: sizes[group])
        self.tried_kind = len(self.kinds)
        self.kinds.append(self.kinds[self._first[self.tried_group]].packed())
        self.tried_bytes = self.kinds[-1].length_bytes

    def of(self, copies: Sequence[RowCopies]) -> Parts:
        """All parts of these copies. Raises ``LocalError``: a block or a row does not exist."""
        columns: list[tuple[Column, ...]] = []
        for one in copies:
            blocks, numbers = columns_of(one, self._layout.of(one.group))
            addresses = self._arena.addresses(one.group, numbers)
            lengths, first = self._lengths[one.group], self._first[one.group]
            if len(lengths) == 1:
                like = np.full((2, len(blocks)), ((first,), (lengths[0],)), dtype=np.int64)
                columns.append((like[0], blocks, addresses, like[1]))
                continue
            index = np.tile(np.arange(len(lengths)), len(blocks))
            begin = np.cumsum(lengths) - lengths
            columns.append(
                (
                    first + index,
                    np.repeat(blocks, len(lengths)),
                    np.repeat(addresses, len(lengths)) + begin[index],
                    lengths[index],
                )
            )
        if len(columns) == 1:
            return Parts.sorted(*columns[0])
        if not columns:
            columns.append((np.zeros(0, dtype=np.int64),) * 4)
        return Parts.sorted(*(np.concatenate(column) for column in zip(*columns, strict=True)))

    def cut(self, parts: Parts, most_bytes: int) -> list[Piece]:
        """Parts in pieces of at most so many bytes."""
        return parts.pieces(most_bytes, self._arena.borders)

    def plain_kind(self, length: Column) -> Column:
        """The kind that copies parts of these lengths from row to row."""
        return self._first_plain + np.searchsorted(self._plain_lengths, length)
