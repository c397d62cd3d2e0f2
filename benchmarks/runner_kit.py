"""Benchmarks of the runner kit: zeroing of fresh blocks, and updates of block tables.

On a GPU, device time is taken with CUDA events and host time with the clock, each the median of many
runs; the yardstick runs beside it in the same process.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.device import default_device, device_us, host_us
from benchmarks.options import Options, option
from benchmarks.report import Report
from benchmarks.transfer.cache import BenchCache
from benchmarks.transfer.cases import CacheShape, Layout
from kvconnect.errors import ConfigError
from kvconnect.runner_kit.block_table import BlockTables
from kvconnect.runner_kit.zeroing import KVBlockZeroer


@dataclass(frozen=True)
class ZeroOptions(Options):
    """Blocks to zero, and what else there is."""

    page_bytes: int = option(16 << 10, "Bytes of a page.", least=64)
    regions: int = option(64, "Layers, each in its own allocation.", least=1)
    blocks: int = option(256, "Blocks to zero.", least=1)


def bench_zero(options: ZeroOptions, report: Report) -> None:
    """Zero random blocks over many regions; beside it a memset of as many contiguous bytes."""
    device, blocks = default_device(), options.blocks
    if options.page_bytes % 64:
        raise ConfigError(f"page_bytes is {options.page_bytes}; accepted are multiples of 64")
    shape = CacheShape(options.regions, 4 * blocks, 1, options.page_bytes // 64, Layout("nhd", 16))
    cache = BenchCache(shape, device, seed=0)
    cache.draw(1, blocks, seed=0)
    zeroer = KVBlockZeroer(cache.table(), device=device)
    ids = list(cache.slots[0])
    total = blocks * zeroer.bytes_per_block
    flat = torch.ones(total, dtype=torch.uint8, device=device)
    zero_us = device_us(lambda: zeroer.zero_block_ids(ids), device)
    memset_us = device_us(flat.zero_, device)
    report.add(
        {
            "device": device,
            "page_bytes": options.page_bytes,
            "regions": options.regions,
            "blocks": blocks,
            "total_bytes": total,
            "zero_us": round(zero_us, 2),
            "memset_us": round(memset_us, 2),
            "zero_gb_per_s": round(total / zero_us / 1e3, 1),
            "memset_gb_per_s": round(total / memset_us / 1e3, 1),
            "of_memset": round(memset_us / zero_us, 3),
            "host_us": round(host_us(lambda: zeroer.zero_block_ids(ids)), 2),
        }
    )


@dataclass(frozen=True)
class TablesOptions(Options):
    """A step's tables."""

    requests: int = option(256, "Requests that grow in the step.", least=1)
    groups: int = option(4, "Cache groups.", least=1)


class _TableCase:
    """Tables of several groups, and one step's new blocks as lists and as columns."""

    def __init__(self, requests: int, groups: int, device: str) -> None:
        rng = random.Random(0)
        made = range(groups)

        def tables(groups: Iterable[int]) -> BlockTables:
            return BlockTables(
                max_requests=requests,
                max_blocks=dict.fromkeys(groups, 4096),
                block_sizes=dict.fromkeys(groups, 32),
                kernel_block_sizes=dict.fromkeys(groups, 16),
                device=device,
            )

        self.tables = tables(made)
        self.apart = [tables((0,)) for _ in made]
        self.lists = [
            [[rng.randrange(1, 100_000) for _ in range(rng.randint(1, 8))] for _ in made]
            for _ in range(requests)
        ]
        self.rows = np.arange(requests)
        self.counts = np.array([[len(ids) for ids in row] for row in self.lists])
        self.ids = np.array([block for row in self.lists for ids in row for block in ids])
        self.columns = [
            (self.counts[:, [group]], np.array([b for row in self.lists for b in row[group]]))
            for group in made
        ]

    def clear(self) -> None:
        for tables in (self.tables, *self.apart):
            for row in range(len(self.lists)):
                tables.clear_row(row)
            tables.apply()

    def append_lists(self) -> None:
        for row, ids in enumerate(self.lists):
            self.tables.append_block_ids(row, ids)

    def append_columns(self) -> None:
        self.tables.append_batch(self.rows, self.counts, self.ids)

    def whole_step(self) -> None:
        self.append_columns()
        self.tables.apply()

    def whole_step_per_group(self) -> None:
        for tables, (counts, ids) in zip(self.apart, self.columns, strict=True):
            tables.append_batch(self.rows, counts, ids)
            tables.apply()

    def clear_and_stage(self) -> None:
        self.clear()
        self.append_columns()


def bench_tables(options: TablesOptions, report: Report) -> None:
    """Add one to eight blocks to every request in every group, and make them visible."""
    device = default_device()
    case = _TableCase(options.requests, options.groups, device)
    step_us = host_us(case.whole_step, case.clear)
    per_group_us = host_us(case.whole_step_per_group, case.clear)
    lists_us = host_us(case.append_lists, case.clear)
    apply_us = host_us(case.tables.apply, case.clear_and_stage)
    report.add(
        {
            "device": device,
            "requests": options.requests,
            "groups": options.groups,
            "new_blocks": int(case.counts.sum()),
            "host_us_per_step": round(step_us, 1),
            "of_it_apply_us": round(apply_us, 1),
            "host_us_one_launch_per_group": round(per_group_us, 1),
            "host_us_staging_request_by_request": round(lists_us, 1),
        }
    )
