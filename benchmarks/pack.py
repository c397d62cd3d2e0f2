"""A benchmark of pack and unpack: how near they come to a plain copy of as many bytes, measured beside.

Also with coded exponents; a rate is always of the bytes of pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import torch

from benchmarks.cache import BLOCK_TOKENS, NHD, PLANES, BenchCache, CacheShape
from benchmarks.device import check_device, device_us, run_seconds
from benchmarks.harness import Options as BaseOptions
from benchmarks.harness import report
from kvconnect.pack.batches import StagedChunk
from kvconnect.pack.digest import CPU_DIGEST_SAMPLE
from kvconnect.pack.packer import Packer, make_coder
from kvconnect.plan.chunks import Chunk, TokenSpan
from kvconnect.plan.wire import align_wire

_LAYERS = 64
_CPU_RUNS = 5
_SEED = 0x5EED


@dataclass(frozen=True)
class Options(BaseOptions):
    device: Annotated[str, "cpu or cuda."] = "cpu"


class _Case:
    """Random blocks of 64 layers, and a slot."""

    def __init__(self, device: str, axes: str, heads: int, head_size: int, blocks: int) -> None:
        self.device, self.axes, self.blocks = device, axes, blocks
        shape = CacheShape(_LAYERS, 2 * blocks, heads, head_size, axes=axes)
        self.cache = BenchCache(shape, device, seed=0)
        self.cache.draw(1, blocks, seed=0)
        self.table = self.cache.table()
        self.total_bytes = self.cache.shape.total_bytes // 2
        self.slot, self.other = (
            torch.ones(self.total_bytes, dtype=torch.uint8, device=device) for _ in range(2)
        )
        self.copy_us = self.time_us(lambda: self.other.copy_(self.slot))
        self.coder = make_coder(self.total_bytes, torch.device(device))

    def time_us(self, call: Callable[[], object]) -> float:
        """Microseconds of a call: on a GPU the median of many runs, on a CPU the best of a few."""
        if self.device != "cpu":
            return device_us(call)
        return min(run_seconds(call, _CPU_RUNS)) * 1e6

    def stage(self, order: str, digest_sample: int) -> tuple[Packer, StagedChunk]:
        wire = align_wire(self.table, self.table, order)
        packer = Packer(self.table, wire, side="source", device=self.device, digest_sample=digest_sample)
        tokens = self.blocks * BLOCK_TOKENS
        chunk = Chunk(0, len(wire.streams), (TokenSpan(0, 0, tokens),))
        (staged,) = packer.stage(list(self.cache.groups(0)), [chunk], tokens)
        return packer, staged

    def measure(self, order: str, digest_sample: int) -> dict[str, Any]:
        packer, staged = self.stage(order, digest_sample)
        seed, slot = _SEED, self.slot.data_ptr()
        pack_us = self.time_us(lambda: packer.pack(slot, staged, seed))
        unpack_us = self.time_us(lambda: packer.unpack(slot, staged, seed))
        # A CPU codes slowly, with any digest: once is enough.
        coded = {}
        if digest_sample == 1:
            pack_coded_us = self.time_us(lambda: packer.pack(slot, staged, seed, self.coder))
            unpack_coded_us = self.time_us(lambda: packer.unpack(slot, staged, seed, self.coder))
            coded["pack_coded_gb_per_s"] = self.total_bytes / pack_coded_us / 1e3
            coded["unpack_coded_gb_per_s"] = self.total_bytes / unpack_coded_us / 1e3
        return {
            "device": self.device,
            "order": order,
            "layout": "NHD" if self.axes == NHD else "HND",
            "page_bytes": self.total_bytes // self.blocks // _LAYERS,
            "blocks": self.blocks,
            "total_bytes": self.total_bytes,
            "digest_sample": digest_sample,
            "copy_us": self.copy_us,
            "pack_us": pack_us,
            "unpack_us": unpack_us,
            "pack_gb_per_s": self.total_bytes / pack_us / 1e3,
            "unpack_gb_per_s": self.total_bytes / unpack_us / 1e3,
            "pack_of_copy": self.copy_us / pack_us,
            "unpack_of_copy": self.copy_us / unpack_us,
            **coded,
        }


def _timings(device: str) -> Iterator[dict[str, Any]]:
    on_cpu = device == "cpu"
    # A CPU is the place of tests: small, and enough to see what digests cost there.
    samples = (CPU_DIGEST_SAMPLE, 1) if on_cpu else (1,)
    for blocks in (32,) if on_cpu else (256, 1024):
        shapes = [(NHD, 2, 128), (PLANES, 2, 128)]
        for axes, heads, head_size in shapes if on_cpu else [(NHD, 1, 64), *shapes]:
            case = _Case(device, axes, heads, head_size, blocks)
            for order in ("pages", "rows"):
                yield from (case.measure(order, sample) for sample in samples)


def bench_pack(options: Options) -> None:
    """Pack and unpack 64 layers of random blocks; print how fast, beside a copy of as many bytes.

    Raises:
        ConfigError: ``device`` is CUDA and there is none.
    """
    check_device(options.device)
    for timing in _timings(options.device):
        report("pack", timing)
