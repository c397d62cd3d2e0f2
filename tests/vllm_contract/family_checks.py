"""The cache of each architecture that vLLM registers, through geometry, pack and offload, byte by byte.

What must have landed is read from vLLM's own views, block by block, which shares no code with region tables.
A process of its own: ``families`` changes what vLLM and PyTorch are.
"""

from __future__ import annotations

import collections
import itertools
import sys
import traceback
from collections.abc import Iterator

import torch

from kvconnect.cache.region_table import RegionTable
from kvconnect.cache.shard import HeadInterval
from kvconnect.offload.copies.copier import make_arena, make_copier
from kvconnect.offload.copies.rows import RowLayout
from kvconnect.peer.agreement import table_refusal
from kvconnect.plan.blocks import GroupBlocks
from kvconnect.plan.wire import ORDERS, align_wire
from kvconnect.transfer.orders import RowCopies
from kvconnect.vllm.geometry import VllmCache, head_counts, worker_cache
from kvconnect.vllm.values import attention_layers
from tests.offload.rows_by_hand import plan_rows
from tests.slots import carry_over
from tests.vllm_contract import families


class Side:
    """A rank's cache as the connector describes it, with the blocks of a request."""

    def __init__(self, worker: families.Worker, first_block: int) -> None:
        self.views = worker.kv_caches
        self.cache: VllmCache = worker_cache(
            worker.kv_cache_config,
            worker.kv_caches,
            tensor_rank=worker.rank,
            num_ranks=worker.world_size,
            head_counts=head_counts(worker.vllm_config),
            layers=attention_layers(worker.vllm_config),
        )
        cache = self.cache
        self.table = RegionTable.build(
            cache.config, cache.kernel_block_sizes, cache.tensors, cache.heads, cache.scales
        )
        groups = [(at, group) for at, group in enumerate(cache.config.groups) if group.has_cache]
        self.num_tokens = max(
            group.block_size for _, group in groups if not group.is_state or len(groups) == 1
        )
        ids = itertools.count(first_block)
        self.blocks = [
            GroupBlocks(at, 0, tuple(itertools.islice(ids, group.num_positions(self.num_tokens))))
            for at, group in groups
        ]
        self.layers = {at: list(worker.kv_cache_config.kv_cache_groups[at].layer_names) for at, _ in groups}

    def pages(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What vLLM's views show of the request: all bytes of each of its blocks, by layer."""
        for blocks in self.blocks:
            for name in self.layers[blocks.group]:
                view = self.views[name]
                ratio = view.shape[0] // self.cache.config.num_blocks
                for block in blocks.block_ids:
                    yield name, view[block * ratio : (block + 1) * ratio]

    def fill(self) -> None:
        for seed, (_, page) in enumerate(self.pages()):
            values = torch.randint(-128, 128, page.shape, dtype=torch.int8, generator=_seeded(seed))
            # Any bits will do, also of types that cannot be drawn.
            page.view(torch.int8)[..., : values.shape[-1]] = values


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def assert_equal(ours: Side, theirs: Side) -> None:
    for (name, page), (_, other) in zip(ours.pages(), theirs.pages(), strict=True):
        assert torch.equal(page.view(torch.int8), other.view(torch.int8)), name
        assert page.view(torch.int8).any(), f"{name}: nothing was compared"


def hand_over(architecture: str) -> str:
    """In either order on the wire, and out to host memory and back. Returns the kinds of its groups."""
    source = families.worker(architecture)
    if source is None:
        return "no cache"
    ours = Side(source, 1)
    ours.fill()
    for order in ORDERS:
        theirs = Side(families.again(source), 1 + sum(len(blocks.block_ids) for blocks in ours.blocks))
        assert table_refusal(theirs.table) is None
        request = ours.blocks, theirs.blocks, ours.num_tokens
        carry_over(ours.table, theirs.table, *request, slot_bytes=1 << 26, order=order)
        assert_equal(ours, theirs)
    kept(ours)
    kinds = (type(group.kv_cache_spec).__name__ for group in source.kv_cache_config.kv_cache_groups)
    return ", ".join(f"{count} {kind}" for kind, count in collections.Counter(kinds).items())


def kept(side: Side) -> None:
    before = [page.clone() for _, page in side.pages()]
    layout = RowLayout.build(side.table)
    most = max(len(blocks.block_ids) for blocks in side.blocks)
    arena = make_arena(plan_rows(layout.row_bytes, most), "cpu")
    copier = make_copier(layout, arena, "cpu")
    copies = [
        RowCopies(blocks.group, blocks.block_ids, tuple(range(len(blocks.block_ids))))
        for blocks in side.blocks
    ]
    copier.snapshot(copies).wait()
    for _, page in side.pages():
        page.zero_()
    restored = copier.restore(copies, copier.mark())
    restored.wait()
    assert restored.error is None
    for (name, page), was in zip(side.pages(), before, strict=True):
        assert torch.equal(page.view(torch.int8), was.view(torch.int8)), name
    copier.close()


def feed_from_two(architecture: str) -> tuple[str, ...]:
    """Two ranks to one: all that one rank keeps comes from them. Returns layers that are not divided."""
    whole = families.worker(architecture)
    if whole is None:
        return ()
    target = Side(whole, 1)
    fed: dict[tuple[str, int], list[HeadInterval]] = collections.defaultdict(list)
    for rank in range(2):
        part = families.worker(architecture, rank, 2)
        assert part is not None
        source = Side(part, 1)
        if source.cache.rank_bound:
            return source.cache.rank_bound
        align_wire(source.table, target.table)
        for region in source.table.regions:
            fed[region.layer, region.first_plane].append(region.heads or HeadInterval(0, 1))
    for region in target.table.regions:
        wanted = range(region.heads.start, region.heads.stop) if region.heads else range(1)
        have = {head for one in fed[region.layer, region.first_plane] for head in range(one.start, one.stop)}
        assert have >= set(wanted), region.layer
    return ()


def check(architecture: str) -> Iterator[str]:
    """What became of an architecture, in words of which the first is the verdict."""
    try:
        families.worker(architecture)
    except families.NoConfigurationError:
        yield "unknown: its configuration comes with its weights"
        return
    except Exception as error:
        yield f"unbuilt: {type(error).__name__}: {str(error)[:150]!r}"
        return
    try:
        yield f"passes: {hand_over(architecture)}"
    except Exception:
        yield f"refused: {traceback.format_exc()[-600:]!r}"
        return
    try:
        families.worker(architecture, 1, 2)
    except Exception as error:
        yield f"one rank only: {str(error)[:150]!r}"
        return
    try:
        bound = feed_from_two(architecture)
        yield f"bound: {bound[0]}" if bound else "divided"
    except Exception:
        yield f"refused: {traceback.format_exc()[-600:]!r}"


if __name__ == "__main__":
    for name in sys.argv[1:] or families.GENERATING:
        for verdict in check(name):
            print(f"{name} {verdict}", flush=True)
