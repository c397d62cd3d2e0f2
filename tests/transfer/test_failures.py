"""Whatever may keep a request from arriving: it is reported once, and nothing is lost."""

from __future__ import annotations

import pytest
import torch

from kvconnect.config import ExtraConfig
from kvconnect.outcome import Cause
from kvconnect.peer.messages import Written
from tests.transfer.pair import D_IDS, OTHER, P_IDS, Pair, quarantined


def test_a_failure_that_left_writes_under_way_keeps_only_slots(pair):
    before = pair.decode.storage.clone()
    pair.prefill.engine.fail_next(quiescent=False, error="the library lost track")
    pair.start(run_s=0)
    assert pair.decode.failed == {"a": "the prefill node's engine: the library lost track"}
    assert pair.prefill.sent == ["a"], "what may still be read is a slot"
    assert quarantined(pair.decode.landing) == 1, "to the other slot nothing was or will be written"
    assert quarantined(pair.prefill.send) == 1
    assert pair.prefill.engine.land_late() == 1
    pair.run(ExtraConfig().quarantine_s - 1, step_s=0.5)
    assert quarantined(pair.decode.landing) == 1
    assert torch.equal(pair.decode.storage, before), "a late write reached a page"
    pair.assert_idle(2)


def test_a_client_that_leaves_is_no_failure_of_either_side(pair, caplog):
    pair.stall(1)
    pair.abort("a", run_s=0.1)
    pair.release(run_s=0)
    assert (pair.decode.received, pair.prefill.sent) == (["a"], ["a"])
    assert pair.decode.failed == {"a": "the request was aborted"}
    assert pair.decode.count("transfers", direction="received", outcome="aborted") == 1
    assert pair.prefill.count("transfers", direction="sent", outcome="cancelled") == 1
    for side, direction in ((pair.decode, "received"), (pair.prefill, "sent")):
        assert side.count("transfers", direction=direction, outcome="failed") == 0
    assert (
        pair.decode.count("failures", reason="landing") == pair.prefill.count("failures", reason="send") == 0
    )
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_a_load_that_failed_before_its_client_left_is_a_failure(pair):
    pair.stall(1)
    pair.decode.transfers.decode.loads["a"].fail(Cause.LANDING("what landed is not what was asked for"))
    pair.abort("a", run_s=0.1)
    pair.release(run_s=0)
    assert pair.decode.count("transfers", direction="received", outcome="failed") == 1
    assert pair.decode.count("transfers", direction="received", outcome="aborted") == 0
    assert pair.decode.count("failures", reason="landing") == 1


@pytest.mark.parametrize(("lease_s", "until_s"), [(100.0, 60), (30.0, 30)])
def test_the_prefill_side_stops_by_itself_when_its_time_or_its_lease_is_over(lease_s, until_s):
    pair = Pair(ExtraConfig(lease_s=lease_s))
    pair.prefill.engine.delay_next(1000)
    pair.start()
    pair.prefill.transfers.prefill.sender._config = ExtraConfig(transfer_timeout_s=500, quarantine_s=500)
    pair.run(1)
    pair.cut()
    pair.run(until_s - 2)
    assert pair.prefill.transfers.prefill.sender.sendings
    pair.run(2)
    assert not pair.prefill.transfers.prefill.sender.sendings


def test_a_peer_that_is_not_there(pair):
    pair.load("a", D_IDS, port=99, run_s=0.1)
    assert "nothing listens at h:99" in pair.decode.failed["a"]
    pair.assert_idle()


def test_a_peer_that_falls_silent_while_it_writes(pair):
    before = pair.decode.storage.clone()
    pair.stall(1)
    pair.cut(run_s=9)
    assert not pair.decode.received, "it may only be slow"
    pair.run(2)
    assert pair.decode.received == ["a"]
    assert "silent for 10 s" in pair.decode.failed["a"]
    slots = pair.decode.arenas[0]._storage.clone()
    pair.release()
    pair.run(60 + 27, step_s=0.5)
    assert not torch.equal(pair.decode.arenas[0]._storage, slots), "it was written late"
    assert torch.equal(pair.decode.storage, before)
    assert quarantined(pair.decode.landing) == 2, "it was given 60 s, and its last write may take a while"
    assert pair.decode.gauge("slots_quarantined") == 2
    pair.run(4)
    assert pair.decode.gauge("slots_quarantined") == 0
    assert pair.decode.landing.taken == 0


def test_a_peer_whose_process_is_gone_is_quiet_soon(pair):
    pair.stall(1)
    pair.network.kill(pair.prefill.channel.port)
    pair.run(0.5)
    assert pair.decode.received == ["a"]
    assert "the prefill node is gone" in pair.decode.failed["a"]
    assert quarantined(pair.decode.landing) == 2
    pair.run(1)
    assert pair.decode.landing.taken == 0


def test_another_engine_id_than_the_request_names(pair):
    pair.hold("a", P_IDS)
    pair.load("a", D_IDS, engine_id="Q", run_s=0.1)
    assert "engine P serves at h:1 now, and the request names Q" in pair.decode.failed["a"]


def test_a_batch_that_the_engine_does_not_take_fails_the_fetch(pair):
    def refuse(batch):
        raise RuntimeError("no")

    pair.prefill.engine.submit = refuse
    pair.start(run_s=0)
    assert "does not take a batch: RuntimeError: no" in pair.decode.failed["a"]
    assert pair.prefill.sent == ["a"]


def test_the_answers_to_a_fetch_that_was_aborted_are_no_fault_of_the_peer(caplog):
    """The abort crosses the peer's answer, so that the peer does not know what it is to cancel."""
    pair = Pair()
    late = []
    pair.network.insert(Written, lambda written: late.append(written) or [], times=1)
    pair.start(run_s=0)
    pair.abort("a", run_s=0)
    pair.say(late[0])
    pair.settle()
    assert len(pair.network.heard(Written)) == 3
    assert pair.decode.count("failures", reason="peer_message") == 0
    assert "not asked" not in caplog.text
    pair.assert_idle()


def test_a_load_that_is_refused_before_it_is_asked_for_is_given_back_at_once():
    pair = Pair()
    pair.hold("a", P_IDS)
    pair.load("a", D_IDS, refusal=Cause.OTHER_PROMPT("it is of another prompt"), run_s=0.2)
    assert pair.decode.failed == {"a": "it is of another prompt"}
    assert pair.prefill.sent == ["a"]


def test_a_load_that_fails_with_its_link_is_given_back_when_the_peer_is_met_again():
    pair = Pair(ExtraConfig(lease_s=300.0, lease_max_s=300.0))
    pair.prefill.engine.hold()
    pair.start()
    pair.start("b", *OTHER, run_s=0)
    pair.cut(run_s=25)
    assert set(pair.decode.failed) == {"a", "b"}
    pair.release()
    pair.mend()
    pair.run(30)
    assert sorted(pair.prefill.sent) == ["a", "b"]


def test_what_may_still_be_written_does_not_put_off_that_a_load_is_given_back(pair):
    pair.stall()
    pair.abort("a")
    pair.network.lose(Written)
    pair.settle()
    assert pair.decode.received == ["a"]
    assert quarantined(pair.decode.landing) == 2, "they may still be written, as far as is known"
    assert pair.prefill.sent == ["a"]


def test_a_request_that_is_loaded_twice_at_once_is_reported_for_its_first_load(pair):
    pair.hold("a", P_IDS)
    pair.load("a", D_IDS)
    pair.load("a", D_IDS, run_s=0)
    assert pair.decode.received == ["a"]
    assert pair.decode.count("failures", reason="request_in_use") == 1
    pair.assert_idle()


def test_an_engine_that_raises_keeps_no_load_from_its_deadline():
    def broken():
        raise RuntimeError("the library is in a bad state")

    pair = Pair(ExtraConfig(load_timeout_s=5.0))
    pair.stall(0.2)
    pair.decode.engine.poll = broken
    pair.run(6)
    assert "a" in pair.decode.failed
    assert pair.decode.count("failures", reason="internal") > 1
