"""The worker half of the connector: what lives beside the tensors, as a serving stack calls it.

Made once per worker, before its caches. Hooks never wait for a transfer: orders go to the mover's
thread, results are taken from it.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import msgspec
import torch
from prometheus_client import REGISTRY, CollectorRegistry

from kvconnect.cache.region_table import CacheTensor, RegionTable, Scales
from kvconnect.cache.shard import HeadInterval
from kvconnect.cache.specs import KVCacheConfig
from kvconnect.config import TransferConfig
from kvconnect.engine.base import Engine, Span
from kvconnect.engine.registry import create_engine
from kvconnect.errors import LocalError
from kvconnect.metrics import Changes, Metrics
from kvconnect.orders import Orders, RankAddress, Results
from kvconnect.pack.arena import Arena
from kvconnect.pack.digest import CPU_DIGEST_SAMPLE
from kvconnect.pack.packer_torch import use_one_thread
from kvconnect.peer.allow_list import AllowList
from kvconnect.peer.keyring import load_keyring
from kvconnect.peer.messages import CacheMeaning, Introduction
from kvconnect.peer.zmq_channel import ZmqChannel
from kvconnect.plan.align import TableCard
from kvconnect.runner_kit.kernel_blocks import sync_block_size
from kvconnect.worker.calibration import pack_bytes_per_s
from kvconnect.worker.local import Local, make_arenas
from kvconnect.worker.mover import Mover
from kvconnect.worker.slots import SlotPool

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 5.0


class WorkerConnector:
    """Holds, sends and fetches the KV of one worker.

    Args:
        config: the parsed ``kv_transfer_config``.
        cache_config: this worker's own cache configuration.
        kernel_block_sizes: tokens of a kernel block, per group index.
        model: the serving stack's fingerprint of model and cache dtype; peers must agree.
        weights: its name of the weights that it runs with; likewise.
        rank: tensor-parallel rank of this worker.
        world_size: number of tensor-parallel ranks.
        num_heads: KV heads of the whole model, or None where every rank keeps the same bytes.
        held_back: tokens at the end of a prompt that the scheduler half leaves to D; peers must agree.
        registry: where the metrics are exported.
        engine: an engine to use in place of the configured one.

    Raises:
        ConfigError: the kernel block is larger than a group's block, the side channel cannot listen, or it
            has no usable keys.
        EngineError: the engine is not usable on this machine.
    """

    def __init__(
        self,
        config: TransferConfig,
        cache_config: KVCacheConfig,
        kernel_block_sizes: Mapping[int, int],
        *,
        model: str,
        weights: str = "",
        rank: int = 0,
        world_size: int = 1,
        num_heads: int | None = None,
        held_back: int = 0,
        registry: CollectorRegistry = REGISTRY,
        engine: Engine | None = None,
    ) -> None:
        extra = config.extra
        self._config = config
        self._cache_config = cache_config
        self._rank = rank
        self._meaning = CacheMeaning(model, num_heads, world_size, weights, held_back)
        self._incarnation = uuid.uuid4().hex
        # Everything built from here on, the region table first, is in kernel blocks.
        self.kernel_block_sizes = {
            group: sync_block_size(cache_config.groups[group].block_size, kernel)
            for group, kernel in kernel_block_sizes.items()
        }
        # Before anything is opened: what is wrong with the keys is said first.
        keyring, allowed = load_keyring(extra, os.environ), AllowList(extra.allow_peers)
        self._engine = engine or create_engine(
            extra.engine,
            host=extra.host,
            protocol=extra.protocol,
            options={"device_name": extra.device_name, **extra.engine_options}
            if extra.device_name
            else extra.engine_options,
        )
        self._channel = ZmqChannel(
            extra.host,
            extra.port + rank if extra.port else 0,
            max_message_bytes=extra.max_message_bytes,
            peer_timeout_s=extra.peer_timeout_s,
            keyring=keyring,
            allowed=allowed,
            handshake_timeout_s=extra.handshake_timeout_s,
            max_connections=4 * extra.max_peers,
            count=lambda reason: self._metrics.failures.labels(reason).inc(),
        )
        self._table: RegionTable | None = None
        self._metrics = Metrics(registry)
        self._mover: Mover | None = None
        self._computed: Callable[[], bool] | None = None
        self._wake_owner: Callable[[], None] = lambda: None
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        logger.info(
            "%s %s rank %d: engine %s, side channel on %s:%d",
            config.kv_role,
            config.engine_id,
            rank,
            self._engine.capabilities.name,
            extra.host,
            self._channel.port,
        )
        logger.info("side channel: %s", keyring.describe() if keyring else "insecure, as configured")

    @property
    def engine_name(self) -> str:
        """The engine that is used, also where the configuration says ``auto``."""
        return self._engine.capabilities.name

    @property
    def table(self) -> RegionTable:
        """What was registered.

        Raises:
            LocalError: nothing was.
        """
        if self._table is None:
            raise LocalError("register_kv_caches was not called")
        return self._table

    def address(self) -> RankAddress:
        """Where this worker listens for peers."""
        return RankAddress(self._rank, self._config.extra.host, self._channel.port)

    def register_kv_caches(
        self,
        tensors: Mapping[str, CacheTensor],
        heads: Mapping[str, HeadInterval] | None = None,
        scales: Mapping[str, Scales] | None = None,
        *,
        reserved_bytes: int = 0,
    ) -> None:
        """Describe the caches, register them with the engine in one call, and begin to serve peers.

        ``heads`` says which of the model's heads a layer's tensor holds on this rank, ``scales`` what its
        quantised values are to be multiplied with: of K and of V, 1 where nothing is said. ``reserved_bytes``
        of the device's free memory are not for slots: the serving stack is still to take them.

        Raises:
            LayoutError: a cache cannot be expressed.
            ConfigError: the device has no room for the fewest slots.
            EngineError: the engine refuses the memory.
            LocalError: it was done before.
        """
        if self._table is not None:
            raise LocalError("register_kv_caches was called twice")
        table = RegionTable.build(self._cache_config, self.kernel_block_sizes, tensors, heads, scales)
        self._on_cuda = any(cache.tensor.is_cuda for cache in tensors.values())
        # The tensors must outlive the registration, whatever the serving stack does with its own.
        self._tensors = dict(tensors)
        device = next(iter(tensors.values())).tensor.device
        max_bytes = self._engine.capabilities.max_bytes
        arenas = make_arenas(self._config, device, max_bytes, reserved_bytes, self._metrics)
        # What is registered, peers can write to; where all goes through slots they need nothing else.
        storages = () if self._config.extra.path == "packed" else table.storages
        spans = [Span(storage.address, storage.length_bytes, storage.device) for storage in storages]
        spans += [Span(arena.address, arena.length_bytes, str(device)) for arena in arenas.values()]
        self._engine.register(spans)
        self._table = table
        logger.info(
            "%d regions in %d storages, %d bytes; registered with the engine: %d bytes",
            len(table.regions),
            len(table.storages),
            sum(storage.length_bytes for storage in table.storages),
            sum(span.length_bytes for span in spans),
        )
        self._mover = self._make_mover(table, device, arenas)
        self._thread = threading.Thread(
            target=self._move, args=(self._mover,), name="kvconnect-mover", daemon=True
        )
        self._thread.start()

    def _make_mover(self, table: RegionTable, device: torch.device, arenas: Mapping[str, Arena]) -> Mover:
        def pool(kind: str) -> SlotPool:
            arena = arenas.get(kind)
            # Another process that uses this address after us must not grant the same numbers.
            first = random.SystemRandom().randrange(1, 1 << 61)
            return SlotPool(arena.addresses if arena else (), arena.slot_bytes if arena else 0, first)

        # Slots are addresses: their memory lives as long as this.
        self._arenas = tuple(arenas.values())
        pack_rate = pack_bytes_per_s(self._arenas[0]) if self._arenas else None
        self._stream = torch.cuda.Stream(device) if self._on_cuda else None  # type: ignore[no-untyped-call]
        self._slot_bytes = min(
            (min(arena.slot_bytes, self._engine.capabilities.max_bytes) for arena in arenas.values()),
            default=0,
        )
        local = Local(table, device, pool("landing"), pool("send"), self._stream, pack_rate)
        if self._on_cuda:
            local.warm_up()
        return Mover(
            self._config.extra,
            self._engine,
            self._channel,
            rank=self._rank,
            meaning=self._meaning,
            introduce=self._introduce,
            local=local,
            metrics=self._metrics,
            wake_owner=self._wake_owner,
        )

    def _move(self, mover: Mover) -> None:
        """The transfer thread."""
        with ExitStack() as used:
            # By the thread that used them, so that nothing is closed under a running call.
            used.callback(self._release)
            if self._stream is not None:
                torch.cuda.set_device(self._stream.device)
                torch.cuda.set_stream(self._stream)
            else:
                use_one_thread()
            mover.run(self._stopping)

    def replace_weights(self, weights: str) -> None:
        """The model runs with other weights from now on: what is held or being loaded is void.

        Before ``start`` of the first orders whose KV is of the new ones.
        """
        self._meaning = msgspec.structs.replace(self._meaning, weights=weights)
        self._metrics.failures.labels("weights_replaced").inc()
        if self._mover is not None:
            self._mover.replace_weights()

    def mark(self) -> None:
        """Take note of what the device was given so far: what the next orders call computed is part of it.

        Optional, and for a serving stack that gives the device more before it can pass on orders.
        """
        self._computed = self._device_done()

    def start(self, orders: Orders) -> None:
        """Take one step's orders, after the step's forward was launched. Never waits."""
        computed, self._computed = self._computed, None
        if not orders:
            return
        if self._mover is None:
            raise LocalError("orders came before register_kv_caches was called")
        self._mover.order(orders, self._device_done(), computed)

    def results(self) -> Results:
        """What ended since the last call. Every ordered request comes back exactly once."""
        return self._mover.take_results() if self._mover is not None else Results()

    def changes(self) -> Changes | None:
        """What the metrics have grown by since the last call, or None. Quick when that is nothing."""
        return self._metrics.changes()

    def on_results(self, wake: Callable[[], None]) -> None:
        """Have ``wake`` called, from another thread, whenever results are waiting."""
        self._wake_owner = wake
        if self._mover is not None:
            self._mover.wake_owner = wake

    def state(self) -> dict[str, Any]:
        """Counts of what is held and under way, for people and tests. All zero when idle."""
        if self._mover is None:
            return {"engine": self.engine_name}
        prefill, decode = self._mover.prefill, self._mover.decode
        return {
            "engine": self.engine_name,
            "leases": len(prefill.leases),
            "expected": len(prefill.pending.expected),
            "pending_fetches": len(prefill.pending),
            "streaming_prefills": len(prefill.streaming),
            "sendings": len(prefill.sender.sendings),
            "loads": len(decode.loads),
            "awaited": len(decode.renewals.awaited),
            "slots": prefill.sender.slots_taken + decode.bay.taken,
            "peers": len(decode.peers),
            "inbound_peers": len(prefill.inbound_peers),
        }

    def drain(self, timeout_s: float | None = None) -> bool:
        """Begin no lease any more, and wait until everything that is held was fetched, or is given up.

        What is not fetched within ``drain_s`` is given up, and the peers that count on it get a message. Not
        for a hook: it waits, for ``drain_s`` and a little more if ``timeout_s`` says nothing else. Results
        are to be taken meanwhile. False: not everything ended in that time.
        """
        if self._mover is None:
            return True
        drained = threading.Event()
        self._mover.drain(drained.set)
        return drained.wait(self._config.extra.drain_s + _CLOSE_TIMEOUT_S if timeout_s is None else timeout_s)

    def close(self) -> None:
        """Stop the thread, which releases the engine and the side channel when it ends. Idempotent.

        Waits 5 s at most. A thread that takes longer, in a call of the engine, releases them whenever that
        returns: what is open until then is logged, and counted as ``close_timeout``.
        """
        if self._stopping.is_set():
            return
        self._stopping.set()
        if self._thread is None:
            self._release()
            return
        self._channel.wake()
        self._thread.join(_CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            self._metrics.failures.labels("close_timeout").inc()
            logger.error(
                "the transfer thread did not stop within %s s. Open until it does: the registered memory of "
                "engine %s, the side channel on port %d, and %s",
                _CLOSE_TIMEOUT_S,
                self.engine_name,
                self._channel.port,
                ", ".join(f"{count} {what}" for what, count in self.state().items() if what != "engine"),
            )

    def _release(self) -> None:
        """Close what was opened, each whatever becomes of the others."""
        with ExitStack() as opened:
            opened.callback(self._metrics.retire)
            opened.callback(self._channel.close)
            opened.callback(self._engine.close)

    def _device_done(self) -> Callable[[], bool]:
        """Whether the device has finished what was launched so far: engines do not follow its streams."""
        if not self._on_cuda:
            return _always
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event.query

    def _introduce(self) -> Introduction:
        return Introduction(
            engine_id=self._config.engine_id,
            incarnation=self._incarnation,
            rank=self._rank,
            meaning=self._meaning,
            engine=self._engine.capabilities.name,
            engine_card=self._engine.card(),
            table=TableCard.of(self.table),
            slot_bytes=self._slot_bytes,
            scratch_address=self._arenas[0].scratch_address if self._arenas else 0,
            scratch_bytes=self._arenas[0].scratch_bytes if self._arenas else 0,
            digest_sample=1 if self._on_cuda else self._config.extra.digest_sample or CPU_DIGEST_SAMPLE,
        )


def _always() -> bool:
    return True
