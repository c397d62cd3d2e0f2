"""What peers say, as bytes: every message survives, the format is pinned, bounds hold."""

from __future__ import annotations

import contextlib
from typing import get_args

import msgspec
import msgspec.inspect as mi
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvconnect.addresses import RankAddress
from kvconnect.cache.identity import MAX_NAMES, Naming, Prefix
from kvconnect.cache.region_table import GroupGeometry, PageAxes, Region, RegionTable
from kvconnect.cache.shard import HeadInterval
from kvconnect.errors import PeerError
from kvconnect.outcome import Cause
from kvconnect.pack.shared_memory import SharedMemoryCard
from kvconnect.peer import messages as m
from kvconnect.plan.chunks import Chunk, TokenSpan
from tests.identities import named

LIMIT = 16 << 20
KINDS = {m.Side.PREFILL: get_args(m.ToPrefill), m.Side.DECODE: get_args(m.ToDecode)}


def values(kind: mi.Type) -> st.SearchStrategy:
    """What a field may hold by its type and bounds."""
    match kind:
        case mi.IntType():
            low = kind.ge if kind.ge is not None else -(2**63) if kind.gt is None else kind.gt + 1
            high = kind.le if kind.le is not None else 2**63 - 1 if kind.lt is None else kind.lt - 1
            return st.integers(low, high)
        case mi.FloatType():
            low = kind.gt if kind.ge is None else kind.ge
            return st.floats(low, kind.le, allow_nan=False, exclude_min=kind.gt is not None)
        case mi.StrType():
            # What has a pattern is shown in logs.
            last = 126 if kind.pattern else None
            return st.text(st.characters(codec="utf-8", min_codepoint=32, max_codepoint=last), max_size=20)
        case mi.BytesType():
            return st.binary(min_size=kind.min_length or 0, max_size=min(kind.max_length or 20, 20))
        case mi.VarTupleType():
            return st.lists(values(kind.item_type), min_size=kind.min_length or 0, max_size=3).map(tuple)
        case mi.TupleType():
            return st.tuples(*map(values, kind.item_types))
        case mi.DictType():
            return st.dictionaries(values(kind.key_type), values(kind.value_type), max_size=3)
        case mi.StructType():
            return st.builds(kind.cls, *(values(field.type) for field in kind.fields))
        case mi.UnionType():
            return st.one_of(map(values, kind.types))
        case mi.EnumType():
            return st.sampled_from(kind.cls)
        case mi.LiteralType():
            return st.sampled_from(kind.values)
        case mi.BoolType():
            return st.booleans()
    assert isinstance(kind, mi.NoneType), kind
    return st.none()


messages = st.one_of(
    [values(mi.type_info(kind)) for kind in dict.fromkeys((*KINDS[m.Side.PREFILL], *KINDS[m.Side.DECODE]))]
)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(messages)
def test_every_message_survives_on_its_own_way_and_on_no_other(message):
    frame = m.encode(message)
    for side, kinds in KINDS.items():
        if isinstance(message, kinds):
            assert m.decode(side, frame, LIMIT) == message
        else:
            with pytest.raises(PeerError):
                m.decode(side, frame, LIMIT)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(messages, st.data())
def test_a_changed_frame_is_read_as_some_message_or_not_at_all(message, data):
    frame = bytearray(m.encode(message))
    frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    shortened = frame[: data.draw(st.integers(0, len(frame)))]
    for damaged in (bytes(frame), bytes(shortened)):
        for side in m.Side:
            with contextlib.suppress(PeerError):
                m.decode(side, damaged, LIMIT)


GRANT = m.Grant(4096, 8192, 7)
MEMORY = SharedMemoryCard("boot pid", 4711, 5, b"0123456789abcdef", 4096, 1 << 20)
PREFIX = Prefix(Naming("s", 16), 0, (b"\x01n",))
CHUNK = Chunk(0, 3, (TokenSpan(0, 16, 48), TokenSpan(1, 0, 1)))


FRAMES = [
    (m.Cancel(7), "92a663616e63656c07"),
    (m.Release("h", 2), "93a66c65745f676fa16802"),
    (m.Alive(), "91a5616c697665"),
    (m.StillAlive(), "91ab7374696c6c5f616c697665"),
    (m.Question(1, "t", "a"), "94a87175657374696f6e01a174a161"),
    (m.Answer(1, b"d", "e"), "94a6616e7377657201c40164a165"),
    (
        m.Transport("tcp", "lo", "observed", 1.5e9, 0.0, "no"),
        "97a97472616e73706f7274a3746370a26c6fa86f62736572766564cb41d65a0bc0000000cb0000000000000000a26e6f",
    ),
    (m.Bad("x"), "92a3626164a178"),
    (m.Refused(2, "no", "peer_busy"), "94a77265667573656402a26e6fa9706565725f62757379"),
    (
        m.Fetch(1, "h", 10, 1, 30.0),
        "9aa5666574636801a1680a01cb403e0000000000009090cb7ff000000000000000",
    ),
    (
        m.Fetch(1, "h", 48, 1, 30.0, (CHUNK,), (GRANT,), 100.0, 16),
        "9aa5666574636801a1683001cb403e0000000000009193000392930010309301000191 93cd1000cd200007"
        "cb405900000000000010",
    ),
    (m.PinPrefix("h", PREFIX, 16), "94a370696ea1689392a173100091c402016e10"),
    (m.FindPrefix(3, PREFIX, 48), "94a466696e6403939 2a1731000 91c402016e30"),
    (
        m.PrefixFound(3, 16, 64, 32, 96, 0.5, Cause.BUSY("e")),
        "99a5666f756e640310402060cb3fe000000000000092a9706565725f62757379a165c2",
    ),
    (m.CreditGrant(3, (GRANT,)), "93a76772616e746564039193cd1000cd200007"),
    (m.Accepted(3, 9), "93a861636365707465640309"),
    (m.CreditRequest(3, 2, (7,)), "94a677616e74656403029107"),
    (m.Renew(("h",)), "92a572656e657791a168"),
    (
        m.Renewed((("h", 9),), (("i", Cause.LOST("no")),), ("j",)),
        "94a772656e657765649192a168099192a16992ae6c6f73745f776974685f70656572a26e6f91a16a",
    ),
    (m.Landed(3, 1, 7, 4096, 2**64 - 1, 9), "98a66c616e646564030107cd1000cfffffffffffffffff09c2"),
    (m.Landed(3, 1, 7, 4096, None, coded=True), "98a66c616e646564030107cd1000c000c3"),
    (
        m.Written(1, True, True, 5, 1, 0.5, None),
        "9da77772697474656e01c3c30501cb3fe0000000000000c0c200c0c400c2",
    ),
    (
        m.Written(
            1,
            False,
            True,
            5,
            1,
            0.5,
            Cause.PROTOCOL("no"),
            again=True,
            epoch=9,
            attachment=b"a",
            on_device=True,
        ),
        "9da77772697474656e01c2c30501cb3fe000000000000092a870726f746f636f6ca26e6fc309c0c40161c3",
    ),
]


@pytest.mark.parametrize(
    ("message", "frame"),
    FRAMES,
    ids=lambda value: type(value).__name__ if isinstance(value, msgspec.Struct) else "",
)
def test_the_wire_format_of_version_8_does_not_change_by_accident(message, frame):
    assert m.PROTOCOL_VERSION == 8
    assert m.encode(message).hex() == frame.replace(" ", "")


def test_every_kind_of_message_has_its_frame_here():
    assert {type(message) for message, _ in FRAMES} | {m.Hello, m.Welcome} == {
        kind for kinds in KINDS.values() for kind in kinds
    }


def test_a_greeting_of_version_8_has_its_fields_in_this_order():
    meaning = m.CacheMeaning(named("model", "1f"), 8, 2)
    axes = PageAxes(1, 2, 16, 4, 128, 64, 4)
    region = Region("l", 0, 0, HeadInterval(0, 2), "int8", 4096, 4, 128, 128, axes)
    table = RegionTable((region,), (GroupGeometry(0, 16, 1, "Full"),))
    ours = m.Introduction(
        "D", "1", 1, meaning, "memory", b"card", table, 1 << 20, 8192, 64, 256, Naming("s", 16), MEMORY
    )
    read = msgspec.msgpack.decode(m.encode(m.Hello(8, ours)))
    assert read[:2] == ["hello", 8]
    entries = {"model": {"": "model"}, "weights": {"files": "1f"}}
    assert read[2][:6] == ["D", "1", 1, [[entries], 8, 2, 0, [0], 1, 1, 0], "memory", b"card"]
    (row,), geometry = read[2][6]
    assert row[:10] == ["l", 0, 0, [0, 2], "int8", 4096, 4, 128, 128, [1, 2, 16, 4, 128, 64, 4]]
    assert geometry == [[0, 16, 1, "Full"]]
    memory = ["boot pid", 4711, 5, b"0123456789abcdef", 4096, 1 << 20]
    assert read[2][7:] == [1 << 20, 8192, 64, 256, ["s", 16], memory, False]


@pytest.mark.parametrize(
    "changes",
    [
        {"machine": "m" * 257},
        {"pid": 0},
        {"pid": -1},
        {"pid": 2**31},
        {"descriptor": -1},
        {"descriptor": 2**31},
        {"nonce": b"short"},
        {"nonce": b"n" * 17},
        {"address": 0},
        {"address": 2**62},
        {"length_bytes": 0},
        {"length_bytes": 2**62},
    ],
    ids=str,
)
def test_a_card_of_shared_memory_that_no_node_makes_is_not_read(changes):
    meaning = m.CacheMeaning(named("model"), 8, 2)
    memory = msgspec.structs.replace(MEMORY, **changes)
    ours = m.Introduction("D", "1", 1, meaning, "memory", b"card", RegionTable((), ()), memory=memory)
    with pytest.raises(PeerError, match="a message that cannot be read"):
        m.decode(m.Side.PREFILL, m.encode(m.Hello(m.PROTOCOL_VERSION, ours)), LIMIT)


@pytest.mark.parametrize("side", list(m.Side))
def test_a_greeting_of_another_version_is_refused_for_that_whatever_it_has(side):
    short = ["D", "1", 0, ["model", 8, 2], "memory", b"card", [[], []]]
    tag = "hello" if side is m.Side.PREFILL else "welcome"
    with pytest.raises(PeerError, match="protocol version is .*6 on the"):
        m.decode(side, msgspec.msgpack.encode([tag, 6, short]), LIMIT)


@pytest.mark.parametrize(
    "message",
    [
        m.Hello(
            8,
            m.Introduction("D", "1", 0, m.CacheMeaning(named(), None, 10**10), "e", b"", RegionTable((), ())),
        ),
        m.Fetch(1, "h", -1, 1, 1.0),
        m.Fetch(1, "h", 1, 0, 1.0),
        m.Fetch(1, "h", 1, 257, 1.0),
        m.Fetch(1, "h", 1, 1, 1.0, (Chunk(-1, 1, ()),)),
        m.Fetch(1, "h", 1, 1, 1.0, (Chunk(0, 2**31, ()),)),
        m.Fetch(1, "h", 1, 1, 1.0, (Chunk(0, 1, (TokenSpan(0, -1, 1),)),)),
        m.Fetch(1, "h", 1, 1, 1.0, (Chunk(0, 1, (TokenSpan(4096, 0, 1),)),)),
        m.Fetch(1, "h", 1, 1, 1.0, (), (m.Grant(0, 1, 1),)),
        m.Fetch(1, "h", 1, 1, 1.0, (), (m.Grant(2**62, 1, 1),)),
        m.Fetch(1, "h", 1, 1, 1.0, (CHUNK,) * (m.MAX_CHUNKS + 1)),
        m.Fetch(1, "h", 1, 1, 1.0, (), (GRANT,) * (m.MAX_CHUNKS + 1)),
        m.CreditGrant(1, (m.Grant(4096, -1, 1),)),
        m.CreditGrant(1, (m.Grant(4096, 1, 0),)),
        m.CreditGrant(1, (m.Grant(-4096, 1, 1),)),
        m.CreditGrant(1, (GRANT,) * (m.MAX_CHUNKS + 1)),
        m.Release("h", 10**6),
        m.FindPrefix(1, Prefix(Naming("s", 0), 0, ()), 1),
        m.FindPrefix(1, Prefix(Naming("s" * 257, 16), 0, ()), 1),
        m.FindPrefix(1, Prefix(Naming("s", 16), 0, (b"",)), 1),
        m.FindPrefix(1, Prefix(Naming("s", 16), 0, (b"n" * 65,)), 1),
        m.FindPrefix(1, Prefix(Naming("s", 16), -1, ()), 1),
        m.FindPrefix(1, Prefix(Naming("s", 16), 0, (b"n",) * (MAX_NAMES + 1)), 1),
        m.Written(1, True, True, -1, 1, 0.1, None),
        m.Written(1, True, True, 1, -1, 0.1, None),
        m.Written(1, True, True, 2**62, 1, 0.1, None),
        m.Written(1, True, True, 1, 1, 0.1, None, attachment=bytes(m.MAX_ATTACHMENT_BYTES + 1)),
        m.Landed(1, -1, 1, 1, None),
        m.Landed(1, 2**31, 1, 1, None),
        m.Landed(1, 0, 0, 1, None),
        m.Landed(1, 0, 1, -1, None),
        m.Landed(1, 0, 1, 1, -1),
    ],
)
def test_numbers_out_of_bounds_are_not_read(message):
    (side,) = (side for side, kinds in KINDS.items() if isinstance(message, kinds))
    with pytest.raises(PeerError):
        m.decode(side, m.encode(message), LIMIT)


def test_messages_of_before_attachments_are_read_and_so_is_the_longest_attachment():
    longest = m.Written(1, True, True, 5, 1, 0.5, None, attachment=bytes(m.MAX_ATTACHMENT_BYTES))
    assert m.decode(m.Side.DECODE, m.encode(longest), LIMIT) == longest
    # Of an array with one element less.
    before = bytes.fromhex("9ba77772697474656e01c3c30501cb3fe0000000000000c0c200c0")
    assert m.decode(m.Side.DECODE, before, LIMIT).attachment == b""
    fetch = bytes.fromhex("99a5666574636801a1680a01cb403e0000000000009090cb7ff0000000000000")
    assert m.decode(m.Side.PREFILL, fetch, LIMIT) == m.Fetch(1, "h", 10, 1, 30.0)


def test_a_handle_that_no_node_makes_is_not_read():
    for length, is_read in ((m.LONGEST_HANDLE, True), (m.LONGEST_HANDLE + 1, False)):
        frame = m.encode(m.Fetch(1, "h" * length, 16, 1, 1.0))
        with contextlib.nullcontext() if is_read else pytest.raises(PeerError):
            m.decode(m.Side.PREFILL, frame, LIMIT)


@pytest.mark.parametrize("text", ["\x1b[2J", "lo\n", "\u202e"])
@pytest.mark.parametrize("field", ["device", "known_by", "refusal"])
def test_a_lane_that_would_change_how_a_log_is_shown_is_not_read(field, text):
    with pytest.raises(PeerError):
        m.decode(m.Side.DECODE, m.encode(m.Transport("tcp", **{field: text})), LIMIT)


def test_a_rank_listens_at_a_port():
    given = msgspec.msgpack.encode(RankAddress(0, "h", 65536))
    with pytest.raises(msgspec.ValidationError, match="<= 65535"):
        msgspec.msgpack.decode(given, type=RankAddress)
