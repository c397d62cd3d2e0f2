"""The dictionary that travels with a request through a router, as P and D read it.

It comes from a client: nothing in it is trusted further than its type and size, but for what a signed
handle states.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec

from kvconnect.addresses import split_address
from kvconnect.errors import PeerError
from kvconnect.outcome import Cause, Reason
from kvconnect.peer.handles import PROMPT_BYTES, Claims, Handles, Host, NumTokens, Port
from kvconnect.peer.messages import LONGEST_HANDLE
from kvconnect.transfer.stack import RequestView

HANDLE_KEY = "kvconnect_handle"
"""Our key beside those that routers know."""

TRANSFER_KEY = "transfer_id"
"""What a router names a transfer, when it asks P and D at once."""

PEER_KEY = "kvconnect_peer"
"""Any handle of P, also an expired one, beside a transfer id: it vouches for the address that D is given."""

BATCH_KEY = "kvconnect_batch"
"""A transfer id of P's own, for the later prompts of a batch: a router is answered for the first alone."""

SOURCES_KEY = "kv_sources"
"""Where a request's KV may be kept, as ``host:port`` of rank 0 of each node."""

HINTS_KEY, RESULTS_KEY = "kv_hints", "kv_hint_results"
"""What a client wants kept, and what came of that."""

_MOST_SOURCES = 64

MOST_LATER_PROMPTS = 256

_TRANSFER_PREFIX = "transfer:"
# Signed handles have no colon: no client can name one of them with a transfer id.

_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=LONGEST_HANDLE, pattern=r"^[ -~]+\Z")]
_Address = Annotated[str, msgspec.Meta(max_length=LONGEST_HANDLE, pattern=r"^[][A-Za-z0-9._:-]+\Z")]
_TEXT = (_Text, f"printable ASCII, at most {LONGEST_HANDLE} characters")
_FIELDS: Mapping[str, tuple[Any, str]] = {
    HANDLE_KEY: _TEXT,
    TRANSFER_KEY: _TEXT,
    PEER_KEY: _TEXT,
    BATCH_KEY: _TEXT,
    SOURCES_KEY: (
        Annotated[list[_Address], msgspec.Meta(max_length=_MOST_SOURCES)],
        f"a list of at most {_MOST_SOURCES} host:port",
    ),
    "remote_engine_id": _TEXT,
    "remote_host": (Host, "a host name or address"),
    "remote_port": (Port, "1 to 65535"),
    "remote_num_tokens": (NumTokens, "a number of tokens, at least 1"),
}
"""What is read of it: the type of each field, and how an error names what is accepted."""

_PROMPT = re.compile(f"[0-9a-f]{{{2 * PROMPT_BYTES}}}")


class RemotePrefill(msgspec.Struct, frozen=True):
    """Where the KV of a request waits, or will.

    ``engine_id`` empty: any engine that answers there. ``num_tokens`` 0: unknown. ``vouched``: a signed
    handle named the address, and no client did. ``is_announced``: P may be computing it yet.
    ``is_of_other_prompt``: the handle was made for another prompt. ``identity`` are the marks of what P's KV
    depends on, empty where no handle states them. ``refusal`` states why the dictionary is
    unusable. With either of these two the others mean nothing. Under ``duplicate``, if any, P may hold the
    same prompt once more, for a fetch that does not come.
    """

    handle: str = ""
    engine_id: str = ""
    host: str = ""
    port: int = 0
    num_tokens: int = 0
    vouched: bool = False
    is_of_other_prompt: bool = False
    identity: bytes = b""
    refusal: Reason | None = None
    is_announced: bool = False
    duplicate: str = ""

    @property
    def peer(self) -> tuple[str, str, int]:
        """Engine, host and port."""
        return self.engine_id, self.host, self.port


def transfer_params(request: RequestView) -> Mapping[str, Any]:
    """The dictionary of a request; empty where it has none, or what some front ends let clients put there."""
    params: object = request.kv_transfer_params
    return params if isinstance(params, Mapping) else {}


def read_transfer_id(params: Mapping[str, Any], prompt: bytes = b"") -> str:
    """What P and D call a transfer: its id, and the prompt, since a router may give one to several.

    Raises:
        PeerError: there is no transfer id, or it cannot be used.
    """
    return f"{_TRANSFER_PREFIX}{prompt.hex()}{':' if prompt else ''}{_read(params, TRANSFER_KEY)}"


def read_remote_prefill(
    params: Mapping[str, Any] | None,
    handles: Handles,
    prompt: bytes | None = b"",
    *,
    is_later_prompt: bool = False,
) -> RemotePrefill | None:
    """Read ``kv_transfer_params`` on D. None where they do not ask for a fetch. Raises nothing.

    ``prompt`` is the digest of the tokens that the request wants; None where it only gives back what the
    handle stands for, which a transfer id without a handle does not name then. With a handle all is in it,
    also if routers write more beside it. With a transfer id alone P is computing meanwhile, and neither its
    engine id nor its count of tokens need be known. ``is_later_prompt``: of a batch, whose first prompt the
    handle was made for.
    """
    if not params or not params.get("do_remote_prefill"):
        return None
    try:
        if params.get(HANDLE_KEY) is None and params.get(TRANSFER_KEY) is not None:
            return None if prompt is None else _announced(params, handles, prompt)
        if is_later_prompt and prompt is not None and params.get(BATCH_KEY) is not None:
            return _batched(params, handles, prompt)
        return _held(params, handles, prompt)
    except PeerError as error:
        return RemotePrefill(refusal=Cause.PARAMETERS(str(error)))


def read_sources(params: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Nodes that may keep KV of a request, as a client names them. Raises ``PeerError``: not as accepted."""
    if params.get(SOURCES_KEY) is None:
        return []
    found = [split_address(address) for address in _read(params, SOURCES_KEY)]
    known = [address for address in found if address is not None]
    if len(known) < len(found):
        raise _unusable(params, SOURCES_KEY, f"accepted: {_FIELDS[SOURCES_KEY][1]}")
    return known


def transfer_name(handle: str) -> str:
    """What a signed handle calls a transfer id, which may be longer than a handle has room for."""
    return _TRANSFER_PREFIX + hashlib.sha256(handle.encode()).hexdigest()[:32]


def announced_id(handle: str) -> str:
    """The router's transfer id in a name, for any prompt; empty for other handles."""
    if not handle.startswith(_TRANSFER_PREFIX):
        return ""
    name = handle.removeprefix(_TRANSFER_PREFIX)
    prompt, colon, transfer_id = name.partition(":")
    return transfer_id if colon and _PROMPT.fullmatch(prompt) else name


def _held(params: Mapping[str, Any], handles: Handles, prompt: bytes | None) -> RemotePrefill:
    """P's own answer."""
    if params.get(HANDLE_KEY) is None:
        raise PeerError(
            f"kv_transfer_params have no {HANDLE_KEY}: another connector made them. Does the prefill node, "
            f"engine {_shown(params, 'remote_engine_id')}, run NixlConnector? Its kv_connector has to be "
            "KVConnect, as here; or the router drops what it does not know"
        )
    handle, claims = _claims(params, HANDLE_KEY, handles, same=("remote_engine_id", "remote_num_tokens"))
    if prompt is not None and claims.prompt != prompt:
        return RemotePrefill(is_of_other_prompt=True, identity=claims.identity)
    if claims.name.startswith(_TRANSFER_PREFIX):
        handle = read_transfer_id(params, claims.prompt)
        if transfer_name(handle) != claims.name:
            raise _unusable(params, TRANSFER_KEY, f"{HANDLE_KEY} was signed for another one")
    return RemotePrefill(
        handle, claims.engine_id, claims.host, claims.port, claims.num_tokens, handles.are_signed
    )


def _batched(params: Mapping[str, Any], handles: Handles, prompt: bytes) -> RemotePrefill:
    """P's answer for the first prompt of a batch, read for another prompt: it vouches for the address."""
    _, claims = _claims(params, HANDLE_KEY, handles, same=("remote_engine_id",))
    handle = read_transfer_id({TRANSFER_KEY: _read(params, BATCH_KEY)}, prompt)
    if claims.prompt == prompt:
        # The first prompt comes twice, or alone was asked of P: only its own handle is held in any case.
        return msgspec.structs.replace(_held(params, handles, prompt), duplicate=handle)
    return RemotePrefill(handle, claims.engine_id, claims.host, claims.port, vouched=handles.are_signed)


def _announced(params: Mapping[str, Any], handles: Handles, prompt: bytes) -> RemotePrefill:
    """What a router states while P is computing."""
    if params.get("remote_host") is None and params.get("remote_bootstrap_addr") is not None:
        return _introduced(params, handles, prompt)
    remote = RemotePrefill(
        handle=read_transfer_id(params, prompt),
        engine_id="" if params.get("remote_engine_id") is None else _read(params, "remote_engine_id"),
        host=_read(params, "remote_host"),
        port=_read(params, "remote_port"),
        num_tokens=0 if params.get("remote_num_tokens") is None else _read(params, "remote_num_tokens"),
        is_announced=True,
    )
    if params.get(PEER_KEY) is None:
        return remote
    # It was made for another request, so of that it states nothing.
    _claims(params, PEER_KEY, handles, same=("remote_host", "remote_port"), even_expired=True)
    return msgspec.structs.replace(remote, vouched=handles.are_signed)


def _introduced(params: Mapping[str, Any], handles: Handles, prompt: bytes) -> RemotePrefill:
    """The same by a router that speaks Mooncake's protocol: what P's bootstrap answered is its engine id."""
    try:
        _, claims = _claims(params, "remote_engine_id", handles, same=(), even_expired=True)
    except PeerError as error:
        raise PeerError(
            f"{error}; the bootstrap_port of a prefill node with KVConnect answers one"
        ) from error
    handle = read_transfer_id(params, prompt)
    where = claims.host, claims.port
    return RemotePrefill(handle, claims.engine_id, *where, vouched=handles.are_signed, is_announced=True)


def _claims(
    params: Mapping[str, Any], key: str, handles: Handles, *, same: Sequence[str], even_expired: bool = False
) -> tuple[str, Claims]:
    """A handle and what it states. Routers repeat that beside it: what is ``same`` must not contradict."""
    handle: str = _read(params, key)
    try:
        claims = handles.read(handle, even_expired=even_expired)
    except PeerError as error:
        raise PeerError(f"kv_transfer_params.{key} is of no use: {error}") from error
    for repeated in ("remote_engine_id", "remote_host", "remote_port", "remote_num_tokens"):
        signed = getattr(claims, repeated.removeprefix("remote_"))
        if params.get(repeated) is not None and _read(params, repeated) != signed and repeated in same:
            raise _unusable(params, repeated, f"its handle says {signed!r}")
    return handle, claims


def _read(params: Mapping[str, Any], key: str) -> Any:
    """A field, checked. Routers that keep them in a protocol buffer know no integers, and some write text."""
    kind, accepted = _FIELDS[key]
    try:
        return msgspec.convert(params.get(key), kind, strict=False)
    except (msgspec.ValidationError, ValueError) as error:
        # A lone surrogate is text to JSON and none to msgspec.
        raise _unusable(params, key, f"accepted: {accepted}") from error


def _unusable(params: Mapping[str, Any], key: str, why: str) -> PeerError:
    return PeerError(f"kv_transfer_params.{key} is {_shown(params, key)}, {why}")


def _shown(params: Mapping[str, Any], key: str) -> str:
    text = repr(params.get(key))
    return text if len(text) <= 80 else text[:77] + "..."
