"""Requests that move from P to D, on a virtual clock."""

from __future__ import annotations

import logging

import pytest
import torch

from kvconnect.config import ExtraConfig
from kvconnect.outcome import Cause
from kvconnect.peer.messages import Landed
from kvconnect.plan.blocks import GroupBlocks
from kvconnect.transfer.orders import LetGo, Orders
from tests.transfer.pair import BLOCK_TOKENS, D_IDS, P_IDS, PAGE_BYTES, Pair


def test_a_request_lands_and_both_sides_forget_it(pair):
    before = pair.decode.storage.clone()
    pair.start()
    pair.run()
    assert pair.landed()
    untouched = [block for block in range(50) if block not in D_IDS]
    assert torch.equal(pair.decode.storage[:, untouched], before[:, untouched])
    assert (pair.prefill.sent, pair.decode.received, pair.decode.failed) == (["a"], ["a"], {})
    pair.assert_idle()


def test_metrics_count_bytes_and_copies_on_both_sides(pair):
    pair.start()
    pair.run()
    for worker, direction in ((pair.prefill, "sent"), (pair.decode, "received")):
        assert worker.count("transfers", direction=direction, outcome="ok") == 1
        assert worker.count("transfer_bytes", direction=direction) == 9 * PAGE_BYTES
        assert worker.count("copies", direction=direction) == 2
    assert len(pair.network.heard(Landed)) == 2


def test_nothing_is_reported_while_the_engine_holds_the_bytes(pair):
    pair.prefill.engine.hold()
    pair.start()
    pair.run(20)
    assert not pair.prefill.sent
    assert not pair.decode.received
    pair.prefill.engine.release()
    pair.run()
    assert pair.landed()
    assert pair.decode.received == ["a"]


def test_only_the_blocks_beyond_a_prefix_are_fetched(pair):
    pair.hold("a", P_IDS)
    pair.load("a", D_IDS, groups=(GroupBlocks(0, 2, D_IDS[2:]),))
    pair.run()
    assert pair.landed(P_IDS[2:], D_IDS[2:])
    assert not pair.decode.storage[:, list(D_IDS[:2])].any()


def test_a_fetch_may_come_before_the_prefill_ends(pair):
    pair.load("a", D_IDS)
    pair.run(2)
    pair.hold("a", P_IDS)
    pair.run()
    assert pair.landed()
    assert pair.decode.received == ["a"]


def test_a_lease_waits_for_the_device(pair):
    done = []
    pair.hold("a", P_IDS, ready=lambda: bool(done))
    pair.load("a", D_IDS)
    pair.run(10)
    assert not pair.decode.received
    done.append(True)
    pair.run()
    assert pair.landed()


def test_nothing_is_written_to_blocks_that_the_device_still_uses(pair):
    done = []
    pair.hold("a", P_IDS)
    pair.load("a", D_IDS, ready=lambda: bool(done))
    pair.run(2)
    assert pair.network.heard(Landed), "what lands in slots can wait there"
    assert not pair.decode.received
    assert not pair.landed()
    done.append(True)
    pair.run()
    assert pair.landed()
    assert pair.decode.received == ["a"]
    pair.run(30)
    pair.assert_idle()


def test_a_load_that_is_aborted_before_its_blocks_are_unused_gives_its_slots_back(pair):
    pair.hold("a", P_IDS)
    pair.load("a", D_IDS, ready=lambda: False)
    pair.run(2)
    assert pair.decode.transfers.local.landing.taken
    pair.abort("a")
    pair.run(2)
    assert "a" in pair.decode.failed
    assert not pair.landed()
    pair.assert_idle()


def test_an_unknown_handle_fails_within_its_deadline(pair):
    pair.load("a", D_IDS, handle="made up")
    pair.run(ExtraConfig().early_fetch_s + 0.1)
    assert pair.decode.failed == {"a": "no request is held under this handle"}
    assert pair.decode.received == ["a"]
    pair.start("b")
    pair.run()
    assert pair.landed()


def test_a_handle_works_once(pair):
    pair.start()
    pair.run()
    pair.load("again", D_IDS, handle="handle-a")
    pair.run(0.1)
    assert "no longer held" in pair.decode.failed["again"]


def test_a_handle_does_not_serve_more_tokens_than_are_held(pair):
    pair.hold("a", P_IDS)
    pair.load("a", (*D_IDS, 11), num_tokens=4 * BLOCK_TOKENS)
    pair.run(0.1)
    assert pair.decode.failed == {"a": "16 tokens are wanted, 12 are held"}


def test_a_lease_that_nobody_fetches_ends_and_a_late_fetch_hears_why(pair):
    pair.hold("a", P_IDS)
    pair.run(29)
    assert not pair.prefill.sent
    pair.run(2)
    assert pair.prefill.sent == ["a"]
    assert pair.prefill.count("failures", reason="lease_expired") == 1
    pair.load("a", D_IDS)
    pair.run(0.1)
    assert "its lease of 30.0 s is over" in pair.decode.failed["a"]
    pair.assert_idle()


def test_letting_go_frees_the_lease_at_once(pair):
    pair.hold("a", P_IDS)
    pair.run()
    let_go = LetGo("a", "handle-a", "P", "h", pair.prefill.channel.port)
    pair.decode.transfers.order(Orders(let_go=(let_go,)), lambda: True)
    pair.run()
    assert pair.prefill.sent == ["a"]
    assert not pair.decode.received
    pair.assert_idle()


def test_a_refused_order_is_reported_and_never_sent(pair):
    pair.load("a", D_IDS, "", refusal=Cause.PARAMETERS("kv_transfer_params.remote_port is 'x'"))
    pair.run()
    assert pair.decode.failed == {"a": "kv_transfer_params.remote_port is 'x'"}
    assert not pair.decode.transfers.decode.peers


def test_a_peer_that_forgot_us_is_met_again(pair):
    pair.start()
    pair.run()
    pair.prefill.transfers.prefill.inbound_peers._peers.clear()
    pair.start("b", (7, 8), (30, 31))
    pair.run(0.1)
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
    pair.prefill.engine.release()
    pair.run(1)
    assert sorted(pair.decode.received) == [f"r{n}" for n in range(5)]
    assert not pair.decode.failed


def test_bytes_in_flight_keep_their_bound():
    pair = Pair(ExtraConfig(max_inflight_bytes=2 * PAGE_BYTES), slot_bytes=PAGE_BYTES)
    pair.prefill.engine.hold()
    pair.start()
    pair.run(1)
    (sending,) = pair.prefill.transfers.prefill.sender.sendings.values()
    assert sum(sending.in_flight.values()) == 2 * PAGE_BYTES
    pair.prefill.engine.release()
    pair.run(1)
    assert pair.landed()


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
            pair.start(request)
            pair.run()
    said = [text for text in caplog.messages if "over memory" in text]
    assert len(said) == 2
    assert any(text.startswith("prefill node ") and "is met" in text for text in said)
    assert any(text.startswith("decode node ") and "fetches" in text for text in said)
