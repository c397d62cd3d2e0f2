"""What a serving stack sends along with the KV, fetches that are reported, and blocks that are revoked."""

from __future__ import annotations

import pytest

from kvconnect.errors import PeerError
from kvconnect.outcome import Cause
from kvconnect.peer.messages import MAX_ATTACHMENT_BYTES, Fetch, Side, Written, decode, encode
from kvconnect.transfer.orders import Reports


def test_what_comes_with_a_request_and_why_one_was_not_sent_is_reported_once():
    reports = Reports(0)
    reports.received("a", None, b"rows")
    reports.received("b", Cause.LOST("gone"), b"void")
    reports.sent("c")
    reports.sent("d", Cause.LEASE_OVER("late"))
    found = reports.take()
    assert found.received == ("a", "b")
    assert found.attachments == {"a": b"rows"}
    assert set(found.failed) == {"b"}
    assert found.sent == ("c", "d")
    assert set(found.unsent) == {"d"}
    assert not reports.take()


def test_a_fetch_counts_more_than_a_release_of_another_rank():
    reports = Reports(0)
    for first_token in (-1, 8, -1):
        reports.wanted("h", first_token)
    reports.wanted("i", -1)
    assert reports.take().wanted == {"h": 8, "i": -1}


def test_messages_of_before_attachments_are_read():
    written = encode(Written(1, True, True, 5, 1, 0.5, None, attachment=b"rows"))
    assert decode(Side.DECODE, written, 1 << 20).attachment == b"rows"
    longest = Written(1, True, True, 5, 1, 0.5, None, attachment=bytes(MAX_ATTACHMENT_BYTES))
    assert decode(Side.DECODE, encode(longest), 1 << 20) == longest
    too_long = Written(1, True, True, 5, 1, 0.5, None, attachment=bytes(MAX_ATTACHMENT_BYTES + 1))
    with pytest.raises(PeerError):
        decode(Side.DECODE, encode(too_long), 1 << 20)
    # Of an array with one element less.
    before = bytes.fromhex("9ba77772697474656e01c3c30501cb3fe0000000000000c0c200c0")
    assert decode(Side.DECODE, before, 1 << 20).attachment == b""
    fetch = bytes.fromhex("99a5666574636801a1680a01cb403e0000000000009090cb7ff0000000000000")
    assert decode(Side.PREFILL, fetch, 1 << 20) == Fetch(1, "h", 10, 1, 30.0)
