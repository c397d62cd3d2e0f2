"""Bodies and headers of the requests to each node, as pure functions of the client's request.

Nothing here logs: bodies and credentials must not appear in any log.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvconnect.node.http_server import REQUEST_ID, BadRequest

API_KEY_VARIABLE = "VLLM_API_KEY"
"""The environment variable that vLLM's servers read their key from, too."""
PARAMS = "kv_transfer_params"

# Parameters with which a prefill node keeps the blocks of a request for a decode node.
ASK_FOR_REMOTE_DECODE: Mapping[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@dataclass(frozen=True, slots=True)
class SideChannel:
    """The address of a prefill node's side channel, taken from the node's own answers.

    ``handle`` is one of its signed handles: a decode node trusts the address that a signed handle names.
    """

    host: str
    port: int
    engine_id: str
    handle: str = field(default="", compare=False)


_HOP_BY_HOP = {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection"}
_HOP_BY_HOP |= {"te", "trailer", "transfer-encoding", "upgrade"}
# Set for every node separately, because the body that they describe is rewritten.
_OF_THE_BODY = {"host", "content-length", "content-type", "content-encoding", "expect", "x-request-id"}
# Other routers' headers that name a node's peer: a client must not choose a peer.
_ROUTING = {"x-prefiller-host-port", "x-encoder-hosts-ports", "x-data-parallel-host-port"}
_ROUTING |= {"x-kv-cache-source-host-port"}


def at(value: Any, *path: str | int) -> Any:
    """The part of a decoded JSON value at a path of keys and indices; None where there is none."""
    for step in path:
        try:
            value = value[step]
        except (KeyError, IndexError, TypeError):
            return None
    return value


def decode_params(handed: Mapping[str, Any], *, is_batch: bool, is_several: bool) -> Mapping[str, Any] | None:
    """The parameters for a decode node, made from ``handed``, the prefill node's.

    None if its several requests cannot share them: other connectors free the blocks after the first load.
    """
    if not is_several:
        return handed
    if "kvconnect_handle" not in handed:
        return None
    if not is_batch:
        return handed
    channel, transfer_id = side_channel(handed), handed.get("transfer_id")
    return announced_decode(transfer_id, channel) if channel and isinstance(transfer_id, str) else None


def side_channel(params: Mapping[str, Any]) -> SideChannel | None:
    """The side channel of the node that returned these parameters; None if they do not name it."""
    host, port, engine_id = (params.get(f"remote_{name}") for name in ("host", "port", "engine_id"))
    if not isinstance(host, str) or not isinstance(port, int) or not isinstance(engine_id, str):
        return None
    handle = params.get("kvconnect_handle")
    return SideChannel(host, port, engine_id, handle if isinstance(handle, str) else "")


def announced_prefill(transfer_id: str) -> dict[str, Any]:
    """Parameters with which a prefill node keeps the blocks of a request under a known transfer id."""
    return {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}


def announced_decode(transfer_id: str, channel: SideChannel) -> dict[str, Any]:
    """Parameters with which a decode node fetches from a prefill node that is asked at the same time."""
    params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": transfer_id,
        "remote_host": channel.host,
        "remote_port": channel.port,
        "remote_engine_id": channel.engine_id,
    }
    return {**params, "kvconnect_peer": channel.handle} if channel.handle else params


def to_bytes(body: Mapping[str, Any]) -> bytes:
    """A body as JSON bytes. Raises ``BadRequest`` if it is nested too deeply."""
    try:
        return json.dumps(body, separators=(",", ":")).encode()
    except RecursionError:
        raise BadRequest("the request body is nested too deeply") from None


class WholeEvents:
    """Cuts an answer behind the events of a stream; any other answer is whole at its end."""

    def __init__(self, *, is_stream: bool) -> None:
        self._is_stream, self._held = is_stream, b""

    def take(self, data: bytes, *, is_end: bool) -> bytes:
        """What is whole with these bytes; at the end, all that is left."""
        held, self._held = self._held + data, b""
        if is_end:
            return held
        whole, ends, self._held = held.rpartition(b"\n\n") if self._is_stream else (b"", b"", held)
        return whole + ends


def request_headers(
    pairs: Iterable[tuple[str, str]], request_id: str, content_type: str = "application/json"
) -> list[tuple[str, str]]:
    """The headers for a node: the client's, without those of one connection or one body."""
    kept = [(k, v) for k, v in _end_to_end(pairs) if k.lower() not in _OF_THE_BODY | _ROUTING]
    return [*kept, ("Content-Type", content_type), (REQUEST_ID, request_id)]


def of_the_client(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """The headers that name the client: with those a node lets the router's own requests for it in."""
    return [(k, v) for k, v in headers if k.lower() in ("authorization", "x-api-key")]


def identity_encoding(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """The same headers, asking for an uncompressed answer."""
    return [(k, v) for k, v in headers if k.lower() != "accept-encoding"] + [("Accept-Encoding", "identity")]


def answer_headers(pairs: Iterable[tuple[str, str]], request_id: str) -> list[tuple[str, str]]:
    """The headers of the answer to the client: the node's, without those of one connection."""
    kept = [(k, v) for k, v in _end_to_end(pairs) if k.lower() != "x-request-id"]
    return [*kept, (REQUEST_ID, request_id)]


def _end_to_end(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    pairs = list(pairs)
    named = {
        name.strip().lower()
        for key, value in pairs
        if key.lower() == "connection"
        for name in value.split(",")
    }
    return [(k, v) for k, v in pairs if k.lower() not in _HOP_BY_HOP | named]
