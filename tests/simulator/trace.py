"""The trace of a run as text: the same in every process, whatever its addresses are."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from kvconnect.errors import PeerError
from kvconnect.peer.messages import CreditGrant, Fetch, Hello, Welcome
from tests.simulator.frames import read_frame
from tests.simulator.world import START_S

_CARD = re.compile(r"/[0-9a-f]{12}\b")
"""What tells two cards of an engine apart in its name at a peer: made of addresses and chance."""


def format_event(event: Sequence[object]) -> str:
    """One line: when, who, what."""
    time, who, what, *details = event
    assert isinstance(time, float)
    if what == "says":
        link, data = details
        assert isinstance(link, str)
        assert isinstance(data, bytes)
        details = [f"to {link}:", _describe(link, data)]
    words = " ".join(str(detail) for detail in details)
    return _CARD.sub("/card", f"{time - START_S:10.4f}  {who:<10} {what} {words}".rstrip())


def _describe(link: str, data: bytes) -> str:
    try:
        message = read_frame(data, to_decode=link.startswith("in:"))
    except PeerError as error:
        return str(error)
    name = type(message).__name__
    match message:
        case Hello(introduction=who) | Welcome(introduction=who):
            return f"{name} {who.engine_id}/{who.rank} {who.incarnation}"
        case Fetch():
            return (
                f"Fetch {message.transfer_id} {message.handle} of {message.num_tokens} tokens, "
                f"{len(message.chunks)} chunks, {_granted(message)}, {message.timeout_s:.3f} s"
            )
        case CreditGrant():
            return f"CreditGrant {message.transfer_id}: {_granted(message)}"
    fields = [f"{key}={value}" for key, value in msgspec.structs.asdict(message).items()]
    return f"{name} {' '.join(fields)}"


def _granted(message: Fetch | CreditGrant) -> str:
    """Grants without their addresses, which differ between processes."""
    return f"slots {[grant.generation for grant in message.grants]}"
