"""Pack and unpack on a CPU: a few strided copies per lane, from page to slot and back, by torch.

A page and its place in the slot are the same five axes with different strides, so that one indexed
copy moves all whole pages of a lane. The first and the last page of a chunk may be partial and go
alone. Values that are cast go a few pages at a time, through what stays in the processor's cache.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kvconnect.pack.batches import Batch, LaneClass, Move, PageRange
from kvconnect.pack.casts import Cast, cast_table
from kvconnect.pack.digest import digest_streams
from kvconnect.pack.lanes import Access, Walk
from kvconnect.pack.packer import ChunkLayout, StagedChunk, Ticket
from kvconnect.runner_kit.block_table import BlockIds

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
        self._pages: dict[tuple[Walk, Access], dict[int, torch.Tensor]] = {}
        for lanes in classes:
            views = self._pages.setdefault((lanes.walk, lanes.access), {})
            for address in lanes.address.tolist():
                views[address] = _memory_view(address, lanes)

    def prepare(self, moves: Sequence[Move]) -> None:
        """See ``PackOps``. Nothing is worth it."""

    def stage(self, layouts: Sequence[ChunkLayout], blocks: Mapping[PageRange, BlockIds]) -> Sequence[None]:
        """Nothing to bring anywhere."""
        return [None] * len(layouts)

    def move(self, slot: int, staged: StagedChunk, seed: int | None, pack: bool) -> Ticket:
        """See ``PackOps``."""
        if not staged.total_bytes:
            return _Done(None if seed is None else 0)
        raw = np.ctypeslib.as_array((ctypes.c_uint8 * staged.total_bytes).from_address(slot))
        for batch in staged.batches:
            views, rows = self._pages[(batch.walk, batch.access)], _SlotRows(raw, batch)
            # What all lanes of a batch have in common is worked out before, since there may be hundreds.
            for part in _parts(batch):
                for lane, (address, wire) in enumerate(
                    zip(batch.address.tolist(), batch.wire.tolist(), strict=True)
                ):
                    pages, slot_view = views[address], rows.view(wire, part)
                    if part.tokens != batch.walk.tokens:
                        pages = pages.narrow(1, part.first_token, part.tokens)
                    if batch.access.cast is None:
                        _move_part(pages, slot_view, part, pack)
                    else:
                        values = _Values(batch.access.cast, batch.key_values, batch.scales[lane].tolist())
                        _cast_part(pages, slot_view, part, values, pack)
        if seed is None:
            return _Done(None)
        return _Done(digest_streams(raw, staged.streams, seed, self._digest_sample))


@dataclass(frozen=True)
class _Part:
    """Pages of which the same tokens travel: their blocks, and where the first of their rows lies.

    ``missing`` and ``kept`` are the pages without and with a block, None where all have one.
    """

    blocks: torch.Tensor
    first_row: int
    first_token: int
    tokens: int
    missing: torch.Tensor | None
    kept: torch.Tensor | None


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
        count = min(tokens, batch.rows - row) - skipped
        blocks = torch.from_numpy(batch.blocks[first:stop])
        missing = (blocks == 0).nonzero().reshape(-1)
        kept = blocks.nonzero().reshape(-1) if len(missing) else None
        yield _Part(blocks, row + skipped, skipped, count, missing if len(missing) else None, kept)


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


class _SlotRows:
    """The rows of a batch's lanes in a slot."""

    def __init__(self, slot: NDArray[np.uint8], batch: Batch) -> None:
        walk, cast = batch.walk, batch.access.cast
        self._walk = walk
        self._word = min(8, batch.access.memory) if cast is None else cast.wire_bytes
        self._words = torch.from_numpy(slot[: len(slot) // self._word * self._word]).view(_DTYPES[self._word])
        self._strides = tuple(
            stride // self._word
            for stride in (
                walk.tokens * walk.wire_token_stride,
                walk.wire_token_stride,
                walk.wire_head_stride,
                walk.wire_plane_stride,
            )
        )

    def view(self, wire: int, part: _Part) -> torch.Tensor:
        """Those of one lane, which begin ``wire`` bytes into the slot: (page, token, head, plane, word)."""
        walk = self._walk
        return self._words.as_strided(
            (len(part.blocks), part.tokens, walk.heads, walk.planes, walk.wire_run_bytes // self._word),
            (*self._strides, 1),
            (wire + part.first_row * walk.wire_token_stride) // self._word,
        )


def _move_part(pages: torch.Tensor, wire: torch.Tensor, part: _Part, pack: bool) -> None:
    if pack:
        torch.index_select(pages, 0, part.blocks, out=wire)
        if part.missing is not None:
            wire.index_fill_(0, part.missing, 0)
    elif part.kept is not None:
        pages.numpy()[part.blocks[part.kept].numpy()] = wire[part.kept].numpy()
    else:
        # numpy takes a quarter of the time of torch's index_copy_ for that.
        pages.numpy()[part.blocks.numpy()] = wire.numpy()


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


def _cast_part(pages: torch.Tensor, wire: torch.Tensor, part: _Part, values: _Values, pack: bool) -> None:
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
