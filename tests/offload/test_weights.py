"""Kept blocks belong to the weights that they were computed with: in one folder, one store, and over time."""

from __future__ import annotations

import time

import pytest

from kvconnect.errors import ConfigError
from kvconnect.transfer.orders import Store, TierFetch
from tests.offload.worker_kit import Double, Rig, copies

HASHES = (b"hash1", b"hash2")


@pytest.fixture
def rigs():
    made = []
    yield made
    for rig in made:
        rig.close()


def start(rigs, weights, tiers=None, **settings):
    """A worker with these weights. ``tiers`` makes its lower tiers of a namespace."""
    rig = Rig(register=False, weights=weights, **settings)
    if tiers is not None:
        rig.worker._make_tiers = lambda namespace, plan: [tiers(namespace)]
    rig.worker.register_kv_caches(rig.tensors)
    rigs.append(rig)
    return rig


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
    (tier,) = rig.worker._loop.work.tiers
    assert tier.recovered.wait(10)


def test_two_fine_tunes_in_one_folder_find_nothing_of_each_other(rigs, tmp_path):
    first = start(rigs, "files 1", **on_disk(tmp_path))
    keep(first, 1, *HASHES)
    second = start(rigs, "files 2", **on_disk(tmp_path))
    recovered(second)
    assert missing(second, 2, "disk", *HASHES) == HASHES
    assert not any(change.added for change in second.changes)
    keep(second, 3, HASHES[0])
    for rig in (first, second):
        rig.close()
    again = start(rigs, "files 1", **on_disk(tmp_path))
    recovered(again)
    assert missing(again, 4, "disk", *HASHES) == ()


def test_what_is_kept_before_and_after_weights_are_replaced_does_not_meet(rigs, tmp_path):
    rig = start(rigs, "files 1", **on_disk(tmp_path))
    keep(rig, 1, *HASHES)
    rig.order(clear=True)
    rig.worker.replace_weights({"files": "tensors 2"})
    rig.until(lambda: len(rig.worker._loop.work.tiers) == 1)
    assert missing(rig, 2, "disk", *HASHES) == HASHES
    keep(rig, 3, HASHES[0])
    namespace = rig.worker.namespace
    rig.close()
    former = start(rigs, "files 1", **on_disk(tmp_path))
    assert former.worker.namespace != namespace
    recovered(former)
    assert missing(former, 4, "disk", *HASHES) == HASHES, "it was cleared, and what came then is another's"
    later = start(rigs, "tensors 2", **on_disk(tmp_path))
    recovered(later)
    assert missing(later, 5, "disk", *HASHES) == (HASHES[1],)


class SharedStore:
    """A store that others use too: what is kept in it, by namespace."""

    def __init__(self):
        self.kept = {}

    def open(self, namespace):
        tier = Double("store", indexed=False)
        tier.kept = self.kept.setdefault(namespace.digest, {})
        return tier


def test_one_node_of_a_store_whose_weights_are_replaced_while_another_runs(rigs):
    store = SharedStore()
    one, other = (start(rigs, "files 1", store.open) for _ in range(2))
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


def test_jobs_under_way_end_when_weights_are_replaced(rigs):
    opened = []

    def late(namespace):
        opened.append(Double("disk", mood="late" if not opened else "good"))
        return opened[-1]

    rig = start(rigs, "files 1", late)
    rig.order(stores=(Store(1, copies(0, [(1, 0)]), (b"x",), keep=True),))
    rig.order(fetches=(TierFetch(2, "disk", 0, (b"y",), (3,)),))
    rig.until(lambda: len(opened[0].put_off) == 2)
    rig.worker.replace_weights({"files": "tensors 2"})
    rig.until(lambda: 1 in rig.kept and 2 in rig.fetched)
    assert rig.fetched[2] == (b"y",)
    assert opened[0].closed
    keep(rig, 3, b"z")
    assert [content[1] for content in opened[1].kept] == [b"z"]


def test_a_tier_that_cannot_be_opened_for_other_weights_is_done_without(rigs):
    opened = []

    def once(namespace):
        if opened:
            raise ConfigError("the folder is another process's")
        opened.append(Double())
        return opened[0]

    rig = start(rigs, "files 1", once)
    rig.worker.replace_weights({"files": "tensors 2"})
    end = time.monotonic() + 10
    while not rig.failures("offload_tiers_lost"):
        assert time.monotonic() < end
        time.sleep(0.01)
    rig.order(stores=(Store(1, copies(0, [(1, 0)]), (b"x",), keep=True),))
    rig.until(lambda: 1 in rig.kept)
