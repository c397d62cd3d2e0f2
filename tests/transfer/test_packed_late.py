"""Writes that come late, when a slot is in quarantine or lent to another request, or that come in part."""

from __future__ import annotations

import msgspec
import pytest

from kvconnect.config import ExtraConfig
from kvconnect.peer.messages import Fetch, Landed, Written, encode
from tests.transfer.pair import Pair, quarantined

ONE_SLOT = ExtraConfig(num_slots=1)
SHORT = (7,), (30,)
"""One chunk."""


def scribble(worker):
    """Other bytes where the engine reads from, as if these slots were in use again."""
    arena = worker.arenas[1]
    arena.view(arena.address, arena.length_bytes).random_()


def one_late_write(fault=lambda engine: engine.fail_next(quiescent=False)):
    """A pair that has written off one write, and lends its only slot again; the write is still to come."""
    pair = Pair(ONE_SLOT)
    fault(pair.prefill.engine)
    pair.start("old", *SHORT, run_s=0)
    assert "old" in pair.decode.failed
    assert (quarantined(pair.decode.landing), quarantined(pair.prefill.send)) == (1, 1)
    pair.assert_idle(ExtraConfig().quarantine_s + 1, step_s=1)
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
    pair.start("next", (9,), (32,), run_s=0)
    assert pair.landed((9,), (32,))
    pair.assert_idle()


def test_a_late_write_into_quarantine_reaches_nobody():
    pair = Pair(ExtraConfig(num_slots=3))
    pair.prefill.engine.fail_next(quiescent=False)
    pair.start("old", *SHORT, run_s=0)
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
    pair.assert_idle(ExtraConfig().quarantine_s + 1, step_s=1)


@pytest.mark.parametrize(("names", "lost"), [(None, 2), (0, 0), (1, 1), (2, 2)])
def test_what_a_peer_cannot_call_back_keeps_its_slots_for_as_long_as_it_may_land(names, lost):
    """P's answer to a cancel is that memory is not quiescent: all of the slots, or those that it names."""
    pair = Pair(ExtraConfig(num_slots=2))

    def not_quiescent(message):
        lent = [slot.generation for slot in pair.decode.landing.slots]
        unsettled = None if names is None else tuple(lent[:names])
        return [msgspec.structs.replace(message, quiescent=False, unsettled=unsettled)]

    pair.network.insert(Written, not_quiescent)
    pair.stall()
    pair.abort("a", run_s=0)
    assert pair.decode.received == ["a"]
    assert len(pair.network.heard(Written)) == 1
    pair.run(ExtraConfig().quarantine_s - 1, step_s=1)
    assert quarantined(pair.decode.landing) == lost
    pair.assert_idle(2, step_s=1)


@pytest.mark.parametrize("late_s", [0.0, 9.0])
def test_a_fetch_that_is_read_late_is_not_served_after_its_time(late_s):
    """P stood still while the fetch lay in its socket; D's time goes on, and its slots are another's."""
    pair = Pair(ExtraConfig(load_timeout_s=6.0, lease_s=100.0))
    pair.start("warm", *SHORT, run_s=1)
    kept = []
    pair.network.insert(Fetch, lambda fetch: kept.append(fetch) or [], times=1)
    pair.start()
    pair.run(late_s)
    pair.network.said.clear()
    (link,) = pair.decode.transfers.decode.peers.links
    pair.decode.channel.send(link, encode(kept[0]))
    pair.run(0.2)
    assert pair.landed() == (late_s == 0.0)
    assert bool(pair.network.heard(Landed)) == (late_s == 0.0)
