"""The half beside the tensors of one rank."""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import msgspec

from kvconnect.addresses import RankAddress, join_address
from kvconnect.cache.identity import Identity
from kvconnect.config import TransferConfig
from kvconnect.engine.base import Engine
from kvconnect.engine.registry import create_engine
from kvconnect.errors import LocalError
from kvconnect.halves.inspection_page import write_inspection
from kvconnect.halves.rank_traits import RankTraits, SentCache
from kvconnect.halves.worker_transfers import WorkerTransfers
from kvconnect.metrics import Changes, Metrics
from kvconnect.outcome import Reason
from kvconnect.packages import package_versions
from kvconnect.peer import description, inspection, timeline_page
from kvconnect.peer.allow_list import AllowList
from kvconnect.peer.keyring import load_keyring
from kvconnect.peer.messages import Introduction
from kvconnect.peer.zmq_channel import ZmqChannel
from kvconnect.prefill.prefill_side import ASLEEP, STOPPING
from kvconnect.transfer.kept import KeptByName
from kvconnect.transfer.local import Local, open_local
from kvconnect.transfer.orders import NO_OFFLOAD, Orders, Reports, Results, joined

if TYPE_CHECKING:
    from kvconnect.offload.worker.offload_worker import OffloadWorker
    from kvconnect.offload.worker.prefix_blocks import PrefixBlocks

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 5.0


class TransferWorker(WorkerTransfers):
    """Holds, sends and fetches the KV of one worker, and serves peers from its construction on.

    Args:
        config: the parsed ``kv_transfer_config``; its settings in ``ranks`` apply to the worker of that rank.
        traits: of this rank, with the caches that are ``sent``.
        offload: has rows that peers may look up by name, and rows that loads may fill.
        engine: an engine to use in place of the configured one.

    Raises ``ConfigError``: the kernel block is larger than a group's block, the side channel has no address
    or keys, or cannot listen, or the device has no room for the fewest slots; ``EngineError``: the engine is
    not usable on this machine, or refuses the memory; ``LayoutError``: a cache cannot be expressed.
    """

    def __init__(
        self,
        config: TransferConfig,
        traits: RankTraits,
        offload: OffloadWorker | None = None,
        *,
        engine: Engine | None = None,
    ) -> None:
        # Before engine and channel are opened: errors in keys, and in addresses of this machine, come first.
        keyring, allowed = load_keyring(config.extra, os.environ), AllowList(config.extra.allow_peers)
        rank, sent = traits.rank, traits.sent
        assert sent is not None, "it has a cache to send or to fill"
        extra = config.extra.here(rank)
        self._config = config = msgspec.structs.replace(config, kv_connector_extra_config=extra)
        # The tensors must outlive the registration, also where the serving stack drops its own.
        self._meaning, self._cache = sent.meaning, sent.cache
        self._tiers: Callable[[], Mapping[str, dict[str, Any]]] = dict if offload is None else offload.tiers
        self._reports, self._is_closed = Reports(rank), False
        self._reports.has_wanted = traits.reports_fetches
        metrics = Metrics()
        # ZeroMQ's context waits for ever if it is collected before its sockets.
        with ExitStack() as opened:
            engine = engine or create_engine(
                extra.engine, host=extra.host, protocol=extra.protocol, options=extra.all_engine_options
            )
            opened.callback(engine.close)
            port = extra.port + rank if extra.port else 0
            failed = metrics.failures
            channel = ZmqChannel(extra, port, keyring, allowed, lambda reason: failed.labels(reason).inc())
            opened.callback(channel.close)
            logger.info(
                "%s %s rank %d: engine %s, side channel on %s, port %d",
                config.kv_role,
                config.engine_id,
                rank,
                engine.capabilities,
                extra.place,
                channel.port,
            )
            logger.info("side channel: %s", keyring.describe() if keyring else "insecure, as configured")
            local, shared = self._open(engine, traits, sent, offload, metrics)
            super().__init__(config, channel, local, self._reports, metrics, shared=shared)
            topics = self.inbound_peers.topics
            # Not on the transfer thread: reading the versions of packages takes milliseconds, and files.
            topics.add(description.TOPIC, functools.partial(self._describe, package_versions()))
            page = functools.partial(timeline_page.write_page, metrics.timeline, config.engine_id, rank)
            topics.add(timeline_page.TOPIC, page)
            topics.add(inspection.TOPIC, self._inspect)
            metrics.side_channel.labels(join_address(extra.host, channel.port)).set(1)
            self.serve()
            opened.pop_all()

    def _open(
        self,
        engine: Engine,
        traits: RankTraits,
        sent: SentCache,
        offload: OffloadWorker | None,
        metrics: Metrics,
    ) -> tuple[Local, PrefixBlocks | None]:
        """Describe the caches, and register slots with the engine in one call."""
        config, cache, table = self._config, sent.cache, sent.cache.table()
        introduction = Introduction(
            engine_id=config.engine_id,
            incarnation=uuid.uuid4().hex,
            rank=traits.rank,
            meaning=sent.meaning,
            engine=engine.capabilities.name,
            engine_card=b"",
            table=table,
        )
        reserved_bytes = traits.reserved_bytes
        local = open_local(config, engine, introduction, table, cache.device, reserved_bytes, metrics)
        kept: KeptByName | None = None if offload is None else offload.names
        shared: PrefixBlocks | None = None
        if sent.shared is not None:
            from kvconnect.offload.worker.prefix_blocks import PrefixBlocks

            kept = shared = PrefixBlocks(*sent.shared, table, cache.config.num_blocks, kept)
        if kept is not None:
            local.keep(kept)
        if offload is not None and offload.load_rows is not None:
            local.park(offload.load_rows)
        return local, shared

    @property
    def engine_name(self) -> str:
        """The name of the engine in use, also where the configuration has ``auto``."""
        return self.local.engine.capabilities.name

    @property
    def identity(self) -> Identity:
        """What this worker's KV depends on."""
        return self._meaning.identity

    def address(self) -> RankAddress:
        """Where this worker listens for peers."""
        return RankAddress(self.local.introduction.rank, self._config.extra.host, self._channel.port)

    def replace_weights(self, weights: Mapping[str, str]) -> None:
        """The model runs with other weights from now on: end all leases and loads.

        To be called before ``start`` of the first orders for KV of the new weights.
        """
        self._metrics.failures.labels("weights_replaced").inc()
        if self._shared is not None:
            self._shared.forget()
        self._meaning = self._meaning.with_weights(weights)
        super().replace_weights(weights)

    def results(self) -> Results:
        return self._reports.take()

    def changes(self) -> Changes | None:
        return self._metrics.changes()

    def on_results(self, wake: Callable[[], None]) -> None:
        self._reports.wake = wake

    def state(self) -> dict[str, Any]:
        return {"engine": self.engine_name, **super().state()}

    def _describe(self, versions: dict[str, str], argument: str) -> bytes:
        """On the transfer thread."""
        return msgspec.msgpack.encode(
            description.Description(
                clock_s=time.time(),
                role=self._config.kv_role,
                lane=self.local.engine.capabilities.lane,
                lease_s=self._config.extra.lease_s,
                versions=versions,
                directory=self.inbound_peers.directory,
                introduced=description.introduced(self.local.introduce()),
            )
        )

    def _inspect(self, argument: str) -> bytes:
        """On the transfer thread."""
        counts = super().state()
        # Its name in the releases before, whose ``kvconnect inspect`` adds it to the leases.
        counts["streaming_prefills"] = counts.get("expected", 0)
        return write_inspection(self, self._metrics.timeline, counts, self._tiers(), argument)

    def drain(self, timeout_s: float | None = None) -> bool:
        """Begin no further lease, and wait until all held requests were fetched or given up.

        Requests not fetched within ``drain_s`` seconds are given up, and peers that renewed them are
        informed. Waits for a little more than ``drain_s`` unless ``timeout_s`` is given, so it is not for a
        hook; results are to be taken meanwhile. False: requests are still held after that time.
        """
        drained, drain_s = threading.Event(), self._config.extra.drain_s
        if held := self.state().get("leases"):
            most_s = drain_s if timeout_s is None else min(drain_s, timeout_s)
            logger.info("%d requests are held for peers, which may fetch them for %g s more", held, most_s)
        self.quiesce(drained.set, STOPPING, drain_s)
        return drained.wait(drain_s + _CLOSE_TIMEOUT_S if timeout_s is None else timeout_s)

    def sleep(self) -> None:
        """Wait until no transfer reads or writes pages, and let none do so until ``wake``. Idempotent.

        Peers stay connected, and are refused with the reason. Raises ``LocalError``, with transfers
        continuing as before: a load is under way, or pages are still read after 5 s.
        """
        if self._shared is not None:
            self._shared.forget()
        asleep = threading.Event()
        self.quiesce(asleep.set, ASLEEP, 0.0)
        if asleep.wait(_CLOSE_TIMEOUT_S) and not self.state().get("loads"):
            return
        self.wake()
        raise LocalError("the node cannot sleep: requests are being loaded, or pages are still being read")

    def close(self) -> None:
        """Stop the thread, which releases the engine and the side channel when it ends. Idempotent.

        Waits 5 s at most. A thread that is in a longer call of the engine releases both after that call; what
        is open until then is logged, and counted as ``close_timeout``.
        """
        if self._is_closed:
            return
        self._is_closed = True
        if not self.stop(_CLOSE_TIMEOUT_S):
            self._metrics.failures.labels("close_timeout").inc()
            logger.error(
                "the transfer thread did not stop within %s s. Open until it does: the registered memory of "
                "engine %s, the side channel on port %d, and %s",
                _CLOSE_TIMEOUT_S,
                self.engine_name,
                self._channel.port,
                ", ".join(f"{count} {what}" for what, count in super().state().items()),
            )


class WorkerHalf:
    """Composite of one rank's transfers and offload, beside its tensors.

    See ``building.build_worker_half``.
    """

    def __init__(self, transfer: TransferWorker | None = None, offload: OffloadWorker | None = None) -> None:
        self.transfer, self.offload = transfer, offload

    @property
    def _parts(self) -> Sequence[TransferWorker | OffloadWorker]:
        return [part for part in (self.transfer, self.offload) if part is not None]

    def address(self) -> RankAddress | None:
        return None if self.transfer is None else self.transfer.address()

    @property
    def identity(self) -> Identity:
        """What the KV depends on that is sent, or else kept; empty without either."""
        part = self.transfer or self.offload
        return Identity() if part is None else part.identity

    def replace_weights(self, weights: Mapping[str, str]) -> None:
        for part in self._parts:
            part.replace_weights(weights)

    def revoke(self, handle: str, reason: Reason) -> None:
        """The stack frees the blocks under a handle at once, without waiting for ``Results.sent``.

        From now on no peer uses what it is sent of them: P answers its fetches with the reason. A hold of the
        handle is still reported sent, once nothing reads its blocks.
        """
        if self.transfer is not None:
            self.transfer.revoke(handle, reason)

    def before_step(self, orders: Orders) -> None:
        """Mark the step's start on the device, snapshot blocks that it may overwrite, and begin its orders.

        To be called for every step. Orders with ``zeroes_loads`` begin later. Never waits.
        """
        if self.transfer is not None:
            self.transfer.before_step(orders)
        if self.offload is not None and orders.offload != NO_OFFLOAD:
            self.offload.before_step(orders.offload)
        # After the snapshot: one step's orders may store a block, and give it to a load or a restore. Not
        # after the launch, which takes as long as a prefill where another one keeps the device's queue full.
        if not orders.zeroes_loads and (orders.notes or orders):
            self._start(orders)

    def after_zeroing(self, orders: Orders) -> None:
        """Begin orders with ``zeroes_loads``. Never waits."""
        if orders.zeroes_loads:
            self._start(orders)

    def _start(self, orders: Orders) -> None:
        is_both = orders.offload != NO_OFFLOAD
        if self.offload is not None and is_both:
            self.offload.start(orders.offload)
        if self.offload is not None:
            for load in orders.loads:
                if load.parks and self.offload.load_rows is not None:
                    self.offload.load_rows.begin(load.parks)
        if self.transfer is not None:
            alone = msgspec.structs.replace(orders, offload=NO_OFFLOAD) if is_both else orders
            self.transfer.start(alone)
        elif self.offload is not None and orders.failures:
            self.offload.count_failures(orders.failures)

    def results(self) -> Results:
        """The requests that ended since the last call. Every ordered request comes back exactly once."""
        sent = Results() if self.transfer is None else self.transfer.results()
        if self.offload is None:
            return sent
        kept = self.offload.results()
        return joined((sent, kept)) if kept else sent

    def on_results(self, wake: Callable[[], None]) -> None:
        """Have ``wake`` called, from any thread, when results are waiting."""
        for part in self._parts:
            part.on_results(wake)

    def changes(self) -> Changes | None:
        """The changes of the metrics since the last call, or None. From any one thread."""
        sent = None if self.transfer is None else self.transfer.changes()
        return sent if self.offload is None else self.offload.changes(sent)

    def state(self) -> dict[str, Any]:
        """Counts of leases, loads, slots and jobs, for people and tests. All zero when idle."""
        state = {"engine": "none"} if self.transfer is None else self.transfer.state()
        kept = {} if self.offload is None else self.offload.state()
        return {**state, **{f"offload_{name}": count for name, count in kept.items()}}

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait, within a bound, until no request is held. From any thread but that of the hooks."""
        return True if self.transfer is None else self.transfer.drain(timeout_s)

    def close(self) -> None:
        """Close all parts. Idempotent."""
        for part in self._parts:
            part.close()
