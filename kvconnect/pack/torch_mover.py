"""Pack and unpack with plain torch, for a GPU without Triton: a few indexed copies per lane, on one stream.

The bytes and digests are those of the Triton kernel. It is slower, since every lane needs its own launches.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
import torch

from kvconnect.cache.borrowed_memory import memory_at
from kvconnect.pack.batches import Move, PackTicket, PlainMover, StagedChunk, parts, values_by_scale
from kvconnect.pack.casts import cast_table
from kvconnect.pack.digest import MULTIPLIER, STEP
from kvconnect.pack.page_lanes import Lanes
from kvconnect.plan.blocks import BlockIds

_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LOW_HALF = (1 << 32) - 1


class TorchMover(PlainMover):
    """All work is on ``cuda_stream``; None for the stream that is current at construction, or for a CPU."""

    def __init__(
        self, all_lanes: Sequence[Lanes], device: torch.device, cuda_stream: torch.cuda.Stream | None
    ) -> None:
        on_cuda = device.type == "cuda"
        self._device = device
        self._stream = cuda_stream or (torch.cuda.current_stream(device) if on_cuda else None)
        self._pages = {
            lanes: [self._pages_of(at, lanes) for at in lanes.address.tolist()] for lanes in all_lanes
        }

    def move(self, slot: int, staged: StagedChunk, seed: int, pack: bool) -> PackTicket:
        """Pack pages into the slot at address ``slot``, or unpack them, and compute the slot's digest."""
        if not staged.total_bytes:
            return PackTicket(0)
        with torch.cuda.stream(self._stream):
            raw = memory_at(slot, staged.total_bytes, self._device)
            for move in staged.layout.moves:
                self._move_rows(
                    self._pages[move.lanes][move.which], move, staged.blocks[move.pages], raw, pack
                )
            digest = torch.stack([_digest(raw, *one, seed) for one in staged.layout.streams]).sum()
            if self._stream is None:
                return PackTicket(_number(digest))
            return _StreamTicket(self._stream, digest)

    def _pages_of(self, address: int, lanes: Lanes) -> torch.Tensor:
        """All pages of a lane: (block, token, head, plane, word)."""
        walk, cast = lanes.walk, lanes.access.cast
        word = math.gcd(8, walk.memory_step()) if cast is None else cast.memory_bytes
        length_bytes = (lanes.num_blocks - 1) * walk.block_stride + walk.extent_bytes
        shape = (lanes.num_blocks, walk.tokens, walk.heads, walk.planes, walk.run_bytes // word)
        strides = (walk.block_stride, walk.token_stride, walk.head_stride, walk.plane_stride, word)
        return _strided(memory_at(address, length_bytes, self._device), 0, shape, strides, word)

    def _move_rows(
        self,
        all_pages: Sequence[torch.Tensor],
        move: Move,
        of_pages: BlockIds,
        slot: torch.Tensor,
        pack: bool,
    ) -> None:
        """Move the pages of each lane."""
        walk, cast = move.lanes.walk, move.lanes.access.cast
        word = all_pages[0].element_size() if cast is None else cast.wire_bytes
        step = walk.tokens * walk.wire_token_stride
        strides = (step, walk.wire_token_stride, walk.wire_head_stride, walk.wire_run_bytes, word)
        all_scales = move.lanes.scales[move.which].tolist()
        for blocks, skipped, tokens, at in parts(move, of_pages):
            if not blocks[0] and not pack:
                continue
            ids = torch.from_numpy(blocks).to(self._device)
            shape = (len(blocks), tokens, walk.heads, walk.planes, walk.wire_run_bytes // word)
            for pages, wire, scales in zip(all_pages, move.wire.tolist(), all_scales, strict=True):
                pages = pages[:, skipped : skipped + tokens]
                in_slot = _strided(slot, wire + at, shape, strides, word)
                if not blocks[0]:
                    in_slot.zero_()
                elif pack:
                    found = pages[ids]
                    in_slot.copy_(found if cast is None else self._cast(found, move.lanes, scales, pack))
                else:
                    pages[ids] = in_slot if cast is None else self._cast(in_slot, move.lanes, scales, pack)

    def _cast(self, codes: torch.Tensor, lanes: Lanes, scales: list[float], pack: bool) -> torch.Tensor:
        """Cast values, shape (page, token, head, plane, value), to the other dtype."""
        cast, (planes, run) = lanes.access.cast, codes.shape[3:]
        assert cast is not None
        types = (cast.memory, cast.wire) if pack else (cast.wire, cast.memory)
        made = [
            _table(*types, scale, self._device)[_unsigned(codes[..., plane, values])]
            for plane, values, scale in values_by_scale(lanes, planes, run, scales)
        ]
        joined = torch.cat(made, dim=-1)
        return joined.view(*joined.shape[:-1], planes, run)


class _StreamTicket(PackTicket):
    """A pack or unpack on a stream, done when its event is."""

    def __init__(self, stream: torch.cuda.Stream, digest: torch.Tensor) -> None:
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(stream)
        self._sum = digest

    @property
    def done(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    @property
    def digest(self) -> int:
        return _number(self._sum)

    def wait(self) -> None:
        self._event.synchronize()


def _number(digest: torch.Tensor) -> int:
    return int(digest.item()) % 2**64


def _strided(
    memory: torch.Tensor, first: int, shape: tuple[int, ...], strides: tuple[int, ...], word: int
) -> torch.Tensor:
    """A view of bytes as words; ``first`` and ``strides`` are in bytes, and multiples of a word."""
    words = memory[: len(memory) // word * word].view(_INTS[word])
    steps = tuple(stride // word for stride in strides)
    return words.as_strided(shape, steps, words.storage_offset() + first // word)


def _unsigned(codes: torch.Tensor) -> torch.Tensor:
    """The bits of values as non-negative int64, to index a table."""
    return codes.long() & ((1 << 8 * codes.element_size()) - 1)


@functools.lru_cache(maxsize=512)
def _table(source: str, target: str, scale: float, device: torch.device) -> torch.Tensor:
    """``cast_table`` on a device."""
    made = cast_table(source, target, scale)
    return torch.from_numpy(made.view(np.int16) if made.itemsize == 2 else made).to(device)


def _digest(slot: torch.Tensor, offset: int, length: int, word: int, seed: int) -> torch.Tensor:
    """The digest of one stream: see ``kvconnect.pack.digest``. int64 wraps around as uint64 does."""
    words = slot[offset : offset + length].view(_INTS[word])
    places = torch.arange(offset // word, offset // word + len(words), device=slot.device)
    x = _unsigned(words) if word < 8 else words
    x = _mix(x + (places * _signed(STEP) + _signed(seed)))
    return x.sum()


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = x ^ (x >> 32 & _LOW_HALF)
    x = x * _signed(MULTIPLIER)
    return x ^ (x >> 32 & _LOW_HALF)


def _signed(number: int) -> int:
    """An unsigned 64-bit number as int64."""
    number %= 2**64
    return number - 2**64 if number >= 2**63 else number
