"""A prefill and a decode worker on one virtual clock: no threads, no sockets, nothing waits.

Everything under test is real but the wire: transfer threads, sessions, ledgers, plans, packers and the memory
engine. The two sides have different block counts and ids, so that mixing them up shows.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from msgspec import structs

from kvconnect.cache.region_table import CacheTensor, RegionTable
from kvconnect.cache.shard import shard_heads
from kvconnect.cache.specs import AttentionSpec, KVCacheConfig, KVCacheGroup
from kvconnect.config import ExtraConfig, TransferConfig
from kvconnect.engine.base import Span
from kvconnect.halves.worker_transfers import WorkerTransfers
from kvconnect.metrics import Metrics
from kvconnect.pack.arena import Arena
from kvconnect.pack.exponent_code import ExponentCoder
from kvconnect.peer.messages import CacheMeaning, Introduction, Message, Side, decode, encode
from kvconnect.plan.blocks import GroupBlocks
from kvconnect.prefill.outbox import SlotOutbox
from kvconnect.transfer.local import Local
from kvconnect.transfer.orders import Hold, Load, Orders, Reports, Results
from kvconnect.transfer.slots import SlotPool, SlotState
from kvconnect.transfer.stack import RankCache
from tests.engine.faulty_engine import FaultyEngine
from tests.identities import named
from tests.peer.memory_network import MemoryNetwork

LAYERS = 3
HEADS = 2
BLOCK_TOKENS = 4
SLOT_BYTES = 1024
PAGE_BYTES = BLOCK_TOKENS * HEADS * 8 * 2
P_IDS, D_IDS = (5, 6, 9), (21, 3, 8)
"""The blocks of a request on either side, where a test does not care which."""
OTHER = (11, 12, 13), (31, 32, 33)
"""Those of another one."""
MEANING = CacheMeaning(named("m"), HEADS, 1)
_LIMIT = 64 << 20

Tap = Callable[[Message], Sequence[Message]]


class Clock:
    """A time that moves only when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class TappedNetwork(MemoryNetwork):
    """A network that remembers what was said, and lets a test change it on its way."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.said: list[Message] = []
        self.taps: list[Tap] = []

    def deliver(self, source: int, target: int, link: str, data: bytes) -> bool:
        try:
            side = Side.PREFILL if link.startswith("in:") else Side.DECODE
            messages: Sequence[Message] = [decode(side, data, _LIMIT)]
        except Exception:
            return super().deliver(source, target, link, data)
        self.said.extend(messages)
        for tap in self.taps:
            messages = [changed for message in messages for changed in tap(message)]
        for message in messages:
            super().deliver(source, target, link, encode(message))
        return target in self._channels

    def insert(self, kind: type, make: Tap, times: float = math.inf) -> None:
        """Have ``make(message)`` heard instead of each message of a kind, or of the next few."""

        def tap(message: Message) -> Sequence[Message]:
            nonlocal times
            if not isinstance(message, kind) or not times:
                return [message]
            times -= 1
            return make(message)

        self.taps.append(tap)

    def change(self, kind: type, times: float = math.inf, **fields) -> None:
        """Have messages of a kind say something else."""
        self.insert(kind, lambda message: [structs.replace(message, **fields)], times)

    def lose(self, kind: type, times: float = math.inf) -> None:
        """Have messages of a kind not heard."""
        self.insert(kind, lambda message: [], times)

    def heard(self, kind: type) -> list:
        """Everything of one kind that was said, whatever became of it on its way."""
        return [message for message in self.said if isinstance(message, kind)]


class PlainCache:
    """Three layers of one group, all in one tensor: (layer, block, token, head, content)."""

    def __init__(self, num_blocks: int, rank: int = 0, world_size: int = 1) -> None:
        heads = shard_heads(HEADS, rank, world_size)
        self.storage = torch.zeros(LAYERS, num_blocks, BLOCK_TOKENS, len(heads), 8, dtype=torch.float16)
        tensors = {
            f"layer{i}": CacheTensor(self.storage[i], "block token head content") for i in range(LAYERS)
        }
        spec = AttentionSpec(BLOCK_TOKENS, len(heads), 4, torch.float16)
        config = KVCacheConfig(num_blocks, (KVCacheGroup(tuple(tensors), spec),))
        by_layer = dict.fromkeys(tensors, heads)
        self.described = RankCache(config, {0: BLOCK_TOKENS}, tensors, by_layer)
        self.table = RegionTable.build(config, {0: BLOCK_TOKENS}, tensors, by_layer)


class FakeWorker:
    """A transfer thread with its cache, engine and channel, stepped by hand.

    ``cache`` is anything with a region table as ``table``; left out, a ``PlainCache`` of ``num_blocks``.
    ``shared``: its landing slots can be mapped by peers, and it maps those of its peers.
    """

    def __init__(
        self,
        engine_id: str,
        num_blocks: int,
        network: MemoryNetwork,
        config: ExtraConfig,
        *,
        meaning: CacheMeaning = MEANING,
        rank: int = 0,
        cache=None,
        slot_bytes: int = SLOT_BYTES,
        scratch_bytes: int = 0,
        engine: FaultyEngine | None = None,
        shared: bool = False,
        role: str = "kv_both",
    ) -> None:
        self.engine_id = engine_id
        self.config = config
        self.rank = rank
        self.cache = cache or PlainCache(num_blocks)
        self.table: RegionTable = self.cache.table
        self.engine = engine or FaultyEngine(clock=network.clock)
        self.engine.capabilities = replace(self.engine.capabilities, may_be_bypassed=shared)
        self.slot_bytes = slot_bytes
        self.arenas = [
            Arena("cpu", slot_bytes, config.num_slots, scratch_bytes, shared=of_landing)
            for of_landing in (shared, False)
        ]
        self.engine.register([Span(arena.address, arena.length_bytes) for arena in self.arenas])
        # No two pools count alike, so that a number of one is never right by accident in another.
        first = 1 + 100_000 * rank + 10_000_000 * (sum(engine_id.encode()) % 97)
        self.landing = SlotPool(self.arenas[0].addresses, slot_bytes, first)
        self.send = SlotPool(self.arenas[1].addresses, slot_bytes, first + 50_000)
        self.channel = network.channel()
        self.metrics = Metrics()
        self.coder = ExponentCoder(slot_bytes) if config.exponent_coding != "off" else None
        introduction = Introduction(
            engine_id,
            f"{engine_id} rank {rank} started once",
            rank,
            meaning,
            "memory",
            b"",
            self.table,
            self.slot_bytes,
            self.arenas[0].scratch_address if scratch_bytes else 0,
            scratch_bytes,
            memory=self.arenas[0].card,
            decodes=self.coder is not None,
        )
        self.local = Local(
            introduction,
            self.engine,
            self.table,
            torch.device("cpu"),
            self.landing,
            self.send,
            maps_peers=shared,
            coder=self.coder,
        )
        self.reports = Reports(rank)
        # A run is as the one before it: attempts to reach a peer are spread by chance.
        chance = random.Random(f"{engine_id} {rank}")
        whole = TransferConfig(kv_role=role, engine_id=engine_id, kv_connector_extra_config=config)
        self.transfers = WorkerTransfers(whole, self.channel, self.local, self.reports, self.metrics, chance)
        self.results: list[Results] = []
        self.ordered: Counter[str] = Counter()

    def order(self, orders: Orders, ready: Callable[[], bool] = lambda: True) -> None:
        """Give orders, and remember what is to be reported."""
        self.ordered.update(order.request_id for order in (*orders.holds, *orders.loads))
        self.transfers.order(orders, lambda step: ready)

    def introduce(self, **fields) -> None:
        """Have it introduce itself with other words."""
        self.local.introduction = structs.replace(self.local.introduction, **fields)

    @property
    def storage(self) -> torch.Tensor:
        return self.cache.storage

    def step(self, now: float) -> None:
        self.transfers.step(now)
        if results := self.reports.take():
            self.results.append(results)

    @property
    def sent(self) -> list[str]:
        return [request for results in self.results for request in results.sent]

    @property
    def received(self) -> list[str]:
        return [request for results in self.results for request in results.received]

    @property
    def failed(self) -> dict[str, str]:
        return {key: why.text for results in self.results for key, why in results.failed.items()}

    def count(self, name: str, **labels: str) -> float:
        """The sum over all labels that are not given."""
        numbers = self.metrics.families[name]
        return sum(
            value
            for given, value in numbers.values().items()
            if labels.items() <= dict(zip(numbers.family.labels, given, strict=True)).items()
        )

    def gauge(self, name: str) -> float:
        return self.metrics.families[name].labels().value

    def check_slots(self) -> None:
        """Every slot is where exactly one record says that it is, and nothing was reported twice."""
        prefill, decode = self.transfers.prefill, self.transfers.decode
        landings = decode.bay._landings.values() if decode else ()
        lent, lost = (
            {id(slot) for landing in landings if landing.closed is closed for slot in landing.lent.values()}
            for closed in (False, True)
        )
        unpacking = {id(slot) for one in landings for slot, *_ in (*one.unpacking, *one.packed)}
        assert _by_state(self.landing) == {
            SlotState.THEIRS: lent,
            SlotState.OURS: unpacking,
            SlotState.QUARANTINED: lost,
        }
        sendings = prefill.sender.sendings.values() if prefill else ()
        outboxes = [sent.outbox for sent in sendings if isinstance(sent.outbox, SlotOutbox)]
        # What is packed into a landing slot has none of ours.
        parcels = [parcel for box in outboxes for parcel in (*box._kernels, *box._filled)]
        ours = {id(parcel.slot) for parcel in parcels if parcel.slot is not None}
        theirs = {id(parcel.slot) for box in outboxes for parcel in box._in_flight.values()}
        assert _by_state(self.send) == {
            SlotState.THEIRS: theirs,
            SlotState.OURS: ours,
            SlotState.QUARANTINED: {id(slot) for _, slot in prefill.sender._lost} if prefill else set(),
        }
        assert Counter((*self.sent, *self.received)) <= self.ordered

    def assert_idle(self) -> None:
        """Nothing is remembered."""
        self.check_slots()
        if (prefill := self.transfers.prefill) is not None:
            assert not prefill.leases
            assert not prefill.sender.sendings
            assert not prefill.sender._batches
            assert not prefill.sender._in_flight_bytes
            assert not prefill.has_work
            assert not prefill.pending.fetches
            assert not prefill.book.expected
            assert not prefill.book.released
        if (decode := self.transfers.decode) is not None:
            assert not decode.loads
            assert len(decode.rank_fetches) == 0
            assert not decode.bay.busy
            assert len(decode.bay) == 0
            assert not decode.bay._hungry
        assert (self.send.taken, self.landing.taken) == (0, 0)
        for pool in (self.send, self.landing):
            assert pool.free == len(pool.slots)
        assert not self.gauge("leases_held")
        assert not self.gauge("loads_in_flight")
        assert self.gauge("slots_send") == 0
        assert self.gauge("slots_landing") == 0


def quarantined(pool: SlotPool) -> int:
    """How many slots nobody may use, since somebody may still touch them."""
    return sum(slot.state is SlotState.QUARANTINED for slot in pool.slots)


def _by_state(pool: SlotPool) -> dict[SlotState, set[int]]:
    """The slots that are not free, by state. Those that are free can be taken, each once."""
    found: dict[SlotState, set[int]] = {state: set() for state in SlotState}
    for slot in pool.slots:
        found[slot.state].add(id(slot))
    free = [id(slot) for slot in pool._free]
    assert len(free) == len(set(free))
    assert set(free) == found.pop(SlotState.FREE)
    return found


class Deployment:
    """Workers, the network between them, and the clock that they live on."""

    rounds = 8
    """Turns of each worker, after which it has nothing more to say."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.network = TappedNetwork(self.clock)

    @property
    def workers(self) -> list[FakeWorker]:
        raise NotImplementedError

    def run(self, seconds: float = 0.0, step_s: float | None = None) -> None:
        """Step all until ``seconds`` have passed, and then until nothing is left to say.

        A step is of 50 ms, or of a hundredth of a long time.
        """
        step_s = step_s or max(0.05, seconds / 100)
        end = self.clock.now + seconds
        while self.clock.now < end:
            self.clock.now = min(end, self.clock.now + step_s)
            self.settle()
        self.settle()

    def settle(self, rounds: int = 0) -> None:
        for _ in range(rounds or self.rounds):
            for worker in self.workers:
                worker.step(self.clock.now)
        for worker in self.workers:
            worker.check_slots()

    def assert_idle(self, after_s: float = 0.0, step_s: float | None = None) -> None:
        """Nothing is remembered on any side, once so much time has passed."""
        if after_s:
            self.run(after_s, step_s)
        for worker in self.workers:
            worker.assert_idle()


@dataclass
class Pair(Deployment):
    """P and D, and the clock they live on. What begins with ``prefill`` is P's, if that is other.

    What happens to them goes on for ``run_s`` seconds, where these are given.

    ``shared``: P packs into D's landing slots, as memory of its own process. ``are_apart``: P only hands out,
    D only fetches; else each could do both.
    """

    config: ExtraConfig = field(default_factory=ExtraConfig)
    prefill_model: str = "m"
    prefill_config: ExtraConfig | None = None
    slot_bytes: int = SLOT_BYTES
    prefill_slot_bytes: int = 0
    prefill_blocks: int = 40
    decode_blocks: int = 50
    shared: bool = False
    scratch_bytes: int = 0
    are_apart: bool = False

    def __post_init__(self) -> None:
        super().__init__()
        self.others: list[FakeWorker] = []
        self.prefill = self._worker(
            "P",
            self.prefill_blocks,
            "kv_producer",
            config=self.prefill_config or self.config,
            meaning=CacheMeaning(named(self.prefill_model), HEADS, 1),
            slot_bytes=self.prefill_slot_bytes or self.slot_bytes,
        )
        self.decode = self._worker("D", self.decode_blocks, "kv_consumer")
        self.prefill.storage.copy_(torch.randn(self.prefill.storage.shape))

    def _worker(self, engine_id: str, num_blocks: int, role: str, **other) -> FakeWorker:
        given = {"config": self.config, "slot_bytes": self.slot_bytes, **other}
        return FakeWorker(
            engine_id,
            num_blocks,
            self.network,
            scratch_bytes=self.scratch_bytes,
            engine=self.engine(),
            shared=self.shared,
            role=role if self.are_apart else "kv_both",
            **given,
        )

    def engine(self) -> FaultyEngine:
        """That of one side."""
        return FaultyEngine(clock=self.clock)

    def add(self, engine_id: str) -> FakeWorker:
        """One more worker, with a cache of other contents."""
        worker = self._worker(engine_id, self.prefill_blocks, "kv_both")
        worker.storage.copy_(torch.randn(worker.storage.shape))
        self.others.append(worker)
        return worker

    @property
    def workers(self) -> list[FakeWorker]:
        return [self.prefill, *self.others, self.decode]

    def hold(
        self,
        request: str,
        block_ids: tuple[int, ...],
        handle: str | None = None,
        ready=lambda: True,
        worker: FakeWorker | None = None,
    ) -> None:
        order = Hold(
            request,
            handle or f"handle-{request}",
            len(block_ids) * BLOCK_TOKENS,
            (GroupBlocks(0, 0, block_ids),),
            0,
        )
        (worker or self.prefill).order(Orders(holds=(order,)), ready)

    def load(
        self,
        request: str,
        block_ids: tuple[int, ...],
        handle: str | None = None,
        ready=lambda: True,
        engine_id: str = "P",
        host: str = "h",
        port: int | None = None,
        run_s: float | None = None,
        **changes,
    ) -> None:
        fields = {
            "request_id": request,
            "handle": f"handle-{request}" if handle is None else handle,
            "peer": (engine_id, host, port or self.prefill.channel.port),
            "num_tokens": len(block_ids) * BLOCK_TOKENS,
            "groups": (GroupBlocks(0, 0, block_ids),),
        }
        self.decode.order(Orders(loads=(Load(**{**fields, **changes}),)), ready)
        self._go_on(run_s)

    def _go_on(self, run_s: float | None) -> None:
        if run_s is not None:
            self.run(run_s)

    def start(
        self,
        request: str = "a",
        source: tuple[int, ...] = P_IDS,
        target: tuple[int, ...] = D_IDS,
        *,
        run_s: float | None = None,
    ) -> None:
        """A request that is prefilled, and then fetched."""
        self.hold(request, source)
        self.load(request, target, run_s=run_s)

    def stall(self, run_s: float = 0.0) -> None:
        """A request whose bytes do not leave P's engine until its ``release``."""
        self.prefill.engine.hold()
        self.start(run_s=run_s)

    def release(self, run_s: float | None = None) -> None:
        self.prefill.engine.release()
        self._go_on(run_s)

    def abort(self, request: str, run_s: float | None = None) -> None:
        self.decode.order(Orders(aborted=(request,)))
        self._go_on(run_s)

    def say(self, message: Message, worker: FakeWorker | None = None) -> None:
        """P, or another worker, says something to D of its own accord."""
        worker = worker or self.prefill
        (link,) = worker.transfers.prefill.inbound_peers._peers
        worker.channel.send(link, encode(message))

    def cut(self, worker: FakeWorker | None = None, run_s: float | None = None) -> None:
        """Lose whatever P, or another worker, and D say to each other from now on."""
        self.network.cut((worker or self.prefill).channel.port, self.decode.channel.port)
        self._go_on(run_s)

    def mend(self, worker: FakeWorker | None = None) -> None:
        self.network.mend((worker or self.prefill).channel.port, self.decode.channel.port)

    def landed(self, source_ids: tuple[int, ...] = P_IDS, target_ids: tuple[int, ...] = D_IDS) -> bool:
        source, target = self.prefill.storage, self.decode.storage
        return torch.equal(source[:, list(source_ids)], target[:, list(target_ids)])
