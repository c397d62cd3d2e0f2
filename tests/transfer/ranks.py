"""Tensor-parallel P and D on one virtual clock, each rank with its share of a model's heads."""

from __future__ import annotations

import itertools
import random

import numpy as np
from msgspec.structs import replace

from kvconnect.addresses import RankAddress
from kvconnect.cache.shard import Topology, shard_heads
from kvconnect.cache.specs import div_ceil
from kvconnect.config import ExtraConfig
from kvconnect.peer.messages import CacheMeaning
from kvconnect.plan.blocks import GroupBlocks
from kvconnect.transfer.orders import Hold, Load, Orders
from tests.identities import named
from tests.transfer.pair import SLOT_BYTES, Deployment, FakeWorker
from tests.transfer.shapes import Model, Shape, ShapedCache, Truth

Blocks = dict[str, GroupBlocks]


class Ranks(Deployment):
    """P of ``prefill_ranks`` and D of ``decode_ranks`` ranks, each side with its own shape."""

    rounds = 12

    def __init__(
        self,
        model: Model,
        prefill: Shape,
        decode: Shape,
        prefill_ranks: int | Topology = 1,
        decode_ranks: int | Topology = 1,
        config: ExtraConfig | None = None,
        *,
        num_blocks: int = 40,
        slot_bytes: int = SLOT_BYTES,
        scratch_bytes: int = 0,
        seed: int = 0,
    ) -> None:
        self.model = model
        self.random = random.Random(seed)
        self._scratch_bytes = scratch_bytes
        super().__init__()
        self.config = config or ExtraConfig()
        self.prefill = self._workers("P", prefill, prefill_ranks, num_blocks, slot_bytes)
        self.decode = self._workers("D", decode, decode_ranks, num_blocks + 7, slot_bytes)
        self.directory = tuple(RankAddress(w.rank, "h", w.channel.port) for w in self.prefill)
        self._unused = {
            side: self.random.sample(range(1, count), count - 1)
            for side, count in (("P", num_blocks), ("D", num_blocks + 7))
        }
        self._seeds = itertools.count(seed)

    def _workers(
        self, engine_id: str, shape: Shape, ranks: int | Topology, num_blocks: int, slot_bytes: int
    ) -> list[FakeWorker]:
        workers = []
        topology = Topology(ranks) if isinstance(ranks, int) else ranks
        for rank in range(topology.size):
            heads = shard_heads(self.model.heads, rank % topology.tensor, topology.tensor)
            # Said once more, in the plainest words.
            stage = rank // topology.tensor
            ends = [*topology.stages[1:], len(self.model.all_names)]
            names = self.model.all_names[topology.stages[stage] : ends[stage]]
            seed = 1000 * rank + len(engine_id)
            context, interleave = topology.context, topology.interleave
            turns = context, rank % topology.tensor % context, interleave
            theirs = topology.tensor, 0, topology.stages, context, interleave
            cache = ShapedCache(self.model, shape, num_blocks, heads, seed, names, turns)
            worker = FakeWorker(
                engine_id,
                num_blocks,
                self.network,
                self.config,
                rank=rank,
                meaning=CacheMeaning(named("m"), self.model.num_heads, *theirs),
                cache=cache,
                slot_bytes=slot_bytes,
                scratch_bytes=self._scratch_bytes,
            )
            workers.append(worker)
        return workers

    def blocks(self, side: str, num_tokens: int, known_tokens: int = 0, drop: bool = True) -> Blocks:
        """Blocks for a request, but for those of ``known_tokens`` and, if ``drop``, those before a window."""
        worker = (self.prefill if side == "P" else self.decode)[0]
        shape: Shape = worker.cache.shape
        made = {}
        for kind in self.model.kinds:
            group = worker.cache.group_of(kind)
            if kind == "state":
                made[kind] = GroupBlocks(group, 0, (self._unused[side].pop(),))
                continue
            tokens = shape.block[kind] * worker.cache.turns[0]
            first = known_tokens // tokens
            visible = num_tokens - self.model.window if kind == "window" and drop else 0
            ids = tuple(
                0 if (index + 1) * tokens <= visible else self._unused[side].pop()
                for index in range(first, div_ceil(num_tokens, tokens))
            )
            made[kind] = GroupBlocks(group, first, ids)
        return made

    def computed(self, num_tokens: int, *, drop: bool = True) -> tuple[Truth, Blocks]:
        """A request that all ranks of P have in blocks."""
        truth = Truth(self.model, num_tokens, next(self._seeds))
        blocks = self.blocks("P", num_tokens, drop=drop)
        for worker in self.prefill:
            worker.cache.write(truth, blocks)
        return truth, blocks

    def prefilled(self, request: str, num_tokens: int, *, drop: bool = True) -> Truth:
        """A request that all ranks of P hold."""
        truth, blocks = self.computed(num_tokens, drop=drop)
        for worker in self.prefill:
            order = Hold(request, f"handle-{request}", num_tokens, _in_order(blocks), 0)
            worker.order(Orders(holds=(order,), directory=self.directory))
        return truth

    def fetched(
        self, request: str, num_tokens: int, known_tokens: int = 0, *, drop: bool = True, **changes
    ) -> Blocks:
        """Have all ranks of D fetch a request, by an order with these changes; the blocks that it gets."""
        blocks = self.blocks("D", num_tokens, known_tokens, drop)
        load = Load(
            request,
            f"handle-{request}",
            ("P", "h", self.prefill[0].channel.port),
            num_tokens,
            _in_order(blocks),
        )
        for worker in self.decode:
            worker.order(Orders(loads=(replace(load, **changes),)))
        return blocks

    def hand_over(
        self, num_tokens: int, known_tokens: int = 0, drop: tuple[bool, bool] = (True, True)
    ) -> None:
        """A request, from P to D. ``drop``: whether P, and D, have no blocks before a window."""
        truth = self.prefilled("a", num_tokens, drop=drop[0])
        blocks = self.fetched("a", num_tokens, known_tokens, drop=drop[1])
        others = self.others(blocks)
        self.run_until_received(1)
        self.check_landed(truth, blocks, others)

    def refused(self) -> str:
        """Why the first rank of D does not get a request."""
        self.prefilled("a", 20)
        self.fetched("a", 20)
        self.run(1)
        return self.decode[0].failed["a"]

    @property
    def workers(self) -> list[FakeWorker]:
        return [*self.prefill, *self.decode]

    def run(self, seconds: float = 0.0, step_s: float | None = 0.5) -> None:
        super().run(seconds, step_s)

    def others(self, blocks: Blocks) -> list[dict[str, np.ndarray]]:
        """What every rank of D has in all other blocks."""
        return [worker.cache.outside(blocks) for worker in self.decode]

    def check_landed(self, truth: Truth, blocks: Blocks, others: list[dict[str, np.ndarray]]) -> None:
        """All of a request is in its blocks, and blocks of others are as they were."""
        for worker, kept in zip(self.decode, others, strict=True):
            assert worker.failed == {}
            assert worker.cache.differences(truth, blocks) == []
            for name, now in worker.cache.outside(blocks).items():
                assert (kept[name] == now).all(), f"{name}: blocks of others were written"

    def run_until_received(self, count: int) -> None:
        """Step until every rank of D has reported so many requests. No time passes."""
        for _ in range(400):
            if all(len(worker.received) >= count for worker in self.decode):
                return
            self.settle(1)
        raise AssertionError([(worker.rank, worker.received) for worker in self.decode])

    def assert_idle(self, after_s: float = 0.0, step_s: float | None = None) -> None:
        self.settle()
        super().assert_idle(after_s, step_s)


def _in_order(blocks: Blocks) -> tuple[GroupBlocks, ...]:
    return tuple(sorted(blocks.values(), key=lambda held: held.group))
