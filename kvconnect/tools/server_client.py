"""Asks servers over HTTP, vLLM's or ours, for their model, a completion, metrics and their workers."""

from __future__ import annotations

import os
import random
import time
import uuid
from collections.abc import Mapping
from typing import Any

from kvconnect.addresses import split_address
from kvconnect.errors import ConfigError, PeerError
from kvconnect.metrics import PREFIX
from kvconnect.node.children import Samples, fetch, fetch_json, parse_metrics
from kvconnect.node.http_server import REQUEST_ID
from kvconnect.router.bodies import API_KEY_VARIABLE

_METRICS_TIMEOUT_S = 10.0
_ANSWER_TIMEOUT_S = 300.0
_REPORTED_WITHIN_S = 10.0


def served_model(url: str) -> Mapping[str, Any]:
    """The first model of a server, as ``/v1/models`` describes it. Raises ``PeerError``."""
    match fetch_json(f"{url}/v1/models", headers=_headers()):
        case {"data": [{"id": str()} as model, *_]}:
            return dict(model)
    raise PeerError(f"{url}/v1/models names no model")


def complete(url: str, model: str, prompt: str, request_id: str = "", **more: Any) -> Mapping[str, Any]:
    """A server's whole greedy answer to a text. Raises ``PeerError``: an error, or no answer."""
    body = {"model": model, "prompt": prompt, "temperature": 0, **more}
    headers = {**_headers(), REQUEST_ID: request_id or uuid.uuid4().hex}
    match fetch_json(f"{url}/v1/completions", body, _ANSWER_TIMEOUT_S, headers):
        case {"choices": [{"text": str()}, *_]} as answer:
            return dict(answer)
    raise PeerError(f"{url}/v1/completions answered without a completion")


def random_text(characters: int, seed: int) -> str:
    """Words of random letters: no server has the KV of their beginning."""
    draw = random.Random(seed)
    words = (
        "".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 7))) for _ in range(characters)
    )
    return " ".join(words)[:characters]


def read_samples(url: str) -> Samples:
    """The metrics of a server. Raises ``PeerError``."""
    page = url.removesuffix("/metrics") + "/metrics"
    try:
        return parse_metrics(fetch(page, timeout_s=_METRICS_TIMEOUT_S, headers=_headers()).decode())
    except (PeerError, ValueError) as error:
        raise PeerError(f"{page} does not show the metrics of a server: {error}") from error


def side_channels(given: str, where: str) -> list[tuple[str, int]]:
    """The side channel at ``HOST:PORT``, or those of all workers of the server at a URL.

    A vLLM server reports its workers with the first request that it serves: it is sent a short one, if it
    has served none yet.

    Raises:
        ConfigError: neither of both; ``where`` names the option in the message.
        PeerError: no server answers, or none of its workers reports its side channel.
    """
    if not given.startswith(("http://", "https://")):
        if (address := split_address(given)) is None:
            raise ConfigError(
                f"{where} is {given!r}; accepted: HOST:PORT of a side channel, or the URL of a server, as "
                "http://HOST:PORT"
            )
        return [address]
    url = given.rstrip("/").removesuffix("/metrics")
    if found := _reported(read_samples(url)):
        return found
    # Longer than a token: on some processors vLLM's CPU kernels die of a first request with one.
    complete(url, str(served_model(url)["id"]), random_text(100, time.time_ns()), max_tokens=1)
    deadline = time.monotonic() + _REPORTED_WITHIN_S
    while not (found := _reported(read_samples(url))):
        if time.monotonic() > deadline:
            raise PeerError(
                f"{url}/metrics has no {PREFIX}_side_channel: this server has no kvconnect connector, or "
                "shows no metrics of it (vLLM's --disable-log-stats); start it with a kv_transfer_config, or "
                "give HOST:PORT of a side channel, which its log has"
            )
        time.sleep(0.1)
    return found


def _reported(samples: Samples) -> list[tuple[str, int]]:
    """The side channels in a server's metrics, in order of data-parallel engines and ranks."""
    found = []
    for (name, labels), value in samples.items():
        stated = dict(labels)
        address = split_address(stated.get("address", ""))
        if name.endswith(f"{PREFIX}_side_channel") and value and address is not None:
            found.append((stated.get("engine", ""), int(stated.get("rank", 0)), address))
    return [address for _, _, address in sorted(found)]


def _headers() -> dict[str, str]:
    """The API key that clients of vLLM's servers have, where the environment has it, as the router's own."""
    key = os.environ.get(API_KEY_VARIABLE, "")
    return {"Authorization": f"Bearer {key}"} if key else {}
