"""Requests that move from P to D, on a virtual clock."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import msgspec
import pytest
import torch

from kvconnect.config import ExtraConfig
from kvconnect.outcome import Cause
from kvconnect.peer.messages import Fetch, Hello, Landed
from kvconnect.plan.blocks import GroupBlocks
from kvconnect.transfer.local import without_slots
from kvconnect.transfer.orders import Park, Reports, Results
from tests.transfer.pair import D_IDS, P_IDS, PAGE_BYTES, Pair
from tests.transfer.ranks import Ranks
from tests.transfer.shapes import Model, same_blocks


def test_a_request_lands_and_both_sides_forget_it(pair):
    before = pair.decode.storage.clone()
    pair.start(run_s=0)
    assert pair.landed()
    untouched = [block for block in range(50) if block not in D_IDS]
    assert torch.equal(pair.decode.storage[:, untouched], before[:, untouched])
    assert (pair.prefill.sent, pair.decode.received, pair.decode.failed) == (["a"], ["a"], {})
    for worker, direction in ((pair.prefill, "sent"), (pair.decode, "received")):
        assert worker.count("transfers", direction=direction, outcome="ok") == 1
        assert worker.count("transfer_bytes", direction=direction) == 9 * PAGE_BYTES
        assert worker.count("copies", direction=direction) == 2
    assert len(pair.network.heard(Landed)) == 2
    pair.assert_idle()


def test_nothing_is_reported_while_the_engine_holds_the_bytes(pair):
    pair.stall(20)
    assert not pair.prefill.sent
    assert not pair.decode.received
    assert (pair.decode.gauge("slots_landing"), pair.prefill.gauge("slots_send")) == (2, 2)
    pair.release(run_s=0)
    assert pair.landed()
    assert pair.decode.received == ["a"]


def test_nothing_is_written_to_blocks_that_the_device_still_uses(pair):
    done = []
    pair.hold("a", P_IDS)
    pair.load("a", D_IDS, ready=lambda: bool(done), run_s=2)
    assert pair.network.heard(Landed), "what lands in slots can wait there"
    assert not pair.decode.received
    assert not pair.landed()
    done.append(True)
    pair.run()
    assert pair.landed()
    assert pair.decode.received == ["a"]
    pair.assert_idle(30)


def test_a_load_that_is_aborted_before_its_blocks_are_unused_gives_its_slots_back(pair):
    pair.hold("a", P_IDS)
    pair.load("a", D_IDS, ready=lambda: False, run_s=2)
    assert pair.decode.transfers.local.landing.taken
    pair.abort("a", run_s=2)
    assert "a" in pair.decode.failed
    assert not pair.landed()
    pair.assert_idle()


def test_a_handle_works_once(pair):
    pair.start(run_s=0)
    pair.load("again", D_IDS, handle="handle-a", run_s=0.1)
    assert "no longer held" in pair.decode.failed["again"]


def test_a_lease_that_nobody_fetches_ends_and_a_late_fetch_hears_why(pair):
    pair.hold("a", P_IDS)
    pair.run(29)
    assert not pair.prefill.sent
    pair.run(2)
    assert pair.prefill.sent == ["a"]
    assert pair.prefill.count("failures", reason="lease_expired") == 1
    pair.load("a", D_IDS, run_s=0.1)
    assert "its lease_s of 30 s is over, and no decode node asked for it" in pair.decode.failed["a"]
    pair.assert_idle()


def test_a_refused_order_is_reported_and_never_sent(pair):
    pair.load("a", D_IDS, "", refusal=Cause.PARAMETERS("kv_transfer_params.remote_port is 'x'"), run_s=0)
    assert pair.decode.failed == {"a": "kv_transfer_params.remote_port is 'x'"}
    assert not pair.decode.transfers.decode.peers


def test_a_peer_that_forgot_us_is_met_again(pair):
    pair.start(run_s=0)
    pair.prefill.transfers.prefill.inbound_peers._peers.clear()
    pair.start("b", (7, 8), (30, 31), run_s=0.1)
    assert pair.decode.received == ["a", "b"]
    assert not pair.decode.failed
    assert pair.landed((7, 8), (30, 31))
    pair.assert_idle()


def test_loads_beyond_the_bound_wait_their_turn():
    pair = Pair(ExtraConfig(max_loads=2))
    pair.prefill.engine.hold()
    for n in range(5):
        pair.start(f"r{n}", (n + 1,), (n + 10,))
    pair.run(1)
    assert len(pair.prefill.transfers.prefill.sender.sendings) == 2
    pair.release(run_s=1)
    assert sorted(pair.decode.received) == [f"r{n}" for n in range(5)]
    assert not pair.decode.failed


def test_a_load_that_ends_makes_room_for_the_next_at_once():
    pair = Pair(ExtraConfig(max_loads=1))
    pair.start("a", (1,), (10,))
    pair.start("b", (2,), (11,))
    for _ in range(12):
        pair.prefill.step(pair.clock.now)
        sleep_s = pair.decode.transfers.step(pair.clock.now)
        pair.decode.results.append(pair.decode.reports.take())
        if pair.decode.received == ["a"]:
            assert pair.decode.transfers.decode.loads["b"].admitted
            assert sleep_s < 5
    assert sorted(pair.decode.received) == ["a", "b"]


@pytest.mark.parametrize("is_order", [True, False])
def test_what_wakes_the_thread_while_it_takes_messages_is_not_slept_over(is_order):
    """The channel takes what woke it with the messages, when orders were looked for already."""
    pair = Pair()
    transfers, receive = pair.decode.transfers, pair.decode.channel.receive
    assert transfers.step(pair.clock.now) > 1

    def receive_meanwhile():
        if is_order:
            pair.load("a", D_IDS)
        else:
            transfers.stop(0.0)
        pair.decode.channel.receive = receive
        return receive()

    pair.decode.channel.receive = receive_meanwhile
    assert transfers.step(pair.clock.now) == 0
    transfers.step(pair.clock.now)
    assert bool(transfers.decode.loads) is is_order


def test_the_first_meeting_is_logged_once_by_each_side(pair, caplog):
    """It is how an operator sees that two nodes found each other, and what carries KV."""
    with caplog.at_level(logging.INFO):
        for request in ("a", "b"):
            pair.start(request, run_s=0)
    said = [text for text in caplog.messages if "over memory" in text]
    assert len(said) == 2
    assert any("prefill node P" in text and "is met" in text for text in said)
    assert any("decode node D" in text and "fetches" in text for text in said)


# What both sides must be like


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_nothing_is_fetched_where_one_side_has_no_slots(pair, side):
    """As a node that only offloads."""
    getattr(pair, side).introduce(slot_bytes=0)
    pair.start(run_s=0.1)
    assert pair.decode.failed == {"a": without_slots(side)}
    assert pair.prefill.sent == ["a"]
    assert not pair.network.heard(Fetch)
    pair.assert_idle()


def test_a_peer_without_slots_that_fetches_is_refused(pair):
    ours = pair.decode.local.introduction
    pair.network.change(Hello, introduction=msgspec.structs.replace(ours, slot_bytes=0))
    pair.start(run_s=0.1)
    assert pair.decode.failed == {"a": without_slots("decode")}
    assert pair.prefill.sent == ["a"]
    pair.assert_idle()


@pytest.mark.parametrize(("ours", "theirs"), [(1024, 16384), (16384, 1024)])
def test_chunks_fit_the_smaller_of_both_sides_slots(ours, theirs):
    pair = Pair(slot_bytes=ours, prefill_slot_bytes=theirs)
    source, target = tuple(range(1, 37)), tuple(range(40, 4, -1))
    pair.start("a", source, target)
    pair.settle(60)
    assert pair.landed(source, target)
    lengths = [landed.length_bytes for landed in pair.network.heard(Landed)]
    assert max(lengths) <= 1024
    assert sum(lengths) == 3 * 36 * PAGE_BYTES
    pair.assert_idle()


ONE_ROW = Model({"full": 1}, heads=2, width=1100)
"""A token of it has 8800 bytes."""


@pytest.mark.parametrize("block_tokens", [4, 8])
def test_a_slot_that_no_row_fits_is_named_with_both_sizes(block_tokens):
    ranks = Ranks(ONE_ROW, same_blocks(4), same_blocks(block_tokens), slot_bytes=4096)
    assert "a slot has 4096 bytes, but layer 'full.0' needs at least" in ranks.refused()
    ranks.assert_idle()


def test_a_slot_that_no_block_fits_holds_rows():
    """A block of 128 tokens has 8192 bytes; a slot has half of that."""
    ranks = Ranks(Model({"full": 1}, heads=4), same_blocks(16), same_blocks(128), slot_bytes=4096)
    ranks.hand_over(200)
    ranks.assert_idle()


@pytest.mark.parametrize("groups", [(), (GroupBlocks(0, 3, ()),), (GroupBlocks(0, 0, (0, 0, 0)),)])
def test_a_request_of_which_nothing_is_wanted_arrives(pair, groups):
    pair.hold("a", P_IDS)
    pair.load("a", D_IDS, groups=groups, run_s=0)
    assert (pair.decode.received, pair.decode.failed) == (["a"], {})
    assert not pair.decode.storage.any()
    assert pair.prefill.sent == ["a"]
    pair.assert_idle()


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_results_are_taken_once_and_those_that_all_ranks_have_alike_from_rank_0(rank):
    reports, woken = Reports(rank), []
    reports.wake = lambda: woken.append(rank)
    reports.add(Results(received=("a",), ragged=("a",), attachments={"a": b"rows"}))
    reports.add(Results(received=("b",), failed={"b": Cause.LOST("gone")}))
    reports.add(Results(sent=("c", "d"), unsent={"d": Cause.LEASE_OVER("late")}))
    reports.settled("h")
    for _ in range(2):
        reports.read([7, 8])
    taken = reports.take()
    assert (taken.received, taken.ragged, taken.attachments) == (("a", "b"), ("a",), {"a": b"rows"})
    assert (taken.sent, set(taken.failed), set(taken.unsent)) == (("c", "d"), {"b"}, {"d"})
    known_to_all = (taken.settled, taken.read)
    assert known_to_all == ((("h",), (7, 8)) if rank == 0 else ((), ())), "it is reported once"
    assert len(woken) == 3 + (rank == 0)
    assert not reports.take()


@pytest.mark.parametrize("ok", [True, False])
def test_the_outcome_of_a_load_into_rows_is_there_before_these_are_reported(pair, ok):
    """Its request is not received, which comes with a restore."""
    worker, ended = pair.decode, []
    worker.local.parked = SimpleNamespace(
        table=worker.local.table,
        pages=lambda groups: groups,
        end=lambda parks, ok: ended.append((parks, ok, [*worker.reports.take().outcomes])),
    )
    park = Park(7, 0, (b"n",) * len(D_IDS), D_IDS)
    pair.hold("a", P_IDS)
    refusal = None if ok else Cause.BLOCKS("no row is there")
    pair.load("a", D_IDS, parks=(park,), wants_outcome=True, refusal=refusal, run_s=0)
    ((parks, is_whole, (outcome,)),) = ended
    assert (parks, is_whole) == ((park,), ok)
    assert (outcome.request_id, outcome.reason is None) == ("a", ok)
    assert not worker.received
