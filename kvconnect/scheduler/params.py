"""The dictionary that travels with a request through a router, as P and D read it.

It comes from a client: nothing in it is trusted further than its type and size.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from kvconnect.orders import RequestView

HANDLE_KEY = "kvconnect_handle"
"""Our key beside those that routers know."""

TRANSFER_KEY = "transfer_id"
"""What a router names a transfer, when it asks P and D at once."""

_TRANSFER_PREFIX = "transfer:"
# Random handles have no colon: nobody can name one of them with a transfer id.

_LONGEST_TEXT = 512
_TEXT = re.compile(r"[ -~]+")
_HOST = re.compile(r"[A-Za-z0-9._:-]+")
_DIGITS = re.compile(r"[0-9]{1,5}")


class RemotePrefill(msgspec.Struct, frozen=True):
    """Where the KV of a request waits, or will.

    ``engine_id`` empty: whichever engine answers there. ``num_tokens`` 0: not told.
    ``refusal`` says why the dictionary is of no use; the other fields mean nothing then.
    """

    handle: str = ""
    engine_id: str = ""
    host: str = ""
    port: int = 0
    num_tokens: int = 0
    refusal: str = ""


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


def read_transfer_id(params: Mapping[str, Any] | None) -> TransferId | None:
    """The transfer id of a request. None where it has none. Raises nothing."""
    if not params or params.get(TRANSFER_KEY) is None:
        return None
    try:
        return TransferId(_TRANSFER_PREFIX + _text(params, TRANSFER_KEY))
    except _Unusable as error:
        return TransferId(refusal=str(error))


def read_remote_prefill(params: Mapping[str, Any] | None) -> RemotePrefill | None:
    """Read ``kv_transfer_params`` on D. None where they do not ask for a fetch. Raises nothing.

    With a handle they are P's own answer. With a transfer id alone P is computing meanwhile, and
    neither its engine id nor its count of tokens need be known.
    """
    if not params or not params.get("do_remote_prefill"):
        return None
    try:
        if params.get(HANDLE_KEY) is None and params.get(TRANSFER_KEY) is not None:
            return RemotePrefill(
                handle=_TRANSFER_PREFIX + _text(params, TRANSFER_KEY),
                engine_id="" if params.get("remote_engine_id") is None else _text(params, "remote_engine_id"),
                host=_host(params),
                port=_port(params),
                num_tokens=0 if params.get("remote_num_tokens") is None else _num_tokens(params),
            )
        return RemotePrefill(
            handle=_text(params, HANDLE_KEY, _LONGEST_TEXT + len(_TRANSFER_PREFIX)),
            engine_id=_text(params, "remote_engine_id"),
            host=_host(params),
            port=_port(params),
            num_tokens=_num_tokens(params),
        )
    except _Unusable as error:
        return RemotePrefill(refusal=str(error))


def _text(params: Mapping[str, Any], key: str, longest: int = _LONGEST_TEXT) -> str:
    value = params.get(key)
    if not isinstance(value, str) or not value:
        raise _wrong(key, value, "it must be a non-empty str")
    if len(value) > longest:
        raise _Unusable(f"kv_transfer_params.{key} has {len(value)} characters, accepted: {longest}")
    if not _TEXT.fullmatch(value):
        raise _wrong(key, value, "accepted: printable ASCII")
    return value


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
