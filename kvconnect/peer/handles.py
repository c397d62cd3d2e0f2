"""Handles: what P states about a request that it holds, so that no router or client can change it.

A handle is text for ``kv_transfer_params``: a version, the claims, and a code over both. With a secret
the code is HMAC-SHA256, and only who has the secret can make one; without it, it is a plain checksum.
Pure: secret and time are arguments.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
import struct
import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated

import msgspec

from kvconnect.addresses import is_loopback
from kvconnect.errors import ConfigError, PeerError
from kvconnect.outcome import Cause, Reason
from kvconnect.peer.allow_list import AllowList
from kvconnect.peer.messages import LONGEST_HANDLE

PROMPT_BYTES = 16
MOST_TOKENS = 2**31 - 1
MOST_SKEW_S = 60.0
"""How far the clocks of two nodes may be apart before a fresh handle counts as expired."""

_SIGNED, _UNSIGNED = "s3.", "u3."
_CODE_BYTES = 32
Host = Annotated[str, msgspec.Meta(max_length=LONGEST_HANDLE, pattern=r"^[A-Za-z0-9._:-]+\Z")]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
NumTokens = Annotated[int, msgspec.Meta(ge=1, le=MOST_TOKENS)]


class Claims(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a handle states: under which name P holds how many tokens of a request, and where.

    ``epoch`` is that of P's scheduler, made at its start. ``name`` is random, made anew for each request, or
    stands for the router's transfer id. ``prompt`` is the digest of those tokens: a handle opens one load of
    one prompt. ``expires_at`` is in seconds of the wall clock. ``identity`` are the marks of what P's KV
    depends on beside the prompt and the weights.
    """

    engine_id: str
    epoch: str
    name: str
    num_tokens: NumTokens
    host: Host
    port: Port
    expires_at: float
    prompt: Annotated[bytes, msgspec.Meta(max_length=PROMPT_BYTES)] = b""
    identity: Annotated[bytes, msgspec.Meta(max_length=64)] = b""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Claims)


class Handles:
    """Makes and reads handles, with what all nodes of a cluster sign with, and the wall clock in seconds."""

    def __init__(self, secret: bytes = b"", clock: Callable[[], float] = lambda: 0.0) -> None:
        self._secret, self.clock = secret, clock
        self.are_signed = bool(secret)
        """Whether what they state is beyond doubt."""

    def expiry(self, lease_s: float) -> float:
        """When a handle that is made now expires."""
        return self.clock() + lease_s

    def make(self, claims: Claims) -> str:
        """The handle of some claims. Raises ``ConfigError``: engine id and host make it too long."""
        version = _SIGNED if self._secret else _UNSIGNED
        payload = _encoder.encode(claims)
        text = base64.urlsafe_b64encode(self._code(version, payload) + payload).decode().rstrip("=")
        handle = version + text
        if len(handle) > LONGEST_HANDLE:
            raise ConfigError(
                f"kv_transfer_config.engine_id {claims.engine_id!r} and host {claims.host!r} make handles of "
                f"{len(handle)} characters, accepted: {LONGEST_HANDLE}; choose shorter ones"
            )
        return handle

    def introduce(self, host: str, port: int) -> str:
        """A handle that opens no load, and vouches for the address of any engine there."""
        return self.make(Claims("", "", "introduction", 1, host, port, expires_at=0.0))

    def read(self, handle: str, *, even_expired: bool = False) -> Claims:
        """The claims of a handle that a node of this cluster made.

        Raises:
            PeerError: it is none, was changed, is signed with another secret, or has expired.
        """
        version, data = _split(handle)
        if version != (_SIGNED if self._secret else _UNSIGNED):
            if self._secret:
                raise PeerError("it is not signed: the prefill node is insecure, this one has keys")
            raise PeerError("it is signed: the prefill node has keys, this one is insecure")
        code, payload = data[:_CODE_BYTES], data[_CODE_BYTES:]
        if not hmac.compare_digest(code, self._code(version, payload)):
            raise PeerError("its signature is wrong: it was changed, or signed with another key than ours")
        try:
            claims = _decoder.decode(payload)
        except (msgspec.MsgspecError, ValueError) as error:
            raise PeerError(f"its content cannot be read: {error}") from error
        late_s = self.clock() - claims.expires_at
        if late_s > MOST_SKEW_S and not even_expired:
            raise PeerError(f"it expired {late_s:.0f} s ago by this node's clock")
        return claims

    def _code(self, version: str, payload: bytes) -> bytes:
        data = version.encode() + payload
        if self._secret:
            return hmac.digest(self._secret, data, "sha256")
        return hashlib.sha256(data).digest()


def new_handle() -> str:
    """A handle that cannot be guessed."""
    return secrets.token_urlsafe(24)


class PeerTrust:
    """Addresses that D may fetch from: those ``allowed``, or, if that is empty, what handles named last."""

    def __init__(self, allowed: AllowList, max_named: int) -> None:
        self._allowed = allowed if allowed else None
        self._max_named = max_named
        self._named: dict[tuple[str, int], None] = {}

    def refusal(self, host: str, port: int, *, vouched: bool) -> Reason | None:
        """Why an address must not be connected to, or nothing. ``vouched``: by a signed handle, no client."""
        where = f"kv_transfer_params.remote_host and remote_port are {host}:{port}"
        if self._allowed is not None:
            if self._allowed.allows(host, port):
                return None
            return Cause.NOT_TRUSTED(f"{where}, which kv_connector_extra_config.allow_peers does not have")
        if vouched:
            self._named.pop((host, port), None)
            self._named[host, port] = None
            if len(self._named) > self._max_named:
                del self._named[next(iter(self._named))]
            return None
        if (host, port) in self._named or is_loopback(host):
            return None
        return Cause.NOT_TRUSTED(
            f"{where}, which no signed handle has named; accepted: peers of a handle, and those in "
            "kv_connector_extra_config.allow_peers"
        )


def epoch_of(handle: str) -> str:
    """The epoch that a handle names; empty where it is none. Unchecked: good only to refuse a handle for."""
    try:
        return _decoder.decode(_split(handle)[1][_CODE_BYTES:]).epoch
    except (PeerError, msgspec.MsgspecError, ValueError):
        return ""


def _split(handle: str) -> tuple[str, bytes]:
    """Version and content of a handle, which has exactly one spelling: no second one passes for another."""
    version, text = handle[:3], handle[3:]
    if len(handle) > LONGEST_HANDLE or version not in (_SIGNED, _UNSIGNED):
        raise PeerError("it is no handle of kvconnect, or of another version")
    try:
        data = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except ValueError as error:
        raise PeerError(f"it is cut or changed: {error}") from error
    if base64.urlsafe_b64encode(data).decode().rstrip("=") != text or len(data) <= _CODE_BYTES:
        raise PeerError("it is cut or changed")
    return version, data


def digest_prompt(token_ids: Sequence[int], keys: Iterable[Sequence[str | int | bytes]] = ()) -> bytes:
    """The digest of tokens, and of what they are computed with besides: adapters, images, a salt.

    Two prompts have the same one only if they have the same tokens and the same ``keys`` in the same order.
    """
    digest = hashlib.blake2b(struct.pack("<Q", len(token_ids)), digest_size=PROMPT_BYTES)
    # Four bytes a token, the lowest first.
    packed = array("I")
    try:
        # Less than half the time of ``struct.pack``, which makes a tuple of all tokens first.
        packed.fromlist(token_ids if isinstance(token_ids, list) else list(token_ids))
        if sys.byteorder == "big":
            packed.byteswap()
        digest.update(packed)
    except (OverflowError, TypeError):
        # No vocabulary has such tokens, but a client may send them. Longer than as many that fit.
        digest.update(repr(list(token_ids)).encode().ljust(4 * len(token_ids) + 1))
    for key in keys:
        digest.update(struct.pack("<I", len(key)))
        for part in key:
            data = part if isinstance(part, bytes) else str(part).encode("utf-8", "surrogatepass")
            digest.update(struct.pack("<cQ", type(part).__name__[:1].encode(), len(data)))
            digest.update(data)
    return digest.digest()
