"""What a worker shows of what it holds: at every stage of a load, bounded, and without a handle."""

from __future__ import annotations

import time

import pytest

from kvconnect.config import ExtraConfig
from kvconnect.halves.inspection_page import write_inspection
from kvconnect.peer.description import read_answer
from kvconnect.peer.inspection import MOST_PER_PAGE, Inspection
from kvconnect.peer.loss import PeerLoss
from kvconnect.peer.timeline_page import digest
from kvconnect.plan.blocks import GroupBlocks
from kvconnect.transfer.orders import Hold, Orders
from tests.transfer.pair import LAYERS, PAGE_BYTES, Pair


def answer(worker, argument=""):
    return write_inspection(worker.transfers, worker.metrics.timeline, {}, {}, argument)


def seen(worker, argument=""):
    return read_answer(answer(worker, argument), Inspection)


def slots(worker, direction):
    (found,) = (one for one in seen(worker).slots if one["direction"] == direction)
    return tuple(found[state] for state in ("free", "ours", "granted", "quarantined"))


@pytest.fixture
def pair():
    made = Pair(ExtraConfig(lease_s=30.0, lease_max_s=100.0, load_timeout_s=20.0))
    for worker in made.workers:
        worker.metrics.timeline.clock = made.clock
    return made


def test_a_request_is_seen_on_both_sides_at_each_stage(pair):
    pair.hold("a", (5, 6, 9))
    pair.run(4)
    (lease,) = seen(pair.prefill).leases
    assert (lease["request_id"], lease["state"], lease["blocks"], lease["tokens"]) == ("a", "held", 3, 12)
    assert (lease["age_s"], lease["left_s"]) == pytest.approx((4, 26), abs=0.1)
    assert lease["digest"] == digest("handle-a")
    pair.prefill.engine.hold()
    pair.load("a", (21, 3, 8), run_s=2)
    (load,), (lease,) = seen(pair.decode).loads, seen(pair.prefill).leases
    assert (load["request_id"], load["engine_id"], load["address"]) == (
        "a",
        "P",
        f"h:{pair.prefill.channel.port}",
    )
    assert (load["phase"], load["landed_bytes"]) == ("asked", 0)
    assert load["total_bytes"] == 3 * PAGE_BYTES * LAYERS
    assert (load["age_s"], load["left_s"]) == pytest.approx((2, 18), abs=0.1)
    assert (load["digest"], lease["state"]) == (lease["digest"], "sending")
    assert slots(pair.decode, "receive")[2] > 0
    assert slots(pair.prefill, "send")[2] > 0
    (source,), (inbound,) = seen(pair.decode).peers, seen(pair.prefill).peers
    assert (source["direction"], source["engine_id"], source["ranks"]) == ("received", "P", [0])
    assert (source["met"], "loss" in source) == ("a request named it", False)
    assert (inbound["direction"], inbound["engine_id"]) == ("sent", "D")
    pair.release(run_s=1)
    assert (seen(pair.decode).loads, seen(pair.prefill).leases) == ((), ())
    assert slots(pair.decode, "receive")[1:] == slots(pair.prefill, "send")[1:] == (0, 0, 0)


def test_a_load_that_waits_for_its_turn_says_so(pair):
    pair.load("a", (21,), ready=lambda: False)
    pair.decode.transfers.decode._config = ExtraConfig(max_loads=0)
    pair.run(0.1)
    assert [load["phase"] for load in seen(pair.decode).loads] == ["waits for its turn"]


def test_a_lost_peer_is_named_with_its_breaker_and_its_slots_are_in_quarantine(pair):
    pair.stall(1)
    pair.cut(run_s=12)
    (peer,) = seen(pair.decode).peers
    assert peer["loss"].startswith(f"{PeerLoss.SILENT.name.lower()}: ")
    assert 0 < peer["loss_age_s"] < 12
    assert peer["failures"] > 0
    assert peer["met"] == ""
    assert slots(pair.decode, "receive")[3] > 0


def test_ten_thousand_leases_are_read_in_pages_that_take_little_time(pair):
    holds = [
        Hold(f"request-{number}", f"the handle {number}", 2048, (GroupBlocks(0, 0, (1,) * 128),), 0)
        for number in range(10_000)
    ]
    pair.prefill.order(Orders(holds=tuple(holds)))
    pair.run()
    found, took_s, page = [], [], None
    while page is None or not page.is_last:
        began_at = time.thread_time()
        data = answer(pair.prefill, str(len(found)) if found else "")
        took_s.append(time.thread_time() - began_at)
        assert len(data) < 1 << 16
        assert b"the handle" not in data, "it would open a load"
        page = read_answer(data, Inspection)
        assert len(page.leases) <= MOST_PER_PAGE
        found += page.leases
    assert [lease["request_id"] for lease in found] == [hold.request_id for hold in holds]
    # A millisecond as a rule: what others do on this machine disturbs some.
    assert sorted(took_s)[len(took_s) // 2] < 5e-3


@pytest.mark.parametrize("argument", ["-1", "1e9", "x"])
def test_another_argument_is_refused_or_harmless(pair, argument):
    try:
        assert seen(pair.prefill, argument).is_last
    except ValueError:
        assert argument != "-1"
