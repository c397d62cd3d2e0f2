"""A worker and its cache in a process of its own.

Does with a worker what a serving stack's runner does: makes it, registers the caches, starts orders, and
takes results when it is woken. The clock that counts runs here, in the process that gives the orders.
"""

from __future__ import annotations

import gc
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.cache import BenchCache, CacheShape, Digests
from benchmarks.device import use_device
from benchmarks.process import Side, StepFailed
from kvconnect.addresses import RankAddress
from kvconnect.cache.identity import Identity
from kvconnect.cache.shard import HeadInterval
from kvconnect.config import parse_kv_transfer_config
from kvconnect.halves.rank_traits import RankTraits, SentCache
from kvconnect.halves.worker_half import TransferWorker
from kvconnect.peer.messages import CacheMeaning
from kvconnect.transfer.orders import Hold, Load, Orders, Results
from kvconnect.transfer.stack import RankCache

_POLL_S = 0.0005


@dataclass(frozen=True)
class WorkerAddress:
    """Where a side listens, and the engine that it took."""

    engine_id: str
    engine: str
    rank: RankAddress


@dataclass(frozen=True)
class Round:
    """Requests that are fetched one after the other, ``in_flight`` of them at a time."""

    name: str
    requests: int
    in_flight: int
    tokens: int

    def request_ids(self) -> list[str]:
        return [f"{self.name}-{index}" for index in range(self.requests)]


@dataclass(frozen=True)
class RoundResult:
    """What the decode side saw of a round.

    ``seconds`` runs from the first order to the last result, ``latencies_s`` per request from its order
    to its result. ``last_in_slot`` has by slot the request that came to its blocks last. ``bytes_by_lane``
    and ``copies`` are the worker's own counts.
    """

    seconds: float
    latencies_s: tuple[float, ...]
    last_in_slot: Mapping[int, int]
    bytes_by_lane: Mapping[str, int]
    copies: int


class WorkerSide(Side):
    """A worker and its cache. ``open`` comes first, then ``draw``, then rounds."""

    def __init__(self) -> None:
        super().__init__()
        self._woken = threading.Event()
        self._woken_at = 0.0
        self._failures = Counter[str]()

    # Steps that the parent asks for

    def open(
        self,
        stated: Mapping[str, Any],
        device: str,
        shape: CacheShape,
        seed: int | None,
        timeout_s: float,
        settings: Mapping[str, Any],
        rank: int = 0,
        ranks: int = 1,
    ) -> WorkerAddress:
        """Make the cache and the worker, and begin to serve. ``seed`` is None for the side that receives.

        ``stated`` is the role, and the engine id where ``ranks`` share one; each has the heads of its cache.
        """
        use_device(device)
        self._timeout_s = timeout_s
        self.cache = BenchCache(shape, device, seed)
        bounds = dict.fromkeys(("load_timeout_s", "lease_s", "lease_max_s"), timeout_s)
        extra = {**bounds, "peer_timeout_s": min(10.0, 2 * timeout_s), **settings}
        config = parse_kv_transfer_config({**stated, "kv_connector_extra_config": extra})
        identity = Identity.of({"model": "python -m benchmarks transfer"})
        heads = dict.fromkeys(self.cache.tensors, HeadInterval(rank * shape.heads, (rank + 1) * shape.heads))
        cache = RankCache(self.cache.config(), {0: shape.block_tokens}, self.cache.tensors, heads)
        traits = RankTraits(rank, sent=SentCache(cache, CacheMeaning(identity, shape.heads * ranks, ranks)))
        connector = self.connector = TransferWorker(config, traits)
        self.ends.callback(connector.close)
        connector.on_results(self._wake)
        # As serving stacks do: else a collection of everything that was imported stops all threads for 90 ms.
        gc.collect()
        gc.freeze()
        self.ends.callback(gc.unfreeze)
        return WorkerAddress(config.engine_id, connector.engine_name, connector.address())

    def draw(self, slots: int, blocks: int, seed: int) -> None:
        """Choose the blocks of so many requests."""
        self.cache.draw(slots, blocks, seed)

    def clear(self) -> None:
        self.cache.clear()

    def digests(self, slots: Sequence[int]) -> Digests:
        return self.cache.digests(slots)

    def hold(self, asked: Round) -> None:
        """Hold the requests of a round, and return when the worker has taken the orders."""
        deadline = time.monotonic() + self._timeout_s
        holds = []
        for index, name in enumerate(asked.request_ids()):
            groups = self.cache.groups(index % asked.in_flight)
            holds.append(Hold(name, f"handle-{name}", asked.tokens, groups, 0))
        self.connector.start(Orders(holds=tuple(holds)))
        while (held := self.connector.state()["leases"]) < asked.requests:
            if time.monotonic() > deadline:
                raise StepFailed(f"{held} of {asked.requests} requests are held")
            time.sleep(_POLL_S)

    def failures(self) -> dict[str, int]:
        """What went wrong so far, by the metric's reason."""
        self._counted()
        return dict(self._failures)

    def drain(self, asked: Round) -> None:
        """Wait until every request of a round is reported sent."""
        deadline = time.monotonic() + self._timeout_s
        waiting = set(asked.request_ids())
        while waiting:
            problem = f"{len(waiting)} requests are not reported sent"
            waiting -= set(self._next_results(deadline, problem).sent)

    def load(self, asked: Round, source: WorkerAddress) -> RoundResult:
        """Fetch the requests of a round, and time it. Raises StepFailed: one was not loaded."""
        deadline = time.monotonic() + self._timeout_s
        waiting, free = list(enumerate(asked.request_ids()))[::-1], list(range(asked.in_flight))
        taken: dict[str, tuple[int, int, float]] = {}
        latencies_s: list[float] = []
        last_in_slot: dict[int, int] = {}
        self._counted()
        began = time.perf_counter()
        while waiting or taken:
            loads = []
            while waiting and free:
                (index, name), slot = waiting.pop(), free.pop()
                taken[name] = index, slot, time.perf_counter()
                loads.append(self._load(name, slot, asked, source))
            self.connector.start(Orders(loads=tuple(loads)))
            results = self._next_results(deadline, f"{len(taken)} requests have not arrived")
            for name in results.received:
                if name in results.failed:
                    raise StepFailed(f"request {name} was not loaded: {results.failed[name]}")
                index, slot, ordered_at = taken.pop(name)
                free.append(slot)
                last_in_slot[slot] = index
                latencies_s.append(self._woken_at - ordered_at)
        return RoundResult(self._woken_at - began, tuple(latencies_s), last_in_slot, *self._counted())

    # What the above is made of

    def _wake(self) -> None:
        self._woken_at = time.perf_counter()
        self._woken.set()

    def _next_results(self, deadline: float, problem: str) -> Results:
        """Wait for results without taking the interpreter from the thread that makes them.

        Raises:
            StepFailed: there are none before the deadline.
        """
        while not (results := self.connector.results()):
            if not self._woken.wait(max(0.0, deadline - time.monotonic())):
                raise StepFailed(f"{problem} after {self._timeout_s:g} s: {self.connector.state()}")
            self._woken.clear()
        return results

    def _load(self, name: str, slot: int, asked: Round, source: WorkerAddress) -> Load:
        rank, groups = source.rank, self.cache.groups(slot)
        return Load(name, f"handle-{name}", (source.engine_id, rank.host, rank.port), asked.tokens, groups)

    def _counted(self) -> tuple[dict[str, int], int]:
        """Bytes by lane and copies since the last call."""
        changes = self.connector.changes()
        counters = {} if changes is None else changes.counters
        self._failures.update(counters.get("failures", {}))
        lanes: Counter[str] = Counter()
        for labels, growth in counters.get("transfer_bytes", {}).items():
            direction, lane = labels.split(",")
            lanes[lane] += int(growth) * (direction == "received")
        return +lanes, int(counters.get("copies", {}).get("received", 0))
