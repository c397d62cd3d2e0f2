"""Which of many stretches lie in registered spans, for engines that are faster than a search for each.

Copies of a plan come span by span, so a chunk of neighbouring copies usually lies in one span: then its
least and largest addresses decide for all of it. Only chunks that straddle are searched one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvconnect.engine.base import Addresses

_CHUNK = 64


class SpanTable:
    """Spans, as (address, length in bytes), that do not overlap; and how far each is moved. Never changed.

    ``shifts`` has a number of bytes for each span: the distance to where its memory is mapped. Without it
    nothing is moved.
    """

    def __init__(self, spans: Iterable[tuple[int, int]], shifts: Sequence[int] = ()) -> None:
        columns = np.array(list(spans), dtype=np.int64).reshape(-1, 2)
        order = np.argsort(columns[:, 0])
        self._starts = columns[order, 0]
        self._ends = self._starts + columns[order, 1]
        self._shifts = np.array(shifts or [0] * len(columns), dtype=np.int64)[order]

    def outside(self, addresses: Addresses, length: Addresses) -> int | None:
        """The index of the first stretch that is not inside one span, or None. No length may be negative."""
        return self._walk(addresses, length, None)

    def translate(self, addresses: Addresses, length: Addresses, into: Addresses) -> int | None:
        """Write the addresses to ``into``, each moved as its span is; returns what ``outside`` does.

        Where that is not None, what was written is of no use.
        """
        return self._walk(addresses, length, into)

    def _walk(self, addresses: Addresses, length: Addresses, into: Addresses | None) -> int | None:
        if not len(addresses):
            return None
        if not len(self._starts):
            return 0
        chunks = len(addresses) // _CHUNK
        end = chunks * _CHUNK
        near = addresses[:end].reshape(chunks, _CHUNK)
        # The longest of all at a chunk's last address: too strict at worst, then each stretch is looked at.
        owner, inside = self._search(near.min(axis=1), near.max(axis=1), length.max())
        if into is not None:
            np.add(near, self._shifts[owner][:, None], out=into[:end].reshape(chunks, _CHUNK))
        if end == len(addresses) and inside.all():
            return None
        straddling = np.flatnonzero(np.repeat(~inside, _CHUNK))
        rest = np.concatenate((straddling, np.arange(end, len(addresses))))
        owner, inside = self._search(addresses[rest], addresses[rest], length[rest])
        if not inside.all():
            return int(rest[np.argmin(inside)])
        if into is not None:
            into[rest] = addresses[rest] + self._shifts[owner]
        return None

    def _search(
        self, low: Addresses, high: Addresses, length: Addresses | np.int64
    ) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
        """The span around ``low``, and whether ``length`` bytes from ``high`` on are in it too."""
        owner = np.searchsorted(self._starts, low, side="right") - 1
        # Subtracted rather than added: an address near the end of the number range must not wrap.
        return owner, (owner >= 0) & (high <= self._ends[np.maximum(owner, 0)] - length)
