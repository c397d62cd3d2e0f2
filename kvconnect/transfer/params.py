"""``kv_transfer_params``, which travel with a request through a router, as P and D read them.

They come from a client: no field is trusted beyond its type and size, except a signed handle's claims.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec

from kvconnect.addresses import split_address
from kvconnect.config import RELEASE_KEY
from kvconnect.errors import PeerError
from kvconnect.outcome import Cause, Reason
from kvconnect.peer.handles import Claims, Handles, Host, NumTokens, Port
from kvconnect.peer.messages import LONGEST_HANDLE
from kvconnect.transfer.orders import PeerKey
from kvconnect.transfer.stack import RequestView

HANDLE_KEY = "kvconnect_handle"
"""Key of P's handle, beside the keys that routers know."""

TRANSFER_KEY = "transfer_id"
"""Key of a router's name for a transfer that it sends to P and D at once."""

PEER_KEY = "kvconnect_peer"
"""Key of any handle of P, also an expired one, beside a transfer id: it proves the address of P to D."""

BATCH_KEY = "kvconnect_batch"
"""Key of P's own transfer id for the later prompts of a batch: P's answer covers only the first."""

SOURCES_KEY = "kv_sources"
"""Key of the nodes that may keep a request's KV, each as ``host:port`` of its rank 0."""

HINTS_KEY, RESULTS_KEY = "kv_hints", "kv_hint_results"
"""Keys of a client's hints on what to keep, and of their results."""

_MOST_SOURCES = 64

MOST_LATER_PROMPTS = 256
NO_REQUEST = (
    "no request is held under this handle on the prefill node: its lease is over, its prefill was aborted, "
    "the node was restarted, or its prompt for the same transfer id is another one"
)

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
    RELEASE_KEY: _TEXT,
    SOURCES_KEY: (
        Annotated[list[_Address], msgspec.Meta(max_length=_MOST_SOURCES)],
        f"a list of at most {_MOST_SOURCES} host:port",
    ),
    "remote_engine_id": _TEXT,
    "remote_host": (Host, "a host name or address"),
    "remote_port": (Port, "1 to 65535"),
    "remote_num_tokens": (NumTokens, "a number of tokens, at least 1"),
}
"""The fields that are read: the type of each, and how an error names the accepted values."""


class RemotePrefill(msgspec.Struct, frozen=True):
    """Where P holds the KV of a request, or will hold it.

    ``num_tokens`` 0: unknown. ``vouched``: a signed handle states the address. ``is_announced``: P may still
    be computing. ``is_of_other_prompt``: the handle was made for another prompt, and of the other fields only
    ``identity`` is valid: the marks of what P's KV depends on. ``refusal``: why the parameters are unusable;
    the other fields are void then. ``duplicate``: a handle, if any, under which P may hold the same prompt
    again, for a fetch that will not come.
    """

    handle: str = ""
    peer: PeerKey = ("", "", 0)
    num_tokens: int = 0
    vouched: bool = False
    is_of_other_prompt: bool = False
    identity: bytes = b""
    refusal: Reason | None = None
    is_announced: bool = False
    duplicate: str = ""


def transfer_params(request: RequestView) -> Mapping[str, Any]:
    """A request's parameters; empty if there are none, or a client's value is not a dictionary."""
    params: object = request.kv_transfer_params
    return params if isinstance(params, Mapping) else {}


def is_release(params: Mapping[str, Any]) -> bool:
    """Whether a request only ends leases: it asks for no fetch."""
    return params.get(RELEASE_KEY) is not None and not params.get("do_remote_decode")


def read_release(params: Mapping[str, Any]) -> str:
    """A router's name for what P holds for a request; empty without one. Raises ``PeerError``: unusable."""
    return "" if params.get(RELEASE_KEY) is None else str(_read(params, RELEASE_KEY))


def read_transfer_id(params: Mapping[str, Any], prompt: bytes = b"") -> str:
    """The handle of a transfer id, with the prompt's digest: a router may reuse an id for other prompts.

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
    """Read ``kv_transfer_params`` on D. None if they ask for no fetch. Raises nothing.

    ``prompt``: the digest of the tokens that the request needs; None for a request that only releases its
    handle, which a transfer id alone does not name. A handle states everything, and fields that routers write
    beside it are ignored unless they contradict. With only a transfer id P is still computing, and its engine
    id and count of tokens may be unknown. ``is_later_prompt``: a prompt of a batch for whose first prompt the
    handle was made.
    """
    if not params or not params.get("do_remote_prefill") or is_release(params):
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
    """The sources that a client names for a request. Raises ``PeerError``: they are not valid addresses."""
    if params.get(SOURCES_KEY) is None:
        return []
    found = [split_address(address) for address in _read(params, SOURCES_KEY)]
    known = [address for address in found if address is not None]
    if len(known) < len(found):
        raise _unusable(params, SOURCES_KEY, f"accepted: {_FIELDS[SOURCES_KEY][1]}")
    return known


def transfer_name(handle: str) -> str:
    """A transfer id's name in a signed handle: a digest, as the id may be too long for a handle."""
    return _TRANSFER_PREFIX + hashlib.sha256(handle.encode()).hexdigest()[:32]


def _held(params: Mapping[str, Any], handles: Handles, prompt: bytes | None) -> RemotePrefill:
    """Read P's own answer, which has a handle."""
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
    peer = claims.engine_id, claims.host, claims.port
    return RemotePrefill(handle, peer, claims.num_tokens, handles.are_signed)


def _batched(params: Mapping[str, Any], handles: Handles, prompt: bytes) -> RemotePrefill:
    """Read P's answer for the first prompt of a batch, for a later prompt: it proves the address."""
    _, claims = _claims(params, HANDLE_KEY, handles, same=("remote_engine_id",))
    handle = read_transfer_id({TRANSFER_KEY: _read(params, BATCH_KEY)}, prompt)
    if claims.prompt == prompt:
        # The batch has the first prompt twice, or P got only that one: P surely holds its own handle.
        return msgspec.structs.replace(_held(params, handles, prompt), duplicate=handle)
    peer = claims.engine_id, claims.host, claims.port
    return RemotePrefill(handle, peer, vouched=handles.are_signed)


def _announced(params: Mapping[str, Any], handles: Handles, prompt: bytes) -> RemotePrefill:
    """Read what a router states while P is computing."""
    if params.get("remote_host") is None and params.get("remote_bootstrap_addr") is not None:
        return _introduced(params, handles, prompt)
    engine_id = "" if params.get("remote_engine_id") is None else _read(params, "remote_engine_id")
    remote = RemotePrefill(
        handle=read_transfer_id(params, prompt),
        peer=(engine_id, _read(params, "remote_host"), _read(params, "remote_port")),
        num_tokens=0 if params.get("remote_num_tokens") is None else _read(params, "remote_num_tokens"),
        is_announced=True,
    )
    if params.get(PEER_KEY) is None:
        return remote
    # That handle is of another request, and states nothing about this one.
    _claims(params, PEER_KEY, handles, same=("remote_host", "remote_port"), even_expired=True)
    return msgspec.structs.replace(remote, vouched=handles.are_signed)


def _introduced(params: Mapping[str, Any], handles: Handles, prompt: bytes) -> RemotePrefill:
    """Read a Mooncake router's parameters: the engine id is a handle, the answer of P's bootstrap."""
    try:
        _, claims = _claims(params, "remote_engine_id", handles, same=(), even_expired=True)
    except PeerError as error:
        raise PeerError(
            f"{error}; the bootstrap_port of a prefill node with KVConnect answers one"
        ) from error
    handle, peer = read_transfer_id(params, prompt), (claims.engine_id, claims.host, claims.port)
    return RemotePrefill(handle, peer, vouched=handles.are_signed, is_announced=True)


def _claims(
    params: Mapping[str, Any], key: str, handles: Handles, *, same: Sequence[str], even_expired: bool = False
) -> tuple[str, Claims]:
    """A handle and its claims. Fields in ``same`` must not contradict what the handle states."""
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
    """A checked field. Not strict: routers with protocol buffers know no integers, and some write text."""
    kind, accepted = _FIELDS[key]
    try:
        return msgspec.convert(params.get(key), kind, strict=False)
    except (msgspec.ValidationError, ValueError) as error:
        # A lone surrogate is valid text in JSON, but not in msgspec.
        raise _unusable(params, key, f"accepted: {accepted}") from error


def _unusable(params: Mapping[str, Any], key: str, why: str) -> PeerError:
    return PeerError(f"kv_transfer_params.{key} is {_shown(params, key)}, {why}")


def _shown(params: Mapping[str, Any], key: str) -> str:
    try:
        text = repr(params.get(key))
    except RecursionError:
        return "nested too deeply"
    return text if len(text) <= 80 else text[:77] + "..."
