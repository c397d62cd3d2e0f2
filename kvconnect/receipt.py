"""The receipt of a request: what served its prompt, signed with the cluster's key.

A receipt travels as JSON in the answer's ``kv_transfer_params`` and has text, whole numbers, lists and
objects only: its signature is HMAC-SHA256 over the JSON of all fields but ``signature``, in ASCII, with
sorted keys and without spaces. Pure: the secret is an argument.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from kvconnect.errors import PeerError

RECEIPT_KEY = "kvconnect_receipt"
"""The key of ``kv_transfer_params``: true asks for a receipt, an object is one."""

DEVICE, PEER, COMPUTED, UNSERVED = "device", "peer", "computed", "unserved"
"""Origins of a prompt's tokens, beside the tiers ``host``, ``disk`` and ``store``."""

LOADED = "loaded"
MOST_BYTES = 16384
_SIGNATURE = "signature"

_Count = Annotated[int, msgspec.Meta(ge=0)]


class LoadPart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A load of a request: of ``tokens`` that ``origin`` had, by ``ended``, which is ``loaded`` or a cause.

    ``bytes`` and ``us``: what was moved, over all ranks of the node, and the microseconds from the order to
    the report. ``digest``: of the digests of all chunks as they were checked where they landed, or of the
    names of the restored blocks. Of a peer: its engine id, ``address`` and ``lane``; ``by``, which is
    ``lease`` or ``name``; ``tier``, where it had the KV; ``identity``, the digest of what its KV depends on.
    """

    origin: str
    tokens: _Count
    ended: str
    bytes: _Count = 0
    us: _Count = 0
    digest: str = ""
    engine_id: str = ""
    address: str = ""
    lane: str = ""
    by: str = ""
    tier: str = ""
    identity: str = ""


class Receipt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What served the prompt of a request at one node.

    ``tokens``: the prompt's tokens by origin, which add up to ``prompt_tokens``; ``unserved`` are those of a
    request that ended before its first token. ``loads``: every load, also those that failed and whose tokens
    were computed. ``prompt``: the digest of tokens, adapter, images and salt. ``identity``: of this node's
    KV. ``handle``: the digest of the handle that a prefill node returned. ``issued_at``: seconds of the wall
    clock. ``waited_us``: from arrival to the last admission before the first token. ``prefill``: the receipt
    of the prefill node that held the KV.
    """

    request_id: str
    engine_id: str
    prompt: str
    prompt_tokens: _Count
    tokens: dict[str, _Count]
    issued_at: int
    version: int
    address: str = ""
    identity: str = ""
    loads: tuple[LoadPart, ...] = ()
    preemptions: _Count = 0
    waited_us: _Count = 0
    delivered: bool = False
    handle: str = ""
    prefill: dict[str, Any] = {}


def sign(receipt: Receipt, secret: bytes) -> dict[str, Any]:
    """The receipt as it travels; without a secret its signature is empty."""
    fields: dict[str, Any] = msgspec.to_builtins(receipt)
    return {**fields, _SIGNATURE: _code(_text(fields), secret) if secret else ""}


def verify(given: object, secret: bytes, most_bytes: int = MOST_BYTES) -> Receipt:
    """The receipt in a JSON value of at most ``most_bytes``.

    The signature also covers fields that this release does not know.

    Raises ``PeerError``: it is no receipt, was changed, is not signed, or is signed with another key.
    """
    if not isinstance(given, Mapping):
        raise PeerError(f"a receipt is an object, not {type(given).__name__}")
    fields = {name: value for name, value in given.items() if name != _SIGNATURE}
    signature = given.get(_SIGNATURE)
    if not isinstance(signature, str) or not signature:
        raise PeerError("it has no signature: the node that issued it has no key")
    text = _text(fields)
    if len(text) > most_bytes:
        raise PeerError(f"it has {len(text)} bytes of JSON, accepted: {most_bytes}")
    if not (secret and signature.isascii() and hmac.compare_digest(signature, _code(text, secret))):
        raise PeerError("its signature is wrong: it was changed, or its node has another key")
    try:
        receipt = msgspec.convert(fields, Receipt)
    except msgspec.ValidationError as error:
        raise PeerError(f"it cannot be read: {error}") from error
    if sum(receipt.tokens.values()) != receipt.prompt_tokens:
        raise PeerError(f"its tokens add up to {sum(receipt.tokens.values())}, not {receipt.prompt_tokens}")
    return receipt


def _text(fields: Mapping[str, Any]) -> str:
    try:
        return json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise PeerError(f"it is no JSON: {error}") from error


def _code(text: str, secret: bytes) -> str:
    return hmac.digest(secret, text.encode(), "sha256").hex()
