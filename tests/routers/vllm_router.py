"""vllm-router as its users install it, before servers of any kind, and clients of it.

It has an environment of its own (``make setup-routers``), and knows nothing of kvconnect.
"""

from __future__ import annotations

import http.client
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from kvconnect.node.children import Child, fetch_json
from tests.ports import free_port

ENVIRONMENT = Path(os.environ.get("KVCONNECT_ROUTERS", Path(__file__).parents[2] / ".venv-routers"))
ANSWER_TIMEOUT_S = 120
CONCURRENT = 16
MODES = ("sequential", "mooncake")
"""Prefill first, and decode with its answer; or both at once, by Mooncake's protocol."""
REQUEST_ID_LENGTH = 170
"""What the names of pods in Kubernetes make of the request id that the router gives to both servers."""


def find_router() -> str:
    """The program. Skips the test where it is not installed."""
    program = ENVIRONMENT / "bin" / "vllm-router"
    if not program.exists():
        pytest.skip(f"there is no {program}; make test-routers")
    return str(program)


def spelled_long(url: str, length: int) -> str:
    """The same address in so many characters: the router's request ids have both addresses in them."""
    parts = urlsplit(url)
    assert parts.hostname == "127.0.0.1"
    tail = f"7f000001:{parts.port}"
    return "http://0x" + tail.rjust(length - len("0x"), "0")


@contextmanager
def routed(folder: Path, *arguments: str, program: str = "") -> Iterator[str]:
    """A router that is ready; its URL."""
    port = free_port()
    command = [program or find_router(), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-port", str(free_port()), *arguments]
    url = f"http://127.0.0.1:{port}"
    child = Child("vllm-router", command, folder / f"router-{port}.log", url=url).start()
    try:
        child.wait_answer("/health", 60)
        yield url
    finally:
        child.end(10)


def pd_arguments(mode: str, prefill: str, decode: str, bootstrap_port: int) -> list[str]:
    """What has it ask a prefill and a decode server, in one of ``MODES``."""
    addresses = REQUEST_ID_LENGTH - 64
    if mode == "mooncake":
        # It looks up what the bootstrap answered by a prefill server's usual spelling.
        decode = spelled_long(decode, addresses - len(prefill.removeprefix("http://")))
        more = ["--kv-connector", "mooncake", "--prefill", prefill, str(bootstrap_port)]
    else:
        prefill, decode = (spelled_long(url, addresses // 2) for url in (prefill, decode))
        more = ["--prefill", prefill]
    return ["--vllm-pd-disaggregation", "--policy", "round_robin", *more, "--decode", decode]


def token_ids(answer: Mapping[str, Any]) -> list[list[int]]:
    """Of all choices of an answer, in their order."""
    return [list(one["token_ids"]) for one in sorted(answer["choices"], key=lambda one: one["index"])]


def complete(url: str, body: Mapping[str, Any], path: str = "/v1/completions") -> dict[str, Any]:
    answer: dict[str, Any] = fetch_json(url + path, body, ANSWER_TIMEOUT_S)
    return answer


def _post(url: str, body: Mapping[str, Any]) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=ANSWER_TIMEOUT_S)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    return connection


def stream(url: str, body: Mapping[str, Any]) -> list[list[int]]:
    """The token ids of a streamed answer, by choice. It has to end as a stream does."""
    connection = _post(url, {**body, "stream": True})
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    assert response.status == 200, text
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]", text
    found: dict[int, list[int]] = {}
    for event in events[:-1]:
        for choice in json.loads(event)["choices"]:
            found.setdefault(choice["index"], []).extend(choice.get("token_ids") or [])
    return [found[index] for index in sorted(found)]


def leave(url: str, body: Mapping[str, Any], after_s: Sequence[float]) -> None:
    """Ask as clients that close their connection so much later, one after the other."""
    for wait_s in after_s:
        connection = _post(url, {**body, "stream": True})
        time.sleep(wait_s)
        connection.close()
