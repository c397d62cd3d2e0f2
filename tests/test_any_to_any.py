"""Any number of ranks, block size and layout to any other, over the real engines, byte for byte.

Every rank is a worker of its own, with an engine, a side channel and a thread.
"""

from __future__ import annotations

import itertools
import random
import time
from contextlib import ExitStack, closing

import pytest

from kvconnect.cache.shard import shard_heads
from kvconnect.config import parse_kv_transfer_config
from kvconnect.engine.registry import available_engines
from kvconnect.halves.rank_traits import RankTraits, SentCache
from kvconnect.halves.worker_half import TransferWorker
from kvconnect.node.pair_demo import PROTOCOLS
from kvconnect.peer.messages import CacheMeaning
from kvconnect.plan.blocks import GroupBlocks
from kvconnect.transfer.orders import Hold, Load, Orders
from kvconnect.transfer.stack import RankCache
from tests.identities import named
from tests.transfer.shapes import Model, ShapedCache, Truth, same_blocks

TOKENS, NUM_BLOCKS = 300, 64
MODEL = Model({"full": 2, "latent": 1}, heads=6, width=8)
WORLDS = (1, 2, 3, 4)
TIMEOUT_S = 60.0


class World:
    """The ranks of one side: ``size`` of them, blocks of ``block`` tokens that lie as ``layout`` says."""

    def __init__(self, stack: ExitStack, role: str, engine: str, size: int, block: int, layout: str) -> None:
        self.size, self.block, self.engine_id = size, block, f"{role} {size}"
        self.workers, self.caches = [], []
        extra = {"engine": engine, "protocol": PROTOCOLS[engine], "slot_bytes": 1 << 18, "num_slots": 2}
        config = {"kv_role": role, "engine_id": self.engine_id, "kv_connector_extra_config": extra}
        for rank in range(size):
            heads = shard_heads(MODEL.heads, rank, size)
            cache = ShapedCache(MODEL, same_blocks(block, layout=layout), NUM_BLOCKS, heads, seed=rank)
            divided = dict.fromkeys(MODEL.names("full"), heads)
            described = RankCache(cache.config, {0: block, 1: block}, cache.tensors, divided)
            sent = SentCache(described, CacheMeaning(named(), MODEL.heads, size))
            worker = TransferWorker(parse_kv_transfer_config(config), RankTraits(rank, sent=sent))
            self.workers.append(stack.enter_context(closing(worker)))
            self.caches.append(cache)
        self.address, *_ = directory = tuple(worker.address() for worker in self.workers)
        self.workers[0].start(Orders(directory=directory))

    def blocks(self, seed: int) -> dict[str, GroupBlocks]:
        """Of a request, by kind of layers."""
        count = -(-TOKENS // self.block)
        ids = random.Random(seed).sample(range(1, NUM_BLOCKS), 2 * count)
        return {
            "full": GroupBlocks(0, 0, tuple(ids[:count])),
            "latent": GroupBlocks(1, 0, tuple(ids[count:])),
        }

    def order(self, orders: Orders) -> None:
        for worker in self.workers:
            worker.start(orders)

    def wait(self, what: str, name: str) -> None:
        waiting, deadline = set(self.workers), time.monotonic() + TIMEOUT_S
        while waiting:
            assert time.monotonic() < deadline, (what, name, [worker.state() for worker in self.workers])
            for worker in list(waiting):
                results = worker.results()
                assert not results.failed, results.failed
                waiting -= {worker} if name in getattr(results, what) else set()
            time.sleep(0.002)


def hand_over(prefill: World, decode: World, seed: int) -> None:
    name, truth = f"{prefill.size} to {decode.size}", Truth(MODEL, TOKENS, seed)
    source, target = prefill.blocks(seed), decode.blocks(seed + 1000)
    for cache in prefill.caches:
        cache.write(truth, source)
    prefill.order(Orders(holds=(Hold(name, name, TOKENS, tuple(source.values()), 0),)))
    where = prefill.engine_id, prefill.address.host, prefill.address.port
    decode.order(Orders(loads=(Load(name, name, where, TOKENS, tuple(target.values())),)))
    decode.wait("received", name)
    assert [cache.differences(truth, target) for cache in decode.caches] == [[]] * decode.size, name
    prefill.wait("sent", name)


SHAPES = {
    "16 nhd to 128 hnd": ((16, "NHD"), (128, "planes in the block")),
    "128 hnd to 16 nhd": ((128, "planes in the block"), (16, "NHD")),
    "32 hnd to 48 hnd": ((32, "planes in the block"), (48, "planes in the block")),
}
# An engine moves slots, whatever the shape of what is packed in them: one shape outside of the long form.
# Mooncake takes half a minute, most of it waiting, to open and to end twenty engines in one process.
CASES = [
    pytest.param("16 nhd to 128 hnd", "nixl", WORLDS, WORLDS, id="nixl"),
    pytest.param("16 nhd to 128 hnd", "mooncake", (2,), (3,), id="2 to 3-mooncake"),
    *(
        pytest.param(shape, engine, WORLDS, WORLDS, id=f"{shape}-{engine}", marks=pytest.mark.full)
        for shape, engine in itertools.product(SHAPES, PROTOCOLS)
    ),
]


@pytest.mark.parametrize(("shape", "engine", "prefill_sizes", "decode_sizes"), CASES)
def test_every_rank_gets_its_heads_of_every_token(shape, engine, prefill_sizes, decode_sizes):
    if problem := available_engines()[engine]:
        pytest.skip(problem)
    near, far = SHAPES[shape]
    with ExitStack() as stack:
        prefills = [World(stack, "kv_producer", engine, size, *near) for size in prefill_sizes]
        decodes = [World(stack, "kv_consumer", engine, size, *far) for size in decode_sizes]
        for prefill in prefills:
            for decode in decodes:
                hand_over(prefill, decode, seed=10 * prefill.size + decode.size)
        for world in [*prefills, *decodes]:
            for worker in world.workers:
                state = worker.state()
                assert not any(state[what] for what in ("leases", "sendings", "loads", "slots")), state
