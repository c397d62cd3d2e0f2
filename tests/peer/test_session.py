"""The conversation of two workers, without sockets: its table, its deadlines, and hostile bytes."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.addresses import RankAddress
from kvconnect.cache.region_table import GroupGeometry, PageAxes, Region, RegionTable
from kvconnect.config import ExtraConfig
from kvconnect.errors import LocalError
from kvconnect.outcome import Cause
from kvconnect.peer import messages as m
from kvconnect.peer.loss import PeerLoss
from kvconnect.peer.session import LEGAL, Ended, Misused, Session, SessionState, Side
from kvconnect.plan.chunks import Chunk, TokenSpan
from tests.identities import named


def introduction(engine_id="P", model="m", engine="memory", heads=None, weights="w", held_back=0):
    meaning = m.CacheMeaning(named(model, weights), heads, 1, held_back)
    return m.Introduction(engine_id, "1", 0, meaning, engine, b"card", RegionTable((), ()))


def region(**changes):
    fields = {
        "layer": "l",
        "group": 0,
        "first_plane": 0,
        "heads": None,
        "dtype": "int8",
        "address": 4096,
        "num_blocks": 4,
        "block_stride": 64,
        "page_bytes": 64,
        "axes": PageAxes(1, 1, 16, 4, 4, 4, 4),
    }
    return Region(**{**fields, **changes})


LIMITS = ExtraConfig(lease_s=0.0, max_message_bytes=1 << 16, handshake_timeout_s=5, peer_timeout_s=8)


def session(side, limits=LIMITS, **kwargs):
    return Session(side, introduction(**kwargs), limits, (RankAddress(0, "h", 1),))


def talk(decode, prefill, now=0.0):
    """Carry frames both ways until both are silent; the events of both sides."""
    seen = {decode.side: [], prefill.side: []}
    while True:
        frames = [(prefill, f) for f in decode.outgoing()] + [(decode, f) for f in prefill.outgoing()]
        if not frames:
            return seen
        for receiver, frame in frames:
            seen[receiver.side] += receiver.receive(frame, now)


def ready_pair():
    decode, prefill = session(Side.DECODE, engine_id="D"), session(Side.PREFILL)
    decode.greet(0)
    talk(decode, prefill)
    return decode, prefill


GRANT = m.Grant(4096, 8192, 7)
FETCH = m.Fetch(1, "h", 10, 1, 30.0, (Chunk(0, 1, (TokenSpan(0, 0, 10),)),), (GRANT,))


def test_greeting_makes_both_sides_ready():
    decode, prefill = session(Side.DECODE, engine_id="D"), session(Side.PREFILL)
    decode.greet(0)
    seen = talk(decode, prefill)
    assert [type(event) for event in seen[Side.DECODE]] == [m.Welcome]
    assert seen[Side.DECODE][0].introduction.engine_id == "P"
    assert seen[Side.DECODE][0].directory == (RankAddress(0, "h", 1),)
    assert seen[Side.PREFILL][0].introduction.engine_id == "D"
    assert (decode.state, prefill.state) == (SessionState.READY, SessionState.READY)


@pytest.mark.parametrize(
    ("difference", "match"),
    [
        ({"model": "other"}, "model is m on the prefill node, other on the decode node"),
        ({"engine": "nixl"}, "engine is memory on the prefill node, nixl on the decode node: set the"),
        ({"heads": 4}, "number of KV heads is None on the prefill node, 4 on the decode node"),
        ({"weights": "v"}, "other weights: weights.files is w on the prefill node, v on the decode node"),
        ({"held_back": 1}, "prompt tokens left to the decode node is 0 on the prefill node, 1 on the decode"),
    ],
)
def test_a_peer_that_disagrees_is_refused_with_both_values(difference, match):
    decode, prefill = session(Side.DECODE, **difference), session(Side.PREFILL)
    decode.greet(0)
    (ended,) = talk(decode, prefill)[Side.DECODE]
    assert isinstance(ended, Ended)
    assert match in ended.reason.text
    assert (decode.state, prefill.state) == (SessionState.ENDED, SessionState.ENDED)


@pytest.mark.parametrize(
    "card",
    [
        RegionTable((), (GroupGeometry(0, 16, 10**9, "Full"),)),
        RegionTable((), (GroupGeometry(0, 0, 1, "Full"),)),
        RegionTable((), (GroupGeometry(0, 16, 1, "Full"),) * 2),
        RegionTable((region(group=3),), (GroupGeometry(0, 16, 1, "Full"),)),
        RegionTable((region(address=2**63 - 1),), (GroupGeometry(0, 16, 1, "Full"),)),
        RegionTable((region(block_stride=2**60),), (GroupGeometry(0, 16, 1, "Full"),)),
        RegionTable((region(page_bytes=0),), (GroupGeometry(0, 16, 1, "Full"),)),
        RegionTable(
            (region(axes=PageAxes(1, 2**20, 2**20, 1, 1, 1, 1)),), (GroupGeometry(0, 16, 1, "Full"),)
        ),
    ],
)
def test_a_table_that_no_cache_can_have_is_refused_before_it_is_used(card):
    prefill = session(Side.PREFILL)
    hostile = msgspec.structs.replace(introduction("D"), table=card)
    (ended,) = prefill.receive(m.encode(m.Hello(m.PROTOCOL_VERSION, hostile)), 0)
    assert isinstance(ended, Ended)
    assert "table" in ended.reason.text


def test_each_greeting_tells_the_new_introduction_and_is_answered():
    decode, prefill = session(Side.DECODE, engine_id="D"), session(Side.PREFILL)
    decode.greet(0.0)
    for card in (b"before the first answer", b"after it"):
        decode.greet_anew(msgspec.structs.replace(decode.ours, engine_card=card))
        seen = talk(decode, prefill)
        assert [type(event) for event in seen[Side.DECODE]] == [m.Welcome] * (1 + (card != b"after it"))
        assert prefill.peer.engine_card == card
        assert decode.state is prefill.state is SessionState.READY


@pytest.mark.parametrize(
    ("greetings", "answered", "loss"),
    [
        (1, False, PeerLoss.TOLD_TO_STOP),
        (1, True, PeerLoss.TOLD_TO_STOP),
        (2, True, PeerLoss.TOLD_TO_STOP),
        (2, False, PeerLoss.UNUSABLE),
    ],
)
def test_a_refusal_stops_what_was_asked_unless_it_may_be_of_a_later_greeting(greetings, answered, loss):
    decode, prefill = session(Side.DECODE, engine_id="D"), session(Side.PREFILL)
    decode.greet(0.0)
    if greetings == 2:
        talk(decode, prefill)
        decode.greet_anew(decode.ours)
    if answered:
        talk(decode, prefill)
    (ended,) = decode.receive(m.encode(m.Refused(m.PROTOCOL_VERSION, "too many peers", "peer_busy")), 0.0)
    assert ended == Ended(Cause.BUSY("the prefill node refused: too many peers"), loss)


def test_another_protocol_version_is_refused():
    prefill = session(Side.PREFILL)
    (ended,) = prefill.receive(m.encode(m.Hello(99, introduction("D"))), 0)
    assert "protocol version is 8 on the prefill node, 99 on the decode node" in ended.reason.text


ALL_MESSAGES = [
    m.Hello(m.PROTOCOL_VERSION, introduction("D")),
    m.Welcome(m.PROTOCOL_VERSION, introduction(), ()),
    m.Refused(m.PROTOCOL_VERSION, "no"),
    FETCH,
    m.CreditGrant(1, (GRANT,)),
    m.Accepted(1, 9),
    m.Landed(1, 0, 7, 64, None),
    m.Written(1, True, True, 5, 1, 0.1, None),
    m.Cancel(1),
    m.Release("h", 1),
    m.Alive(),
    m.StillAlive(),
    m.Bad("what"),
]


def changed(message, at, value):
    """A frame with one byte changed."""
    frame = bytearray(m.encode(message))
    frame[at % len(frame)] = value
    return bytes(frame)


@pytest.mark.parametrize("side", list(Side))
@pytest.mark.parametrize("state", [SessionState.NEW, SessionState.GREETED, SessionState.READY])
@pytest.mark.parametrize("message", ALL_MESSAGES, ids=lambda message: type(message).__name__)
def test_what_is_not_in_the_table_changes_nothing_and_what_is_passes_once_ready(side, state, message):
    subject = session(side)
    if state is not SessionState.NEW and side is Side.DECODE:
        subject.greet(0)
    subject.state = state
    events = subject.receive(m.encode(message), 0)
    if type(message) in LEGAL.get((side, state), ()):
        if state is SessionState.READY and not isinstance(message, m.Hello | m.Welcome | m.Refused | m.Bad):
            assert (events, subject.state) == ([message], state)
        return
    assert isinstance(events[0], Misused)
    # Forgotten peers are told to greet again.
    is_forgotten = side is Side.PREFILL and state is SessionState.NEW and isinstance(message, m.ToPrefill)
    assert subject.state is (SessionState.ENDED if is_forgotten else state)


FLIPPED = st.builds(changed, st.sampled_from(ALL_MESSAGES), st.integers(0), st.integers(0, 255))


@given(st.binary(max_size=200) | FLIPPED)
def test_no_bytes_raise_and_what_is_misused_changes_nothing(frame):
    for subject in (*ready_pair(), *map(session, Side)):
        before = subject.state
        events = subject.receive(frame, 1)
        if all(isinstance(event, Misused) for event in events):
            assert subject.state is before


def test_frames_beyond_the_limit_are_not_read():
    _, prefill = ready_pair()
    (event,) = prefill.receive(b"\0" * ((1 << 16) + 1), 0)
    assert "65537 bytes, accepted are 65536" in event.reason.text


def test_bad_is_never_answered():
    decode, prefill = ready_pair()
    for subject in (decode, prefill):
        subject.receive(m.encode(m.Bad("x")), 0)
        assert subject.outgoing() == []


def test_a_greeting_without_an_answer_ends():
    decode = session(Side.DECODE)
    decode.greet(10)
    assert decode.tick(14.9) == []
    assert decode.next_tick() == 15
    (ended,) = decode.tick(15)
    assert "5 s" in ended.reason.text


@pytest.mark.parametrize("asked_at", [2, 1000])
def test_a_silent_peer_is_asked_once_and_then_gone(asked_at):
    """Counted from the question: a node that did not run for a while asks first, too."""
    decode, prefill = ready_pair()
    assert decode.next_tick() == 2
    assert decode.tick(1.9) == []
    assert decode.outgoing() == []
    assert decode.tick(asked_at) == []
    (frame,) = decode.outgoing()
    assert prefill.receive(frame, asked_at) == [m.Alive()]
    assert decode.next_tick() == asked_at + 6
    assert decode.tick(asked_at + 5.9) == []
    assert decode.outgoing() == []
    (ended,) = decode.tick(asked_at + 6)
    assert "silent for 8 s" in ended.reason.text
    assert ended.loss is PeerLoss.SILENT


@pytest.mark.parametrize(("message", "every_s"), [(m.StillAlive(), 2), (m.Landed(1, 0, 7, 64, None), 1)])
def test_whatever_a_peer_says_shows_that_it_lives(message, every_s):
    decode, _ = ready_pair()
    for now in range(every_s, 40, every_s):
        assert decode.tick(now) == []
        decode.receive(m.encode(message), now)
    assert decode.state is SessionState.READY


def test_what_is_said_too_early_is_our_own_bug():
    decode = session(Side.DECODE)
    with pytest.raises(LocalError):
        decode.send(FETCH)
    decode.greet(0)
    with pytest.raises(LocalError):
        decode.greet(0)
    with pytest.raises(LocalError):
        session(Side.PREFILL).greet(0)
