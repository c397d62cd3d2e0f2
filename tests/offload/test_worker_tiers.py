"""A worker above lower tiers that are late, fail, or never answer: nothing is lost, and no byte is wrong."""

from __future__ import annotations

import random
import threading
import time
from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnect.errors import ConfigError
from kvconnect.transfer.orders import CHANGES_AT_ONCE, Restore, Seek, Store, TierChange, TierFetch
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


def test_what_is_kept_is_fetched_into_other_rows_and_restored():
    disk = Double()
    rig = Rig(disk)
    image = rig.image()
    for group in range(NUM_GROUPS):
        rig.order(stores=(store(group, [(1, 0), (2, 1)], 1, 2, group=group),))
    rig.until(lambda: len(rig.kept) == NUM_GROUPS)
    assert rig.stored == dict.fromkeys(range(NUM_GROUPS), ())
    assert rig.kept == set(range(NUM_GROUPS))
    assert sorted(rig.changes, key=lambda change: change.group) == [
        TierChange("disk", group, hashes(1, 2)) for group in range(NUM_GROUPS)
    ]
    rig.scribble(1)
    for group in range(NUM_GROUPS):
        rig.order(fetches=(TierFetch(10 + group, "disk", group, hashes(2, 9, 1), (3, 4, 5)),))
    rig.until(lambda: len(rig.fetched) == NUM_GROUPS)
    assert set(rig.fetched.values()) == {hashes(9)}
    rig.restore_all(image, [(6, 3, 2), (7, 5, 1)])
    assert rig.sample("offload_rows", move="kept", tier="disk") == 2 * NUM_GROUPS
    assert rig.sample("offload_rows", move="fetched", tier="disk") == 2 * NUM_GROUPS
    assert rig.sample("offload_rows", move="missed", tier="disk") == NUM_GROUPS
    rig.until_idle()


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


def test_kept_is_told_once_no_tier_reads_the_rows():
    disk, store_ = Double("disk", "late"), Double("store", indexed=False)
    rig = Rig(disk, store_)
    rig.order(stores=(store(1, [(1, 0)], 1),))
    rig.until(lambda: rig.stored == {1: ()})
    rig.until(lambda: len(store_.kept) == 1 and len(disk.put_off) == 1)
    rig.collect()
    assert not rig.kept
    disk.release()
    rig.until(lambda: rig.kept == {1})
    rig.until_idle()


def test_what_no_tier_has_is_counted_and_the_job_is_kept():
    disk, store_ = Double("disk", "refuse"), Double("store", indexed=False)
    rig = Rig(disk, store_)
    rig.order(stores=(store(1, [(1, 0)], 1),))
    rig.until(lambda: rig.kept == {1})
    store_.mood = "refuse"
    rig.order(stores=(store(2, [(1, 0)], 1),))
    rig.until(lambda: 2 in rig.kept)
    assert (rig.failures("disk_refused"), rig.failures("store_refused")) == (2, 1)
    assert rig.sample("offload_rows", move="unkept", tier="disk") == 2


def test_a_tier_that_is_asked_says_what_it_has():
    tier = Double("store", indexed=False)
    rig = Rig(tier)
    tier.kept = {(1, hashes(1)[0]): b"", (0, hashes(2)[0]): b"", (1, hashes(3)[0]): b""}
    rig.order(seeks=(Seek(1, "store", 1, hashes(1, 2, 3, 4)), Seek(2, "store", 0, ())))
    rig.until(lambda: len(rig.found) == 2)
    assert rig.found == {1: hashes(1, 3), 2: ()}


def test_a_tier_that_does_not_answer_keeps_its_jobs_open_and_other_jobs_go_on():
    """So the scheduler half uses none of their rows again: what is late is written into rows of its own."""
    disk, other = Double(mood="late"), Double("store", indexed=False)
    rig = Rig(disk, other)
    disk.kept = {(0, hash_): b"\xee" * rig.worker.row_bytes[0] for hash_ in hashes(7, 8)}
    rig.order(
        stores=(store(1, [(1, 0)], 1),),
        fetches=(TierFetch(2, "disk", 0, hashes(7, 8), (1, 2)),),
        seeks=(Seek(3, "disk", 0, hashes(7)),),
    )
    rig.until(lambda: len(disk.put_off) == 3)
    disk.mood = "good"
    rig.order(stores=(store(4, [(2, 3)], 2),), fetches=(TierFetch(5, "disk", 0, hashes(7, 9), (4, 5)),))
    rig.until(lambda: 4 in rig.kept and 5 in rig.fetched)
    assert rig.stored == {1: (), 4: ()}
    assert rig.fetched == {5: hashes(9)}
    assert rig.kept == {4}
    assert not rig.found
    image = rig.image()
    disk.release()
    rig.until(lambda: 1 in rig.kept and 2 in rig.fetched and 3 in rig.found)
    assert rig.fetched[2] == ()
    assert rig.found == {3: hashes(7)}
    assert np.array_equal(row(rig, 0, 3), image.row(0, 2))
    assert (row(rig, 0, 2) == 0xEE).all()
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


@pytest.mark.parametrize("broken", ["raise", "dead"])
def test_a_tier_that_is_broken_harms_nobody_else(broken):
    disk, other = Double("disk"), Double("store", indexed=False)
    rig = Rig(disk, other)
    disk.mood = broken
    for job in range(3):
        rig.order(
            stores=(store(job, [(1, job)], job),),
            fetches=(TierFetch(10 + job, "disk", 0, hashes(9), (5 + job,)),),
            seeks=(Seek(20 + job, "disk", 0, hashes(9)), Seek(30 + job, "store", 0, hashes(job))),
        )
    rig.until(lambda: len(rig.stored) == 3 and len(rig.found) == 3 and len(other.kept) == 3)
    rig.until(lambda: rig.failures("disk_internal") >= (9 if broken == "raise" else 1))
    assert not rig.kept | rig.fetched.keys(), "it may still use their rows"
    assert rig.worker._loop.is_alive
    disk.mood = "good"
    disk.release()
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


def test_closing_ends_what_tiers_never_answered():
    disk = Double(mood="never")
    rig = Rig(disk)
    rig.order(
        stores=(store(1, [(1, 0)], 1),),
        fetches=(TierFetch(2, "disk", 0, hashes(7), (1,)),),
        seeks=(Seek(3, "disk", 0, hashes(7)),),
    )
    rig.until(lambda: rig.stored == {1: ()})
    rig.close()
    assert rig.kept == {1}
    assert rig.fetched == {2: hashes(7)}
    assert rig.found == {3: ()}
    assert disk.closed
    assert not any(rig.worker.state().values())


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

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.truth = {}
        self.ready = {}
        self.busy = set()
        self.jobs = {}
        self.restores = {}
        self.next_job = 0

    def free_rows(self, rig, group, count):
        last = rig.worker.plan.row_class(group).num_rows - 1
        rows = [at for at in range(min(last, 5) + 1) if (group, at) not in self.busy]
        self.random.shuffle(rows)
        return rows[:count]


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**31), st.lists(st.sampled_from(MOODS), min_size=1, max_size=4))
def test_random_orders_over_unreliable_tiers(seed, moods):
    """Everything comes back exactly once, what is served is right, and nothing is left when idle."""
    disk = Double("disk", moods[0])
    memory = MemoryTier(64 << 10, indexed=False, name="store")
    rig = Rig(disk, memory)
    model = Model(seed)
    chance = model.random
    try:
        for step in range(40):
            if step % 8 == 0:
                disk.mood = moods[step // 8 % len(moods)]
                memory.is_failing = chance.random() < 0.2
            _random_step(rig, model)
            if chance.random() < 0.2:
                time.sleep(0.01)
                _settle(rig, model)
            if chance.random() < 0.2:
                disk.release(1)
            _settle(rig, model)
        disk.mood, memory.is_failing = "good", False
        disk.put_off = type(disk.put_off)(("late", work) for _, work in disk.put_off)
        disk.release()
        rig.until(lambda: _settle(rig, model) or (not model.jobs and not model.restores))
        rig.until_idle()
    finally:
        rig.close()
    assert not any(rig.worker.state().values())


def _random_step(rig, model):
    chance = model.random
    group = chance.randrange(NUM_GROUPS)
    model.next_job += 1
    job = model.next_job
    what = chance.choice(["store", "store", "fetch", "fetch", "seek", "restore", "scribble"])
    if what == "scribble":
        if not model.restores:
            rig.scribble(job)
    elif what == "store":
        rows = model.free_rows(rig, group, chance.randrange(1, 4))
        pairs = [(chance.randrange(1, NUM_BLOCKS), at) for at in rows]
        names = tuple(b"%d.%d" % (job, at) for at in rows)
        if model.restores:
            return
        image = rig.image()
        for (block, _), name in zip(pairs, names, strict=True):
            model.truth[group, name] = image.row(group, block).copy()
        _take_rows(model, group, rows)
        keep = chance.random() < 0.7
        model.jobs[job] = ("store", group, names, rows, keep)
        rig.order(stores=(Store(job, copies(group, pairs), names, keep),))
    elif what == "fetch":
        known = [name for of, name in model.truth if of == group]
        names = tuple(chance.sample(known, min(len(known), 3))) + (
            (b"unknown",) if chance.random() < 0.2 else ()
        )
        rows = model.free_rows(rig, group, len(names))
        names = names[: len(rows)]
        _take_rows(model, group, rows)
        model.jobs[job] = ("fetch", group, names, rows, False)
        rig.order(fetches=(TierFetch(job, chance.choice(["disk", "store"]), group, names, tuple(rows)),))
    elif what == "seek":
        model.jobs[job] = ("seek", group, (), [], False)
        rig.order(seeks=(Seek(job, chance.choice(["disk", "store"]), group, (b"unknown",)),))
    else:
        ready = [place for place in model.ready if place[0] == group]
        chosen = chance.sample(ready, min(len(ready), 3))
        blocks = chance.sample(range(1, NUM_BLOCKS), len(chosen))
        pairs = [(block, at) for block, (_, at) in zip(blocks, chosen, strict=True)]
        model.restores[str(job)] = [(group, block, model.ready[group, at]) for block, at in pairs]
        model.busy |= set(chosen)
        rig.order(restores=(Restore(str(job), (copies(group, pairs),)),))
        rig.until(lambda: str(job) in rig.received)
        image = rig.image()
        assert str(job) not in rig.failed
        for of, block, name in model.restores.pop(str(job)):
            assert np.array_equal(image.row(of, block), model.truth[of, name])
        model.busy -= set(chosen)


def _take_rows(model, group, rows):
    for at in rows:
        model.busy.add((group, at))
        model.ready.pop((group, at), None)


def _settle(rig, model):
    """Take reports as a scheduler half does."""
    rig.collect()
    for job, (what, group, names, rows, keep) in list(model.jobs.items()):
        told = {"store": rig.stored, "fetch": rig.fetched, "seek": rig.found}[what]
        if job not in told or (keep and job not in rig.kept):
            continue
        del model.jobs[job]
        assert set(told[job]) <= set(names)
        for name, at in zip(names, rows, strict=True):
            model.busy.discard((group, at))
            if name not in told[job]:
                model.ready[group, at] = name
    return False


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
