"""Reading the frames that workers of a simulation exchange."""

from __future__ import annotations

from kvconnect.peer.messages import Message, Side, decode

_LARGEST_BYTES = 1 << 30
_TAG_BYTES = 10


def tag_of(data: bytes) -> bytes:
    """Where a frame says what it is: most need not be read for more."""
    return data[:_TAG_BYTES]


def read_frame(data: bytes, *, to_decode: bool) -> Message:
    """The message of a frame.

    Raises:
        PeerError: it is none that this side of a conversation is sent.
    """
    return decode(Side.DECODE if to_decode else Side.PREFILL, data, _LARGEST_BYTES)
