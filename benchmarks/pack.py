"""A benchmark of pack and unpack: how near they come to a plain copy of as many bytes, measured beside."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from benchmarks.report import Report
from benchmarks.runner_kit import default_device, device_us, host_us
from kvconnect.cache.region_table import CacheTensor, RegionTable
from kvconnect.cache.specs import FullAttentionSpec, KVCacheConfig, KVCacheGroup
from kvconnect.errors import ConfigError
from kvconnect.orders import GroupBlocks
from kvconnect.pack.batches import StagedChunk
from kvconnect.pack.digest import CPU_DIGEST_SAMPLE
from kvconnect.pack.packer import Packer
from kvconnect.pack.torch_mover import use_one_thread
from kvconnect.plan.align import TableCard
from kvconnect.plan.chunks import Chunk, TokenSpan
from kvconnect.plan.wire import align_wire

_LAYERS = 64
_TOKENS = 16
_CPU_RUNS = 5
_SEED = 0x5EED
_NHD = "block token head content"
_HND = "block plane head token content"


@dataclass(frozen=True)
class PackTiming:
    """One measured pack and unpack."""

    device: str
    order: str
    layout: str
    page_bytes: int
    blocks: int
    total_bytes: int
    digest_sample: int
    copy_us: float
    pack_us: float
    unpack_us: float
    pack_gb_per_s: float
    unpack_gb_per_s: float
    pack_of_copy: float
    unpack_of_copy: float
    pack_host_us: float


class _Case:
    """Layers in allocations of their own, random blocks of them, and a slot."""

    def __init__(self, device: str, layout: str, heads: int, head_size: int, blocks: int) -> None:
        num_blocks = 2 * blocks
        sizes = {"block": num_blocks, "token": _TOKENS, "head": heads, "plane": 2, "content": head_size}
        if "plane" not in layout:
            sizes["content"] *= 2
        shape = [sizes[axis] for axis in layout.split()]
        names = tuple(f"layer{index}" for index in range(_LAYERS))
        tensors = {
            name: CacheTensor(torch.ones(shape, dtype=torch.bfloat16, device=device), layout)
            for name in names
        }
        spec = FullAttentionSpec(_TOKENS, heads, head_size, torch.bfloat16)
        config = KVCacheConfig(num_blocks, (KVCacheGroup(names, spec),))
        self.device, self.layout, self.blocks = device, layout, blocks
        self.page_bytes = spec.content_bytes
        self.total_bytes = self.page_bytes * blocks * _LAYERS
        self.tensors = tensors
        self.table = RegionTable.build(config, {0: _TOKENS}, tensors)
        self.ids = tuple(random.Random(0).sample(range(1, num_blocks), blocks))
        self.slot, self.other = (
            torch.ones(self.total_bytes, dtype=torch.uint8, device=device) for _ in range(2)
        )
        self.copy_us = self.time_us(self._copy)

    def time_us(self, call: Callable[[], object]) -> float:
        """Microseconds of a call: on a GPU the median of many runs, on a CPU the best of a few."""
        if self.device != "cpu":
            return device_us(lambda: _ignore(call()), self.device)
        times = []
        for _ in range(_CPU_RUNS):
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e6)
        return min(times)

    def _copy(self) -> None:
        self.other.copy_(self.slot)

    def stage(self, order: str, digest_sample: int) -> tuple[Packer, StagedChunk]:
        card = TableCard.of(self.table)
        wire = align_wire(card, card, order)
        packer = Packer(
            self.table,
            wire,
            side="source",
            device=self.device,
            digest_sample=max(1, digest_sample),
        )
        tokens = self.blocks * _TOKENS
        chunk = Chunk(0, len(wire.streams), (TokenSpan(0, 0, tokens),))
        (staged,) = packer.stage([GroupBlocks(0, 0, self.ids)], [chunk], tokens)
        return packer, staged

    def measure(self, order: str, digest_sample: int = 1) -> PackTiming:
        packer, staged = self.stage(order, digest_sample)
        seed = _SEED if digest_sample else None
        pack_us = self.time_us(lambda: packer.pack(self.slot, staged, seed))
        unpack_us = self.time_us(lambda: packer.unpack(self.slot, staged, seed))
        on_cpu = self.device == "cpu"
        pack_host_us = pack_us if on_cpu else host_us(lambda: _ignore(packer.pack(self.slot, staged, seed)))
        return PackTiming(
            device=self.device,
            order=order,
            layout="HND" if self.layout == _HND else "NHD",
            page_bytes=self.page_bytes,
            blocks=self.blocks,
            total_bytes=self.total_bytes,
            digest_sample=digest_sample,
            copy_us=round(self.copy_us, 1),
            pack_us=round(pack_us, 1),
            unpack_us=round(unpack_us, 1),
            pack_gb_per_s=round(self.total_bytes / pack_us / 1e3, 1),
            unpack_gb_per_s=round(self.total_bytes / unpack_us / 1e3, 1),
            pack_of_copy=round(self.copy_us / pack_us, 3),
            unpack_of_copy=round(self.copy_us / unpack_us, 3),
            pack_host_us=round(pack_host_us, 1),
        )


def _ignore(_: object) -> None:
    pass


def _timings(device: str) -> Iterator[PackTiming]:
    if device == "cpu":
        # A CPU is the place of tests: small, and enough to see what digests cost there.
        use_one_thread()
        for layout in (_NHD, _HND):
            case = _Case(device, layout, 2, 128, 32)
            for order in ("pages", "rows"):
                samples = (0, CPU_DIGEST_SAMPLE, 1)
                yield from (case.measure(order, digest_sample=sample) for sample in samples)
        return
    for blocks in (256, 1024):
        case = _Case(device, _NHD, 1, 64, blocks)
        yield from (case.measure(order) for order in ("pages", "rows"))
        for layout in (_NHD, _HND):
            case = _Case(device, layout, 2, 128, blocks)
            for order in ("pages", "rows"):
                if order == "pages" and layout == _HND:
                    continue
                yield from (case.measure(order, digest_sample=sample) for sample in (0, 1))


def bench_pack(*, device: str | None = None, json_output: bool = False) -> None:
    """Pack and unpack 64 layers of random blocks; print how fast, beside a copy of as many bytes.

    Raises:
        ConfigError: ``device`` is CUDA and there is none.
    """
    chosen = torch.device(device or default_device()).type
    if chosen == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is 'cuda', but torch sees no CUDA device here; accepted: cpu")
    report = Report("pack", json_output=json_output)
    for timing in _timings(chosen):
        report.add(timing)
    report.show()
