"""Peers whose weights differ, or are replaced while they run: no KV crosses, and the reason has a name."""

from __future__ import annotations

import pytest

from kvconnect.config import ExtraConfig
from kvconnect.transfer.orders import Orders
from tests.prefill.prefills import Prefill
from tests.transfer.pair import D_IDS, OTHER, P_IDS, Pair

QUICK = {"retry_max_s": 1.0, "lease_s": 20.0}


@pytest.fixture
def pair():
    made = Pair(ExtraConfig(**QUICK))
    for worker in made.workers:
        rename(worker, "first", replace=False)
    return made


def rename(worker, weights, *, replace=True):
    if replace:
        worker.transfers.replace_weights({"files": weights})
    else:
        worker.local.replace_weights({"files": weights})


def refused(pair, request):
    assert "weights" in pair.decode.failed[request]
    return pair.decode.count("failures", reason="other_weights")


def test_a_peer_with_other_weights_is_refused_by_name(pair):
    rename(pair.decode, "second", replace=False)
    pair.start(run_s=1)
    assert (
        "peer has other weights: weights.files is first on the prefill node, second on the decode node"
        in pair.decode.failed["a"]
    )
    assert refused(pair, "a") == 1
    pair.start("b", *OTHER, run_s=1)
    assert refused(pair, "b") == 2
    assert not pair.landed()
    assert pair.decode.count("failures", reason="load") == 0
    pair.assert_idle(30)


def test_what_is_held_when_the_weights_are_replaced_is_not_loaded(pair):
    pair.start(run_s=1)
    assert pair.landed()
    pair.hold("b", OTHER[0])
    pair.run(0.1)
    rename(pair.prefill, "second")
    pair.run(0.1)
    assert "b" in pair.prefill.sent, "its blocks are free at once"
    leased_s = pair.prefill.metrics.changes().observed["lease_seconds"]
    assert len(leased_s) == 2
    assert sum(leased_s) > 0.09
    pair.load("b", OTHER[1])
    pair.hold("c", P_IDS)
    pair.load("c", D_IDS, run_s=1)
    assert refused(pair, "b") == refused(pair, "c") == 2
    assert not pair.landed(*OTHER)
    pair.assert_idle(30)


def test_a_prefill_that_is_being_sent_when_the_weights_are_replaced_is_cut_short():
    pair = Pair(ExtraConfig(stream_min_tokens=1, **QUICK))
    for worker in pair.workers:
        rename(worker, "first", replace=False)
    prefill = Prefill(pair, (1, 2, 3, 4, 5), 20)
    pair.load("a", (11, 12, 13, 14, 15), num_tokens=20, run_s=0)
    prefill.to(8)
    pair.run(0.2)
    sendings = pair.prefill.transfers.prefill.sender.sendings
    assert sendings
    rename(pair.prefill, "second")
    pair.run(0.2)
    assert not sendings, "not only once the prefill would have ended"
    assert "a" in pair.decode.failed
    pair.assert_idle(30)


@pytest.mark.parametrize("who", ["prefill", "decode"])
def test_a_pair_that_was_updated_one_by_one_goes_on_after_the_second(pair, who):
    pair.start(run_s=1)
    first = pair.prefill if who == "prefill" else pair.decode
    second = pair.decode if who == "prefill" else pair.prefill
    rename(first, "second")
    pair.run(0.1)
    pair.start("b", *OTHER, run_s=1)
    assert refused(pair, "b") == 1
    rename(second, "second")
    pair.run(3)
    pair.start("c", OTHER[0], OTHER[1], run_s=3)
    assert "c" not in pair.decode.failed
    assert pair.landed(*OTHER)
    pair.assert_idle(30)


def test_a_load_under_way_fails_when_our_own_weights_are_replaced(pair):
    pair.stall(0.2)
    assert pair.decode.transfers.decode.loads
    rename(pair.decode, "second")
    pair.run(0.2)
    pair.release(run_s=1)
    assert "the decode node's weights were replaced" in pair.decode.failed["a"]
    pair.start("b", *OTHER, run_s=1)
    assert refused(pair, "b") == 1
    pair.assert_idle(pair.config.load_timeout_s + pair.config.quarantine_s + 1, step_s=0.5)


def test_what_is_being_sent_to_a_peer_with_the_weights_of_before_arrives(pair):
    pair.stall(0.2)
    rename(pair.prefill, "second")
    pair.run(0.2)
    pair.release(run_s=1)
    assert pair.landed()
    assert pair.decode.failed == {}
    pair.assert_idle(30)


def test_a_fetch_that_waits_for_its_prefill_is_refused_once_that_has_other_weights(pair):
    pair.prefill.order(Orders(expected=("handle-a",)))
    pair.load("a", D_IDS, run_s=0.5)
    rename(pair.prefill, "second")
    pair.hold("a", P_IDS)
    pair.run(1)
    assert refused(pair, "a") == 1
    assert not pair.landed()
    pair.assert_idle(30)
