"""The dictionary that travels with a request through a router, as D reads it.

It comes from a client: nothing in it is trusted further than its type and size.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

HANDLE_KEY = "kvconnect_handle"
"""Our key beside those that routers know."""

_LONGEST_TEXT = 512
_TEXT = re.compile(r"[!-~]+")
_HOST = re.compile(r"[A-Za-z0-9._:-]+")


class RemotePrefill(msgspec.Struct, frozen=True):
    """Where the KV of a request waits.

    ``refusal`` says why the dictionary is of no use; the other fields mean nothing then.
    """

    handle: str = ""
    engine_id: str = ""
    host: str = ""
    port: int = 0
    num_tokens: int = 0
    refusal: str = ""


_FIELDS: tuple[tuple[str, str, type], ...] = (
    (HANDLE_KEY, "handle", str),
    ("remote_engine_id", "engine_id", str),
    ("remote_host", "host", str),
    ("remote_port", "port", int),
    ("remote_num_tokens", "num_tokens", int),
)


def read_remote_prefill(params: Mapping[str, Any] | None) -> RemotePrefill | None:
    """Read ``kv_transfer_params`` on D. None where they do not ask for a fetch. Raises nothing."""
    if not params or not params.get("do_remote_prefill"):
        return None
    values: dict[str, Any] = {}
    for key, name, kind in _FIELDS:
        value = params.get(key)
        if not isinstance(value, kind) or isinstance(value, bool) or value in ("", 0):
            return RemotePrefill(
                refusal=f"kv_transfer_params.{key} is {_short(value)}, it must be a non-empty {kind.__name__}"
            )
        if isinstance(value, str) and len(value) > _LONGEST_TEXT:
            return RemotePrefill(
                refusal=f"kv_transfer_params.{key} has {len(value)} characters, accepted: {_LONGEST_TEXT}"
            )
        if isinstance(value, str) and not (_HOST if name == "host" else _TEXT).fullmatch(value):
            kinds = "a host name or address" if name == "host" else "printable ASCII without spaces"
            return RemotePrefill(refusal=f"kv_transfer_params.{key} is {_short(value)}, accepted: {kinds}")
        values[name] = value
    if not 0 < values["port"] <= 65535:
        return RemotePrefill(
            refusal=f"kv_transfer_params.remote_port is {values['port']}, accepted: 1 to 65535"
        )
    return RemotePrefill(**values)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
