"""Pack and unpack on a CPU: a few strided copies per lane, from page to slot and back, by torch.

A page and its place in the slot are the same five axes with different strides, so that one indexed
copy moves all whole pages of a lane. The first and the last page of a chunk may be partial and go
alone. Values that are cast go a few pages at a time, through what stays in the processor's cache.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kvconnect.pack.batches import Batch, LaneClass
from kvconnect.pack.casts import Cast, cast_table
from kvconnect.pack.digest import digest_streams
from kvconnect.pack.lanes import Access, Walk
from kvconnect.pack.packer import StagedChunk, Ticket

_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_UINTS = {1: np.uint8, 2: np.uint16}
_VALUES_AT_ONCE = 1 << 15


def use_one_thread() -> None:
    """Let torch work with this thread alone whenever it is called from it; other threads are not touched.

    A model may keep all cores busy: threads of ours that wait for each other between its own are many times
    slower than one.
    """
    everyone = torch.get_num_threads()
    torch.set_num_threads(1)
    # What counts is each thread's own, but threads that begin later take what any has set last.
    other = threading.Thread(target=torch.set_num_threads, args=(everyone,))
    other.start()
    other.join()


@dataclass(frozen=True)
class _Done:
    """A ticket of something that happened already."""

    digest: int | None
    done: bool = True

    def wait(self) -> None:
        pass


class TorchPackOps:
    """See ``PackOps``."""

    def __init__(self, classes: Sequence[LaneClass], digest_sample: int) -> None:
        self._digest_sample = digest_sample
        self._pages = {
            (int(address), lanes.walk, lanes.access): _memory_view(int(address), lanes)
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
            lanes = zip(batch.address.tolist(), batch.wire.tolist(), batch.scales.tolist(), strict=True)
            for address, wire, scales in lanes:
                view = self._pages[(address, batch.walk, batch.access)]
                for part in _parts(batch):
                    slot_view = _slot_view(view, raw[wire:], batch.walk, batch.access, part)
                    if batch.access.cast is None:
                        _move_part(view, slot_view, part, pack)
                    else:
                        values = _Values(batch.access.cast, batch.key_values, scales)
                        _cast_part(view, slot_view, part, values, pack)
        if seed is None:
            return _Done(None)
        return _Done(digest_streams(raw, staged.streams, seed, self._digest_sample))


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
    walk, cast = lanes.walk, lanes.access.cast
    word = min(8, lanes.access.memory) if cast is None else cast.memory_bytes
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


def _slot_view(
    view: torch.Tensor, slot: NDArray[np.uint8], walk: Walk, access: Access, part: _Part
) -> torch.Tensor:
    """The rows of a part in the slot: (page, token, head, plane, word)."""
    word = view.element_size() if access.cast is None else access.cast.wire_bytes
    start = part.first_row * walk.wire_token_stride
    return (
        torch.from_numpy(slot[start:])
        if word == 1
        else torch.from_numpy(slot[start : start + (len(slot) - start) // word * word]).view(_DTYPES[word])
    ).as_strided(
        (len(part.blocks), part.tokens, walk.heads, walk.planes, walk.wire_run_bytes // word),
        (
            walk.tokens * walk.wire_token_stride // word,
            walk.wire_token_stride // word,
            walk.wire_head_stride // word,
            walk.wire_plane_stride // word,
            1,
        ),
    )


def _move_part(view: torch.Tensor, wire: torch.Tensor, part: _Part, pack: bool) -> None:
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


@dataclass(frozen=True)
class _Values:
    """What a lane's values are: see ``Lane``."""

    cast: Cast
    key_values: int
    scales: Sequence[float]

    def cast_into(self, target: torch.Tensor, source: torch.Tensor, pack: bool) -> None:
        """Cast (page, token, head, plane, value) from one tensor into another."""
        planes, run = source.shape[3:]
        from_type, to_type = (
            (self.cast.memory, self.cast.wire) if pack else (self.cast.wire, self.cast.memory)
        )
        for plane in range(planes):
            keys = min(max(self.key_values - plane * run, 0), run)
            for first, stop, scale in ((0, keys, self.scales[0]), (keys, run, self.scales[1])):
                if first < stop:
                    codes = source[..., plane, first:stop].numpy()
                    table = cast_table(from_type, to_type, scale)
                    made = table.take(codes.view(_UINTS[codes.itemsize]), mode="wrap")
                    target[..., plane, first:stop] = torch.from_numpy(made.view(f"i{made.itemsize}"))


def _cast_part(view: torch.Tensor, wire: torch.Tensor, part: _Part, values: _Values, pack: bool) -> None:
    pages = view.narrow(1, part.first_token, part.tokens)
    at_once = max(1, _VALUES_AT_ONCE // wire[0].numel())
    for first in range(0, len(part.blocks), at_once):
        blocks, rows = part.blocks[first : first + at_once], wire[first : first + at_once]
        missing = (blocks == 0).nonzero().reshape(-1)
        if pack:
            values.cast_into(rows, pages.index_select(0, blocks), pack)
            rows.index_fill_(0, missing, 0)
            continue
        if len(missing):
            kept = blocks.nonzero().reshape(-1)
            blocks, rows = blocks[kept], rows[kept]
        cast = torch.empty((len(blocks), *pages.shape[1:]), dtype=pages.dtype)
        values.cast_into(cast, rows, pack)
        pages.index_copy_(0, blocks, cast)
