"""What the front's process and the engine's tell each other, and how messages are told apart in a stream.

Each is a MessagePack array after its length in four bytes. Both ends are processes of one node: what does not
decode is a bug, and ends the link.
"""

from __future__ import annotations

import enum
import json
import struct
from typing import Any, TypeVar

import msgspec

from kvconnect.node.front.port import NodeInfo, Submission
from kvconnect.node.output import Failure, Output

M = TypeVar("M")

LONGEST_FRAME_BYTES = 256 << 20
_LENGTH = struct.Struct("<I")


class Look(enum.Enum):
    """What can be seen of an engine."""

    ALIVE = "alive"
    METRICS = "metrics"
    STATE = "state"


class Submit(msgspec.Struct, array_like=True, tag="submit"):
    """A request. ``params`` are its transfer parameters as JSON, which knows larger integers."""

    number: int
    request_id: str
    prompt_token_ids: list[int]
    max_tokens: int
    params: bytes | None


class Abort(msgspec.Struct, array_like=True, tag="abort"):
    """The client of a request left."""

    number: int


class Ask(msgspec.Struct, array_like=True, tag="ask"):
    """Look into the engine. One question of each kind is open at most."""

    look: Look


class Listening(msgspec.Struct, array_like=True, tag="listening"):
    """The front takes connections."""


class Hello(msgspec.Struct, array_like=True, tag="hello"):
    """The first message to a front: what it serves. The listening sockets travel with it."""

    info: NodeInfo
    num_sockets: int


class End(msgspec.Struct, array_like=True):
    """The last output of a request."""

    number: int
    token_ids: list[int]
    draft_token_ids: list[int] | None
    finish_reason: str | None
    failure: Failure | None
    kv_transfer_params: Any
    kv_block_ids: list[list[int]] | None
    cached_tokens: int


class News(msgspec.Struct, array_like=True, tag="news"):
    """All outputs of one step: number, tokens and draft tokens of requests that go on, and ends."""

    tokens: list[tuple[int, list[int], list[int] | None]]
    ends: list[End]


class Seen(msgspec.Struct, array_like=True, tag="seen"):
    """What a look found: ``data`` of ``content_type``, or whether the engine is alive."""

    look: Look
    alive: bool = False
    data: bytes = b""
    content_type: str = ""


class Refuse(msgspec.Struct, array_like=True, tag="refuse"):
    """Take no new request from now on."""


class Stop(msgspec.Struct, array_like=True, tag="stop"):
    """Nothing follows: write what is there to the clients, and end."""


ToEngine = Submit | Abort | Ask | Listening
ToFront = Hello | News | Seen | Refuse | Stop

_encoder = msgspec.msgpack.Encoder()


def encode_frame(message: Any) -> bytes:
    """A message with its length.

    Raises:
        TypeError, OverflowError, ValueError: it holds what MessagePack does not know.
    """
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Cuts what arrives of a stream into messages of one type."""

    def __init__(self, kind: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """The messages that are complete now.

        Raises:
            msgspec.MsgspecError: one does not decode.
            ValueError: one is longer than any is.
        """
        rest = self._rest
        rest += data
        found, at = [], 0
        while len(rest) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(rest, at)
            if length > LONGEST_FRAME_BYTES:
                raise ValueError(f"a message of {length} bytes, the longest is {LONGEST_FRAME_BYTES}")
            end = at + _LENGTH.size + length
            if len(rest) < end:
                break
            found.append(self._decoder.decode(memoryview(rest)[at + _LENGTH.size : end]))
            at = end
        del rest[:at]
        return found


def submit_of(number: int, submission: Submission) -> Submit:
    """A request for the wire."""
    params = submission.kv_transfer_params
    return Submit(
        number,
        submission.request_id,
        submission.prompt_token_ids,
        submission.max_tokens,
        None if params is None else json.dumps(params).encode(),
    )


def submission_of(message: Submit) -> Submission:
    """The request of a message."""
    params = None if message.params is None else json.loads(message.params)
    return Submission(message.request_id, message.prompt_token_ids, message.max_tokens, params)


def end_of(number: int, output: Output) -> End:
    """A last output for the wire."""
    return End(
        number,
        list(output.token_ids),
        None if output.draft_token_ids is None else list(output.draft_token_ids),
        output.finish_reason,
        output.failure,
        output.kv_transfer_params,
        None if output.kv_block_ids is None else list(output.kv_block_ids),
        output.cached_tokens,
    )


def output_of(end: End) -> Output:
    """The last output of a message."""
    return Output(
        tuple(end.token_ids),
        None if end.draft_token_ids is None else tuple(end.draft_token_ids),
        end.finish_reason,
        end.failure,
        end.kv_transfer_params,
        None if end.kv_block_ids is None else tuple(end.kv_block_ids),
        end.cached_tokens,
    )
