"""A lossless code for bfloat16: each exponent becomes a 4-bit offset from the largest one of its tile.

A tile of 4096 values, 8192 bytes, is coded in 6256 bytes: sign and mantissa of each value, a byte; two
offsets to a byte, the lower value's in the lower bits; the exponents that are kept apart, first those of the
lower values of all pairs, then those of the higher ones; the largest exponent. Offset 14 is an exponent of 0
(zeros and subnormals), 15 an exponent that is kept apart: more than 13 below the largest. A tile with more
than 96 of these cannot be coded, nor the chunk that it is part of. Unused bytes are 0. The size depends only
on the number of bytes, so that both sides know it before the content.
"""

from __future__ import annotations

import math
import time

import numpy as np
import torch
from numpy.typing import NDArray

from kvconnect.cache.borrowed_memory import memory_at
from kvconnect.cache.specs import div_ceil
from kvconnect.pack.batches import PackTicket

TILE_VALUES = 4096
TILE_BYTES = 2 * TILE_VALUES
MOST_APART = 96
ZERO, APART = 14, 15
OFFSETS_AT = TILE_VALUES
APART_AT = OFFSETS_AT + TILE_VALUES // 2
LARGEST_AT = APART_AT + MOST_APART
CODED_TILE_BYTES = LARGEST_AT + 16
_TILES_AT_ONCE = 16
_MEASURED_BYTES = 1 << 20


def coded_bytes(length_bytes: int) -> int:
    """The size in bytes of ``length_bytes`` bytes once they are coded."""
    return div_ceil(length_bytes, TILE_BYTES) * CODED_TILE_BYTES


class CodedTicket(PackTicket):
    """A submitted pack whose bytes are then coded; ``digest`` is of the bytes before that.

    ``failed``: a number that is not 0 once a tile could not be coded. ``event``: of a GPU, recorded after
    all work.
    """

    def __init__(
        self, packed: PackTicket, failed: NDArray[np.int32], event: torch.cuda.Event | None = None
    ) -> None:
        super().__init__()
        self._packed, self._failed, self._event = packed, failed, event

    @property
    def done(self) -> bool:
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    @property
    def digest(self) -> int:
        return self._packed.digest

    @property
    def has_failed(self) -> bool:
        return bool(self._failed.any())

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()


class ExponentCoder:
    """Codes and decodes slots, by way of ``plain``, the address of memory that chunks are packed in before.

    All work of a worker is in the order of its calls, so one such memory is enough. This class is for a CPU.

    Args:
        most_bytes: the size of the largest slot.
    """

    _most_measured = _MEASURED_BYTES

    def __init__(self, most_bytes: int, device: torch.device | str = "cpu") -> None:
        self._plain = torch.zeros(
            div_ceil(most_bytes, TILE_BYTES) * TILE_BYTES, dtype=torch.uint8, device=device
        )
        self.plain = self._plain.data_ptr()
        self.bytes_per_s = 0.0
        """The rate of coding followed by decoding, before it is measured 0."""

    def measure(self, slot: int, slot_bytes: int) -> None:
        """Measure its rate, with any slot that is free: the best of three."""
        length, best_s = min(self._most_measured, slot_bytes) // TILE_BYTES * TILE_BYTES, math.inf
        for _ in range(3 if length else 0):
            began = time.perf_counter()
            self.encode(slot, length, PackTicket())
            self.decode(slot, length)
            self._finish()
            best_s = min(best_s, time.perf_counter() - began)
        self.bytes_per_s = length / best_s

    def pays_below(self, bytes_per_s: float) -> bool:
        """Whether a link of this rate is so slow that coding saves time, even if nothing overlaps."""
        return bytes_per_s < (1 - CODED_TILE_BYTES / TILE_BYTES) * self.bytes_per_s

    def encode(self, slot: int, length_bytes: int, packed: PackTicket) -> CodedTicket:
        """Code the first bytes of ``plain``, where ``packed`` puts a chunk, into the slot at this address."""
        tiles, coded, fits = self._tiles(length_bytes), _coded_tiles(slot, length_bytes), True
        tiles[-1, (length_bytes - 1) % TILE_BYTES // 2 + 1 :] = 0
        for first in range(0, len(tiles), _TILES_AT_ONCE):
            at_once = slice(first, first + _TILES_AT_ONCE)
            fits &= _encode(tiles[at_once], coded[at_once])
        return CodedTicket(packed, np.array([not fits], np.int32))

    def decode(self, slot: int, length_bytes: int) -> None:
        """Restore a chunk of ``length_bytes`` bytes from its code in a slot, into ``plain``.

        Bytes that are no code have some value too: the digest shows that they are wrong.
        """
        tiles, coded = self._tiles(length_bytes), _coded_tiles(slot, length_bytes)
        for first in range(0, len(tiles), _TILES_AT_ONCE):
            at_once = slice(first, first + _TILES_AT_ONCE)
            _decode(coded[at_once], tiles[at_once])

    def _finish(self) -> None:
        """Wait for all work."""

    def _tiles(self, length_bytes: int) -> NDArray[np.uint16]:
        whole = div_ceil(length_bytes, TILE_BYTES) * TILE_BYTES
        return self._plain[:whole].numpy().view(np.uint16).reshape(-1, TILE_VALUES)


def _coded_tiles(slot: int, length_bytes: int) -> NDArray[np.uint8]:
    return memory_at(slot, coded_bytes(length_bytes)).numpy().reshape(-1, CODED_TILE_BYTES)


def _encode(values: NDArray[np.uint16], coded: NDArray[np.uint8]) -> bool:
    """Code some tiles; whether all could be coded."""
    exponents = ((values >> 7) & 0xFF).astype(np.uint8)
    largest = exponents.max(axis=1, keepdims=True)
    offsets = np.where(exponents == 0, ZERO, np.minimum(largest - exponents, APART)).astype(np.uint8)
    offsets[(exponents != 0) & (offsets == ZERO)] = APART
    coded[:, :OFFSETS_AT] = ((values >> 8) & 0x80) | (values & 0x7F)
    coded[:, OFFSETS_AT:APART_AT] = offsets[:, 0::2] | (offsets[:, 1::2] << 4)
    coded[:, APART_AT:] = 0
    coded[:, LARGEST_AT] = largest[:, 0]
    tile, place = np.nonzero(_halves(offsets) == APART)
    at = _places(tile, len(values))
    fits = at < MOST_APART
    coded[tile[fits], APART_AT + at[fits]] = _halves(exponents)[tile[fits], place[fits]]
    return bool(fits.all())


def _decode(coded: NDArray[np.uint8], values: NDArray[np.uint16]) -> None:
    pairs = coded[:, OFFSETS_AT:APART_AT]
    offsets = np.empty(values.shape, np.uint8)
    offsets[:, 0::2], offsets[:, 1::2] = pairs & 15, pairs >> 4
    exponents = np.where(offsets == ZERO, 0, coded[:, LARGEST_AT, None] - offsets).astype(np.uint8)
    tile, place = np.nonzero(_halves(offsets) == APART)
    at = np.minimum(_places(tile, len(values)), MOST_APART - 1)
    apart = coded[tile, APART_AT + at]
    is_high = place >= TILE_VALUES // 2
    exponents[tile, 2 * (place - is_high * (TILE_VALUES // 2)) + is_high] = apart
    rest = coded[:, :OFFSETS_AT].astype(np.uint16)
    values[:] = ((rest & 0x80) << 8) | (exponents.astype(np.uint16) << 7) | (rest & 0x7F)


def _halves(of_values: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The lower values of all pairs, then the higher ones."""
    return np.concatenate((of_values[:, 0::2], of_values[:, 1::2]), axis=1)


def _places(tile: NDArray[np.intp], tiles: int) -> NDArray[np.intp]:
    """The place of each value that is kept apart among those of its tile; ``tile`` is ascending."""
    first = np.searchsorted(tile, np.arange(tiles))
    return np.arange(len(tile)) - first[tile]
