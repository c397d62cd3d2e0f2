"""The worker half of the offload: a rank's rows in host memory, its copies, and its lower tiers.

The thread that launches steps passes orders in and takes results; it blocks for nothing except, on a CPU, the
snapshots themselves. The thread of ``TierLoop`` waits for the device, drives the lower tiers, and restores.
This half does not decide which contents are kept.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvconnect.cache.identity import MODEL, Identity, Naming
from kvconnect.config import OffloadConfig
from kvconnect.errors import EngineError, LayoutError
from kvconnect.metrics import Changes, OffloadMetrics
from kvconnect.offload.copies.copier import make_arena, make_copier
from kvconnect.offload.copies.rows import RowLayout
from kvconnect.offload.index.budgets import plan_for
from kvconnect.offload.lower_tier import LowerTier
from kvconnect.offload.namespace import Namespace, cache_facts, row_facts
from kvconnect.offload.scheduler.hit_requirements import HitRequirements
from kvconnect.offload.worker.jobs import RankJobs, Report
from kvconnect.offload.worker.load_rows import LoadRows
from kvconnect.offload.worker.named_rows import NamedRows
from kvconnect.offload.worker.tier_loop import TierLoop
from kvconnect.transfer.orders import OffloadOrders, Results, RowCopies
from kvconnect.transfer.stack import RankCache

logger = logging.getLogger(__name__)


class OffloadWorker:
    """Carries out orders on one rank; ``results`` reports each order exactly once, as done or failed.

    It allocates host memory and opens the lower tiers. On a GPU, the caller makes the stream of the model's
    steps current.

    Args:
        cache: of the cache groups that are kept.
        identity: the serving stack's facts for the namespace.
        reserved_bytes: of free GPU memory, left to the serving stack.
        least_rows: by group, the rows that the shortest hit needs.
        label: the model's name for operators, which is no fact of the namespace.
        announces: whether contents of lower tiers are published as events.

    Raises:
        LayoutError: a cache cannot be expressed as a region table.
        ConfigError: the memory does not suffice, or a lower tier cannot be used.
    """

    def __init__(
        self,
        config: OffloadConfig,
        cache: RankCache,
        *,
        identity: Identity,
        rank: int = 0,
        world_size: int = 1,
        reserved_bytes: int = 0,
        least_rows: Mapping[int, int] = MappingProxyType({}),
        label: str = "",
        announces: bool = False,
    ) -> None:
        self._config, self._cache = config, cache
        # The tensors must outlive the copier, even if the serving stack drops its references.
        self._tensors = dict(cache.tensors)
        self._rank, self._world_size, self.identity = rank, world_size, identity
        self._label, self._announces = label, announces
        self.load_rows: LoadRows | None = None
        """The rows as a target of loads; None if loads fill none."""
        self._table = cache.table()
        layout, device = RowLayout.build(self._table), cache.device
        self.plan = plan = plan_for(config, cache.config.groups, layout.row_bytes, least_rows)
        self.namespace = self._name()
        self._metrics, self._jobs = OffloadMetrics(), RankJobs(rank)
        with ExitStack() as undo:
            # Tiers first: a bad folder is detected before memory is allocated.
            tiers = self._make_tiers(self.namespace)
            for tier in tiers:
                undo.callback(tier.close)
            self._arena = arena = make_arena(plan, device)
            undo.callback(arena.close)
            self._copier = copier = make_copier(layout, arena, device, reserved_bytes=reserved_bytes)
            undo.pop_all()
        self._loop = TierLoop(copier, arena, tiers, self._jobs, self._metrics, device)
        self._loop.start()
        logger.info(
            "rank %d keeps blocks in %d bytes of host memory, rows of %s bytes by cache group; lower tiers: "
            "%s; namespace %s",
            rank,
            plan.length_bytes,
            self.row_bytes,
            ", ".join(tier.name for tier in tiers) or "none",
            self.namespace.name,
        )

    @property
    def row_bytes(self) -> dict[int, int]:
        return {group: self.plan.row_class(group).row_bytes for group in self.plan.groups}

    def _name(self) -> Namespace:
        own = {"rank": self._rank, "world_size": self._world_size, "salt": self._config.salt}
        kept = {"cache": cache_facts(self._cache.config), "rows": row_facts(self._table)}
        return Namespace.of({**kept, **own, "identity": self.identity.facts})

    @property
    def names(self) -> NamedRows | None:
        """The rows that peers may fetch by name; None if they get none."""
        return self._jobs.names

    def name_rows(self, naming: Naming, requirements: HitRequirements) -> None:
        """Offer rows to peers by name, if rows of this cache can be sent. Call it before any orders."""
        given = self._table, self._arena, self._jobs, self._loop
        try:
            self._jobs.names = NamedRows(naming, requirements, *given)
        except (LayoutError, EngineError) as error:
            logger.warning("peers that ask for KV by name get none of this node: %s", error)

    def open_for_loads(self) -> None:
        """Let loads fill rows, for requests that wait for blocks, if rows of this cache can be filled."""
        try:
            self.load_rows = LoadRows(self._table, self._arena, self._jobs)
        except (LayoutError, EngineError) as error:
            self._metrics.failures.labels("park_refused").inc()
            logger.warning(
                "KV of requests that wait for blocks is not fetched into host memory, and prefill nodes hold "
                "it as without offload: %s",
                error,
            )

    def replace_weights(self, weights: Mapping[str, str]) -> None:
        """Move all tiers to the namespace of new weights.

        Call it after the scheduler half was reset, and before the first orders for KV of the new weights.
        """
        self._jobs.forget_names()
        self.identity = self.identity.replace(weights=weights)
        self.namespace = namespace = self._name()
        logger.info("rank %d keeps blocks in namespace %s now", self._rank, namespace.name)
        self._loop.replace(lambda: self._make_tiers(namespace))

    def _make_tiers(self, namespace: Namespace) -> Sequence[LowerTier]:
        """Open the lower tiers, nearest first. Raises ``ConfigError``: one cannot be used as configured."""
        config, made = self._config, list[LowerTier]()
        with ExitStack() as undo:
            if config.disk_path:
                from kvconnect.offload.disk.disk_tier import DiskTier
                from kvconnect.offload.disk.folder import FolderOwner

                # Not all facts: finding rows takes the salt, which a reader of the folder must not learn.
                model = self.identity.facts.get(MODEL, {}).get("", "")
                owner = FolderOwner(namespace.digest.hex(), self._rank, self._world_size, self._label, model)
                made.append(
                    DiskTier(
                        Path(config.disk_path),
                        owner,
                        config.disk_bytes,
                        max_queued_bytes=config.max_queued_bytes,
                        reads_footers=self._announces,
                    )
                )
                undo.callback(made[-1].close)
            if config.store:
                from kvconnect.offload.store.store_tier import open_store_tier

                most = max(rows.row_bytes for rows in self.plan.classes)
                made.append(store := open_store_tier(config, namespace, most_row_bytes=most))
                undo.callback(store.close)
                if self._announces:
                    store.announce()
            undo.pop_all()
        return made

    # For the thread that launches steps

    def before_step(self, orders: OffloadOrders) -> None:
        """Begin the snapshots of these orders, before their step is launched and overwrites blocks."""
        if not orders:
            return
        copier, loop, now = self._copier, self._loop, time.monotonic()
        loop.held_rows = orders.held_rows
        if orders.clear:
            self._jobs.forget_names()
            loop.order(loop.clear)
            loop.order(lambda _: self._jobs.cleared())
        if orders.disk_pins:
            loop.order(loop.pin, orders.disk_pins)
        if (orders.actions or orders.pinned) and self._rank == 0:
            loop.order(loop.count, orders)
        if not orders.stores:
            return
        jobs = []
        for store in orders.stores:
            owed = (Report.STORED, Report.KEPT) if store.keep else (Report.STORED,)
            jobs.append(self._jobs.open(store.job, store.hashes, *owed, copies=store.copies))
            if store.footers:
                jobs[-1].footers = dict(zip(store.hashes, store.footers, strict=True))
        loop.order(loop.begun, copier.snapshot([job.copies for job in jobs]), jobs, now)

    def start(self, orders: OffloadOrders) -> None:
        """Begin fetches, seeks and restores. Restores wait for all work launched on the device so far."""
        if not (orders.restores or orders.fetches or orders.seeks):
            return
        loop, now, opened = self._loop, time.monotonic(), self._jobs.open
        last_use = self._copier.mark() if orders.restores else None
        turn = self._metrics.wait_seconds.labels("turn")
        loop.order(lambda later: turn.inc(later - now))
        # Fetches and seeks first: requests wait for them, and copies keep the thread busy.
        for fetch in orders.fetches:
            rows = RowCopies(fetch.group, (), fetch.rows)
            job = opened(fetch.job, fetch.hashes, Report.FETCHED, copies=rows)
            loop.order(loop.ask, "read", job, fetch.tier, job=job)
        for seek in orders.seeks:
            job = opened(seek.job, seek.hashes, Report.FOUND, copies=RowCopies(seek.group, (), ()))
            loop.order(loop.ask, "seek", job, seek.tier, job=job)
        for restore in orders.restores:
            job = opened(restore.request_id, (), Report.RECEIVED)
            if restore.refusal:
                self._jobs.fail(job, restore.refusal)
            else:
                loop.order(loop.restore, job, restore.copies, last_use, now, job=job)

    def count_failures(self, reasons: Sequence[str]) -> None:
        # The scheduler half has no metrics.
        def count(_: float) -> None:
            for reason in reasons:
                self._metrics.failures.labels(reason).inc()

        if self._rank == 0:
            self._loop.order(count)

    def results(self) -> Results:
        """Results since the last call: ``received`` and ``failed`` restores, and this rank's report."""
        if not self._loop.is_alive:
            # A dead thread cannot fail its jobs itself.
            self._jobs.fail_all("the thread of the tiers has ended")
        return self._jobs.take()

    def on_results(self, wake: Callable[[], None]) -> None:
        self._jobs.wake = wake

    def changes(self, more: Changes | None = None) -> Changes | None:
        return self._metrics.changes(more)

    def state(self) -> dict[str, int]:
        return {**self._jobs.counts(), "copies": len(self._loop.copies)}

    def usage(self) -> dict[str, Any]:
        return {
            "row_bytes": self.row_bytes,
            "rows": {group: self.plan.row_class(group).num_rows for group in self.plan.groups},
            "tiers": {tier.name: tier.state() for tier in self._loop.tiers},
        }

    def tiers(self) -> dict[str, dict[str, Any]]:
        """The state of each tier, host memory first: see ``LowerTier.state``. Thread-safe."""
        return self._loop.tier_states()

    def close(self) -> None:
        """Stop the thread, close the tiers, and fail open jobs. Idempotent; ``results`` still works."""
        self._loop.close()
        self._jobs.fail_all("the worker was closed")
