"""The steps of ``python -m benchmarks scheduler`` in which blocks are kept in host memory.

Every request that is being decoded gets one token in each step, and a block every 16; what is full is stored.
Those that come have prompts of 2 048 tokens.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kvconnect.cache.specs import FullAttentionSpec, KVCacheGroup
from kvconnect.config import OffloadConfig
from kvconnect.halves.scheduler_half import SchedulerHalf
from kvconnect.node.kv_events import BlockRemoved, BlockStored
from kvconnect.offload.scheduler.hit_requirements import HitRequirements
from kvconnect.offload.scheduler.offload_scheduler import OffloadScheduler
from kvconnect.offload.tier_events import Described, EventMaker, TierEvents
from kvconnect.transfer.orders import OffloadReport, Orders, Results
from kvconnect.transfer.stack import Computed, Step

BLOCK_TOKENS = 16
PROMPT_TOKENS = 2048
_ROW_BYTES = 64
_NUM_ROWS = 1 << 17
# Everybody's, and longer than any request becomes.
_TOKENS = [*range(1 << 14)]


@dataclass
class Running:
    """A request, as a serving stack has it."""

    request_id: str
    num_tokens: int
    names: list[bytes]
    block_ids: list[int] = field(default_factory=list)
    kv_transfer_params: dict[str, Any] | None = None


def _describe(request: Any, first: int, count: int, size: int) -> Described:
    return {"token_ids": _TOKENS[first * size : (first + count) * size]}


def _hashes(request: Any, block_tokens: int) -> Sequence[bytes]:
    names: list[bytes] = request.names
    return names


class Keeping:
    """A node with ``running`` requests, to which ``changed`` come with a step, and as many end.

    With ``has_events`` the events of each step are made too, as a router would get them. The prompts of
    ``known`` requests that have ended are kept, and are what makes room where there is none.
    """

    def __init__(
        self,
        running: int,
        changed: int,
        *,
        has_events: bool = False,
        transfer: SchedulerHalf | None = None,
        known: int = 64,
        num_rows: int = _NUM_ROWS,
    ) -> None:
        self.changed = changed
        self._serial = 0
        groups = [KVCacheGroup(("layer",), FullAttentionSpec(BLOCK_TOKENS, 1, 1, torch.int8))]
        offload = OffloadScheduler(
            OffloadConfig(cpu_bytes=num_rows * _ROW_BYTES),
            groups,
            HitRequirements.of(groups, [0], BLOCK_TOKENS),
            hashes=_hashes,
            row_bytes={0: _ROW_BYTES},
            clock=time.monotonic,
        )
        if has_events:
            facts = {"kv_cache_spec_kind": "full_attention"}
            offload.announce(TierEvents(EventMaker(BlockStored, BlockRemoved, [facts], _describe)))
        made = transfer or SchedulerHalf()
        self.half = SchedulerHalf(made.draft, made.prefill, made.decode, made.pulls, offload)
        self.known = [self._made(PROMPT_TOKENS) for _ in range(known)]
        # Not all of them fill a block in the same step.
        self.running = [self._made(PROMPT_TOKENS + n % BLOCK_TOKENS) for n in range(running)]
        for requests in (self.known, self.running):
            for request in requests:
                self._admit(request)
                self._computed(request)
            self._report(self.half.build_orders())
            self._end([request for request in requests if request not in self.running])
            self._report(self.half.build_orders())

    def decode(self) -> float:
        """Seconds of a step in which everybody gets a token and nobody comes or goes."""
        news = self._grow()
        start = time.perf_counter()
        orders = self._launch(news)
        self.half.update_results(stored(orders))
        self.half.take_events()
        return time.perf_counter() - start

    def _launch(self, news: list[tuple[Running, tuple[list[int]] | None]]) -> Orders:
        """A step is launched in which requests get a token, and some of them a block."""
        due = self.half.due
        self.half.launched(
            Step(
                [
                    Computed(request.request_id, request.num_tokens - 1, new_ids)
                    for request, new_ids in news
                    if new_ids is not None or request.num_tokens >= due[request.request_id]
                ]
            )
        )
        return self.half.build_orders()

    def returning(self) -> float:
        """Seconds of such a step that also admits requests whose prompt is kept."""
        first, self._serial = self._serial, self._serial + self.changed
        coming = []
        for n in range(first, first + self.changed):
            old = self.known[n % len(self.known)]
            coming.append(
                Running(f"again{n}", PROMPT_TOKENS, old.names[: len(old.names)], list(old.block_ids))
            )
        start = time.perf_counter()
        for request in coming:
            self._admit(request)
        seconds = time.perf_counter() - start + self.decode()
        self.half.update_results(Results(received=tuple(request.request_id for request in coming)))
        self._end(coming)
        self._report(self.half.build_orders())
        return seconds

    def fresh(self) -> float:
        """Seconds of such a step that also admits requests with new prompts, and stores those."""
        coming = [self._made(PROMPT_TOKENS) for _ in range(self.changed)]
        start = time.perf_counter()
        for request in coming:
            self._admit(request)
        for request in coming:
            self._computed(request)
        seconds = time.perf_counter() - start + self.decode()
        self._end(coming)
        self._report(self.half.build_orders())
        return seconds

    def _made(self, num_tokens: int) -> Running:
        self._serial += 1
        count = num_tokens // BLOCK_TOKENS
        names = [b"%07d-%07d" % (self._serial, position) for position in range(count)]
        return Running(f"r{self._serial}", num_tokens, names, list(range(1, 2 + count)))

    def _admit(self, request: Running) -> None:
        self.half.new_request(request)
        count, _ = self.half.matched_tokens(request, 0)
        self.half.update_after_alloc(request, (request.block_ids,), count or 0)

    def _computed(self, request: Running) -> None:
        self.half.launched(Step([Computed(request.request_id, request.num_tokens, (request.block_ids,))]))

    def _grow(self) -> list[tuple[Running, tuple[list[int]] | None]]:
        news: list[tuple[Running, tuple[list[int]] | None]] = []
        for request in self.running:
            request.num_tokens += 1
            new_ids = None
            if request.num_tokens % BLOCK_TOKENS == 0:
                position = len(request.names)
                request.names.append(b"%s+%05d" % (request.request_id.encode(), position))
                new_ids = ([position + 1],)
            news.append((request, new_ids))
        return news

    def _report(self, orders: Orders) -> None:
        self.half.update_results(stored(orders))
        self.half.take_events()

    def _end(self, requests: list[Running]) -> None:
        for request in requests:
            self.half.request_finished(request, (request.block_ids,), delivered=True)


def stored(orders: Orders) -> Results:
    """What workers report that have done everything at once."""
    stored: dict[int, tuple[bytes, ...]] = {store.job: () for store in orders.offload.stores}
    return Results(offload=(OffloadReport(0, stored=stored),) if stored else ())
