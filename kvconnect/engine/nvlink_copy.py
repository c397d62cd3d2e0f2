# The kernel is Triton's language, not Python's: its parameters have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""The kernel that carries out a batch of copies, and how the batch is cut for it.

It knows memory by absolute addresses, so that it reaches every allocation and whatever a peer's is mapped
to. Programs take pieces in turn, so that any number of programs can do all the work. What is aligned to 16
bytes on both sides moves 16 bytes at a time, the rest byte by byte.
"""

from __future__ import annotations

import numpy as np
import triton
import triton.language as tl
from numpy.typing import NDArray

from kvconnect.arithmetic import div_ceil
from kvconnect.engine.base import Addresses

LEAST_PIECE_BYTES = 8 << 10
MOST_PIECE_BYTES = 64 << 10
_BYTES_AT_ONCE = 1024


# A new number of pieces must not mean a new compile.
@triton.jit(do_not_specialize=["num_pieces"])
def copy_kernel(pieces, num_pieces, TILE: tl.constexpr, BYTES: tl.constexpr):
    """Copy ``num_pieces`` stretches: ``pieces`` holds their sources, then their targets, then their lengths.

    A program moves ``TILE`` bytes at a time, or ``BYTES`` where they must go one by one.
    """
    unit = tl.arange(0, TILE // 16)[:, None]
    half = tl.arange(0, 2)[None, :]
    byte = tl.arange(0, BYTES)
    for piece in range(tl.program_id(0), num_pieces, tl.num_programs(0)):
        source = tl.load(pieces + piece)
        target = tl.load(pieces + num_pieces + piece)
        length = tl.load(pieces + 2 * num_pieces + piece).to(tl.int32)
        units = tl.where(((source | target) & 15) == 0, length // 16, 0)

        wide_source = tl.multiple_of(source.to(tl.pointer_type(tl.int64)), 16)
        wide_target = tl.multiple_of(target.to(tl.pointer_type(tl.int64)), 16)
        for first in range(0, units, TILE // 16):
            at = (first + unit) * 2 + half
            live = first + unit < units
            words = tl.load(wide_source + at, mask=live, eviction_policy="evict_first")
            tl.store(wide_target + at, words, mask=live)

        byte_source = source.to(tl.pointer_type(tl.uint8))
        byte_target = target.to(tl.pointer_type(tl.uint8))
        for first in range(units * 16, length, BYTES):
            at = first + byte
            live = at < length
            tl.store(byte_target + at, tl.load(byte_source + at, mask=live), mask=live)


def launch(pieces: object, num_pieces: int, programs: int, tile_bytes: int, num_warps: int) -> None:
    """Start the kernel on the current stream. ``pieces`` is an int64 tensor as ``copy_kernel`` takes it."""
    copy_kernel[(programs,)](pieces, num_pieces, TILE=tile_bytes, BYTES=_BYTES_AT_ONCE, num_warps=num_warps)


def piece_bytes(total_bytes: int, programs: int) -> int:
    """How long a piece may be: short enough to give every program of a large batch several."""
    wanted = div_ceil(total_bytes, 4 * programs)
    return min(max(1 << (wanted - 1).bit_length(), LEAST_PIECE_BYTES), MOST_PIECE_BYTES)


def num_pieces(length: Addresses, most_bytes: int) -> int:
    """How many pieces of at most ``most_bytes`` the copies are cut into."""
    if not len(length) or int(length.max()) <= most_bytes:
        return len(length)
    return int((-(-length // most_bytes)).sum())


def cut(
    source: Addresses, target: Addresses, length: Addresses, most_bytes: int, into: NDArray[np.int64]
) -> None:
    """Fill the rows of ``into``, shape ``[3, num_pieces]``, with sources, targets and lengths of pieces."""
    if into.shape[1] == len(length) and (not len(length) or int(length.max()) <= most_bytes):
        into[0], into[1], into[2] = source, target, length
        return
    parts = -(-length // most_bytes)
    first = np.cumsum(parts) - parts
    offset = (np.arange(into.shape[1]) - np.repeat(first, parts)) * most_bytes
    np.add(np.repeat(source, parts), offset, out=into[0])
    np.add(np.repeat(target, parts), offset, out=into[1])
    np.minimum(np.repeat(length, parts) - offset, most_bytes, out=into[2])
