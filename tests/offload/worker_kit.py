"""A worker of the offload with small caches, and a lower tier that does what a test says."""

from __future__ import annotations

import time
from collections import deque

import torch
from prometheus_client import CollectorRegistry

from kvconnect.cache.region_table import RegionTable
from kvconnect.cache.specs import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    MLASpec,
    SlidingWindowSpec,
)
from kvconnect.config import OffloadConfig
from kvconnect.offload.tier import TierUpdate
from kvconnect.offload.worker.offload_worker import OffloadWorker
from kvconnect.transfer.orders import OffloadOrders, Restore, RowCopies
from tests.caches import attention_layer, fill_random
from tests.identities import named
from tests.offload.rows_by_hand import Image

NUM_BLOCKS = 10
NUM_GROUPS = 3
CPU_BYTES = 64 << 10


def caches():
    """Three groups: two layers of K and V, a window with padded pages, a latent cache with split blocks."""
    groups = (
        KVCacheGroup(("a.0", "a.1"), FullAttentionSpec(4, 2, 8, torch.float16)),
        KVCacheGroup(("w.0",), SlidingWindowSpec(8, 1, 24, torch.float16, sliding_window=16)),
        KVCacheGroup(("m.0",), MLASpec(8, 24, torch.float16)),
    )
    tensors = {
        "a.0": attention_layer("block plane token head", NUM_BLOCKS, 2, 4, 8),
        "a.1": attention_layer("plane block token head", NUM_BLOCKS, 2, 4, 8),
        "w.0": attention_layer("block token head plane", NUM_BLOCKS, 1, 8, 24, pad=24),
        "m.0": attention_layer("block token", 2 * NUM_BLOCKS, 0, 4, 24),
    }
    return KVCacheConfig(NUM_BLOCKS, groups), {0: 4, 1: 8, 2: 4}, tensors


class Rig:
    """A worker, its caches, and what it reported so far, by job and by request."""

    def __init__(self, *tiers, seed=0, register=True, weights="", label="", **settings):
        config, sizes, self.tensors = caches()
        for at, cache in enumerate(self.tensors.values()):
            fill_random(cache, seed * 100 + at)
        self.registry = CollectorRegistry()
        given = {"cpu_bytes": CPU_BYTES, "shares": (0.4, 0.3, 0.3), **settings}
        self.worker = OffloadWorker(
            OffloadConfig(**given),
            config,
            sizes,
            identity=named(weights=weights),
            label=label,
            registry=self.registry,
        )
        if tiers:
            self.worker._make_tiers = lambda namespace, plan: tiers
        if register:
            self.worker.register_kv_caches(self.tensors)
        self.received, self.failed, self.changes = [], {}, []
        self.stored, self.fetched, self.found, self.kept = {}, {}, {}, set()

    def image(self):
        return Image(self.table, self.tensors)

    @property
    def table(self):
        config, sizes, _ = caches()
        return RegionTable.build(config, sizes, self.tensors)

    def scribble(self, seed):
        for at, cache in enumerate(self.tensors.values()):
            fill_random(cache, 1000 + seed * 100 + at)

    def order(self, **orders):
        both = OffloadOrders(**orders)
        self.worker.before_step(both)
        self.worker.start(both)

    def restore_all(self, image, moves):
        """Restore rows into blocks of all groups, and nothing else changes.

        ``moves`` are of block, row, and the block of ``image`` that has been stored in that row.
        """
        now = self.image()
        every = tuple(copies(group, [(block, row) for block, row, _ in moves]) for group in range(NUM_GROUPS))
        self.order(restores=(Restore("r", every),))
        self.until(lambda: self.received == ["r"])
        assert not self.failed
        for group in range(NUM_GROUPS):
            for block, _, stored in moves:
                now.write(group, block, image.row(group, stored))
        assert self.image().same_as(now)

    def collect(self):
        results = self.worker.results()
        self.received += results.received
        for request, reason in results.failed.items():
            assert request not in self.failed
            self.failed[request] = reason.text
        for report in results.offload:
            self.changes += report.changes
            self.cleared = report.cleared
            assert self.kept.isdisjoint(report.kept), "a job came back twice as kept"
            self.kept.update(report.kept)
            for name in ("stored", "fetched", "found"):
                for job, told in getattr(report, name).items():
                    ours = getattr(self, name)
                    assert job not in ours, f"job {job} came back twice as {name}"
                    ours[job] = told
        return results

    def until(self, is_so, timeout_s=10.0):
        end = time.monotonic() + timeout_s
        while True:
            self.collect()
            if is_so():
                return
            assert time.monotonic() < end, (self.worker.state(), self.stored, self.kept, self.fetched)
            time.sleep(0.001)

    def until_idle(self, timeout_s=10.0):
        self.until(lambda: not any(self.worker.state().values()), timeout_s)
        self.collect()

    def sample(self, name, **labels):
        return self.registry.get_sample_value(f"kvconnect_{name}", labels) or 0

    def failures(self, reason):
        return self.sample("failures_total", reason=reason)

    def close(self):
        self.worker.close()
        self.collect()


def copies(group, pairs):
    """``pairs`` are of block and row."""
    return RowCopies(group, tuple(block for block, _ in pairs), tuple(row for _, row in pairs))


class Double:
    """A tier in memory. ``mood`` says what becomes of the next orders; ``release`` does what was put off.

    good: at once. late: when released. never: not even then. refuse: writes fail, reads miss, nothing is
    found. raise: the call itself fails. wrong: as good, but its report names contents that nobody asked for.
    """

    indexed = True

    def __init__(self, name="disk", mood="good", indexed=True):
        self.name, self.mood, self.indexed = name, mood, indexed
        self.kept, self.put_off, self.closed = {}, deque(), False
        self._wake = lambda: None
        self._anew()

    def _anew(self):
        self._news = {"written": {}, "read": {}, "found": {}, "added": [], "removed": [], "failures": {}}

    def on_update(self, wake):
        self._wake = wake

    def write(self, job, rows):
        self._do(lambda mood: self._write(job, rows, mood), rows)

    def read(self, job, rows):
        self._do(lambda mood: self._read(job, rows, mood), rows)

    def has(self, contents):
        return [content in self.kept for content in contents]

    def seek(self, job, contents):
        self._do(lambda mood: self._seek(job, contents, mood), ())

    def _do(self, call, rows):
        mood = self.mood
        if mood == "raise":
            raise RuntimeError("no")
        if mood in ("late", "never"):
            self.put_off.append((mood, call, rows))
        else:
            call(mood)
            self._wake()

    def release(self, count=10**9):
        for _ in range(min(count, len(self.put_off))):
            mood, call, rows = self.put_off.popleft()
            if mood == "never":
                self.put_off.append((mood, call, rows))
            else:
                call("good")
        self._wake()

    def _write(self, job, rows, mood):
        if mood == "refuse":
            self._news["failures"]["disk_full"] = 1
            self._news["written"][job] = tuple(row.content for row in rows)
            return
        for row in rows:
            self.kept[row.content] = bytes(row.memory)
        self._news["added"] += [row.content for row in rows]
        self._news["written"][job] = ((7, b"nobody's"),) if mood == "wrong" else ()

    def _read(self, job, rows, mood):
        missing = []
        for row in rows:
            if mood == "refuse" or row.content not in self.kept:
                missing.append(row.content)
            else:
                row.memory[:] = self.kept[row.content]
        self._news["read"][job] = tuple(missing)

    def _seek(self, job, contents, mood):
        has = () if mood == "refuse" else tuple(content for content in contents if content in self.kept)
        self._news["found"][job] = has

    def poll(self):
        if self.mood == "dead":
            raise RuntimeError("its thread has ended")
        news = self._news
        self._anew()
        return TierUpdate(
            **{key: tuple(value) if isinstance(value, list) else value for key, value in news.items()}
        )

    def clear(self):
        self.kept = {}
        self._news["added"] = []

    def close(self):
        self.closed = True
        return True

    def state(self):
        return {"kept": len(self.kept), "taken_bytes": 0, "limit_bytes": 0}
