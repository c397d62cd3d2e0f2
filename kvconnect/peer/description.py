"""The description of a worker: the answer to a question of the topic ``description``."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from kvconnect import __version__
from kvconnect.addresses import RankAddress
from kvconnect.errors import PeerError
from kvconnect.peer.messages import PROTOCOL_VERSION, Introduction

TOPIC = "description"

AnyAnswer = TypeVar("AnyAnswer", bound=msgspec.Struct)


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """A serving worker.

    Other releases read it too: they ignore unknown fields, and read the introduction only if the protocol
    version is theirs. ``clock_s`` is the worker's wall clock, by which handles expire. ``lane`` is the
    engine's own name for its transport. ``versions`` are package versions by name. ``introduced`` is the
    encoded ``Introduction``.
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
        """The worker's introduction. Raises ``PeerError``: another protocol version, or unreadable."""
        if self.protocol != PROTOCOL_VERSION:
            raise PeerError(f"protocol version is {self.protocol} on the peer, {PROTOCOL_VERSION} here")
        return read_answer(self.introduced, Introduction)


def introduced(introduction: Introduction) -> msgspec.Raw:
    """An introduction as a field of a ``Description``."""
    return msgspec.Raw(msgspec.msgpack.encode(introduction))


def read_answer(data: bytes, kind: type[AnyAnswer]) -> AnyAnswer:
    """Decode the data of an answer. Raises ``PeerError``: it is not of this ``kind``."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, ValueError) as error:
        raise PeerError(f"its {kind.__name__.lower()} cannot be read: {error}") from error
