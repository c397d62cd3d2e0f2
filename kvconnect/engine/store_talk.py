"""What a store's process and its parent send each other: frames of a length and a message."""

from __future__ import annotations

import enum
import socket
import struct
from typing import TypeVar

import msgspec

_LENGTH = struct.Struct("<I")
# Keys and codes of one batch; either end would rather stop than take more.
_MAX_FRAME_BYTES = 64 << 20

M = TypeVar("M", bound=msgspec.Struct)


class Verb(str, enum.Enum):
    """What a store can be ordered to do."""

    PUT = "put"
    GET = "get"
    EXIST = "exist"
    REMOVE = "remove"
    CLEAR = "clear"
    CLOSE = "close"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """How a store's process begins. ``parent`` and what follows are the parent's process to fill in.

    ``segment_bytes`` of the process's memory become part of the store. ``timeout_s`` is for one transfer of
    the library. ``memory`` and ``lanes`` are descriptors that the process inherits.
    """

    master: str
    metadata: str
    protocol: str
    host: str
    segment_bytes: int
    device_name: str = ""
    timeout_s: int = 5
    parent: int = 0
    memory: int = -1
    lanes: tuple[int, ...] = ()


class Order(msgspec.Struct, frozen=True, array_like=True):
    """One order. ``offsets`` and ``lengths`` are of values in the shared memory, by key."""

    verb: Verb
    keys: tuple[str, ...] = ()
    offsets: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()


class StoreAnswer(msgspec.Struct, frozen=True, array_like=True):
    """What became of an order: the library's code for each key, or an error. Also sent once at the start."""

    codes: tuple[int, ...]
    error: str = ""


def send(lane: socket.socket, message: msgspec.Struct) -> None:
    """Raises ``OSError``."""
    data = msgspec.msgpack.encode(message)
    lane.sendall(_LENGTH.pack(len(data)) + data)


def receive(lane: socket.socket, kind: type[M]) -> M | None:
    """The next message, or None if the other end is gone.

    Raises ``OSError``: nothing came in the lane's time; ``ValueError``: it is not such a message.
    """
    head = _exactly(lane, _LENGTH.size)
    if head is None:
        return None
    (length,) = _LENGTH.unpack(head)
    if length > _MAX_FRAME_BYTES:
        raise ValueError(f"a message of {length} bytes; accepted: up to {_MAX_FRAME_BYTES}")
    body = _exactly(lane, length)
    return None if body is None else msgspec.msgpack.decode(body, type=kind)


def _exactly(lane: socket.socket, length: int) -> bytes | None:
    found = bytearray()
    while len(found) < length:
        part = lane.recv(length - len(found))
        if not part:
            return None
        found += part
    return bytes(found)
