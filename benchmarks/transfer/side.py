"""One side of a pair of workers, in a process of its own.

Does with a worker what a serving stack's runner does: makes it, registers the caches, starts orders, and
takes results when it is woken. The clock that counts runs here, in the process that gives the orders.
"""

from __future__ import annotations

import gc
import threading
import time
from collections import Counter
from collections.abc import Sequence

from prometheus_client import CollectorRegistry

from benchmarks.device import use_device
from benchmarks.transfer.cache import BenchCache, Digests
from benchmarks.transfer.cases import Round, RoundResult, WorkerAddress, WorkerSettings
from benchmarks.transfer.process import Side, StepFailed
from benchmarks.transfer.receiver import Receiver
from kvconnect.cache.identity import Identity
from kvconnect.config import parse_kv_transfer_config
from kvconnect.halves.worker_half import TransferWorker
from kvconnect.peer.messages import CacheMeaning
from kvconnect.transfer.orders import Hold, Load, Orders, Results

_POLL_S = 0.0005


class WorkerSide(Side):
    """A worker and its cache. ``open`` comes first, then ``draw``, then rounds."""

    def __init__(self) -> None:
        super().__init__()
        self._woken = threading.Event()
        self._woken_at = 0.0

    # Steps that the parent asks for

    def open(self, settings: WorkerSettings) -> WorkerAddress:
        """Make the cache and the worker, and begin to serve."""
        use_device(settings.device)
        self._timeout_s = settings.timeout_s
        self.cache = BenchCache(settings.shape, settings.device, settings.seed)
        config = parse_kv_transfer_config(
            {
                "kv_role": settings.role,
                "kv_connector_extra_config": {
                    "engine": settings.engine,
                    "protocol": settings.protocol,
                    "load_timeout_s": settings.timeout_s,
                    "peer_timeout_s": min(10.0, 2 * settings.timeout_s),
                    **settings.extra,
                },
            }
        )
        connector = self.connector = TransferWorker(
            config,
            self.cache.config(),
            {0: settings.shape.layout.block_tokens},
            CacheMeaning(Identity.of({"model": "python -m benchmarks transfer"}), settings.shape.heads, 1),
            registry=CollectorRegistry(),
        )
        self.ends.callback(connector.close)
        connector.on_results(self._wake)
        connector.register_kv_caches(self.cache.tensors)
        # As serving stacks do: else a collection of everything that was imported stops all threads for 90 ms.
        gc.collect()
        gc.freeze()
        self.ends.callback(gc.unfreeze)
        return WorkerAddress(config.engine_id, connector.engine_name, connector.address())

    def draw(self, slots: int, blocks: int, seed: int) -> None:
        """Choose the blocks of so many requests."""
        self.cache.draw(slots, blocks, seed)

    def clear(self) -> None:
        """Take away what the chosen blocks hold."""
        self.cache.clear()

    def digests(self, slots: Sequence[int], group_tokens: int) -> Digests:
        """See ``BenchCache.digests``."""
        return self.cache.digests(slots, group_tokens)

    def hold(self, asked: Round) -> None:
        """Hold the requests of a round, and return when the worker has taken the orders."""
        deadline = time.monotonic() + self._timeout_s
        self.connector.start(
            Orders(
                holds=tuple(
                    Hold(
                        request_id,
                        f"handle-{request_id}",
                        asked.tokens,
                        self.cache.groups(index % asked.in_flight),
                        self._timeout_s,
                        0,
                    )
                    for index, request_id in enumerate(asked.request_ids())
                )
            )
        )
        while self.connector.state()["leases"] < asked.requests:
            if time.monotonic() > deadline:
                raise StepFailed(f"{self.connector.state()['leases']} of {asked.requests} requests are held")
            time.sleep(_POLL_S)

    def drain(self, asked: Round) -> None:
        """Wait until every request of a round is reported sent."""
        deadline = time.monotonic() + self._timeout_s
        waiting = set(asked.request_ids())
        while waiting:
            waiting -= set(
                self._next_results(deadline, f"{len(waiting)} requests are not reported sent").sent
            )

    def load(self, asked: Round, source: WorkerAddress) -> RoundResult:
        """Fetch the requests of a round, and time it."""
        deadline = time.monotonic() + self._timeout_s
        receiver = self._receiver(asked, source)
        self.connector.changes()
        began = time.perf_counter()
        while not receiver.done:
            self.connector.start(receiver.orders(time.perf_counter()))
            results = self._next_results(deadline, f"{receiver.in_flight} requests have not arrived")
            receiver.take(results, self._woken_at)
        seconds = self._woken_at - began
        return RoundResult(seconds, tuple(receiver.latencies_s), receiver.last_in_slot, *self._counted())

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

    def _receiver(
        self, asked: Round, source: WorkerAddress, request_bytes: int = 0, bytes_per_s: float = 0.0
    ) -> Receiver:
        def load(request_id: str, slot: int) -> Load:
            return Load(
                request_id=request_id,
                handle=f"handle-{request_id}",
                engine_id=source.engine_id,
                host=source.rank.host,
                port=source.rank.port,
                num_tokens=asked.tokens,
                groups=self.cache.groups(slot),
            )

        return Receiver(asked.request_ids(), asked.in_flight, load, request_bytes, bytes_per_s)

    def _counted(self) -> tuple[dict[str, int], int]:
        """Bytes by lane and copies since the last call."""
        changes = self.connector.changes()
        counters = {} if changes is None else changes.counters
        lanes: Counter[str] = Counter()
        for labels, growth in counters.get("transfer_bytes", {}).items():
            direction, lane = labels.split(",")
            lanes[lane] += int(growth) * (direction == "received")
        return +lanes, int(counters.get("copies", {}).get("received", 0))
