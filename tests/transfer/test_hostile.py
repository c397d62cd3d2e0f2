"""What peers and strangers may say and do that they should not.

Each time it is noticed and counted, nothing of it becomes KV, other requests go on, and no slot is lost.
"""

from __future__ import annotations

import msgspec
import pytest

from kvconnect.config import ExtraConfig
from kvconnect.peer.messages import (
    MAX_CHUNKS,
    Accepted,
    Cancel,
    CreditGrant,
    Fetch,
    Grant,
    Landed,
    Written,
    encode,
)
from kvconnect.plan.blocks import GroupBlocks
from kvconnect.plan.chunks import Chunk, TokenSpan
from tests.transfer.pair import D_IDS, P_IDS, SLOT_BYTES, Pair, quarantined


def test_hostile_frames_do_not_stop_the_transfer_of_others(pair):
    stranger = pair.network.channel()
    stranger.connect("x", "h", pair.prefill.channel.port)
    for data in (b"", b"\xc1", b"hello" * 1000, b"\x92\xa6cancel\x07", bytes(1 << 20)):
        stranger.send("x", data)
    pair.start(run_s=0)
    assert pair.landed()
    assert pair.prefill.count("failures", reason="peer_message") >= 4


@pytest.mark.parametrize(
    ("groups", "match"),
    [
        ((GroupBlocks(0, 0, D_IDS), GroupBlocks(0, 0, D_IDS)), ""),
        ((GroupBlocks(0, 0, tuple(range(1, 40))),), ""),
        ((GroupBlocks(7, 0, D_IDS),), "cache group 7 is wanted"),
        ((GroupBlocks(0, 2**40, D_IDS),), ""),
        ((GroupBlocks(0, 0, (2**40,)),), "it cannot be fetched: cache group 0: kernel blocks"),
        ((GroupBlocks(0, 0, (-1,)),), "it cannot be fetched: cache group 0: kernel blocks -1..-1"),
    ],
)
def test_a_fetch_of_nonsense_is_answered_and_takes_nobody_with_it(pair, groups, match):
    pair.start("good", (7, 8), (30, 31))
    pair.hold("bad", P_IDS)
    pair.load("bad", D_IDS, groups=groups, run_s=12)
    assert "good" in pair.decode.received
    assert "good" not in pair.decode.failed
    assert pair.landed((7, 8), (30, 31))
    assert pair.decode.count("failures", reason="internal") == 0
    if match:
        assert match in pair.decode.failed["bad"]
        assert "bad" in pair.prefill.sent, "P need not wait until its lease is over"
        pair.assert_idle()


def test_a_cancel_of_a_fetch_that_never_came_is_answered(pair):
    pair.start(run_s=0)
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


GOOD = (7, 8, 10, 11, 12), (30, 31, 33, 34, 35)
ANOTHER_DIGEST = "chunk 0 landed with another digest than it was sent with"


def fails_alone(pair, match, reason=None):
    """The request "a" fails, one that is fetched meanwhile does not, and nothing is left over."""
    before = pair.decode.storage.clone()
    pair.start()
    pair.start("good", *GOOD, run_s=0.2)
    assert match in pair.decode.failed["a"]
    assert pair.decode.failed.keys() == {"a"}
    assert pair.landed(*GOOD)
    if reason:
        assert pair.decode.count("failures", reason=reason) == 1
    others = [block for block in range(50) if block not in (*D_IDS, *GOOD[1])]
    assert (pair.decode.storage[:, others] == before[:, others]).all()
    pair.run(ExtraConfig().load_timeout_s + ExtraConfig().quarantine_s + 1, step_s=1)
    assert sorted(pair.decode.received) == ["a", "good"]
    assert sorted(pair.prefill.sent) == ["a", "good"]
    pair.assert_idle()


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"generation": 1}, "generation 1 was not granted to it, or was used already"),
        ({"length_bytes": 0}, "chunk 0 has 0 of 768 bytes"),
        ({"length_bytes": 769}, "chunk 0 has 769 of 768 bytes"),
        ({"length_bytes": 2**61}, f"chunk 0 has {2**61} of 768 bytes"),
        ({"chunk": 2}, "chunk 2 of 2 is not awaited"),
        ({"chunk": 2**31 - 1}, f"chunk {2**31 - 1} of 2 is not awaited"),
        ({"chunk": 1}, "chunk 1 has 768 of 384 bytes"),
        ({"digest": None}, "chunk 0 came without its digest"),
    ],
)
def test_a_chunk_that_is_not_what_was_asked_for(pair, fields, match):
    pair.network.change(Landed, times=1, **fields)
    fails_alone(pair, f"what landed is not what was asked for: {match}", "landing")
    assert not pair.decode.storage[:, list(D_IDS)].any()


@pytest.mark.parametrize("digest", [0, 2**64 - 1])
def test_a_chunk_of_another_digest(pair, digest):
    pair.network.change(Landed, times=1, digest=digest)
    fails_alone(pair, ANOTHER_DIGEST, "digest")


def test_a_bit_that_flips_on_the_wire(pair):
    pair.prefill.engine.corrupt_next(767)
    fails_alone(pair, ANOTHER_DIGEST, "digest")


def test_a_chunk_that_lands_in_two_slots(pair):
    """The second time it is a chunk that was there already."""
    said = []

    def again(landed):
        # Chunks of the two requests take turns.
        said.append(landed.transfer_id)
        if said.count(1) < 2 or landed.transfer_id != 1:
            return [landed]
        return [msgspec.structs.replace(landed, chunk=0, length_bytes=768)]

    pair.network.insert(Landed, again, times=4)
    fails_alone(pair, "chunk 0 of 2 is not awaited", "landing")


def test_a_chunk_in_a_slot_of_another_transfer(pair):
    """P says of the second request what is true of the first one's slot."""
    generations = []

    def remember(message):
        if isinstance(message, Fetch):
            generations.extend(grant.generation for grant in message.grants)
        if isinstance(message, Landed) and message.transfer_id == 1 and len(generations) > 2:
            return [msgspec.structs.replace(message, generation=generations[2])]
        return [message]

    pair.network.taps.append(remember)
    fails_alone(pair, "generation 680000003 was not granted to it", "landing")


def two_nodes():
    """D fetches from P, whose engine is held, and has fetched from Q, a peer of D's as well."""
    pair = Pair()
    other = pair.add("Q")
    pair.hold("b", (7, 8), worker=other)
    pair.load("b", (40, 41), engine_id="Q", port=other.channel.port, run_s=0)
    assert pair.decode.received == ["b"]
    pair.stall()
    (fetch,) = [fetch for fetch in pair.network.heard(Fetch) if fetch.handle == "handle-a"]
    return pair, fetch, lambda message: pair.say(message, other)


@pytest.mark.parametrize("kind", ["landed", "accepted", "written", "failed"])
def test_a_stranger_cannot_speak_of_what_another_was_asked_for(kind):
    pair, fetch, say = two_nodes()
    number = fetch.transfer_id
    say(
        {
            "landed": Landed(number, 0, fetch.grants[0].generation, 768, 1),
            "accepted": Accepted(number, 9),
            "written": Written(number, True, True, 0, 0, 0.0, ""),
            "failed": Written(number, False, True, 0, 0, 0.0, "it is gone"),
        }[kind]
    )
    pair.settle()
    assert pair.decode.received == ["b"]
    assert pair.decode.count("failures", reason="peer_message") == 1
    assert pair.decode.landing.taken == 2
    pair.release(run_s=0)
    assert pair.decode.failed == {}
    assert pair.landed()
    pair.assert_idle()


def test_a_stranger_cannot_end_the_quarantine_of_slots():
    pair, fetch, say = two_nodes()
    pair.cut()
    pair.abort("a", run_s=0)
    assert quarantined(pair.decode.landing) == 2
    say(Written(fetch.transfer_id, False, True, 0, 0, 0.0, ""))
    pair.settle()
    assert quarantined(pair.decode.landing) == 2
    assert pair.decode.count("failures", reason="peer_message") == 1
    pair.release()
    pair.assert_idle(101, step_s=1)


def test_all_is_written_and_nothing_was_said_of_any_chunk(pair):
    pair.network.insert(Landed, lambda landed: [] if landed.transfer_id == 1 else [landed])
    fails_alone(pair, "reports all chunks as written, and 2 of them did not land")


def test_a_chunk_that_lands_after_its_fetch_has_failed(pair):
    late = []
    pair.network.insert(Landed, lambda landed: late.append(landed) or [], times=2)
    pair.start(run_s=0.2)
    assert "2 of them did not land" in pair.decode.failed["a"]
    for landed in late:
        pair.say(landed)
    pair.start("good", *GOOD, run_s=0)
    assert not pair.decode.storage[:, list(D_IDS)].any()
    assert pair.landed(*GOOD)
    assert pair.decode.count("failures", reason="peer_message") == 2
    pair.assert_idle()


# What D may ask of P


def test_more_slots_than_chunks_are_not_kept(pair):
    flood = tuple(Grant(4096 + index, SLOT_BYTES, 7 + index) for index in range(1000))
    pair.prefill.engine.hold()
    grants = [CreditGrant(1, flood)] * 20
    pair.network.insert(Fetch, lambda fetch: [fetch, *grants], times=1)
    pair.start(run_s=0)
    (sending,) = pair.prefill.transfers.prefill.sender.sendings.values()
    assert len(sending.outbox._grants) <= 2
    pair.release(run_s=0)
    assert pair.landed()
    pair.assert_idle()


def test_no_slot_at_all_is_waited_for_until_the_time_is_over(pair):
    pair.network.change(Fetch, times=1, grants=())
    pair.start()
    pair.start("good", *GOOD, run_s=1)
    assert pair.landed(*GOOD)
    assert pair.prefill.send.taken == 0
    pair.run(ExtraConfig().load_timeout_s)
    assert "when load_timeout_s of the decode node was over" in pair.decode.failed["a"]
    pair.assert_idle(1)


def test_a_chunk_larger_than_our_own_slots_is_not_packed():
    """Whatever size the landing slot is said to have: what lies behind a send slot is not ours to write."""
    pair = Pair(prefill_blocks=80, decode_blocks=90)
    source, target = tuple(range(1, 41)), tuple(range(1, 41))
    whole = (Chunk(0, 3, (TokenSpan(0, 0, 160),)),)

    def enlarge(fetch):
        grant = Grant(fetch.grants[0].address, 1 << 20, 7)
        return [msgspec.structs.replace(fetch, chunks=whole, grants=(grant,))]

    pair.network.insert(Fetch, enlarge, times=1)
    arena = pair.prefill.arenas[1]
    arena.view(arena.address, arena.length_bytes).fill_(0x5A)
    pair.start("a", source, target, run_s=0.1)
    assert arena.view(arena.address, arena.length_bytes).eq(0x5A).all(), "written beyond a slot"
    assert "15360 bytes, the slots have 1024" in pair.decode.failed["a"]
    pair.start("good", (50, 51), (60, 61), run_s=0)
    assert pair.landed((50, 51), (60, 61))
    pair.assert_idle(110, step_s=1)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        *(
            ({"grants": (Grant(*grant, 7),)}, match)
            for grant, match in (
                ((4096, 767), "chunk 0 has 768 bytes, the slot that was granted has 767"),
                ((4096, 0), "chunk 0 has 768 bytes, the slot that was granted has 0"),
                ((4096, SLOT_BYTES), "remote memory is not registered"),
                ((2**62 - 1, 2**61), "remote memory is not registered"),
            )
        ),
        *(
            ({"chunks": (Chunk(first, stop, tuple(TokenSpan(*span) for span in spans)),)}, match)
            for first, stop, spans, match in (
                (0, 4, [(0, 0, 12)], "streams 0..3, the wire has 0..2"),
                (2, 2, [(0, 0, 12)], "streams 2..1, the wire has 0..2"),
                (0, 3, [(1, 0, 12)], "cache group 1"),
                (0, 3, [(0, 12, 0)], "span 12..0"),
                (0, 3, [(0, 0, 13)], "chunks go beyond the 12 tokens of the fetch"),
                (0, 3, [(0, 0, 2**31 - 1)], "chunks go beyond the 12 tokens of the fetch"),
                (0, 3, [(0, 0, 4), (0, 4, 8)], "names a cache group twice"),
            )
        ),
    ],
)
def test_slots_that_are_none_and_chunks_that_are_none_of_the_request(pair, fields, match):
    pair.network.change(Fetch, times=1, **fields)
    fails_alone(pair, match)


@pytest.mark.parametrize("stop", [1, 12])
def test_a_fetch_of_very_many_chunks_is_refused_before_they_are_looked_at(pair, stop):
    """All of the request, or one token of it, 65 536 times: to plan that would take P seconds."""
    pair.network.change(Fetch, times=1, chunks=(Chunk(0, 3, (TokenSpan(0, 0, stop),)),) * MAX_CHUNKS)
    staged = []
    path_to = pair.prefill.transfers.prefill.fetches.paths.path_to

    def watched(inbound):
        path = path_to(inbound)
        place = path.packer.chunker.place
        path.packer.chunker.place = lambda chunk: staged.append(chunk) or place(chunk)
        return path

    pair.prefill.transfers.prefill.fetches.paths.path_to = watched
    fails_alone(pair, "chunks")
    assert len(staged) < 100
