"""Any number of ranks, block size and layout to any other, over the real engines, byte for byte.

Every rank is a worker of its own, with an engine, a side channel and a thread. What lands is compared
with one tensor of the whole model by indexing, which shares no code with plans and packing.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field

import pytest
import torch

from kvconnect.cache.region_table import CacheTensor
from kvconnect.cache.shard import HeadInterval, shard_heads
from kvconnect.cache.specs import FullAttentionSpec, KVCacheConfig, KVCacheGroup, MLASpec, UniformTypeSpec
from kvconnect.config import parse_kv_transfer_config
from kvconnect.engine.registry import available_engines
from kvconnect.halves.rank_traits import RankCache, RankTraits, SentCache
from kvconnect.halves.worker_half import TransferWorker
from kvconnect.node.pair_demo import PROTOCOLS
from kvconnect.peer.messages import CacheMeaning
from kvconnect.plan.blocks import GroupBlocks
from kvconnect.transfer.orders import Hold, Load, Orders
from tests.identities import named

HEADS, HEAD_SIZE, LATENT, TOKENS, NUM_BLOCKS = 6, 16, 40, 300, 64
WORLDS = (1, 2, 3, 4)
NHD, HND = "block token head content", "block plane head token content"
GQA, MLA = ("layer0", "layer1"), "latent"
TIMEOUT_S = 60.0


@dataclass
class World:
    """The ranks of one side. ``size`` of them, blocks of ``block`` tokens, K and V as ``layout`` says."""

    role: str
    engine: str
    size: int
    block: int
    layout: str
    workers: list[TransferWorker] = field(default_factory=list)
    caches: list[dict[str, torch.Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for rank in range(self.size):
            heads = shard_heads(HEADS, rank, self.size)
            cache = self.make_cache(len(heads))
            specs = {
                name: FullAttentionSpec(self.block, len(heads), HEAD_SIZE, torch.bfloat16) for name in GQA
            }
            latent = MLASpec(self.block, LATENT, torch.bfloat16)
            group = KVCacheGroup((*GQA, MLA), UniformTypeSpec({**specs, MLA: latent}))
            tensors = {name: CacheTensor(cache[name], self.layout) for name in GQA}
            tensors[MLA] = CacheTensor(cache[MLA], "block token content")
            described = RankCache(
                KVCacheConfig(NUM_BLOCKS, (group,)), {0: self.block}, tensors, dict.fromkeys(GQA, heads)
            )
            traits = RankTraits(rank, sent=SentCache(described, CacheMeaning(named(), HEADS, self.size)))
            worker = TransferWorker(self.config(), traits)
            self.workers.append(worker)
            self.caches.append(cache)
        self.workers[0].start(Orders(directory=tuple(worker.address() for worker in self.workers)))

    def config(self):
        extra = {
            "engine": self.engine,
            "protocol": PROTOCOLS[self.engine],
            "slot_bytes": 1 << 18,
            "num_slots": 2,
        }
        engine_id = f"{self.role} {self.size}"
        return parse_kv_transfer_config(
            {"kv_role": f"kv_{self.role}", "engine_id": engine_id, "kv_connector_extra_config": extra}
        )

    def make_cache(self, heads: int) -> dict[str, torch.Tensor]:
        shape = {
            NHD: (NUM_BLOCKS, self.block, heads, 2 * HEAD_SIZE),
            HND: (NUM_BLOCKS, 2, heads, self.block, HEAD_SIZE),
        }[self.layout]
        cache = {name: torch.zeros(shape, dtype=torch.bfloat16) for name in GQA}
        cache[MLA] = torch.zeros(NUM_BLOCKS, self.block, LATENT, dtype=torch.bfloat16)
        return cache

    def blocks(self, seed: int) -> tuple[int, ...]:
        return tuple(random.Random(seed).sample(range(1, NUM_BLOCKS), -(-TOKENS // self.block)))

    def rows(self, rank: int, name: str, ids: tuple[int, ...]) -> torch.Tensor:
        """A view by token of what a rank keeps: (tokens, heads, K then V), or (tokens, latent)."""
        pages = self.caches[rank][name][list(ids)]
        if name == MLA:
            return pages.reshape(-1, LATENT)[:TOKENS]
        if self.layout == HND:
            pages = pages.permute(0, 3, 2, 1, 4).reshape(len(ids), self.block, -1, 2 * HEAD_SIZE)
        return pages.reshape(len(ids) * self.block, -1, 2 * HEAD_SIZE)[:TOKENS]

    def fill(self, rank: int, name: str, ids: tuple[int, ...], whole: torch.Tensor) -> None:
        for position, block in enumerate(ids):
            rows = whole[position * self.block : (position + 1) * self.block]
            page = self.caches[rank][name][block]
            if name != MLA and self.layout == HND:
                page[:, :, : len(rows)] = rows.reshape(len(rows), -1, 2, HEAD_SIZE).permute(2, 1, 0, 3)
            else:
                page[: len(rows)] = rows

    def close(self) -> None:
        for worker in self.workers:
            worker.close()


def whole_model(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = dict.fromkeys(GQA, (TOKENS, HEADS, 2 * HEAD_SIZE)) | {MLA: (TOKENS, LATENT)}
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


def part(whole: torch.Tensor, name: str, heads: HeadInterval) -> torch.Tensor:
    return whole if name == MLA else whole[:, heads.start : heads.stop]


def hand_over(prefill: World, decode: World, seed: int) -> None:
    model, name = whole_model(seed), f"{prefill.size} to {decode.size}, {seed}"
    source, target = prefill.blocks(seed), decode.blocks(seed + 1000)
    for rank, worker in enumerate(prefill.workers):
        for layer, whole in model.items():
            prefill.fill(rank, layer, source, part(whole, layer, shard_heads(HEADS, rank, prefill.size)))
        worker.start(Orders(holds=(Hold(name, name, TOKENS, (GroupBlocks(0, 0, source),), TIMEOUT_S, 0),)))
    address = prefill.workers[0].address()
    load = Load(
        name,
        name,
        f"producer {prefill.size}",
        address.host,
        address.port,
        TOKENS,
        (GroupBlocks(0, 0, target),),
    )
    for worker in decode.workers:
        worker.start(Orders(loads=(load,)))
    wait_for(decode, "received", name)
    for rank in range(decode.size):
        heads = shard_heads(HEADS, rank, decode.size)
        for layer, whole in model.items():
            assert torch.equal(decode.rows(rank, layer, target), part(whole, layer, heads)), (name, layer)
    wait_for(prefill, "sent", name)


def wait_for(world: World, what: str, name: str) -> None:
    waiting, deadline = set(range(world.size)), time.monotonic() + TIMEOUT_S
    while waiting:
        assert time.monotonic() < deadline, (what, name, [worker.state() for worker in world.workers])
        for rank in list(waiting):
            results = world.workers[rank].results()
            assert not results.failed, results.failed
            if name in getattr(results, what):
                waiting.discard(rank)
        time.sleep(0.002)


SHAPES = {
    "16 nhd to 128 hnd": ((16, 128), (NHD, HND)),
    "128 hnd to 16 nhd": ((128, 16), (HND, NHD)),
    "32 hnd to 48 hnd": ((32, 48), (HND, HND)),
}
# An engine moves slots, whatever the shape of what is packed in them. Mooncake takes half a minute, most of
# it waiting, to open and to end twenty engines in one process: outside of the long form it has five of them.
CASES = [
    *(pytest.param(shape, "nixl", WORLDS, WORLDS, id=f"{shape}-nixl") for shape in SHAPES),
    pytest.param("16 nhd to 128 hnd", "mooncake", (2,), (3,), id="2 to 3-mooncake"),
    *(
        pytest.param(shape, "mooncake", WORLDS, WORLDS, id=f"{shape}-mooncake", marks=pytest.mark.full)
        for shape in SHAPES
    ),
]


@pytest.mark.parametrize(("shape", "engine", "prefill_sizes", "decode_sizes"), CASES)
def test_every_rank_gets_its_heads_of_every_token(shape, engine, prefill_sizes, decode_sizes):
    (prefill_block, decode_block), (prefill_layout, decode_layout) = SHAPES[shape]
    problem = available_engines()[engine]
    if problem:
        pytest.skip(problem)
    prefills: list[World] = []
    decodes: list[World] = []
    try:
        for size in prefill_sizes:
            prefills.append(World("producer", engine, size, prefill_block, prefill_layout))
        for size in decode_sizes:
            decodes.append(World("consumer", engine, size, decode_block, decode_layout))
        for prefill in prefills:
            for decode in decodes:
                hand_over(prefill, decode, seed=10 * prefill.size + decode.size)
        for world in [*prefills, *decodes]:
            for worker in world.workers:
                state = worker.state()
                assert not any(state[what] for what in ("leases", "sendings", "loads", "slots")), state
    finally:
        for world in [*prefills, *decodes]:
            world.close()
