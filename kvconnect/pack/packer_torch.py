"""Pack and unpack on a CPU: a few strided copies per lane, from page to slot and back, by torch.

A page and its place in the slot are the same five axes with different strides, so that one indexed
copy moves all whole pages of a lane. The first and the last page of a chunk may be partial and go
alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kvconnect.pack.batches import Batch, LaneClass
from kvconnect.pack.digest import digest_bytes
from kvconnect.pack.lanes import Walk
from kvconnect.pack.packer import StagedChunk, Ticket

_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class _Done:
    """A ticket of something that happened already."""

    digest: int | None
    done: bool = True

    def wait(self) -> None:
        pass


class TorchPackOps:
    """See ``PackOps``."""

    def __init__(self, classes: Sequence[LaneClass]) -> None:
        self._pages = {
            (int(address), lanes.walk): _memory_view(int(address), lanes)
            for lanes in classes
            for address in lanes.address
        }

    def stage(self, chunks: Sequence[Sequence[Batch]]) -> Sequence[None]:
        """Nothing to bring anywhere."""
        return [None] * len(chunks)

    def move(self, slot: int, staged: StagedChunk, seed: int | None, pack: bool) -> Ticket:
        """See ``PackOps``."""
        if not staged.total_bytes:
            return _Done(None if seed is None else 0)
        raw = np.ctypeslib.as_array((ctypes.c_uint8 * staged.total_bytes).from_address(slot))
        for batch in staged.batches:
            for address, wire in zip(batch.address.tolist(), batch.wire.tolist(), strict=True):
                view = self._pages[(address, batch.walk)]
                for part in _parts(batch):
                    _move_part(view, raw[wire:], batch.walk, part, pack)
        return _Done(None if seed is None else _digest(raw, staged, seed))


def _digest(raw: NDArray[np.uint8], staged: StagedChunk, seed: int) -> int:
    total = 0
    for offset, length, word in staged.streams:
        total += digest_bytes(raw[offset : offset + length], offset, word, seed)
    return total % 2**64


@dataclass(frozen=True)
class _Part:
    """Pages of which the same tokens travel: their blocks, and where the first of their rows lies."""

    blocks: torch.Tensor
    first_row: int
    first_token: int
    tokens: int


def _parts(batch: Batch) -> Iterator[_Part]:
    """The first page, the whole pages and the last page: at most three parts."""
    tokens = batch.walk.tokens
    end = batch.lead + len(batch.blocks) * tokens
    head = 1 if batch.lead < 0 else 0
    tail = len(batch.blocks) - 1 if end > batch.rows else len(batch.blocks)
    for first, stop in ((0, head), (head, max(head, tail)), (max(head, tail), len(batch.blocks))):
        if first == stop:
            continue
        row = batch.lead + first * tokens
        skipped = max(0, -row)
        kept = min(tokens, batch.rows - row) - skipped
        yield _Part(torch.from_numpy(batch.blocks[first:stop]), row + skipped, skipped, kept)


def _memory_view(address: int, lanes: LaneClass) -> torch.Tensor:
    """All pages of a lane: (block, token, head, plane, word)."""
    walk, word = lanes.walk, min(8, lanes.access.memory)
    length = (lanes.num_blocks - 1) * walk.block_stride + walk.extent_bytes
    memory = (ctypes.c_uint8 * length).from_address(address)
    raw = torch.frombuffer(memory, dtype=_DTYPES[word])
    return raw.as_strided(
        (lanes.num_blocks, walk.tokens, walk.heads, walk.planes, walk.run_bytes // word),
        (
            walk.block_stride // word,
            walk.token_stride // word,
            walk.head_stride // word,
            walk.plane_stride // word,
            1,
        ),
    )


def _move_part(view: torch.Tensor, slot: NDArray[np.uint8], walk: Walk, part: _Part, pack: bool) -> None:
    word = view.element_size()
    start = part.first_row * walk.wire_token_stride
    count = len(part.blocks)
    wire = (
        torch.from_numpy(slot[start:])
        if word == 1
        else torch.from_numpy(slot[start : start + (len(slot) - start) // word * word]).view(view.dtype)
    ).as_strided(
        (count, part.tokens, walk.heads, walk.planes, walk.run_bytes // word),
        (
            walk.tokens * walk.wire_token_stride // word,
            walk.wire_token_stride // word,
            walk.wire_head_stride // word,
            walk.wire_plane_stride // word,
            1,
        ),
    )
    pages = view.narrow(1, part.first_token, part.tokens)
    missing = part.blocks == 0
    if pack:
        torch.index_select(pages, 0, part.blocks, out=wire)
        if missing.any():
            wire.index_fill_(0, missing.nonzero().reshape(-1), 0)
    elif missing.any():
        kept = (~missing).nonzero().reshape(-1)
        pages.index_copy_(0, part.blocks[kept], wire[kept])
    else:
        pages.index_copy_(0, part.blocks, wire)
