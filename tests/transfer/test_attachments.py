"""The wire format of what a serving stack sends along with the KV."""

from __future__ import annotations

import pytest

from kvconnect.errors import PeerError
from kvconnect.peer.messages import MAX_ATTACHMENT_BYTES, Fetch, Side, Written, decode, encode


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
