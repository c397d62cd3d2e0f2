"""What a worker reports about itself: the answer to the topic ``description`` of a question."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from kvconnect import __version__
from kvconnect.addresses import RankAddress
from kvconnect.errors import PeerError
from kvconnect.peer.messages import PROTOCOL_VERSION, Introduction

TOPIC = "description"

_Answer = TypeVar("_Answer", bound=msgspec.Struct)


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
        return read_answer(self.introduced, Introduction)


def introduced(introduction: Introduction) -> msgspec.Raw:
    """An introduction as a field of a ``Description``."""
    return msgspec.Raw(msgspec.msgpack.encode(introduction))


def read_answer(data: bytes, kind: type[_Answer]) -> _Answer:
    """What a worker answered to a question. Raises ``PeerError``: it is something else."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, ValueError) as error:
        raise PeerError(f"its {kind.__name__.lower()} cannot be read: {error}") from error
