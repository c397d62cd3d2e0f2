"""A prefill and a decode worker on one virtual clock: no threads, no sockets, nothing waits.

Everything under test is real but the wire: movers, sessions, ledgers, plans and the memory engine.
The two sides have different block counts and ids, so that mixing them up shows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from prometheus_client import CollectorRegistry

from kvconnect.cache.region_table import CacheTensor, RegionTable
from kvconnect.cache.shard import shard_heads
from kvconnect.cache.specs import FullAttentionSpec, KVCacheConfig, KVCacheGroup
from kvconnect.config import ExtraConfig
from kvconnect.engine.base import Span
from kvconnect.engine.memory import MemoryEngine
from kvconnect.metrics import Metrics
from kvconnect.orders import GroupBlocks, Hold, Load, Orders, Results
from kvconnect.peer.channel import MemoryNetwork
from kvconnect.peer.messages import CacheMeaning, Introduction
from kvconnect.plan.align import TableCard
from kvconnect.worker.mover import Mover

LAYERS = 3
HEADS = 2
BLOCK_TOKENS = 4


class Clock:
    """A time that moves only when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class FakeWorker:
    """A mover with its cache, engine and channel, stepped by hand."""

    def __init__(
        self,
        engine_id: str,
        num_blocks: int,
        network: MemoryNetwork,
        config: ExtraConfig,
        model: str = "m",
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.engine_id = engine_id
        self.rank = rank
        self.heads = shard_heads(HEADS, rank, world_size)
        self.storage = torch.zeros(LAYERS, num_blocks, BLOCK_TOKENS, len(self.heads), 8, dtype=torch.float16)
        tensors = {
            f"layer{i}": CacheTensor(self.storage[i], "block token head content") for i in range(LAYERS)
        }
        spec = FullAttentionSpec(BLOCK_TOKENS, len(self.heads), 4, torch.float16)
        cache = KVCacheConfig(num_blocks, (KVCacheGroup(tuple(tensors), spec),))
        heads = dict.fromkeys(tensors, self.heads)
        self.table = RegionTable.build(cache, {0: BLOCK_TOKENS}, tensors, heads)
        self.engine = MemoryEngine(listen=False, clock=network.clock)
        self.engine.register([Span(s.address, s.length_bytes) for s in self.table.storages])
        self.channel = network.channel()
        self.metrics = Metrics(CollectorRegistry())
        self.meaning = CacheMeaning(model, HEADS, world_size)
        self.mover = Mover(
            config,
            self.engine,
            self.channel,
            rank=rank,
            meaning=self.meaning,
            introduce=self.introduce,
            metrics=self.metrics,
        )
        self.results: list[Results] = []

    def introduce(self) -> Introduction:
        return Introduction(
            self.engine_id,
            f"{self.engine_id} rank {self.rank} started once",
            self.rank,
            self.meaning,
            "memory",
            self.engine.card(),
            TableCard.of(self.table),
        )

    def step(self, now: float) -> None:
        self.mover.step(now)
        if results := self.mover.take_results():
            self.results.append(results)

    @property
    def sent(self) -> list[str]:
        return [request for results in self.results for request in results.sent]

    @property
    def received(self) -> list[str]:
        return [request for results in self.results for request in results.received]

    @property
    def failed(self) -> dict[str, str]:
        return {key: why for results in self.results for key, why in results.failed.items()}

    def count(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"kvconnect_{name}_total", labels) or 0.0


@dataclass
class Pair:
    """P and D, and the clock they live on."""

    config: ExtraConfig = field(default_factory=ExtraConfig)
    prefill_model: str = "m"
    decode_model: str = "m"

    def __post_init__(self) -> None:
        self.clock = Clock()
        self.network = MemoryNetwork(self.clock)
        self.prefill = FakeWorker("P", 40, self.network, self.config, self.prefill_model)
        self.decode = FakeWorker("D", 50, self.network, self.config, self.decode_model)
        self.prefill.storage.copy_(torch.randn(self.prefill.storage.shape))

    def run(self, seconds: float = 0.0, step_s: float = 0.05) -> None:
        """Step both sides until ``seconds`` have passed, and then until nothing is left to say."""
        end = self.clock.now + seconds
        while self.clock.now < end:
            self.clock.now = min(end, self.clock.now + step_s)
            self.settle()
        self.settle()

    def settle(self) -> None:
        for _ in range(8):
            self.prefill.step(self.clock.now)
            self.decode.step(self.clock.now)

    def hold(
        self, request: str, block_ids: tuple[int, ...], handle: str | None = None, ready=lambda: True
    ) -> None:
        order = Hold(
            request,
            handle or f"handle-{request}",
            len(block_ids) * BLOCK_TOKENS,
            (GroupBlocks(0, 0, block_ids),),
            self.config.lease_s,
        )
        self.prefill.mover.order(Orders(holds=(order,)), ready)

    def load(self, request: str, block_ids: tuple[int, ...], handle: str | None = None, **changes) -> None:
        fields = {
            "request_id": request,
            "handle": handle or f"handle-{request}",
            "engine_id": "P",
            "host": "h",
            "port": self.prefill.channel.port,
            "num_tokens": len(block_ids) * BLOCK_TOKENS,
            "groups": (GroupBlocks(0, 0, block_ids),),
        }
        self.decode.mover.order(Orders(loads=(Load(**{**fields, **changes}),)), lambda: True)

    def abort(self, request: str) -> None:
        self.decode.mover.order(Orders(aborted=(request,)), lambda: True)

    def landed(self, source_ids: tuple[int, ...], target_ids: tuple[int, ...]) -> bool:
        return torch.equal(
            self.prefill.storage[:, list(source_ids)], self.decode.storage[:, list(target_ids)]
        )

    def assert_idle(self) -> None:
        """Nothing is remembered on either side."""
        assert not self.prefill.mover.prefill.leases
        assert not self.prefill.mover.prefill.sendings
        assert not self.prefill.mover.prefill.busy
        assert not self.prefill.mover.prefill.waiting
        assert not self.prefill.mover.prefill.waiting.expected
        assert not self.decode.mover.decode.loads
        assert not self.decode.mover.decode.waiting_for_writes
        assert self.prefill.metrics.registry.get_sample_value("kvconnect_leases_held") == 0
        assert self.decode.metrics.registry.get_sample_value("kvconnect_loads_in_flight") == 0
