"""Benchmarks that need no second node: how long it takes to plan a transfer.

Times are the best of several runs, since everything above the best is the machine's noise.
"""

from __future__ import annotations

import json
import random
import time
from dataclasses import asdict, dataclass

import torch
from rich.console import Console
from rich.table import Table

from kvconnect.cache.region_table import CacheTensor, RegionTable
from kvconnect.cache.specs import KVCacheConfig, KVCacheGroup, MLASpec
from kvconnect.orders import GroupBlocks
from kvconnect.plan.align import TableCard, align_tables
from kvconnect.plan.transfer import make_plan

_LAYERS = 61
_BLOCK_TOKENS = 16
_LATENT = 64
_RUNS = 50


@dataclass(frozen=True)
class PlanTiming:
    """One planned transfer."""

    layers: int
    blocks: int
    order: str
    pages: int
    copies: int
    total_bytes: int
    plan_ms: float
    batches_ms: float


def _table(num_blocks: int) -> RegionTable:
    names = tuple(f"layer{index}" for index in range(_LAYERS))
    spec = MLASpec(_BLOCK_TOKENS, _LATENT, torch.bfloat16)
    # Pages are never touched here: memory that is only reserved costs nothing.
    storage = torch.empty(_LAYERS, num_blocks, _BLOCK_TOKENS, _LATENT, dtype=torch.bfloat16)
    tensors = {name: CacheTensor(storage[index], "block token content") for index, name in enumerate(names)}
    config = KVCacheConfig(num_blocks, (KVCacheGroup(names, spec),))
    return RegionTable.build(config, {0: _BLOCK_TOKENS}, tensors)


def _measure(blocks: int, scattered: bool) -> PlanTiming:
    rng = random.Random(0)
    counts = (blocks * 2, blocks * 3)
    source, target = (_table(count) for count in counts)
    link = align_tables(TableCard.of(source), TableCard.of(target))
    ids = [
        tuple(rng.sample(range(1, count), blocks)) if scattered else tuple(range(5, 5 + blocks))
        for count in counts
    ]
    plan_s = batches_s = float("inf")
    for _ in range(_RUNS):
        start = time.perf_counter()
        plan = make_plan(
            link, [GroupBlocks(0, 0, ids[0])], [GroupBlocks(0, 0, ids[1])], blocks * _BLOCK_TOKENS
        )
        planned = time.perf_counter()
        sum(1 for _ in plan.batches(1024, 64 << 20))
        plan_s = min(plan_s, planned - start)
        batches_s = min(batches_s, time.perf_counter() - planned)
    return PlanTiming(
        layers=_LAYERS,
        blocks=blocks,
        order="scattered" if scattered else "adjacent",
        pages=plan.pages,
        copies=plan.copies,
        total_bytes=plan.total_bytes,
        plan_ms=round(plan_s * 1e3, 4),
        batches_ms=round(batches_s * 1e3, 4),
    )


def bench_plan(json_output: bool = False) -> None:
    """Plan transfers of 61 layers by 64 to 4096 blocks, scattered and adjacent; print how long it took."""
    results = [_measure(blocks, scattered) for blocks in (64, 512, 4096) for scattered in (True, False)]
    if json_output:
        for result in results:
            print(json.dumps(asdict(result)))
        return
    table = Table(title="planning one request, best of 50")
    for column in ("layers", "blocks", "order", "pages", "copies", "MiB", "plan ms", "batches ms"):
        table.add_column(column, justify="right")
    for result in results:
        table.add_row(
            str(result.layers),
            str(result.blocks),
            result.order,
            str(result.pages),
            str(result.copies),
            f"{result.total_bytes / 2**20:.0f}",
            f"{result.plan_ms:.3f}",
            f"{result.batches_ms:.3f}",
        )
    Console().print(table)
