"""What a worker reports about itself: the answer to the topic ``description`` of a question."""

from __future__ import annotations

import msgspec

from kvconnect import __version__
from kvconnect.errors import PeerError
from kvconnect.orders import RankAddress
from kvconnect.peer.messages import PROTOCOL_VERSION, Introduction

TOPIC = "description"


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that serves.

    Read by other releases too: fields that they do not know are ignored, and the introduction is read only
    where the protocol is the same. ``clock_s`` is the wall clock, by which handles expire. ``lane`` is how
    the engine reaches its peers, in its own words. ``versions`` are those of the packages that matter.
    """

    release: str = __version__
    protocol: int = PROTOCOL_VERSION
    clock_s: float
    role: str
    path: str
    lane: str
    lease_s: float
    versions: dict[str, str]
    directory: tuple[RankAddress, ...]
    introduced: msgspec.Raw

    @property
    def introduction(self) -> Introduction:
        """What a greeting would bring. Raises ``PeerError``: another protocol, or it cannot be read."""
        if self.protocol != PROTOCOL_VERSION:
            raise PeerError(f"protocol version is {self.protocol}, accepted: {PROTOCOL_VERSION}")
        try:
            return msgspec.msgpack.decode(self.introduced, type=Introduction)
        except (msgspec.MsgspecError, ValueError) as error:
            raise PeerError(f"its introduction cannot be read: {error}") from error


def introduced(introduction: Introduction) -> msgspec.Raw:
    """An introduction as a field of a ``Description``."""
    return msgspec.Raw(msgspec.msgpack.encode(introduction))


def read_description(data: bytes) -> Description:
    """The answer to a question for it. Raises ``PeerError``."""
    try:
        return msgspec.msgpack.decode(data, type=Description)
    except (msgspec.MsgspecError, ValueError) as error:
        raise PeerError(f"its description cannot be read: {error}") from error
