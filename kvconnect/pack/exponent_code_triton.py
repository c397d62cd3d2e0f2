"""Codes and decodes slots with Triton kernels: one program codes one tile. See ``exponent_code.py``."""

from __future__ import annotations

import itertools

import torch
import triton
import triton.language as tl

from kvconnect.cache.specs import div_ceil
from kvconnect.pack import exponent_code as code
from kvconnect.pack.batches import PackTicket
from kvconnect.pack.move_triton import word_pointer

_PAIRS = tl.constexpr(code.TILE_VALUES // 2)
_ZERO, _APART, _MOST = tl.constexpr(code.ZERO), tl.constexpr(code.APART), tl.constexpr(code.MOST_APART)
_OFFSETS_AT, _APART_AT = tl.constexpr(code.OFFSETS_AT), tl.constexpr(code.APART_AT)
_LARGEST_AT, _TILE = tl.constexpr(code.LARGEST_AT), tl.constexpr(code.TILE_BYTES)
_CODED = tl.constexpr(code.CODED_TILE_BYTES)
# A power of two from the exponents kept apart to the end of a tile.
_REST = tl.constexpr(1 << (code.CODED_TILE_BYTES - code.APART_AT - 1).bit_length())
_NUM_WARPS = 4
_MOST_UNDER_WAY = 4096


@triton.jit
def _offset(exponent, largest):
    # Below the range: 15, as an exponent that is kept apart.
    return tl.where(exponent == 0, _ZERO, tl.where(largest - exponent < _ZERO, largest - exponent, _APART))


@triton.jit
def encode_kernel(plain, coded, length_bytes, failed):
    """Code the tiles of ``length_bytes`` bytes; the int32 at ``failed`` becomes 1 if one cannot be coded."""
    tile = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, _PAIRS)
    # The last tile is filled up with zeros.
    live = tile * _TILE + 4 * pair < length_bytes
    # A pair of values is one word: lower and higher 16 bits.
    words = tl.load(word_pointer(plain + tile * _TILE, 4) + pair, mask=live, other=0).to(tl.uint32)
    low, high = (words >> 7) & 0xFF, (words >> 23) & 0xFF
    largest = tl.maximum(tl.max(low), tl.max(high))
    low_offset, high_offset = _offset(low, largest), _offset(high, largest)
    out = coded + tile * _CODED
    low_rest = ((words >> 8) & 0x80) | (words & 0x7F)
    high_rest = ((words >> 24) & 0x80) | ((words >> 16) & 0x7F)
    tl.store(word_pointer(out, 2) + pair, (low_rest | (high_rest << 8)).to(tl.uint16))
    tl.store(word_pointer(out + _OFFSETS_AT, 1) + pair, (low_offset | (high_offset << 4)).to(tl.uint8))
    # All lower values that are kept apart come first, then all higher ones.
    low_apart, high_apart = (low_offset == _APART).to(tl.int32), (high_offset == _APART).to(tl.int32)
    lows = tl.sum(low_apart)
    count = lows + tl.sum(high_apart)
    apart = word_pointer(out + _APART_AT, 1)
    if count > 0:
        at_low, at_high = tl.cumsum(low_apart) - 1, lows + tl.cumsum(high_apart) - 1
        tl.store(apart + at_low, low.to(tl.uint8), mask=(low_apart > 0) & (at_low < _MOST))
        tl.store(apart + at_high, high.to(tl.uint8), mask=(high_apart > 0) & (at_high < _MOST))
    rest = tl.arange(0, _REST)
    is_free = (rest >= count) & (rest != _MOST) & (rest < _CODED - _APART_AT)
    tl.store(apart + rest, tl.zeros_like(rest).to(tl.uint8), mask=is_free)
    tl.store(apart + _MOST, largest.to(tl.uint8))
    if count > _MOST:
        # Memory of the host: what differs is only which program writes it.
        tl.store(word_pointer(failed, 4), tl.full((), 1, tl.uint32))


@triton.jit
def _exponent(offset, largest, at, apart):
    kept = tl.load(apart + at, mask=(offset == _APART) & (at < _MOST), other=0).to(tl.uint32)
    return tl.where(offset == _ZERO, 0, tl.where(offset == _APART, kept, largest - offset)) & 0xFF


@triton.jit
def decode_kernel(plain, coded, length_bytes):
    """Restore ``length_bytes`` bytes from their code; bytes that are no code have some value too."""
    tile = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, _PAIRS)
    live = tile * _TILE + 4 * pair < length_bytes
    source = coded + tile * _CODED
    rest = tl.load(word_pointer(source, 2) + pair).to(tl.uint32)
    offsets = tl.load(word_pointer(source + _OFFSETS_AT, 1) + pair).to(tl.uint32)
    largest = tl.load(word_pointer(source + _LARGEST_AT, 1)).to(tl.uint32)
    low_offset, high_offset = offsets & 15, offsets >> 4
    low_apart, high_apart = (low_offset == _APART).to(tl.int32), (high_offset == _APART).to(tl.int32)
    apart = word_pointer(source + _APART_AT, 1)
    low = _exponent(low_offset, largest, tl.cumsum(low_apart) - 1, apart)
    high = _exponent(high_offset, largest, tl.sum(low_apart) + tl.cumsum(high_apart) - 1, apart)
    low_value = ((rest & 0x80) << 8) | (low << 7) | (rest & 0x7F)
    high_value = ((rest & 0x8000) << 16) | (high << 23) | ((rest & 0x7F00) << 8)
    tl.store(word_pointer(plain + tile * _TILE, 4) + pair, low_value | high_value, mask=live)


class TritonExponentCoder(code.ExponentCoder):
    """``ExponentCoder`` on ``cuda_stream``, the one that packs; None for the current stream."""

    _most_measured = 256 << 20

    def __init__(
        self, most_bytes: int, device: torch.device, cuda_stream: torch.cuda.Stream | None = None
    ) -> None:
        super().__init__(most_bytes, device)
        self._on_cuda, self._stream = device.type == "cuda", cuda_stream
        # The kernel writes here itself, so that no copy follows it. A send slot is taken for each chunk that
        # is under way, and there are far fewer of those.
        failed = torch.zeros(_MOST_UNDER_WAY, dtype=torch.int32, pin_memory=self._on_cuda)
        self._failed, self._failed_at, self._tensor = failed.numpy(), failed.data_ptr(), failed
        self._places = itertools.cycle(range(_MOST_UNDER_WAY))

    def encode(self, slot: int, length_bytes: int, packed: PackTicket) -> code.CodedTicket:
        place, event = next(self._places), None
        self._failed[place] = 0
        with torch.cuda.stream(self._stream):
            grid = (div_ceil(length_bytes, code.TILE_BYTES),)
            at = self._failed_at + 4 * place
            encode_kernel[grid](self.plain, slot, length_bytes, at, num_warps=_NUM_WARPS)
            if self._on_cuda:
                event = torch.cuda.Event()
                event.record()
        return code.CodedTicket(packed, self._failed[place : place + 1], event)

    def decode(self, slot: int, length_bytes: int) -> None:
        with torch.cuda.stream(self._stream):
            grid = (div_ceil(length_bytes, code.TILE_BYTES),)
            decode_kernel[grid](self.plain, slot, length_bytes, num_warps=_NUM_WARPS)

    def _finish(self) -> None:
        if self._on_cuda:
            torch.cuda.synchronize(self._plain.device)
