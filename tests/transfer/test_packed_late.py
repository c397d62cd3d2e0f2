"""Writes that come late, when a slot is in quarantine or lent to another request, or that come in part."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
import torch

from kvconnect.config import ExtraConfig
from kvconnect.peer.messages import Fetch, Landed, Written, encode
from tests.transfer.pair import D_IDS, P_IDS, Pair, quarantined

ONE_SLOT = ExtraConfig(num_slots=1)
SHORT = (7,), (30,)
"""One chunk."""
OTHER = (11, 12, 13), (31, 32, 33)


def scribble(worker):
    """Other bytes where the engine reads from, as if these slots were in use again."""
    arena = worker.arenas[1]
    arena.view(arena.address, arena.length_bytes).random_()


def one_late_write(fault=lambda engine: engine.fail_next(quiescent=False)):
    """A pair that has written off one write, and lends its only slot again; the write is still to come."""
    pair = Pair(ONE_SLOT)
    fault(pair.prefill.engine)
    pair.start("old", *SHORT)
    pair.settle()
    assert "old" in pair.decode.failed
    assert (quarantined(pair.decode.landing), quarantined(pair.prefill.send)) == (1, 1)
    pair.run(ExtraConfig().quarantine_s + 1, step_s=1)
    pair.assert_idle()
    return pair


def write_until_said(pair, chunks=1):
    """Let P write chunks of which D has not heard yet."""
    for _ in range(20):
        pair.decode.step(pair.clock.now)
        for _ in range(4):
            pair.prefill.step(pair.clock.now)
            if len(pair.network.heard(Landed)) == chunks:
                return
    raise AssertionError("nothing was written")


def test_a_late_write_into_a_slot_that_is_lent_again_is_noticed():
    pair = one_late_write()
    before = pair.decode.storage.clone()
    pair.start("new", (8,), (31,))
    write_until_said(pair)
    scribble(pair.prefill)
    assert pair.prefill.engine.land_late() == 1
    pair.settle()
    assert "another digest" in pair.decode.failed["new"]
    assert pair.decode.count("failures", reason="digest") == 1
    others = [block for block in range(50) if block != 31]
    assert pair.decode.storage[:, others].equal(before[:, others])
    pair.start("next", (9,), (32,))
    pair.settle()
    assert pair.landed((9,), (32,))
    pair.assert_idle()


@pytest.mark.parametrize("check_digest", [True, False])
@pytest.mark.parametrize("when", ["before it is written", "after it was unpacked"])
def test_a_late_write_at_another_time_does_no_harm(when, check_digest):
    pair = Pair(ExtraConfig(num_slots=1, check_digest=check_digest))
    pair.prefill.engine.fail_next(quiescent=False)
    pair.start("old", *SHORT)
    pair.settle()
    pair.run(ExtraConfig().quarantine_s + 1, step_s=1)
    scribble(pair.prefill)
    if when == "before it is written":
        pair.prefill.engine.hold()
        pair.start("new", (8,), (31,))
        pair.settle()
        pair.prefill.engine.land_late()
        pair.prefill.engine.release()
        pair.settle()
    else:
        pair.start("new", (8,), (31,))
        pair.settle()
        scribble(pair.prefill)
        pair.prefill.engine.land_late()
        pair.settle()
    assert pair.landed((8,), (31,))
    assert pair.decode.failed.keys() == {"old"}
    pair.assert_idle()


def test_a_late_write_into_quarantine_reaches_nobody():
    pair = Pair(ExtraConfig(num_slots=3))
    pair.prefill.engine.fail_next(quiescent=False)
    pair.start("old", *SHORT)
    pair.settle()
    (fetch,) = pair.network.heard(Fetch)
    for number in range(10):
        pair.start(f"r{number}", (number + 10,), (number + 10,))
    pair.settle(60)
    granted = [grant.address for fetch in pair.network.heard(Fetch)[1:] for grant in fetch.grants]
    assert granted
    assert fetch.grants[0].address not in granted
    scribble(pair.prefill)
    assert pair.prefill.engine.land_late() == 1
    pair.settle()
    assert all(pair.landed((number + 10,), (number + 10,)) for number in range(10))
    assert not pair.decode.storage[:, list(SHORT[1])].any()
    pair.run(ExtraConfig().quarantine_s + 1, step_s=1)
    pair.assert_idle()


@pytest.mark.parametrize("after_bytes", [0, 1, 100, 383])
@pytest.mark.parametrize("quiescent", [True, False])
def test_a_write_that_was_cut_off_is_never_used(after_bytes, quiescent):
    pair = Pair(ONE_SLOT)
    pair.prefill.engine.cut_next(after_bytes, quiescent)
    pair.start("cut", *SHORT)
    pair.start("next", (8,), (31,))
    pair.settle()
    assert pair.decode.failed == {"cut": "cut on request"}
    assert quarantined(pair.decode.landing) == (not quiescent)
    pair.prefill.engine.land_late()
    pair.run(ExtraConfig().quarantine_s + 1, step_s=1)
    assert pair.landed((8,), (31,))
    assert not pair.decode.storage[:, list(SHORT[1])].any()
    pair.assert_idle()


def test_one_chunk_of_many_fails_and_nothing_of_the_request_is_used():
    """Chunks before it are in their pages by then; the request is reported failed, so nobody reads them."""
    pair = Pair(ONE_SLOT)
    source, target = tuple(range(1, 11)), tuple(range(20, 10, -1))
    pair.start("a", source, target)
    write_until_said(pair, 2)
    pair.prefill.engine.fail_next(quiescent=True, error="the link is down")
    pair.start("b", *SHORT)
    pair.settle(20)
    assert pair.decode.failed == {"a": "the link is down"}
    assert pair.landed(*SHORT)
    pair.assert_idle()


def test_when_the_peer_says_that_it_is_quiet_the_quarantine_ends():
    pair = Pair(ExtraConfig(num_slots=2))
    pair.prefill.engine.hold()
    pair.start()
    pair.settle()
    pair.abort("a")
    pair.decode.step(pair.clock.now)
    assert pair.decode.received == ["a"]
    assert quarantined(pair.decode.landing) == 2
    pair.settle()
    assert pair.decode.landing.taken == 0
    pair.assert_idle()


@pytest.mark.parametrize(("names", "lost"), [(None, 2), (0, 0), (1, 1), (2, 2)])
def test_what_a_peer_cannot_call_back_keeps_its_slots_for_as_long_as_it_may_land(names, lost):
    """P's answer to a cancel is that memory is not quiescent: all of the slots, or those that it names."""
    pair = Pair(ExtraConfig(num_slots=2))

    def not_quiescent(message):
        if not isinstance(message, Written):
            return [message]
        lent = [slot.generation for slot in pair.decode.landing.slots]
        unsettled = None if names is None else tuple(lent[:names])
        return [msgspec.structs.replace(message, quiescent=False, unsettled=unsettled)]

    pair.network.taps.append(not_quiescent)
    pair.prefill.engine.hold()
    pair.start()
    pair.settle()
    pair.abort("a")
    pair.settle()
    assert pair.decode.received == ["a"]
    assert len(pair.network.heard(Written)) == 1
    pair.run(ExtraConfig().quarantine_s - 1, step_s=1)
    assert quarantined(pair.decode.landing) == lost
    pair.run(2, step_s=1)
    pair.assert_idle()


@pytest.mark.parametrize("missing", ["D", "P"])
def test_slots_that_nobody_speaks_of_any_more_are_free_when_time_has_proven_it(missing):
    pair = Pair(ExtraConfig(num_slots=2))
    pair.prefill.engine.hold()
    pair.hold("a", P_IDS)
    pair.load("a", D_IDS)
    pair.settle()
    if missing == "P":
        pair.network.kill(pair.prefill.channel.port)
        pair.decode.step(pair.clock.now)
        pair.run(2)
        assert pair.decode.landing.taken == 0
        return
    pair.network.kill(pair.decode.channel.port)
    for _ in range(400):
        pair.clock.now += 0.5
        pair.prefill.step(pair.clock.now)
        pair.prefill.check_slots()
    pair.prefill.engine.release()
    pair.prefill.step(pair.clock.now)
    pair.prefill.step(pair.clock.now)
    assert pair.prefill.sent == ["a"]
    pair.prefill.assert_idle()


def silent(pair, others=()):
    """P was stopped in the middle of a write, and says nothing; ``others`` wait for their turn."""
    pair.prefill.engine.capabilities = replace(pair.prefill.engine.capabilities, max_batches_per_peer=1)
    pair.prefill.engine.hold()
    pair.start()
    for name, source, target in others:
        pair.start(name, source, target)
    pair.run(1)
    pair.cut()


def test_what_a_silent_peer_writes_late_reaches_no_page(pair):
    before = pair.decode.storage.clone()
    silent(pair)
    pair.run(12)
    assert "silent for 10.0 s" in pair.decode.failed["a"]
    slots = pair.decode.arenas[0]._storage.clone()
    pair.prefill.engine.release()
    pair.run(1)
    assert not torch.equal(pair.decode.arenas[0]._storage, slots), "it was written"
    assert torch.equal(pair.decode.storage, before)
    assert quarantined(pair.decode.landing) == 2


def test_a_peer_that_was_silent_can_be_fetched_from_again(pair):
    silent(pair)
    pair.run(12)
    pair.mend()
    pair.prefill.engine.release()
    pair.run(8)
    pair.start("b", *OTHER)
    pair.run(1)
    assert pair.landed(*OTHER)
    pair.run(100, step_s=1)
    pair.assert_idle()


def test_what_others_send_goes_on_while_slots_of_a_silent_peer_are_in_quarantine(pair):
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
    assert pair.landed(*OTHER, worker=other)


def test_what_waited_to_be_sent_reaches_no_page_once_its_load_is_over():
    """P has more to send than its engine takes; D gives all of it up, and comes back for something else."""
    pair = Pair(ExtraConfig(num_slots=32))
    silent(pair, [(f"r{number}", (number + 10,), (number + 31,)) for number in range(3)])
    assert len(pair.prefill.transfers.prefill.sender.sendings) == 4
    pair.run(12)
    assert len(pair.decode.failed) == 4
    before = pair.decode.storage.clone()
    pair.mend()
    pair.run(8)
    pair.start("new", (20,), (41,))
    pair.settle()
    pair.prefill.engine.release()
    pair.run(20, step_s=0.5)
    assert pair.landed((20,), (41,))
    others = [block for block in range(50) if block != 41]
    assert torch.equal(pair.decode.storage[:, others], before[:, others])
    pair.run(60, step_s=1)
    pair.assert_idle()


@pytest.mark.parametrize("late_s", [0.0, 9.0])
def test_a_fetch_that_is_read_late_is_not_served_after_its_time(late_s):
    """P stood still while the fetch lay in its socket; D's time goes on, and its slots are another's."""
    pair = Pair(ExtraConfig(load_timeout_s=6.0, lease_s=100.0))
    pair.start("warm", *SHORT)
    pair.run(1)
    kept = []
    pair.network.taps.append(
        lambda message: kept.append(message) or () if isinstance(message, Fetch) else (message,)
    )
    pair.start()
    pair.run(late_s)
    pair.network.taps.clear()
    pair.network.said.clear()
    (link,) = pair.prefill.transfers.prefill.inbound_peers._peers
    pair.decode.channel.send(link.split(":", 2)[2], encode(kept[0]))
    pair.run(0.2)
    assert pair.landed() == (late_s == 0.0)
    assert bool(pair.network.heard(Landed)) == (late_s == 0.0)
