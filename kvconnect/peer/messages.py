"""What two workers say to each other: tagged, versioned, size-limited values.

D is the side that asks, P the side that has. A frame is one message. ``decode`` never lets through
what it does not understand, and raises nothing but ``PeerError``.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvconnect.errors import PeerError
from kvconnect.orders import Count, GroupBlocks, RankAddress
from kvconnect.plan.align import TableCard, card_refusal
from kvconnect.plan.chunks import Chunk

Rank = Annotated[int, msgspec.Meta(ge=0, lt=256)]
Ranks = Annotated[int, msgspec.Meta(ge=1, le=256)]
Heads = Annotated[int, msgspec.Meta(ge=1, le=65536)]
Bytes = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
Address = Annotated[int, msgspec.Meta(gt=0, lt=2**62)]
Sample = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
Generation = Annotated[int, msgspec.Meta(gt=0, lt=2**62)]
Digest = Annotated[int, msgspec.Meta(ge=0)]
MAX_CHUNKS = 65_536
Chunks = Annotated[tuple[Chunk, ...], msgspec.Meta(max_length=MAX_CHUNKS)]

PROTOCOL_VERSION = 2
"""Peers with another version are refused. Our own number, so that serving stacks may differ."""


class CacheMeaning(msgspec.Struct, frozen=True, array_like=True):
    """What must be equal for one side's KV to mean the same on the other.

    ``model`` is the serving stack's fingerprint: architecture, weights and cache dtype, in words.
    """

    model: str
    num_heads: Heads | None
    world_size: Ranks


class Introduction(msgspec.Struct, frozen=True, array_like=True):
    """Who a worker is and where its cache lies. Sent by both sides when they meet.

    ``incarnation`` changes with every start, also where an operator fixes the engine id.
    ``engine_card`` is opaque to all but the engine called ``engine``. ``slot_bytes`` is the largest
    chunk that this worker's slots take; 0 if it has none, and the packed path is closed. Digests are of
    one line in ``digest_sample``, the smaller of both sides'. The scratch memory may be written by any peer
    at any time, to see how fast the link is; nobody reads it.
    """

    engine_id: str
    incarnation: str
    rank: Rank
    meaning: CacheMeaning
    engine: str
    engine_card: bytes
    table: TableCard
    slot_bytes: Bytes = 0
    scratch_address: Bytes = 0
    scratch_bytes: Bytes = 0
    digest_sample: Sample = 1


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """D to P, first on every connection."""

    version: int
    introduction: Introduction


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """P to D: the peers agree. ``directory`` is where P's other ranks listen."""

    version: int
    introduction: Introduction
    directory: tuple[RankAddress, ...]


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """P to D: they do not; the reason is for D's operator."""

    version: int
    reason: str


class Grant(msgspec.Struct, frozen=True, array_like=True):
    """A landing slot of D, for one chunk. ``generation`` is never used for another."""

    address: Address
    length_bytes: Bytes
    generation: Generation


Grants = Annotated[tuple[Grant, ...], msgspec.Meta(max_length=MAX_CHUNKS)]


class Fetch(msgspec.Struct, frozen=True, array_like=True, tag="fetch"):
    """D to P: send me these blocks of a held request.

    Over the direct path P writes into the blocks of ``groups``; where there are none, that path is
    closed. Over the packed path it writes ``chunks``, in any order, into granted slots; where there are
    none, that path is closed. If both are open P chooses one, and keeps to it.

    ``consumers`` is how many ranks of D fetch from this rank; P frees after the last of them.
    P starts no write later than ``timeout_s`` after it received this.
    """

    transfer_id: int
    handle: str
    num_tokens: Count
    groups: tuple[GroupBlocks, ...]
    consumers: Ranks
    timeout_s: float
    chunks: Chunks = ()
    grants: Grants = ()


class Granted(msgspec.Struct, frozen=True, array_like=True, tag="granted"):
    """D to P: more slots for the chunks of a fetch."""

    transfer_id: int
    grants: Grants


class Declined(msgspec.Struct, frozen=True, array_like=True, tag="declined"):
    """P to D: this fetch goes over the direct path, and its slots were not and will not be written."""

    transfer_id: int


class Landed(msgspec.Struct, frozen=True, array_like=True, tag="landed"):
    """P to D: a chunk lies in the slot of this generation, and P writes to it no more.

    ``digest`` is that of its bytes as they were packed, with the generation as seed; None for none.
    """

    transfer_id: int
    chunk: Count
    generation: Generation
    length_bytes: Bytes
    digest: Digest | None


class Written(msgspec.Struct, frozen=True, array_like=True, tag="written"):
    """P to D: the one answer to a fetch.

    ``quiet`` says that P will not write to D's blocks and slots any more on behalf of this fetch.
    ``ok`` implies it, and that every byte was written under a valid lease. ``again``: what was sent came
    from blocks that the prefill has lost since; it is being computed anew, and D may fetch it anew.
    """

    transfer_id: int
    ok: bool
    quiet: bool
    total_bytes: Bytes
    copies: Count
    seconds: float
    error: str
    again: bool = False


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """D to P: stop a fetch. It is answered by ``Written``, also where P does not know it."""

    transfer_id: int


class LetGo(msgspec.Struct, frozen=True, array_like=True, tag="let_go"):
    """D to P: a rank that would have fetched this request will not. No answer."""

    handle: str
    consumers: Ranks


class Alive(msgspec.Struct, frozen=True, array_like=True, tag="alive"):
    """D to P while it waits for an answer: I am still here, and so are my fetches."""


class StillAlive(msgspec.Struct, frozen=True, array_like=True, tag="still_alive"):
    """P to D: the answer to ``Alive``."""


class Bad(msgspec.Struct, frozen=True, array_like=True, tag="bad"):
    """To whoever sent something that could not be used. Never answered."""

    reason: str


ToPrefill = Hello | Fetch | Granted | Cancel | LetGo | Alive | Bad
ToDecode = Welcome | Refused | Declined | Landed | Written | StillAlive | Bad
Message = ToPrefill | ToDecode

_encoder = msgspec.msgpack.Encoder()
_to_prefill = msgspec.msgpack.Decoder(ToPrefill)
_to_decode = msgspec.msgpack.Decoder(ToDecode)


def encode(message: Message) -> bytes:
    """The frame of a message."""
    return _encoder.encode(message)


def decode_to_prefill(frame: bytes, max_bytes: int) -> ToPrefill:
    """Read a frame that D sent.

    Raises:
        PeerError: it is too long, or no message that D sends.
    """
    message: ToPrefill = _decode(_to_prefill, frame, max_bytes)
    return message


def decode_to_decode(frame: bytes, max_bytes: int) -> ToDecode:
    """Read a frame that P sent.

    Raises:
        PeerError: it is too long, or no message that P sends.
    """
    message: ToDecode = _decode(_to_decode, frame, max_bytes)
    return message


def _decode(decoder, frame: bytes, max_bytes: int):  # type: ignore[no-untyped-def]
    if len(frame) > max_bytes:
        raise PeerError(f"a message of {len(frame)} bytes, max_message_bytes is {max_bytes}")
    try:
        return decoder.decode(frame)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise PeerError(f"a message that cannot be read: {error}") from error


def disagreement(ours: Introduction, theirs: Introduction) -> str | None:
    """Why two workers cannot work together, naming what differs with both values; None if they can.

    The tables themselves are compared when they are lined up.
    """
    for what, our_value, their_value in (
        ("model", ours.meaning.model, theirs.meaning.model),
        ("number of KV heads", ours.meaning.num_heads, theirs.meaning.num_heads),
        ("engine", ours.engine, theirs.engine),
    ):
        if our_value != their_value:
            return f"{what} differ: {their_value!r} asks {our_value!r}"
    return card_refusal(theirs.table)
