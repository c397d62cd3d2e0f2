"""A worker's rows: what is stored comes back as it was, and every order ends exactly once."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from kvconnect.errors import ConfigError
from kvconnect.offload.disk.folder import cache_folders, look
from kvconnect.offload.tier import TierUpdate
from kvconnect.offload.worker import tier_loop
from kvconnect.transfer.orders import Restore, Seek, Store, TierFetch
from tests.offload.rows_by_hand import rows_of
from tests.offload.worker_kit import NUM_BLOCKS, Double, Rig, copies, hashes


@pytest.fixture
def rig():
    return Rig()


def test_memory_that_is_too_small_for_one_hit_is_refused_before_any_of_it_is_taken():
    with pytest.raises(ConfigError, match=r"cpu_bytes is 65536: .* the shortest hit needs 1000 of them"):
        Rig(least_rows={1: 1000})


@pytest.mark.parametrize(
    "bad",
    [
        copies(0, [(0, 1)]),
        copies(0, [(NUM_BLOCKS, 1)]),
        copies(0, [(1, 10**6)]),
        copies(5, [(1, 1)]),
    ],
    ids=["null block", "no such block", "no such row", "no such group"],
)
def test_an_order_that_cannot_be_carried_out_fails(rig, bad):
    good = Store(1, copies(0, [(1, 0)]), hashes(1))
    wrong = Store(2, bad, hashes(2), keep=True)
    image = rig.image()
    rig.order(stores=(good,))
    rig.order(stores=(wrong,), restores=(Restore("bad", (bad,)), Restore("good", ())))
    rig.until(lambda: len(rig.stored) == 2 and len(rig.received) == 2)
    assert rig.stored == {1: (), 2: hashes(2)}
    assert rig.kept == {2}
    assert set(rig.failed) == {"bad"}
    assert rig.image().same_as(image)
    assert np.array_equal(rows_of(rig.worker._arena, 0)[0][: len(image.row(0, 1))], image.row(0, 1))
    rig.until_idle()


def test_orders_for_a_tier_that_is_not_there_find_nothing(rig):
    rig.order(
        fetches=(TierFetch(1, "disk", 0, hashes(1), (0,)),),
        seeks=(Seek(2, "store", 1, hashes(1, 2)),),
        stores=(Store(3, copies(0, [(1, 0)]), hashes(1), keep=True),),
    )
    rig.until(lambda: rig.fetched and rig.found and rig.kept)
    assert rig.fetched == {1: hashes(1)}
    assert rig.found == {2: ()}
    assert rig.stored == {3: ()}
    assert rig.kept == {3}
    assert rig.failures("offload_unknown_tier") == 2


def test_a_wake_that_fails_harms_nobody(rig):
    rig.worker.on_results(lambda: 1 / 0)
    rig.order(stores=(Store(1, copies(0, [(1, 0)]), hashes(1)),))
    rig.until(lambda: rig.stored == {1: ()})


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_ended_leaves_nobody_waiting(rig):
    rig.worker._loop.step = lambda now: (_ for _ in ()).throw(SystemExit)
    rig.worker._loop._wake.set()
    rig.worker._loop._thread.join(5)
    rig.order(
        stores=(Store(1, copies(0, [(1, 0)]), hashes(1), keep=True),),
        restores=(Restore("r", (copies(1, [(1, 0)]),)),),
        fetches=(TierFetch(2, "disk", 0, hashes(1), (0,)),),
        seeks=(Seek(3, "disk", 0, hashes(1)),),
    )
    rig.collect()
    assert rig.stored == {1: hashes(1)}
    assert rig.kept == {1}
    assert rig.fetched == {2: hashes(1)}
    assert rig.found == {3: ()}
    assert "ended" in rig.failed["r"]


def test_jobs_fail_at_the_close_of_a_worker_whose_thread_hangs(monkeypatch):
    monkeypatch.setattr(tier_loop, "_CLOSE_TIMEOUT_S", 0.05)
    disk, goes_on = Double("disk", "late"), threading.Event()
    rig = Rig(disk)
    rig.order(fetches=(TierFetch(1, "disk", 0, hashes(1), (0,)),))
    rig.until(lambda: disk.put_off)
    monkeypatch.setattr(disk, "poll", lambda: goes_on.wait() and TierUpdate())
    rig.worker._loop.wake()
    rig.close()
    assert rig.worker._loop.is_alive
    assert rig.fetched == {1: hashes(1)}
    goes_on.set()
    rig.worker._loop._thread.join(10)


def test_an_error_of_ours_does_not_end_the_thread(rig):
    step, times = rig.worker._loop.step, []

    def broken(now):
        times.append(now)
        if len(times) < 3:
            raise RuntimeError("a bug")
        return step(now)

    rig.worker._loop.step = broken
    rig.order(stores=(Store(1, copies(0, [(1, 0)]), hashes(1)),))
    rig.until(lambda: rig.stored == {1: ()})
    assert rig.failures("internal") == 2


def test_a_label_is_no_part_of_a_name_and_is_kept_on_disk_with_the_model(tmp_path):
    disk = {"disk_path": str(tmp_path), "disk_bytes": 8 << 20}
    named = []
    for label in ("/models/one", "/models/other"):
        rig = Rig(label=label, **disk)
        named.append(rig.worker.namespace.name)
        rig.close()
    assert named[0] == named[1]
    (folder,) = cache_folders(tmp_path)
    found = look(folder)
    assert (found["label"], found["model"]) == ("/models/other", "m")


def test_changes_are_told_once(rig):
    rig.order(stores=(Store(1, copies(0, [(1, 0)]), hashes(1)),))
    rig.until(lambda: rig.stored == {1: ()})
    rig.until_idle()
    told = rig.worker.changes()
    assert told.counters["offload_rows"] == {"stored,cpu": 1}
    rig.until(lambda: rig.worker.changes() is None)
