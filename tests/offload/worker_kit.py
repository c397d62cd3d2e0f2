"""A worker of the offload with small caches, and a lower tier that does what a test says."""

from __future__ import annotations

import time
from collections import OrderedDict, deque

import torch

from kvconnect.cache.region_table import RegionTable
from kvconnect.cache.retention import Window
from kvconnect.cache.specs import AttentionSpec, KVCacheConfig, KVCacheGroup, MLASpec
from kvconnect.config import OffloadConfig
from kvconnect.offload.worker.offload_worker import OffloadWorker
from kvconnect.transfer.orders import OffloadOrders, RowCopies
from kvconnect.transfer.stack import RankCache
from tests.caches import attention_layer, fill_random
from tests.identities import named
from tests.offload.memory_tier import MemoryTier
from tests.offload.opened import closes_later
from tests.offload.rows_by_hand import Image

NUM_BLOCKS = 10
NUM_GROUPS = 3
CPU_BYTES = 64 << 10


def caches():
    """Three groups: two layers of K and V, a window with padded pages, a latent cache with split blocks."""
    groups = (
        KVCacheGroup(("a.0", "a.1"), AttentionSpec(4, 2, 8, torch.float16)),
        KVCacheGroup(("w.0",), AttentionSpec(8, 1, 24, torch.float16, retention=Window(16))),
        KVCacheGroup(("m.0",), MLASpec(8, 24, torch.float16)),
    )
    tensors = {
        "a.0": attention_layer("block plane token head", NUM_BLOCKS, 2, 4, 8),
        "a.1": attention_layer("plane block token head", NUM_BLOCKS, 2, 4, 8),
        "w.0": attention_layer("block token head plane", NUM_BLOCKS, 1, 8, 24, pad=24),
        "m.0": attention_layer("block token", 2 * NUM_BLOCKS, 0, 4, 24),
    }
    return KVCacheConfig(NUM_BLOCKS, groups), {0: 4, 1: 8, 2: 4}, tensors


class _Worker(OffloadWorker):
    """``make_tiers`` makes its tiers of a namespace; None for those that are configured."""

    def __init__(self, make_tiers, *given, **more):
        self._given = make_tiers
        super().__init__(*given, **more)

    def _make_tiers(self, namespace):
        return self._given(namespace) if self._given else super()._make_tiers(namespace)


class Rig:
    """A worker, its caches, and what it reported so far, by job and by request."""

    def __init__(
        self,
        *tiers,
        seed=0,
        weights="",
        label="",
        make_tiers=None,
        least_rows=None,
        **settings,
    ):
        config, sizes, self.tensors = caches()
        for at, cache in enumerate(self.tensors.values()):
            fill_random(cache, seed * 100 + at)
        given = {"cpu_bytes": CPU_BYTES, "shares": (0.4, 0.3, 0.3), **settings}
        self.worker = _Worker(
            make_tiers or (tiers and (lambda namespace: tiers)),
            OffloadConfig(**given),
            RankCache(config, sizes, self.tensors),
            identity=named(weights=weights),
            least_rows=least_rows or {},
            label=label,
        )
        closes_later(self)
        self.received, self.failed, self.changes = [], {}, []
        self.stored, self.fetched, self.found, self.kept = {}, {}, {}, set()
        self.ends = {}

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
        for jobs, ended in (
            (both.stores, self.stored),
            (both.fetches, self.fetched),
            (both.seeks, self.found),
        ):
            self.ends.update({job.job: ended for job in jobs})
        self.worker.before_step(both)
        self.worker.start(both)

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
            for job, told in report.done.items():
                ended = self.ends.get(job, self.stored)
                assert job not in ended, f"job {job} came back twice"
                ended[job] = told
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
        return self.worker._metrics.families[name].labels(*labels.values()).value

    def failures(self, reason):
        return self.sample("failures", reason=reason)

    def close(self):
        self.worker.close()
        self.collect()


def hashes(*numbers):
    return tuple(b"hash%d" % number for number in numbers)


def copies(group, pairs):
    """``pairs`` are of block and row."""
    return RowCopies(group, tuple(block for block, _ in pairs), tuple(row for _, row in pairs))


class Double(MemoryTier):
    """A tier that does what a test says. ``mood`` is what becomes of the next orders.

    good: at once. late: when released. never: not even then. refuse: writes fail, reads miss, nothing is
    found. raise: the call itself fails, and is late. dead: it reports nothing.
    """

    def __init__(self, name="disk", mood="good", indexed=True, limit_bytes=1 << 30):
        super().__init__(limit_bytes, name=name, indexed=indexed, threads={})
        self.mood, self.put_off, self.closed = mood, deque(), False

    @property
    def kept(self):
        return self._kept

    @kept.setter
    def kept(self, kept):
        self._kept = OrderedDict(kept)

    def has(self, contents):
        return [content in self._kept for content in contents]

    def _submit(self, kind, work):
        if self.mood in ("late", "never", "raise"):
            self.put_off.append((self.mood, work))
            if self.mood == "raise":
                raise RuntimeError("no")
        else:
            self.is_failing = self.mood == "refuse"
            work()

    def release(self, count=10**9):
        self.is_failing = False
        for _ in range(min(count, len(self.put_off))):
            mood, work = self.put_off.popleft()
            if mood == "never":
                self.put_off.append((mood, work))
            else:
                work()

    def poll(self):
        if self.mood == "dead":
            raise RuntimeError("its thread has ended")
        return super().poll()

    def close(self):
        self.closed = super().close()
        self.release()
        return not self.put_off
