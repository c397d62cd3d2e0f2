"""A peer that does not say that it stopped is kept out: memory is registered anew, and the rest goes on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvconnect.config import ExtraConfig
from kvconnect.errors import EngineError
from kvconnect.peer.messages import Fetch, Hello, encode
from kvconnect.worker.rank_fetches import SILENT_S
from tests.worker.pair import D_IDS, P_IDS, Pair, quarantined

OTHER = (11, 12, 13), (31, 32, 33)


def silent(pair):
    """P was stopped in the middle of a write, and says nothing."""
    pair.prefill.engine.hold()
    pair.start()
    pair.run(1)
    pair.cut()


def test_a_load_of_a_silent_peer_ends_without_waiting_for_its_quarantine(pair):
    silent(pair)
    pair.run(10 + SILENT_S + 0.1)
    assert "silent for 10.0 s" in pair.decode.failed["a"]
    assert quarantined(pair.decode.landing) == 0
    assert pair.decode.count("failures", reason="registration_renewed") == 1


def test_what_a_peer_writes_late_goes_nowhere(pair):
    silent(pair)
    pair.run(12)
    assert "a" in pair.decode.failed
    before = pair.decode.storage.clone()
    slots = [arena._storage.clone() for arena in pair.decode.arenas]
    pair.prefill.engine.release()
    pair.run(1)
    assert torch.equal(pair.decode.storage, before)
    assert all(torch.equal(old, arena._storage) for old, arena in zip(slots, pair.decode.arenas, strict=True))


def test_what_a_library_writes_after_it_failed_goes_nowhere_once_the_time_is_over(pair):
    pair.prefill.engine.fail_next(quiescent=False)
    pair.start()
    pair.run(ExtraConfig().quarantine_s + 1, step_s=0.5)
    assert pair.decode.received == ["a"]
    assert pair.decode.landing.taken == 0
    before = pair.decode.storage.clone()
    pair.prefill.engine.land_late()
    assert torch.equal(pair.decode.storage, before)
    pair.assert_idle()


def test_the_peer_can_be_fetched_from_again_under_the_new_card(pair):
    silent(pair)
    pair.run(12)
    pair.mend()
    pair.prefill.engine.release()
    pair.run(40, step_s=0.5)
    pair.start("b", *OTHER)
    pair.run(1)
    assert pair.landed(*OTHER)
    pair.assert_idle()


def test_what_others_were_sending_is_asked_for_anew(pair):
    other = pair.add("Q")
    silent(pair)
    pair.run(9)
    other.engine.hold()
    pair.hold("b", OTHER[0], worker=other)
    pair.load("b", OTHER[1], engine_id="Q", port=other.channel.port)
    pair.run(2)
    assert list(pair.decode.failed) == ["a"]
    other.engine.release()
    pair.run(1)
    assert list(pair.decode.failed) == ["a"]
    assert "b" in pair.decode.received
    assert pair.landed(*OTHER, worker=other)
    assert [fetch.handle for fetch in pair.network.heard(Fetch)].count("handle-b") == 2
    assert len(pair.network.heard(Hello)) >= 3, "everybody has heard of the new card"


def test_nobody_is_kept_out_while_all_peers_say_that_they_stopped(pair):
    pair.prefill.engine.hold()
    pair.start()
    pair.run(1)
    pair.abort("a")
    pair.run(1)
    pair.prefill.engine.release()
    pair.run(60, step_s=1)
    assert pair.decode.count("failures", reason="registration_renewed") == 0
    pair.assert_idle()


def test_a_peer_whose_process_is_gone_needs_no_keeping_out(pair):
    pair.prefill.engine.hold()
    pair.start()
    pair.run(1)
    pair.network.kill(pair.prefill.channel.port)
    pair.run(3)
    assert pair.decode.received == ["a"]
    assert pair.decode.landing.taken == 0
    assert pair.decode.count("failures", reason="registration_renewed") == 0


@pytest.mark.parametrize("error", [EngineError, AttributeError])
def test_an_engine_that_cannot_keep_anybody_out_after_all_is_heard_of(pair, error):
    def refuse():
        raise error("no")

    pair.decode.engine.renew_registration = refuse
    silent(pair)
    pair.run(12)
    assert pair.decode.count("failures", reason="registration") >= 1
    assert pair.decode.received == ["a"]


@pytest.mark.parametrize("late_s", [0.0, 9.0])
def test_a_fetch_that_is_read_late_is_not_served_after_its_time(late_s):
    """P stood still while the fetch lay in its socket; D's time goes on, and its blocks are another's."""
    pair = Pair(ExtraConfig(path="direct", load_timeout_s=6.0, lease_s=100.0))
    pair.hold("warm", (30,))
    pair.load("warm", (40,))
    pair.run(1)
    kept = []
    pair.network.taps.append(
        lambda message: kept.append(message) or () if isinstance(message, Fetch) else (message,)
    )
    pair.hold("a", P_IDS)
    pair.load("a", D_IDS)
    pair.run(late_s)
    pair.network.taps.clear()
    (link,) = pair.prefill.transfers.prefill.inbound_peers._peers
    pair.decode.channel.send(link.split(":", 2)[2], encode(kept[0]))
    pair.run(0.2)
    assert pair.landed() == (late_s == 0.0)


def test_what_waited_to_be_sent_is_not_sent_under_the_new_card():
    """P has more to send than its engine takes; D gives all of it up, and comes back with its new card."""
    pair = Pair(ExtraConfig(path="direct"))
    pair.prefill.engine._capabilities = replace(pair.prefill.engine.capabilities, max_batches_per_peer=1)
    pair.prefill.engine.hold()
    for number in range(4):
        pair.start(f"r{number}", (number + 1,), (number + 21,))
    pair.run(1)
    assert len(pair.prefill.transfers.prefill.sender.sendings) == 4
    pair.cut()
    pair.run(12)
    assert len(pair.decode.failed) == 4
    before = pair.decode.storage.clone()
    pair.mend()
    pair.run(8)
    pair.start("new", (11,), (31,))
    pair.settle()
    pair.prefill.engine.release()
    pair.run(20, step_s=0.5)
    assert pair.landed((11,), (31,))
    assert torch.equal(pair.decode.storage[:, 21:25], before[:, 21:25])
    pair.run(60, step_s=1)
    pair.assert_idle()
