"""Peers and strangers that say what they should not."""

from __future__ import annotations

import pytest

from kvconnect.peer.messages import Cancel, Written, encode
from kvconnect.plan.blocks import GroupBlocks
from tests.transfer.pair import D_IDS, P_IDS


def test_hostile_frames_do_not_stop_the_transfer_of_others(pair):
    stranger = pair.network.channel()
    stranger.connect("x", "h", pair.prefill.channel.port)
    for data in (b"", b"\xc1", b"hello" * 1000, b"\x92\xa6cancel\x07", bytes(1 << 20)):
        stranger.send("x", data)
    pair.start()
    pair.run()
    assert pair.landed()
    assert pair.prefill.count("failures", reason="peer_message") >= 4


def test_only_the_peer_that_was_asked_can_answer(pair):
    """Another peer of D names its transfer."""
    other = pair.add("Q")
    pair.hold("b", (7, 8), worker=other)
    pair.load("b", (30, 31), engine_id="Q", port=other.channel.port)
    pair.run()
    pair.prefill.engine.hold()
    pair.start()
    pair.run(0.1)
    (rank_fetch,) = pair.decode.transfers.decode.loads["a"].fetches.values()
    (link,) = other.transfers.prefill.inbound_peers._peers
    other.channel.send(link, encode(Written(rank_fetch.transfer_id, True, True, 1, 1, 0.1, "")))
    pair.run()
    assert pair.decode.received == ["b"]
    assert pair.decode.count("failures", reason="peer_message") == 1
    pair.prefill.engine.release()
    pair.run()
    assert pair.decode.received == ["b", "a"]
    assert pair.landed()
    pair.assert_idle()


@pytest.mark.parametrize(
    "groups",
    [
        (GroupBlocks(0, 0, D_IDS), GroupBlocks(0, 0, D_IDS)),
        (GroupBlocks(0, 0, tuple(range(1, 40))),),
        (GroupBlocks(7, 0, D_IDS),),
        (GroupBlocks(0, 2**40, D_IDS),),
        (GroupBlocks(0, 0, (2**40,)),),
        (GroupBlocks(0, 0, (-1,)),),
    ],
)
def test_a_fetch_of_nonsense_is_answered_and_takes_nobody_with_it(pair, groups):
    pair.start("good", (7, 8), (30, 31))
    pair.hold("bad", P_IDS)
    pair.load("bad", D_IDS, groups=groups)
    pair.run(12)
    assert "good" in pair.decode.received
    assert "good" not in pair.decode.failed
    assert pair.landed((7, 8), (30, 31))
    assert pair.decode.count("failures", reason="internal") == 0


@pytest.mark.parametrize(
    ("groups", "match"),
    [
        ((GroupBlocks(0, 0, (2**40,)),), "it cannot be fetched: cache group 0: kernel blocks"),
        ((GroupBlocks(0, 0, (-1,)),), "it cannot be fetched: cache group 0: kernel blocks -1..-1"),
        ((GroupBlocks(7, 0, D_IDS),), "cache group 7 is wanted"),
    ],
)
def test_blocks_that_we_do_not_have_ourselves_fail_the_load_at_once(pair, groups, match):
    pair.hold("bad", P_IDS)
    pair.load("bad", D_IDS, groups=groups)
    pair.run()
    assert match in pair.decode.failed["bad"]
    assert pair.prefill.sent == ["bad"], "P need not wait until its lease is over"
    pair.assert_idle()


def test_a_cancel_of_a_fetch_that_never_came_is_answered(pair):
    pair.start()
    pair.run()
    prefill = pair.prefill.transfers.prefill
    (link,) = prefill.inbound_peers._peers
    stranger = pair.decode.channel
    name = link.split(":", 2)[2]

    def answers():
        return [said for said in pair.network.heard(Written) if said.transfer_id in (98, 99)]

    stranger.send(name, encode(Cancel(99)))
    pair.run()
    assert [(said.ok, said.quiescent) for said in answers()] == [(False, True)]
    prefill.fetches.not_quiescent[link, 98] = pair.clock.now + 10
    stranger.send(name, encode(Cancel(98)))
    pair.run()
    assert len(answers()) == 1, "its last answer said that memory is not quiescent, and that still holds"
