"""Handles: P's claims about a request that it holds, protected against changes by routers and clients.

A handle is text for ``kv_transfer_params``: a version, the claims, and a code over both. With a secret the
code is HMAC-SHA256, so that only nodes with the secret can make handles; without a secret it is a checksum.
Pure: secret and clock are arguments.
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
"""The tolerated difference between the clocks of two nodes when a handle's expiry is checked."""

_SIGNED, _UNSIGNED = "s3.", "u3."
_CODE_BYTES = 32
Host = Annotated[str, msgspec.Meta(max_length=LONGEST_HANDLE, pattern=r"^[A-Za-z0-9._:-]+\Z")]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
NumTokens = Annotated[int, msgspec.Meta(ge=1, le=MOST_TOKENS)]


class Claims(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The content of a handle: P, at ``host`` and ``port``, holds ``num_tokens`` tokens under ``name``.

    ``epoch`` names one run of P's scheduler and is made at its start. ``name`` is random for each request, or
    stands for the router's transfer id. ``prompt`` is the digest of the tokens: a handle opens one load of
    one prompt. ``expires_at`` is in seconds of the wall clock. ``identity`` is ``Identity.marks`` of P, which
    leaves out the weights.
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
    """Makes and reads handles, with the cluster's signing ``secret`` and a wall ``clock`` in seconds."""

    def __init__(self, secret: bytes = b"", clock: Callable[[], float] = lambda: 0.0) -> None:
        self._secret, self.clock = secret, clock
        self.are_signed = bool(secret)
        """Whether claims are authenticated: made by a node that has the secret."""

    def make(self, claims: Claims) -> str:
        """The handle for these claims. Raises ``ConfigError``: engine id and host make it too long."""
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
        """A handle that opens no load; it only vouches for an address, for any engine there."""
        return self.make(Claims("", "", "introduction", 1, host, port, expires_at=0.0))

    def read(self, handle: str, *, even_expired: bool = False) -> Claims:
        """The claims of a handle that a node of this cluster made.

        Raises:
            PeerError: the text is no handle, was changed, is signed with another secret, or has expired.
        """
        version, data = _split(handle)
        if version != (_SIGNED if self._secret else _UNSIGNED):
            if self._secret:
                raise PeerError("it is not signed: the prefill node is insecure, this one has keys")
            raise PeerError("it is signed: the prefill node has keys, this one is insecure")
        code, payload = data[:_CODE_BYTES], data[_CODE_BYTES:]
        if not hmac.compare_digest(code, self._code(version, payload)):
            raise PeerError(
                "its signature is wrong: the prefill node has another key (compare `kvconnect keys show` on "
                "both nodes), or the handle was changed on its way"
            )
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
    """A random text that cannot be guessed, for names of requests, epochs and secrets."""
    return secrets.token_urlsafe(24)


class PeerTrust:
    """The addresses that D may connect to: those in ``allowed``, or, if it is empty, the ``max_named`` ones
    that signed handles named last, and loopback addresses."""

    def __init__(self, allowed: AllowList, max_named: int) -> None:
        self._allowed = allowed if allowed else None
        self._max_named = max_named
        self._named: dict[tuple[str, int], None] = {}

    def refusal(self, host: str, port: int, *, vouched: bool) -> Reason | None:
        """Why D must not connect to an address; None if it may. ``vouched``: a signed handle names it."""
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


def _split(handle: str) -> tuple[str, bytes]:
    """Version and content of a handle. Only the canonical base64 text of the content is accepted."""
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
    """The digest of a prompt's tokens and ``keys``: adapters, images, a salt. 16 bytes.

    Two prompts have the same digest only if they have the same tokens and the same ``keys`` in order.
    """
    digest = hashlib.blake2b(struct.pack("<Q", len(token_ids)), digest_size=PROMPT_BYTES)
    # Four bytes per token, little endian.
    packed = array("I")
    try:
        # Takes less than half the time of ``struct.pack``, which needs a tuple of all tokens.
        packed.fromlist(token_ids if isinstance(token_ids, list) else list(token_ids))
        if sys.byteorder == "big":
            packed.byteswap()
        digest.update(packed)
    except (OverflowError, TypeError):
        # No vocabulary has such tokens, but a client may send them. Padded to more bytes than the same
        # number of valid tokens take, so that the two never collide.
        digest.update(repr(list(token_ids)).encode().ljust(4 * len(token_ids) + 1))
    for key in keys:
        digest.update(struct.pack("<I", len(key)))
        for part in key:
            data = part if isinstance(part, bytes) else str(part).encode("utf-8", "surrogatepass")
            digest.update(struct.pack("<cQ", type(part).__name__[:1].encode(), len(data)))
            digest.update(data)
    return digest.digest()
