"""Benchmarks of the runner kit: zeroing of fresh blocks, and updates of block tables.

On a GPU, device time is taken with CUDA events and host time with the clock, each the median of many
runs; the yardstick runs beside it in the same process.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from kvconnect.cache.region_table import CacheTensor, RegionTable
from kvconnect.cache.specs import FullAttentionSpec, KVCacheConfig, KVCacheGroup
from kvconnect.runner_kit.block_table import BlockTables
from kvconnect.runner_kit.zeroing import KVBlockZeroer

_RUNS = 50
_WARM_UP = 5


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def device_us(call: Callable[[], None], device: str) -> float:
    """Median microseconds of a call on the device; on a CPU by the clock."""
    for _ in range(_WARM_UP):
        call()
    times = []
    for _ in range(_RUNS):
        if device == "cpu":
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e6)
            continue
        # The stream is kept busy meanwhile, as in a serving step: what is measured is the device, not
        # how fast this thread launches.
        torch.cuda._sleep(1_000_000)  # type: ignore[no-untyped-call]
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


def bench_zero(*, page_bytes: int, regions: int, blocks: int) -> None:
    """Zero random blocks over many regions; beside it a memset of as many contiguous bytes."""
    device = default_device()
    num_blocks = blocks * 4
    tokens, heads = 16, 2
    content = page_bytes // (tokens * heads)
    names = tuple(f"layer{index}" for index in range(regions))
    # Each layer in an allocation of its own: the zeroer must not need them side by side.
    tensors = {
        name: CacheTensor(
            torch.ones(num_blocks, tokens, heads, content, dtype=torch.uint8, device=device),
            "block token head content",
        )
        for name in names
    }
    spec = FullAttentionSpec(tokens, heads, content // 2, torch.uint8)
    config = KVCacheConfig(num_blocks, (KVCacheGroup(names, spec),))
    zeroer = KVBlockZeroer(RegionTable.build(config, {0: tokens}, tensors), device=device)
    ids = random.Random(0).sample(range(1, num_blocks), blocks)
    total = blocks * zeroer.bytes_per_block
    flat = torch.ones(total, dtype=torch.uint8, device=device)
    zero_us = device_us(lambda: zeroer.zero_block_ids(ids), device)
    memset_us = device_us(lambda: _memset(flat), device)
    spent_us = host_us(lambda: zeroer.zero_block_ids(ids))
    print(
        json.dumps(
            {
                "bench": "zero",
                "device": device,
                "page_bytes": page_bytes,
                "regions": regions,
                "blocks": blocks,
                "total_bytes": total,
                "zero_us": round(zero_us, 2),
                "memset_us": round(memset_us, 2),
                "zero_gb_per_s": round(total / zero_us / 1e3, 1),
                "memset_gb_per_s": round(total / memset_us / 1e3, 1),
                "of_memset": round(memset_us / zero_us, 3),
                "host_us": round(spent_us, 2),
            }
        )
    )


def _memset(flat: torch.Tensor) -> None:
    flat.zero_()


def host_us(call: Callable[[], None], before: Callable[[], None] = lambda: None) -> float:
    """Median microseconds of the host in a call, the device idle before it; ``before`` is not counted."""
    times = []
    for run in range(_WARM_UP + _RUNS):
        before()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if run >= _WARM_UP:
            times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)


class _TableCase:
    """Tables of several groups, and one step's new blocks as lists and as columns."""

    def __init__(self, requests: int, groups: int, device: str) -> None:
        rng = random.Random(0)
        self.groups = groups
        made = range(groups)
        self.tables = BlockTables(
            max_requests=requests,
            max_blocks=dict.fromkeys(made, 4096),
            block_sizes=dict.fromkeys(made, 32),
            kernel_block_sizes=dict.fromkeys(made, 16),
            device=device,
        )
        self.apart = [
            BlockTables(
                max_requests=requests,
                max_blocks={0: 4096},
                block_sizes={0: 32},
                kernel_block_sizes={0: 16},
                device=device,
            )
            for _ in made
        ]
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

    def stage_then_clear(self, stage: Callable[[], None]) -> Callable[[], None]:
        def prepared() -> None:
            self.clear()
            stage()

        return prepared


def bench_tables(*, requests: int, groups: int) -> None:
    """Add one to eight blocks to every request in every group, and make them visible."""
    device = default_device()
    case = _TableCase(requests, groups, device)
    step_us = host_us(case.whole_step, case.clear)
    per_group_us = host_us(case.whole_step_per_group, case.clear)
    lists_us = host_us(case.append_lists, case.clear)
    apply_us = host_us(case.tables.apply, case.stage_then_clear(case.append_columns))
    print(
        json.dumps(
            {
                "bench": "tables",
                "device": device,
                "requests": requests,
                "groups": groups,
                "new_blocks": int(case.counts.sum()),
                "host_us_per_step": round(step_us, 1),
                "of_it_apply_us": round(apply_us, 1),
                "host_us_one_launch_per_group": round(per_group_us, 1),
                "host_us_staging_request_by_request": round(lists_us, 1),
            }
        )
    )
