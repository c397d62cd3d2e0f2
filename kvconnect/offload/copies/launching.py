"""How launches of the kernel get their numbers: memory for them, used again once nobody reads it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from kvconnect.offload.copies.queues import Event, Queue
from kvconnect.offload.copies.rows import Column
from kvconnect.offload.copies.tiles import Launch, TileTable

_LEAST_NUMBERS = 1 << 12


class Mover(Protocol):
    """Moves parts of rows with a kernel, on the queue that is current: see ``RowKernel``."""

    table: TileTable

    def make_numbers(self, length: int) -> Numbers:
        """Room for the numbers of launches."""
        ...

    def load(self, numbers: Any, length: int) -> None:
        """Bring the first so many numbers to where the kernel reads them."""
        ...

    def start(
        self, numbers: Any, launches: Sequence[Launch], rows_at: int, to_rows: bool, programs: int = 0
    ) -> None:
        """Begin to move parts to rows, or back."""
        ...


class Numbers(Protocol):
    """Memory for the numbers of launches. ``column`` is written by the host."""

    @property
    def column(self) -> Column:
        """Where the numbers are put."""
        ...


class NumberPool:
    """Memory for numbers that is used again once the launches that read it are done. Of one thread."""

    def __init__(self, mover: Mover) -> None:
        self._mover = mover
        self._taken: list[Numbers] = []
        self._used: deque[tuple[Numbers, Event]] = deque()

    def take(self, length: int) -> Numbers:
        """Room for so many numbers."""
        numbers: Numbers | None = None
        if self._used and self._used[0][1].done:
            numbers, _ = self._used.popleft()
        if numbers is None or len(numbers.column) < length:
            numbers = self._mover.make_numbers(max(_LEAST_NUMBERS, 1 << (length - 1).bit_length()))
        self._taken.append(numbers)
        return numbers

    def give_back(self, after: Event) -> None:
        """All numbers that were taken are not read any more after this event."""
        self._used += ((numbers, after) for numbers in self._taken)
        self._taken.clear()


class Loading:
    """The numbers of the launches of several pieces, which go to the device at once."""

    def __init__(self, mover: Mover, pool: NumberPool) -> None:
        self._mover, self._pool = mover, pool
        self._columns: list[Column] = []
        self._length = 0
        self._numbers: Numbers | None = None

    def add(self, kind: Column, block: Column, place: Column) -> list[Launch]:
        """The launches of a piece."""
        column, launches = self._mover.table.launches(kind, block, place, self._length)
        self._columns.append(column)
        self._length += len(column)
        return launches

    def load(self, queue: Queue) -> None:
        """Bring all of them to the device."""
        self._numbers = numbers = self._pool.take(self._length)
        np.concatenate(self._columns, out=numbers.column[: self._length])
        queue.run(lambda: self._mover.load(numbers, self._length))

    def start(
        self, queue: Queue, launches: Sequence[Launch], rows_at: int, to_rows: bool, programs: int = 0
    ) -> None:
        """Begin a piece, on the queue that the numbers were loaded on."""
        numbers = self._numbers
        assert numbers is not None
        queue.run(lambda: self._mover.start(numbers, launches, rows_at, to_rows, programs))
