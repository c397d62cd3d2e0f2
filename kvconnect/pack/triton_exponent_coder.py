"""Codes and decodes slots with the kernels in ``exponent_code_triton.py``."""

from __future__ import annotations

import itertools

import torch

from kvconnect.cache.specs import div_ceil
from kvconnect.pack.batches import PackTicket
from kvconnect.pack.exponent_code import TILE_BYTES, CodedTicket, ExponentCoder
from kvconnect.pack.exponent_code_triton import decode_kernel, encode_kernel

_NUM_WARPS = 4
_MOST_UNDER_WAY = 4096


class TritonExponentCoder(ExponentCoder):
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

    def encode(self, slot: int, length_bytes: int, packed: PackTicket) -> CodedTicket:
        place, event = next(self._places), None
        self._failed[place] = 0
        with torch.cuda.stream(self._stream):
            grid = (div_ceil(length_bytes, TILE_BYTES),)
            at = self._failed_at + 4 * place
            encode_kernel[grid](self.plain, slot, length_bytes, at, num_warps=_NUM_WARPS)
            if self._on_cuda:
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record()
        return CodedTicket(packed, self._failed[place : place + 1], event)

    def decode(self, slot: int, length_bytes: int) -> None:
        with torch.cuda.stream(self._stream):
            grid = (div_ceil(length_bytes, TILE_BYTES),)
            decode_kernel[grid](self.plain, slot, length_bytes, num_warps=_NUM_WARPS)

    def _finish(self) -> None:
        if self._on_cuda:
            torch.cuda.synchronize(self._plain.device)
