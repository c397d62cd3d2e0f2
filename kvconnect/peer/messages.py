"""What two workers send each other: tagged, versioned, size-limited values. D asks, P has."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from typing import Annotated

import msgspec

from kvconnect.addresses import RankAddress
from kvconnect.cache.identity import Identity, Naming, Prefix
from kvconnect.cache.shard import Topology
from kvconnect.engine.lanes import Transport
from kvconnect.errors import PeerError
from kvconnect.outcome import Cause, Reason
from kvconnect.pack.shared_memory import SharedMemoryCard
from kvconnect.plan.align import TableCard
from kvconnect.plan.blocks import Count
from kvconnect.plan.chunks import Chunk

Rank = Annotated[int, msgspec.Meta(ge=0, lt=256)]
Ranks = Annotated[int, msgspec.Meta(ge=1, le=256)]
Stages = Annotated[tuple[Count, ...], msgspec.Meta(min_length=1, max_length=256)]
Tokens = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
Heads = Annotated[int, msgspec.Meta(ge=1, le=65536)]
Bytes = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
Address = Annotated[int, msgspec.Meta(gt=0, lt=2**62)]
Sample = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
Generation = Annotated[int, msgspec.Meta(gt=0, lt=2**62)]
Digest = Annotated[int, msgspec.Meta(ge=0)]
Epoch = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
MAX_CHUNKS = 65_536
MAX_HANDLES = 4096
"""Most handles that one message names."""
Chunks = Annotated[tuple[Chunk, ...], msgspec.Meta(max_length=MAX_CHUNKS)]


class Side(enum.Enum):
    """Which half of the protocol a worker speaks on a connection: D asks, P has."""

    DECODE = "decode"
    PREFILL = "prefill"


PROTOCOL_VERSION = 8
"""Peers with another version are refused. Our own number, so that serving stacks may differ."""


class CacheMeaning(msgspec.Struct, frozen=True, array_like=True):
    """What the bytes of a worker's cache are, for peers.

    ``identity`` is what they depend on; it is the same on all ranks of a node. ``held_back`` are the last
    tokens of a prompt that P leaves to D. What divides the cache over ranks need not be equal: see
    ``Topology``. A draft model's layers are numbered from ``draft_from`` on; 0 without one.
    """

    identity: Identity
    num_heads: Heads | None
    tensor: Ranks
    held_back: Count = 0
    stages: Stages = (0,)
    context: Ranks = 1
    interleave: Tokens = 1
    draft_from: Count = 0

    @property
    def topology(self) -> Topology:
        """How this side's cache is divided over its ranks."""
        return Topology(self.tensor, self.stages, self.context, self.interleave)

    def with_weights(self, weights: Mapping[str, str]) -> CacheMeaning:
        """The same of other weights."""
        return msgspec.structs.replace(self, identity=self.identity.replace(weights=weights))


class Introduction(msgspec.Struct, frozen=True, array_like=True):
    """Who a worker is and where its cache lies. Sent by both sides when they meet.

    ``incarnation`` changes with every start, also where an operator fixes the engine id.
    ``engine_card`` is opaque to all but the engine called ``engine``. ``slot_bytes`` is the largest
    chunk that this worker's slots take; 0 if it has none, as one that only offloads. Digests are of
    one line in ``digest_sample``, the smaller of both sides'. The scratch memory may be written by any peer
    at any time, to see how fast the link is; it is never read. ``naming`` is that of the KV which it keeps in
    host memory for peers that ask by name; None for none. ``memory`` is where peers of the same machine find
    its landing slots and scratch memory.
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
    naming: Naming | None = None
    memory: SharedMemoryCard | None = None


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """D to P, first on every connection."""

    version: int
    introduction: Introduction


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """P to D: the peers agree. ``directory`` is where P's other ranks listen.

    ``lease_s`` is how long P holds a request whose lease is not renewed, ``clock_s`` is P's clock.
    """

    version: int
    introduction: Introduction
    directory: tuple[RankAddress, ...]
    lease_s: float = 0.0
    clock_s: float = 0.0


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """P to D: they do not; ``text`` is for D's operator, ``cause`` the value of a ``Cause``.

    Of any protocol version: one before 8 sends no cause, and one after ours perhaps another.
    """

    version: int
    text: str
    cause: str = Cause.OTHER_RELEASE.value

    @property
    def reason(self) -> Reason:
        """Why they do not agree."""
        causes = (cause for cause in Cause if cause.value == self.cause)
        return next(causes, Cause.OTHER_RELEASE)(self.text)


class Grant(msgspec.Struct, frozen=True, array_like=True):
    """A landing slot of D, for one chunk. ``generation`` is never used for another."""

    address: Address
    length_bytes: Bytes
    generation: Generation


Grants = Annotated[tuple[Grant, ...], msgspec.Meta(max_length=MAX_CHUNKS)]


LONGEST_HANDLE = 512
"""Characters."""
Handle = Annotated[str, msgspec.Meta(max_length=LONGEST_HANDLE)]


class Fetch(msgspec.Struct, frozen=True, array_like=True, tag="fetch"):
    """D to P: send me these blocks of a held request.

    P writes ``chunks``, in any order, into granted slots. A fetch of nothing has none.

    ``consumers`` is how many ranks of D fetch from this rank; P frees after the last of them.
    P starts no write later than ``timeout_s`` after it received this, nor from ``until_s`` of its clock on:
    D's own time is not over then, however long this was under way.
    """

    transfer_id: int
    handle: Handle
    num_tokens: Count
    consumers: Ranks
    timeout_s: float
    chunks: Chunks = ()
    grants: Grants = ()
    until_s: float = math.inf


PIN_PREFIX = "pin:"
"""What every handle begins with that D chooses, and none that P does."""


class PinPrefix(msgspec.Struct, frozen=True, array_like=True, tag="pin"):
    """D to P: hold what you keep under these names, for its first ``num_tokens``, under this handle of mine.

    A lease like any other, which a ``Fetch`` of the handle opens; where there is none, that is its answer.
    """

    handle: Handle
    prefix: Prefix
    num_tokens: Count


class CreditGrant(msgspec.Struct, frozen=True, array_like=True, tag="granted"):
    """D to P: more slots for the chunks of a fetch."""

    transfer_id: int
    grants: Grants


class Accepted(msgspec.Struct, frozen=True, array_like=True, tag="accepted"):
    """P to D: a fetch has begun. What it sends belongs to the lease of this epoch, and to no other.

    Left out where chunks follow at once, which state the same.
    """

    transfer_id: int
    epoch: Epoch


class CreditRequest(msgspec.Struct, frozen=True, array_like=True, tag="wanted"):
    """P to D: so many chunks of a fetch, in all, can be packed by now, where not all could when it came.

    The slots of ``spared`` were not written, and will not be.
    """

    transfer_id: int
    chunks: Count
    spared: Annotated[tuple[Generation, ...], msgspec.Meta(max_length=MAX_CHUNKS)] = ()


class Landed(msgspec.Struct, frozen=True, array_like=True, tag="landed"):
    """P to D: a chunk lies in the slot of this generation, and P writes to it no more.

    ``digest`` is that of its bytes as they were packed, with the generation as seed; None for none.
    ``epoch`` is that of ``Accepted``, where that was not sent.
    """

    transfer_id: int
    chunk: Count
    generation: Generation
    length_bytes: Bytes
    digest: Digest | None
    epoch: Epoch = 0


class Written(msgspec.Struct, frozen=True, array_like=True, tag="written"):
    """P to D: the one answer to a fetch.

    ``quiescent``: P will not write to D's blocks and slots any more on behalf of this fetch.
    ``ok`` implies it, and that every byte was written under the lease of ``epoch``. ``again``: what was
    sent came from blocks that the prefill has lost since; it is being computed anew, and D may fetch it anew.
    ``unsettled``, where it is not quiescent, are the generations of the slots that may still be written; None
    where P does not know them.
    """

    transfer_id: int
    ok: bool
    quiescent: bool
    total_bytes: Bytes
    copies: Count
    seconds: float
    error: Reason | None
    again: bool = False
    epoch: Epoch = 0
    unsettled: Annotated[tuple[Generation, ...], msgspec.Meta(max_length=MAX_CHUNKS)] | None = None


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """D to P: stop a fetch. It is answered by ``Written``, also where P does not know it."""

    transfer_id: int


class Release(msgspec.Struct, frozen=True, array_like=True, tag="let_go"):
    """D to P: a rank that would have fetched this request will not. No answer."""

    handle: Handle
    consumers: Ranks


class Renew(msgspec.Struct, frozen=True, array_like=True, tag="renew"):
    """D to P: hold these requests on, I will still fetch them. Answered by ``Renewed``.

    A handle that is not held yet is remembered: D is notified when it is, or never will be.
    """

    handles: Annotated[tuple[Handle, ...], msgspec.Meta(max_length=MAX_HANDLES)]


class Renewed(msgspec.Struct, frozen=True, array_like=True, tag="renewed"):
    """P to D: the leases that go on, each with its epoch, and those that are over, each with the reason.

    A handle that P does not know is in ``unknown``; one whose prefill is under way in none of them. Also
    sent unasked, when a lease that D has renewed is over, or begins.
    """

    epochs: Annotated[tuple[tuple[str, Epoch], ...], msgspec.Meta(max_length=MAX_HANDLES)] = ()
    over: Annotated[tuple[tuple[str, Reason], ...], msgspec.Meta(max_length=MAX_HANDLES)] = ()
    unknown: Annotated[tuple[str, ...], msgspec.Meta(max_length=MAX_HANDLES)] = ()


class FindPrefix(msgspec.Struct, frozen=True, array_like=True, tag="find"):
    """D to P: how many tokens of this prefix, at most ``max_tokens``, do you keep?

    Nothing is held by it. Answered by ``PrefixFound`` with the same number.
    """

    number: Count
    prefix: Prefix
    max_tokens: Count


class PrefixFound(msgspec.Struct, frozen=True, array_like=True, tag="found"):
    """P to D: so many tokens are in host memory, those not wanted included, or 0, perhaps with the reason.

    ``total_bytes`` are those of this rank that a fetch of them would move. ``disk_tokens`` and ``disk_bytes``
    are the same with what is on disk, if that is more, and ``disk_s`` is how long that is read before.
    ``is_busy``: the error concerns this question only, the next one may be answered.
    """

    number: Count
    num_tokens: Count = 0
    total_bytes: Bytes = 0
    disk_tokens: Count = 0
    disk_bytes: Bytes = 0
    disk_s: float = 0.0
    error: Reason | None = None
    is_busy: bool = False


class Alive(msgspec.Struct, frozen=True, array_like=True, tag="alive"):
    """D to P while it waits for an answer, and now and then when it does not: are you still there?"""


class StillAlive(msgspec.Struct, frozen=True, array_like=True, tag="still_alive"):
    """P to D: the answer to ``Alive``."""


class Question(msgspec.Struct, frozen=True, array_like=True, tag="question"):
    """To P, from any client that the channel admits, before a greeting too: what is known of a topic?

    Nothing changes by it. It is answered by ``Answer`` with the same number; ``argument`` is the topic's own.
    """

    number: Count
    topic: Annotated[str, msgspec.Meta(max_length=64)]
    argument: Annotated[str, msgspec.Meta(max_length=4096)] = ""


class Answer(msgspec.Struct, frozen=True, array_like=True, tag="answer"):
    """From P: what P knows, in the encoding of the topic, or the error for which it cannot answer."""

    number: Count
    data: bytes
    error: str = ""


class Bad(msgspec.Struct, frozen=True, array_like=True, tag="bad"):
    """To the peer that sent a message which could not be used. Never answered."""

    reason: str


ToPrefill = (Hello | Fetch | CreditGrant | Cancel | Release | Renew | FindPrefix | PinPrefix) | (
    Alive | Question | Bad
)
ToDecode = (Welcome | Refused | Accepted | CreditRequest | Landed | Written | Renewed) | (
    PrefixFound | StillAlive | Answer | Transport | Bad
)
Message = ToPrefill | ToDecode

_encoder = msgspec.msgpack.Encoder()
_decoders = {Side.DECODE: msgspec.msgpack.Decoder(ToDecode), Side.PREFILL: msgspec.msgpack.Decoder(ToPrefill)}


def encode(message: Message) -> bytes:
    """The frame of a message."""
    return _encoder.encode(message)


def decode(side: Side, frame: bytes, max_bytes: int) -> ToPrefill | ToDecode:
    """Read a frame. Raises ``PeerError``: it is too long, or no message that the other side sends."""
    if len(frame) > max_bytes:
        raise PeerError(f"a message of {len(frame)} bytes, max_message_bytes is {max_bytes}")
    try:
        message: ToPrefill | ToDecode = _decoders[side].decode(frame)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        if version := _other_version(frame):
            text = f"protocol version is {version}, accepted: {PROTOCOL_VERSION}"
            raise PeerError(text, Cause.OTHER_RELEASE) from error
        raise PeerError(f"a message that cannot be read: {error}") from error
    return message


def _other_version(frame: bytes) -> int:
    """The version of a greeting, or of its answer, that is not ours; 0 for any other frame."""
    try:
        found = msgspec.msgpack.decode(frame, type=list[msgspec.Raw])
        tag = msgspec.msgpack.decode(found[0], type=str) if len(found) > 2 else ""
        version = msgspec.msgpack.decode(found[1], type=int) if tag in ("hello", "welcome") else 0
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return 0
    return version if version != PROTOCOL_VERSION else 0
