"""The messages between two workers: tagged, versioned and bounded values. D requests KV, P holds it.

Owns the encoding and the bounds of each field. It must not know which message is legal when: see ``session``.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from kvconnect.addresses import RankAddress
from kvconnect.cache.identity import Identity, Naming, Prefix
from kvconnect.cache.region_table import RegionTable
from kvconnect.cache.shard import Topology
from kvconnect.engine.lanes import Transport
from kvconnect.errors import PeerError
from kvconnect.outcome import Cause, Reason
from kvconnect.pack.shared_memory import SharedMemoryCard
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
MAX_ATTACHMENT_BYTES = 64 << 10
Chunks = Annotated[tuple[Chunk, ...], msgspec.Meta(max_length=MAX_CHUNKS)]


class Side(enum.Enum):
    """The role of a worker on one connection: D requests KV, P holds it."""

    DECODE = "decode"
    PREFILL = "prefill"


PROTOCOL_VERSION = 8
"""Peers with another version are refused. Independent of the serving stack, which may differ."""


class CacheMeaning(msgspec.Struct, frozen=True, array_like=True):
    """The meaning of the bytes in a worker's cache, for peers.

    ``identity`` is the same on all ranks of a node. ``held_back`` is the number of last prompt tokens that P
    leaves to D. ``num_heads`` counts the model's KV heads; None where all ranks keep the same bytes (MLA).
    Two nodes may have different topologies: see ``Topology``. A draft model's layers are numbered from
    ``draft_from`` on; 0 without a draft model.
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
        """How the node divides its cache over its ranks."""
        return Topology(self.tensor, self.stages, self.context, self.interleave)

    def with_weights(self, weights: Mapping[str, str]) -> CacheMeaning:
        """A copy with other names of weights."""
        return msgspec.structs.replace(self, identity=self.identity.replace(weights=weights))


class Introduction(msgspec.Struct, frozen=True, array_like=True):
    """A worker's name, cache meaning, region table and memory. Both sides send theirs in the greeting.

    ``incarnation`` changes with every start, also where an operator fixes the engine id.
    ``engine_card`` is opaque to all but the engine named ``engine``. ``slot_bytes`` is the largest chunk that
    fits this worker's slots; 0 if it has no slots, as a worker that only offloads. Digests cover one line in
    ``digest_sample``, the smaller of both sides' values. Any peer may write to the scratch memory at any time
    to measure the link; it is never read. ``naming`` is how the worker names the KV that peers may pull; None
    if they may not. ``memory`` lets peers of the same machine map its landing slots and scratch memory.
    ``decodes``: chunks for this worker may be coded by ``pack/exponent_code.py``.
    """

    engine_id: str
    incarnation: str
    rank: Rank
    meaning: CacheMeaning
    engine: str
    engine_card: bytes
    table: RegionTable
    slot_bytes: Bytes = 0
    scratch_address: Bytes = 0
    scratch_bytes: Bytes = 0
    digest_sample: Sample = 1
    naming: Naming | None = None
    memory: SharedMemoryCard | None = None
    decodes: bool = False


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """D to P: the greeting, the first message on every connection."""

    version: int
    introduction: Introduction


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """P to D: the two workers are compatible. ``directory`` has the addresses of P's ranks.

    ``lease_s`` is how long P holds a request without renewal. ``clock_s`` is P's clock: see ``Fetch``.
    """

    version: int
    introduction: Introduction
    directory: tuple[RankAddress, ...]
    lease_s: float = 0.0
    clock_s: float = 0.0


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """P to D: the two workers are incompatible, or P ends the session. ``text`` is for D's operator.

    ``cause`` is the value of a ``Cause``. Readable in every protocol version: versions before 8 send no
    cause, and later ones may send a cause that this release does not have.
    """

    version: int
    text: str
    cause: str = Cause.OTHER_RELEASE.value

    @property
    def reason(self) -> Reason:
        """The cause and the text; an unknown cause reads as ``Cause.OTHER_RELEASE``."""
        causes = (cause for cause in Cause if cause.value == self.cause)
        return next(causes, Cause.OTHER_RELEASE)(self.text)


class Grant(msgspec.Struct, frozen=True, array_like=True):
    """Credit for one write of one chunk to a landing slot of D. A ``generation`` is never used twice."""

    address: Address
    length_bytes: Bytes
    generation: Generation


Grants = Annotated[tuple[Grant, ...], msgspec.Meta(max_length=MAX_CHUNKS)]


LONGEST_HANDLE = 512
"""In characters."""
Handle = Annotated[str, msgspec.Meta(max_length=LONGEST_HANDLE)]


class Fetch(msgspec.Struct, frozen=True, array_like=True, tag="fetch"):
    """D to P: send these chunks of a held request.

    P writes ``chunks``, in any order, into granted slots. Without chunks nothing is sent.

    ``consumers`` is the number of D's ranks that fetch from this rank; P frees the blocks after the last one.
    P starts no write later than ``timeout_s`` after it received the message, nor from ``until_s`` of P's own
    clock on. The latter bounds writes by D's deadline however long the message was on its way. D has the
    tokens before ``first_token`` already.
    """

    transfer_id: int
    handle: Handle
    num_tokens: Count
    consumers: Ranks
    timeout_s: float
    chunks: Chunks = ()
    grants: Grants = ()
    until_s: float = math.inf
    first_token: Count = 0


PIN_PREFIX = "pin:"
"""Prefix of every handle that D chooses, and of no handle that P makes."""


class PinPrefix(msgspec.Struct, frozen=True, array_like=True, tag="pin"):
    """D to P: pin the KV of these names, up to ``num_tokens`` of the prompt, under a ``handle`` that D chose.

    It creates a lease like any other, and a ``Fetch`` of the handle opens it. There is no answer to this
    message: if P could not pin, the fetch fails.
    """

    handle: Handle
    prefix: Prefix
    num_tokens: Count


class CreditGrant(msgspec.Struct, frozen=True, array_like=True, tag="granted"):
    """D to P: a credit grant, that is, more landing slots for the chunks of a fetch."""

    transfer_id: int
    grants: Grants


class Accepted(msgspec.Struct, frozen=True, array_like=True, tag="accepted"):
    """P to D: a fetch has begun. Its chunks belong to the lease's ``epoch``.

    Not sent if chunks follow at once, since ``Landed`` has the epoch too.
    """

    transfer_id: int
    epoch: Epoch


class CreditRequest(msgspec.Struct, frozen=True, array_like=True, tag="wanted"):
    """P to D: a credit request, sent if P could not pack all chunks when the fetch came.

    P can pack ``chunks`` chunks of the fetch by now, in total. The slots with the generations ``spared`` were
    not written, and will not be.
    """

    transfer_id: int
    chunks: Count
    spared: Annotated[tuple[Generation, ...], msgspec.Meta(max_length=MAX_CHUNKS)] = ()


class Landed(msgspec.Struct, frozen=True, array_like=True, tag="landed"):
    """P to D: a chunk is complete in the slot of this generation, and P writes there no more.

    ``digest`` is the digest of the packed bytes with the generation as seed; None for none.
    ``epoch`` is the lease's epoch, as in ``Accepted``, where that message was not sent. ``coded``: the slot
    has the code of the packed bytes, of ``length_bytes``.
    """

    transfer_id: int
    chunk: Count
    generation: Generation
    length_bytes: Bytes
    digest: Digest | None
    epoch: Epoch = 0
    coded: bool = False


class Written(msgspec.Struct, frozen=True, array_like=True, tag="written"):
    """P to D: the one answer to a fetch.

    ``quiescent``: P will not write to D's memory any more on behalf of this fetch. ``ok`` implies that, and
    that every byte was written under the lease's ``epoch``. ``again``: the prefill has lost the blocks that
    were sent and computes them again, so D may repeat the fetch. ``unsettled``, if not quiescent, are the
    generations of the slots that may still be written; None if P does not know them. ``attachment``: what P's
    serving stack sends along with the KV. ``on_device``: KV that was fetched by name lay on P's device.
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
    attachment: Annotated[bytes, msgspec.Meta(max_length=MAX_ATTACHMENT_BYTES)] = b""
    on_device: bool = False


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """D to P: stop a fetch. P answers with ``Written``, also if it does not know the fetch."""

    transfer_id: int


class Release(msgspec.Struct, frozen=True, array_like=True, tag="let_go"):
    """D to P: one of the ``consumers`` ranks of D will not fetch this request. No answer."""

    handle: Handle
    consumers: Ranks


class Renew(msgspec.Struct, frozen=True, array_like=True, tag="renew"):
    """D to P: renew the leases of these handles, since D will still fetch them. Answered by ``Renewed``.

    P remembers a handle whose prefill is not done, and notifies D when its lease begins or cannot begin.
    """

    handles: Annotated[tuple[Handle, ...], msgspec.Meta(max_length=MAX_HANDLES)]


class Renewed(msgspec.Struct, frozen=True, array_like=True, tag="renewed"):
    """P to D: the renewed leases with their epochs, and the leases that are over with the reasons.

    A handle that P does not know is in ``unknown``. A handle whose prefill is under way is in no field. P
    also sends this message unasked when a lease that D has renewed begins or is over.
    """

    epochs: Annotated[tuple[tuple[str, Epoch], ...], msgspec.Meta(max_length=MAX_HANDLES)] = ()
    over: Annotated[tuple[tuple[str, Reason], ...], msgspec.Meta(max_length=MAX_HANDLES)] = ()
    unknown: Annotated[tuple[str, ...], msgspec.Meta(max_length=MAX_HANDLES)] = ()


class FindPrefix(msgspec.Struct, frozen=True, array_like=True, tag="find"):
    """D to P: how many tokens of this prefix, at most ``max_tokens``, does P keep?

    The question pins nothing. Answered by ``PrefixFound`` with the same ``number``.
    """

    number: Count
    prefix: Prefix
    max_tokens: Count


class PrefixFound(msgspec.Struct, frozen=True, array_like=True, tag="found"):
    """P to D: ``num_tokens`` of the prefix are in host memory, ``start_tokens`` included; 0 for none.

    ``total_bytes`` are the bytes that a fetch of these tokens from this rank would move. ``disk_tokens`` and
    ``disk_bytes`` count host memory and disk together, where that is more; ``disk_s`` is the time to read
    the disk first. ``is_busy``: the error concerns this question only, the next one may be answered.
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
    """D to P: a heartbeat, sent after a quarter of ``peer_timeout_s`` in which P sent nothing."""


class StillAlive(msgspec.Struct, frozen=True, array_like=True, tag="still_alive"):
    """P to D: the answer to ``Alive``."""


class Question(msgspec.Struct, frozen=True, array_like=True, tag="question"):
    """To P, from any client that the channel admits, also before a greeting: a question about a topic.

    It changes nothing on P. Answered by ``Answer`` with the same ``number``. The topic defines ``argument``.
    """

    number: Count
    topic: Annotated[str, msgspec.Meta(max_length=64)]
    argument: Annotated[str, msgspec.Meta(max_length=4096)] = ""


class Answer(msgspec.Struct, frozen=True, array_like=True, tag="answer"):
    """From P: the answer in the encoding of the topic, or the error that prevents an answer."""

    number: Count
    data: bytes
    error: str = ""


class Bad(msgspec.Struct, frozen=True, array_like=True, tag="bad"):
    """To the sender of a message that was unreadable or illegal. Never answered."""

    reason: str


ToPrefill = (Hello | Fetch | CreditGrant | Cancel | Release | Renew | FindPrefix | PinPrefix) | (
    Alive | Question | Bad
)
ToDecode = (Welcome | Refused | Accepted | CreditRequest | Landed | Written | Renewed) | (
    PrefixFound | StillAlive | Answer | Transport | Bad
)
Message = ToPrefill | ToDecode

_encoder = msgspec.msgpack.Encoder()
_decoders: dict[Side, msgspec.msgpack.Decoder[Any]] = {
    Side.DECODE: msgspec.msgpack.Decoder(ToDecode),
    Side.PREFILL: msgspec.msgpack.Decoder(ToPrefill),
}


def encode(message: Message) -> bytes:
    """Encode a message as one frame."""
    return _encoder.encode(message)


def decode(side: Side, frame: bytes, max_bytes: int) -> ToPrefill | ToDecode:
    """Decode a frame received as ``side``. Raises ``PeerError``: too long, or no message for this side."""
    if len(frame) > max_bytes:
        raise PeerError(f"a message of {len(frame)} bytes, accepted are {max_bytes}")
    try:
        message: ToPrefill | ToDecode = _decoders[side].decode(frame)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        if version := _other_version(frame):
            is_of_prefill = side is Side.DECODE
            versions = (version, PROTOCOL_VERSION) if is_of_prefill else (PROTOCOL_VERSION, version)
            raise PeerError.of(other_release(*versions)) from error
        raise PeerError(f"a message that cannot be read: {error}") from error
    return message


def other_release(prefill: int, decode: int) -> Reason:
    """Why nodes of two protocol versions exchange nothing."""
    text = f"protocol version is {prefill} on the prefill node, {decode} on the decode node"
    return Cause.OTHER_RELEASE(text)


def _other_version(frame: bytes) -> int:
    """The protocol version of a greeting or a welcome of another version; 0 for any other frame."""
    try:
        found = msgspec.msgpack.decode(frame, type=list[msgspec.Raw])
        tag = msgspec.msgpack.decode(found[0], type=str) if len(found) > 2 else ""
        version = msgspec.msgpack.decode(found[1], type=int) if tag in ("hello", "welcome") else 0
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return 0
    return version if version != PROTOCOL_VERSION else 0
