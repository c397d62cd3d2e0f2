"""A worker above lower tiers that are late, fail, or never answer: nothing is lost, and no byte is wrong."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, OrderedDict
from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnect.errors import ConfigError
from kvconnect.transfer.orders import (
    CHANGES_AT_ONCE,
    OffloadOrders,
    Restore,
    Results,
    Seek,
    Store,
    TierFetch,
)
from tests.offload.memory_tier import MemoryTier
from tests.offload.rows_by_hand import rows_of
from tests.offload.tier_suite import LowerTierSuite, until
from tests.offload.worker_kit import NUM_BLOCKS, NUM_GROUPS, Double, Rig, copies, hashes


class Late:
    """The ticket of a copy that ends when a test says."""

    done, error, waited_s = False, None, 0.25


def store(job, pairs, *names, group=0, keep=True):
    return Store(job, copies(group, pairs), hashes(*names), keep)


def row(rig, group, number):
    content_bytes = len(rig.image().row(group, 1))
    return rows_of(rig.worker._arena, group)[number][:content_bytes].copy()


def test_rows_are_kept_only_once_their_copy_is_done():
    """A device that is late: the tier must not see the row before, nor anything if the copy fails."""
    disk = Double()
    rig = Rig(disk)

    tickets = []
    rig.worker._copier.snapshot = lambda orders: tickets.append(Late()) or tickets[-1]
    rig.order(stores=(store(1, [(1, 0)], 1),))
    rig.order(stores=(store(2, [(2, 1)], 2),))
    rig.until(lambda: rig.worker.state()["copies"] == 2)
    assert not rig.stored
    assert not disk.kept
    tickets[1].error = "the device is broken"
    tickets[1].done = True
    rig.until(lambda: 2 in rig.stored)
    assert rig.stored == {2: hashes(2)}
    assert rig.kept == {2}
    tickets[0].done = True
    rig.until(lambda: 1 in rig.kept)
    assert rig.stored[1] == ()
    assert set(disk.kept) == {(0, hashes(1)[0])}
    assert rig.failures("offload_store") == 1
    assert rig.sample("offload_wait_seconds", cause="staging") == 0.5
    rig.until_idle()


def test_a_restore_is_told_once_nobody_writes_the_blocks():
    rig = Rig(Double())
    slow = Late()
    rig.worker._copier.restore = lambda orders, after: slow
    rig.order(restores=(Restore("r", (copies(0, [(1, 0)]),)),))
    rig.until(lambda: rig.worker.state()["copies"] == 1)
    assert not rig.received
    slow.error, slow.done = "the device is broken", True
    rig.until(lambda: rig.received == ["r"])
    assert "broken" in rig.failed["r"]
    assert rig.failures("offload_restore") == 1
    rig.until_idle()


def test_a_refusal_is_a_failure_that_touches_nothing():
    rig = Rig(Double())
    image = rig.image()
    rig.order(restores=(Restore("r", (copies(0, [(1, 0)]),), refusal="too few tokens were taken"),))
    rig.until(lambda: rig.received == ["r"])
    assert rig.failed == {"r": "too few tokens were taken"}
    assert rig.image().same_as(image)


def test_a_tier_that_reports_nothing_harms_nobody_else():
    disk, other = Double("disk", "dead"), Double("store", indexed=False)
    rig = Rig(disk, other)
    for job in range(3):
        rig.order(
            stores=(store(job, [(1, job)], job),),
            fetches=(TierFetch(10 + job, "disk", 0, hashes(9), (5 + job,)),),
            seeks=(Seek(20 + job, "disk", 0, hashes(9)), Seek(30 + job, "store", 0, hashes(job))),
        )
    rig.until(lambda: len(rig.stored) == 3 and len(rig.found) == 3 and len(other.kept) == 3)
    rig.until(lambda: rig.failures("disk_internal"))
    assert not rig.kept | rig.fetched.keys(), "it may still use their rows"
    assert rig.worker._loop.is_alive
    disk.mood = "good"
    rig.worker._loop.wake()
    rig.until(lambda: len(rig.kept) == 3 and len(rig.fetched) == 3 and len(rig.found) == 6)
    assert set(rig.fetched.values()) == {hashes(9)}


def test_after_a_clear_nothing_from_before_reaches_a_tier():
    disk = Double()
    rig = Rig(disk)

    late, copier = Late(), rig.worker._copier
    rig.order(stores=(store(1, [(1, 0)], 1),))
    rig.until(lambda: 1 in rig.kept)
    snapshot, copier.snapshot = copier.snapshot, lambda orders: late
    rig.order(stores=(store(2, [(1, 1)], 2),))
    copier.snapshot = snapshot
    rig.order(clear=True, stores=(store(3, [(1, 2)], 3),))
    rig.until(lambda: 3 in rig.kept)
    assert set(disk.kept) == {(0, hashes(3)[0])}
    late.done = True
    rig.until(lambda: 2 in rig.kept)
    assert rig.stored[2] == ()
    assert set(disk.kept) == {(0, hashes(3)[0])}
    rig.until_idle()


def test_a_tier_with_much_to_tell_is_heard_part_by_part():
    disk = Double()
    rig = Rig(disk)
    woken = threading.Event()
    rig.worker.on_results(woken.set)
    everything = {(group, b"%d" % at) for group in range(2) for at in range(5000)}
    disk.tracker.add(list(everything))
    added = set()
    while len(added) < len(everything):
        assert woken.wait(10)
        woken.clear()
        for report in rig.worker.results().offload:
            assert sum(len(change.added) for change in report.changes) <= 2 * 2048
            added |= {(change.group, name) for change in report.changes for name in change.added}
    assert added == everything
    disk.tracker.remove(list(everything))
    assert woken.wait(10)
    rig.order(clear=True)
    rig.worker._loop._wake.set()
    until(lambda: not rig.worker._jobs._changes)
    assert rig.collect().offload == ()


def test_a_job_is_kept_once_what_changed_before_was_reported():
    """Until then the scheduler half must know what its contents stand for."""
    disk = Double()
    disk.tracker.add([(0, b"%d" % at) for at in range(CHANGES_AT_ONCE + 1)])
    rig = Rig(disk)
    rig.order(stores=(store(1, [(1, 1)], 1),))
    until(lambda: not rig.worker._jobs.counts()["keep"])
    first, second = (rig.worker.results().offload[0] for _ in range(2))
    assert 1 in first.done
    assert first.kept == ()
    assert second.kept == (1,)
    assert (first.is_recovering, second.is_recovering) == (True, False), "more is to be told"
    assert hashes(1)[0] in second.changes[-1].added


def test_a_report_says_how_often_all_was_cleared_before():
    rig = Rig(Double())
    for times in range(3):
        rig.order(stores=(store(times + 1, [(1, times)], times + 1),))
        rig.until(lambda times=times: times + 1 in rig.kept)
        assert rig.cleared == times
        rig.order(clear=True)
        rig.until(lambda times=times: rig.worker._jobs._num_cleared == times + 1)


def test_what_happened_to_the_scheduler_half_is_counted():
    rig = Rig(Double())
    rig.worker.count_failures(("lookup", "lookup"))
    rig.worker.count_failures(())
    rig.until(lambda: rig.failures("lookup") == 2)


def test_the_disk_and_a_restart(tmp_path):
    settings_ = {"disk_path": str(tmp_path), "disk_bytes": 4 << 20}
    rig = Rig(**settings_)
    image = rig.image()
    rig.order(stores=(store(1, [(1, 0), (2, 1)], 1, 2, group=2),))
    rig.until(lambda: rig.kept == {1})
    rig.close()
    for salt, missing in (("another", hashes(2, 1)), ("", ())):
        again = Rig(seed=5, salt=salt, **settings_)
        if not salt:
            again.until(lambda again=again: len(again.changes) > 0)
            assert set(again.changes[0].added) == set(hashes(1, 2))
        again.order(fetches=(TierFetch(1, "disk", 2, hashes(2, 1), (4, 5)),))
        again.until(lambda again=again: again.fetched)
        assert set(again.fetched[1]) == set(missing)
        if not missing:
            assert np.array_equal(row(again, 2, 4), image.row(2, 2))
            assert np.array_equal(row(again, 2, 5), image.row(2, 1))
        again.until_idle()
        again.close()


MOODS = ("good", "late", "never", "refuse", "raise")


class Model:
    """What a scheduler half would believe, kept with plain dictionaries: which content is in which row."""

    def __init__(self, seed, disk, store):
        self.random, self.disk, self.store_tier = random.Random(seed), disk, store
        self.rig = Rig(disk, store)
        self.truth, self.ready, self.busy, self.jobs = {}, {}, set(), {}
        self.number = self.num_kept = 0
        self.moved = Counter()

    def step(self):
        self.number += 1
        choices = [self.store, self.store, self.fetch, self.fetch, self.seek, self.restore]
        self.random.choice(choices)(self.random.randrange(NUM_GROUPS), self.number)

    def rows(self, group, count):
        """Rows that no job has, which lose what they had."""
        last = min(self.rig.worker.plan.row_class(group).num_rows - 1, 5)
        rows = [row for row in range(last + 1) if (group, row) not in self.busy]
        rows = tuple(self.random.sample(rows, min(count, len(rows))))
        for row in rows:
            self.busy.add((group, row))
            self.ready.pop((group, row), None)
        return rows

    def names(self, group):
        known = [name for of, name in self.truth if of == group]
        return self.random.sample([*known, b"unknown"], min(len(known) + 1, 3))

    def store(self, group, job):
        rows = self.rows(group, self.random.randrange(1, 4))
        pairs = [(self.random.randrange(1, NUM_BLOCKS), row) for row in rows]
        names = tuple(b"%d.%d" % (job, row) for row in rows)
        image, keep = self.rig.image(), self.random.random() < 0.7
        self.truth |= {
            (group, name): image.row(group, block) for name, (block, _) in zip(names, pairs, strict=True)
        }
        self.jobs[job] = ("stored", group, names, rows, keep)
        orders = OffloadOrders(stores=(Store(job, copies(group, pairs), names, keep),))
        self.rig.worker.before_step(orders)
        # The step overwrites the blocks.
        self.rig.scribble(job)
        self.rig.worker.start(orders)
        self.moved["stored", "cpu", group] += len(rows)
        self.num_kept += keep * len(rows)

    def fetch(self, group, job):
        names, tier = self.names(group), self.random.choice(["disk", "store"])
        rows = self.rows(group, len(names))
        names = tuple(names[: len(rows)])
        self.jobs[job] = ("fetched", group, names, rows, tier)
        self.rig.order(fetches=(TierFetch(job, tier, group, names, rows),))

    def seek(self, group, job):
        names = tuple(self.names(group))
        self.jobs[job] = ("found", group, names, (), False)
        self.rig.order(seeks=(Seek(job, self.random.choice(["disk", "store"]), group, names),))

    def restore(self, group, job):
        ready = [row for of, row in self.ready if of == group]
        rows = self.random.sample(ready, min(len(ready), 3))
        pairs = list(zip(self.random.sample(range(1, NUM_BLOCKS), len(rows)), rows, strict=True))
        wanted = self.rig.image()
        for block, row in pairs:
            wanted.write(group, block, self.truth[group, self.ready[group, row]])
        self.rig.order(restores=(Restore(str(job), (copies(group, pairs),)),))
        self.rig.until(lambda: str(job) in self.rig.received)
        assert str(job) not in self.rig.failed
        assert self.rig.image().same_as(wanted)
        self.moved["restored", "cpu", group] += len(rows)

    def settle(self):
        """Take reports as a scheduler half does; whether none is to come."""
        rig = self.rig
        rig.collect()
        # Of a late job no row is used again: what a tier reads late is written there.
        late = {work.args[0].job.key for _, work in tuple(self.disk.put_off)}
        assert late.isdisjoint(rig.kept | rig.fetched.keys() | rig.found.keys())
        for job, (what, group, names, rows, tier) in list(self.jobs.items()):
            told = getattr(rig, what).get(job)
            if told is None or (what == "stored" and tier and job not in rig.kept):
                continue
            del self.jobs[job]
            assert set(told) <= set(names)
            if what == "fetched":
                self.moved["missed", tier, group] += len(told)
                self.moved["fetched", tier, group] += len(names) - len(told)
            for name, row in zip(names, rows, strict=False):
                self.busy.discard((group, row))
                if name not in told:
                    self.ready[group, row] = name
        return not self.jobs

    def check_tiers(self):
        """When idle: what tiers have was told, what they are asked for they have, and all is counted."""
        rig, has = self.rig, {"disk": self.disk.kept, "store": self.store_tier._kept}
        index = set()
        for change in rig.changes:
            assert change.tier == "disk"
            index |= {(change.group, name) for name in change.added}
            index -= {(change.group, name) for name in change.removed}
        assert index == has["disk"].keys()
        for job, (tier, group) in enumerate(product(has, range(NUM_GROUPS)), self.number + 1):
            names = tuple(name for of, name in self.truth if of == group)
            rig.order(seeks=(Seek(job, tier, group, names),))
            rig.until(lambda job=job: job in rig.found)
            assert set(rig.found[job]) == {name for name in names if (group, name) in has[tier]}
        rows, total_bytes = Counter(), Counter()
        for (move, tier, group), count in self.moved.items():
            rows[move, tier] += count
            total_bytes[move, tier] += count * rig.worker.row_bytes[group]
        for move, tier in rows:
            assert rig.sample("offload_rows", move=move, tier=tier) == rows[move, tier]
            assert rig.sample("offload_bytes", move=move, tier=tier) == total_bytes[move, tier]
        for tier in has:
            kept, unkept = (rig.sample("offload_rows", move=move, tier=tier) for move in ("kept", "unkept"))
            assert (kept + unkept, unkept) == (self.num_kept, rig.failures(f"{tier}_refused"))


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**31), st.lists(st.sampled_from(MOODS), min_size=1, max_size=4), st.booleans())
def test_random_orders_over_unreliable_tiers(seed, moods, is_closed):
    """Everything comes back exactly once, what is served is right, and nothing is left when idle."""
    # Room for some ten rows: the disk loses others to them.
    disk = Double("disk", moods[0], limit_bytes=6 << 10)
    memory = MemoryTier(64 << 10, indexed=False, name="store")
    model = Model(seed, disk, memory)
    chance, rig = model.random, model.rig
    for step in range(40):
        if step % 8 == 0:
            disk.mood = moods[step // 8 % len(moods)]
            memory.is_failing = chance.random() < 0.2
        model.step()
        if chance.random() < 0.2:
            time.sleep(0.01)
        if chance.random() < 0.2:
            disk.release(1)
        model.settle()
    if not is_closed:
        disk.mood, memory.is_failing = "good", False
        disk.put_off = type(disk.put_off)(("late", work) for _, work in disk.put_off)
        disk.release()
        rig.until(model.settle)
        rig.until_idle()
        model.check_tiers()
    rig.close()
    rig.close()
    assert disk.closed
    # At the end late jobs are over too: their rows are used no more.
    disk.put_off.clear()
    assert model.settle()
    assert not any(rig.worker.state().values())
    assert rig.worker.results() == Results()


HASHES = (b"hash1", b"hash2")


def start(weights, tiers=None, **settings):
    """A worker with these weights. ``tiers`` makes its lower tiers of a namespace."""
    make_tiers = tiers and (lambda namespace: [tiers(namespace)])
    return Rig(weights=weights, make_tiers=make_tiers, **settings)


def keep(rig, job, *hashes):
    pairs = [(1 + at, at) for at in range(len(hashes))]
    rig.order(stores=(Store(job, copies(0, pairs), hashes, keep=True),))
    rig.until(lambda: job in rig.kept)


def missing(rig, job, tier, *hashes):
    """Those of them that a tier does not have."""
    rig.order(fetches=(TierFetch(job, tier, 0, hashes, tuple(range(len(hashes)))),))
    rig.until(lambda: job in rig.fetched)
    return rig.fetched[job]


def on_disk(tmp_path):
    return {"disk_path": str(tmp_path), "disk_bytes": 1 << 28}


def recovered(rig):
    (tier,) = rig.worker._loop.tiers
    until(lambda: not tier.state()["recovering"])


def test_what_is_kept_before_and_after_weights_are_replaced_does_not_meet(tmp_path):
    rig = start("files 1", **on_disk(tmp_path))
    keep(rig, 1, *HASHES)
    rig.order(clear=True)
    rig.worker.replace_weights({"files": "tensors 2"})
    rig.until(lambda: len(rig.worker._loop.tiers) == 1)
    assert missing(rig, 2, "disk", *HASHES) == HASHES
    keep(rig, 3, HASHES[0])
    namespace = rig.worker.namespace
    rig.close()
    former = start("files 1", **on_disk(tmp_path))
    assert former.worker.namespace != namespace
    recovered(former)
    assert missing(former, 4, "disk", *HASHES) == HASHES, "it was cleared, and what came then is another's"
    later = start("tensors 2", **on_disk(tmp_path))
    recovered(later)
    assert missing(later, 5, "disk", *HASHES) == (HASHES[1],)


class SharedStore:
    """A store that others use too: what is kept in it, by namespace."""

    def __init__(self):
        self.kept = {}

    def open(self, namespace):
        tier = Double("store", indexed=False)
        tier._kept = self.kept.setdefault(namespace.digest, OrderedDict())
        return tier


def test_one_node_of_a_store_whose_weights_are_replaced_while_another_runs():
    store = SharedStore()
    one, other = (start("files 1", store.open) for _ in range(2))
    keep(one, 1, *HASHES)
    assert missing(other, 2, "store", *HASHES) == ()
    one.worker.replace_weights({"files": "tensors 2"})
    assert missing(one, 3, "store", *HASHES) == HASHES
    keep(one, 4, b"new")
    assert missing(other, 5, "store", b"new", *HASHES) == (b"new",), "what it has is not taken from it"
    keep(other, 6, b"old")
    assert missing(one, 7, "store", b"old") == (b"old",)
    other.worker.replace_weights({"files": "tensors 2"})
    assert missing(other, 8, "store", b"new", *HASHES) == HASHES


def test_jobs_under_way_end_when_weights_are_replaced():
    opened = []

    def late(namespace):
        opened.append(Double("disk", mood="late" if not opened else "good"))
        return opened[-1]

    rig = start("files 1", late)
    rig.order(stores=(Store(1, copies(0, [(1, 0)]), (b"x",), keep=True),))
    rig.order(fetches=(TierFetch(2, "disk", 0, (b"y",), (3,)),))
    rig.until(lambda: len(opened[0].put_off) == 2)
    rig.worker.replace_weights({"files": "tensors 2"})
    rig.until(lambda: 1 in rig.kept and 2 in rig.fetched)
    assert rig.fetched[2] == (b"y",)
    assert opened[0].closed
    keep(rig, 3, b"z")
    assert [content[1] for content in opened[1].kept] == [b"z"]


def test_a_tier_that_cannot_be_opened_for_other_weights_is_done_without():
    opened = []

    def once(namespace):
        if opened:
            raise ConfigError("the folder is another process's")
        opened.append(Double())
        return opened[0]

    rig = start("files 1", once)
    rig.worker.replace_weights({"files": "tensors 2"})
    until(lambda: rig.failures("offload_tiers_lost"))
    rig.order(stores=(Store(1, copies(0, [(1, 0)]), (b"x",), keep=True),))
    rig.until(lambda: 1 in rig.kept)


class TestMemoryTier(LowerTierSuite):
    def make_tier(self, tmp_path):
        return MemoryTier(64 << 20, max_queued_bytes=self.queue_bytes)
