"""The dictionary that travels with a request through a router, as P and D read it.

It comes from a client: nothing in it is trusted further than its type and size, but for what a signed
handle says.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from kvconnect.errors import PeerError
from kvconnect.scheduler.handles import LONGEST_HANDLE, Claims, Handles
from kvconnect.scheduler.prompts import PROMPT_BYTES
from kvconnect.scheduler.stack import RequestView

HANDLE_KEY = "kvconnect_handle"
"""Our key beside those that routers know."""

TRANSFER_KEY = "transfer_id"
"""What a router names a transfer, when it asks P and D at once."""

PEER_KEY = "kvconnect_peer"
"""Any handle of P, also an expired one, beside a transfer id: it vouches for the address that D is told."""

_TRANSFER_PREFIX = "transfer:"
# Signed handles have no colon: no client can name one of them with a transfer id.

_LONGEST_TEXT = 512
_TEXT = re.compile(r"[ -~]+")
_HOST = re.compile(r"[A-Za-z0-9._:-]+")
_DIGITS = re.compile(r"[0-9]{1,5}")
_PROMPT = re.compile(f"[0-9a-f]{{{2 * PROMPT_BYTES}}}")


class RemotePrefill(msgspec.Struct, frozen=True):
    """Where the KV of a request waits, or will.

    ``engine_id`` empty: whichever engine answers there. ``num_tokens`` 0: not told. ``vouched``: a signed
    handle named the address, and no client did. ``is_announced``: P may be computing it yet.
    ``is_of_other_prompt``: the handle was made for another prompt. ``refusal`` says why the dictionary is of
    no use. With either of these two the others mean nothing.
    """

    handle: str = ""
    engine_id: str = ""
    host: str = ""
    port: int = 0
    num_tokens: int = 0
    vouched: bool = False
    is_of_other_prompt: bool = False
    refusal: str = ""
    is_announced: bool = False


class TransferId(msgspec.Struct, frozen=True):
    """The name that a router gave a transfer, as the handle it stands for, or why it cannot be used."""

    handle: str = ""
    refusal: str = ""


class _Unusable(Exception):
    """A field cannot be used. The text names it, its value and what is accepted."""


def transfer_params(request: RequestView) -> Mapping[str, Any]:
    """The dictionary of a request; empty where it has none, or something that is no dictionary.

    Some front ends let a client put any value there, and a scheduler must not end of it.
    """
    params: object = request.kv_transfer_params
    return params if isinstance(params, Mapping) else {}


def read_transfer_id(params: Mapping[str, Any] | None, prompt: bytes = b"") -> TransferId | None:
    """The transfer id of a request with this prompt. None where it has none. Raises nothing."""
    if not params or params.get(TRANSFER_KEY) is None:
        return None
    try:
        return TransferId(_transfer_handle(params, prompt))
    except _Unusable as error:
        return TransferId(refusal=str(error))


def read_remote_prefill(
    params: Mapping[str, Any] | None, handles: Handles, prompt: bytes | None = b""
) -> RemotePrefill | None:
    """Read ``kv_transfer_params`` on D. None where they do not ask for a fetch. Raises nothing.

    ``prompt`` is the digest of the tokens that the request wants; None where it only gives back what the
    handle stands for, which a transfer id without a handle does not name then.

    With a handle all is in it: some routers write another name of P's host beside it, which no worker
    connects to. With a transfer id alone P is computing meanwhile, and neither its engine id nor its count
    of tokens need be known.
    """
    if not params or not params.get("do_remote_prefill"):
        return None
    try:
        if params.get(HANDLE_KEY) is None and params.get(TRANSFER_KEY) is not None:
            return None if prompt is None else _announced(params, handles, prompt)
        return _held(params, handles, prompt)
    except _Unusable as error:
        return RemotePrefill(refusal=str(error))


def transfer_name(handle: str) -> str:
    """What a signed handle calls a transfer id, which may be longer than a handle has room for."""
    return _TRANSFER_PREFIX + hashlib.sha256(handle.encode()).hexdigest()[:32]


def _transfer_handle(params: Mapping[str, Any], prompt: bytes) -> str:
    """What P and D call a transfer: its id, and the prompt that it is of.

    A router may give one id to several prompts. P holds nothing under the name that D has for another one.
    """
    return f"{_TRANSFER_PREFIX}{prompt.hex()}{':' if prompt else ''}{_text(params, TRANSFER_KEY)}"


def announced_id(handle: str) -> str:
    """The router's transfer id in a name, whatever prompt it is of; empty for other handles."""
    if not handle.startswith(_TRANSFER_PREFIX):
        return ""
    name = handle.removeprefix(_TRANSFER_PREFIX)
    prompt, colon, transfer_id = name.partition(":")
    return transfer_id if colon and _PROMPT.fullmatch(prompt) else name


def _held(params: Mapping[str, Any], handles: Handles, prompt: bytes | None) -> RemotePrefill:
    """P's own answer."""
    handle = _text(params, HANDLE_KEY, LONGEST_HANDLE)
    claims = _claims(handles, HANDLE_KEY, handle)
    _check_contradictions(params, claims, ("remote_engine_id", "remote_num_tokens"))
    if prompt is not None and claims.prompt != prompt:
        return RemotePrefill(is_of_other_prompt=True)
    if claims.name.startswith(_TRANSFER_PREFIX):
        handle = _transfer_handle(params, claims.prompt)
        if transfer_name(handle) != claims.name:
            raise _wrong(TRANSFER_KEY, params[TRANSFER_KEY], f"{HANDLE_KEY} was signed for another one")
    return RemotePrefill(
        handle, claims.engine_id, claims.host, claims.port, claims.num_tokens, handles.are_signed
    )


def _announced(params: Mapping[str, Any], handles: Handles, prompt: bytes) -> RemotePrefill:
    """What a router says while P is computing."""
    remote = RemotePrefill(
        handle=_transfer_handle(params, prompt),
        engine_id="" if params.get("remote_engine_id") is None else _engine_id(params),
        host=_host(params),
        port=_port(params),
        num_tokens=0 if params.get("remote_num_tokens") is None else _num_tokens(params),
        is_announced=True,
    )
    if params.get(PEER_KEY) is None:
        return remote
    claims = _claims(handles, PEER_KEY, _text(params, PEER_KEY, LONGEST_HANDLE), even_expired=True)
    # It was made for another request, so of that it says nothing.
    _check_contradictions(params, claims, ("remote_host", "remote_port"))
    return msgspec.structs.replace(remote, vouched=handles.are_signed)


def _claims(handles: Handles, key: str, handle: str, *, even_expired: bool = False) -> Claims:
    try:
        return handles.read(handle, even_expired=even_expired)
    except PeerError as error:
        raise _Unusable(f"kv_transfer_params.{key} is of no use: {error}") from error


def _check_contradictions(params: Mapping[str, Any], claims: Claims, keys: Sequence[str]) -> None:
    """Routers repeat what P said beside its handle. What is there must be readable, and ``keys`` the same."""
    for key, read in _REPEATED.items():
        signed = getattr(claims, key.removeprefix("remote_"))
        if params.get(key) is not None and read(params) != signed and key in keys:
            raise _wrong(key, params[key], f"its handle says {signed!r}")


def _text(params: Mapping[str, Any], key: str, longest: int = _LONGEST_TEXT) -> str:
    value = params.get(key)
    if not isinstance(value, str) or not value:
        raise _wrong(key, value, "it must be a non-empty str")
    if len(value) > longest:
        raise _Unusable(f"kv_transfer_params.{key} has {len(value)} characters, accepted: {longest}")
    if not _TEXT.fullmatch(value):
        raise _wrong(key, value, "accepted: printable ASCII")
    return value


def _engine_id(params: Mapping[str, Any]) -> str:
    return _text(params, "remote_engine_id")


def _host(params: Mapping[str, Any]) -> str:
    value = _text(params, "remote_host")
    if not _HOST.fullmatch(value):
        raise _wrong("remote_host", value, "accepted: a host name or address")
    return value


def _port(params: Mapping[str, Any]) -> int:
    value = params.get("remote_port")
    # Routers that keep the parameters in a protocol buffer know no integers, and some write ports as text.
    if isinstance(value, str) and _DIGITS.fullmatch(value):
        value = int(value)
    port = _integer("remote_port", value)
    if not 0 < port <= 65535:
        raise _Unusable(f"kv_transfer_params.remote_port is {port}, accepted: 1 to 65535")
    return port


def _num_tokens(params: Mapping[str, Any]) -> int:
    count = _integer("remote_num_tokens", params.get("remote_num_tokens"))
    if count < 1:
        raise _wrong("remote_num_tokens", count, "it must be at least 1")
    return count


_REPEATED: Mapping[str, Callable[[Mapping[str, Any]], object]] = {
    "remote_engine_id": _engine_id,
    "remote_host": _host,
    "remote_port": _port,
    "remote_num_tokens": _num_tokens,
}
"""What stands in the dictionary as well as in the handle, and how it is read there."""


def _integer(key: str, value: object) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise _wrong(key, value, "it must be a non-empty int")
    return value


def _wrong(key: str, value: object, accepted: str) -> _Unusable:
    return _Unusable(f"kv_transfer_params.{key} is {_short(value)}, {accepted}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
