"""Servers that change roles and are restarted under load: ``python -m tests.vllm.measure_restarts --help``.

Three servers of both roles are behind ``kvconnect router``. Requests arrive evenly while a prefill server
becomes a decode server and the reverse, a server of each role is drained and restarted, and one of each role
is restarted without draining, and killed, with requests in flight. The JSON line of each change has the
requests that began during it, how many failed, how many answers are those of a server alone, how often the
servers computed each prompt, and first tokens. Nothing here asserts a time.

    python -m tests.vllm.measure_restarts --cpu
    python -m tests.vllm.measure_restarts --gpus 0,1
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kvconnect.node.children import Samples, growth, read_metrics
from tests.pair_kit import until
from tests.ports import free_port
from tests.vllm import dense_model
from tests.vllm.load_figures import quantile
from tests.vllm.pairs import Answer, Lines, ask, command_line, named_variant, prepared, served
from tests.vllm.servers import EXACT, Server, members, random_prompt, router, running
from tests.vllm.tiny_models import Recipe

_BY_SOURCE = "vllm:prompt_tokens_by_source_total"
_CHANGE_S, _END_S = 120.0, 30.0
_SHAPE = dense_model.Shape(layers=8, hidden=2048, intermediate=6144, heads=16)
"""Small, so that a restart takes little more than vLLM's own time."""


class Load:
    """Requests that arrive evenly, each a prompt of a few that return with another salt."""

    def __init__(
        self, url: str, alone: Mapping[int, list[int]], prompts: list[list[int]], given: Any
    ) -> None:
        self._url, self._alone, self._prompts, self._given = url, alone, prompts, given
        self._pool = ThreadPoolExecutor(64)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._arrive)
        self.asked: list[Future[tuple[bool, Answer]]] = []

    def _arrive(self) -> None:
        number, began = 0, time.monotonic()
        while not self._stop.wait(max(0.0, began + number / self._given.rate - time.monotonic())):
            self.asked.append(self._pool.submit(self._ask, number))
            number += 1

    def _ask(self, number: int) -> tuple[bool, Answer]:
        at = number % len(self._prompts)
        got = ask(self._url, self._prompts[at], self._given.out, cache_salt=f"{number}")
        return got.tokens == self._alone[at], got

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._pool.shutdown()

    def figures(self, first: int) -> dict[str, Any]:
        """Wait for the requests from ``first`` on."""
        exact, seconds, failed = 0, [], []
        for asked in self.asked[first:]:
            try:
                is_exact, got = asked.result(_CHANGE_S)
            except Exception as error:
                failed.append(f"{type(error).__name__}: {error}"[:300])
                continue
            exact += is_exact
            seconds.append(got.first_token_s)
        return {
            "requests": len(seconds) + len(failed),
            "failed": len(failed),
            "exact": exact,
            "first_token_ms": {p: round(1e3 * quantile(seconds, p), 1) for p in (0.5, 0.9, 0.99) if seconds},
            "errors": failed[:3],
        }


class Roles:
    """Which server is routed to in which role."""

    def __init__(self, admin: int) -> None:
        self._url = f"http://127.0.0.1:{admin}/nodes"

    def _nodes(self, method: str = "GET", **named: str) -> set[tuple[str, str]]:
        data = json.dumps(named).encode() if named else None
        request = urllib.request.Request(self._url, data, method=method)
        with urllib.request.urlopen(request, timeout=10) as answer:
            return {(node["role"], node["url"]) for node in json.load(answer)}

    def add(self, role: str, server: Server) -> None:
        self._nodes("POST", role=role, url=server.url)

    def drain(self, role: str, server: Server) -> None:
        """Route no more to a server, and wait until its last request is over."""
        self._nodes("DELETE", role=role, url=server.url)
        until(lambda: (role, server.url) not in self._nodes(), _CHANGE_S)


def restart(server: Server, number: signal.Signals = signal.SIGTERM) -> None:
    """End a server as a container runtime does, by its first process, and start it again."""
    os.kill(server.pid, number)
    with suppress(subprocess.TimeoutExpired):
        server.process.wait(_END_S)
    server.kill()
    # Processes that the first one had started hold its port until they are gone too.
    until(lambda: not members(server), _END_S)
    server.start()
    server.wait_ready()


@contextmanager
def change(name: str, load: Load, servers: list[Server], lines: Lines, given: Any) -> Iterator[None]:
    """Write down what became of the requests that begin during a change, and for some seconds after it."""
    # What a server counted is lost when it ends.
    first, before = len(load.asked), {server.url: read_metrics(server.url) for server in servers}
    began = time.monotonic()
    yield
    took_s = time.monotonic() - began
    time.sleep(given.seconds)
    found = load.figures(first)
    computed = 0.0
    for server in servers:
        after = read_metrics(server.url)
        since: Samples = before[server.url] if _counts(after) >= _counts(before[server.url]) else {}
        computed += growth(since, after, _BY_SOURCE, source="local_compute")
    share = computed / given.tokens / max(1, found["requests"])
    lines.write("change", name=name, took_s=round(took_s, 1), **found, computed_per_request=round(share, 2))


def _counts(samples: Samples) -> float:
    return growth({}, samples, _BY_SOURCE)


def measure(
    servers: list[Server], alone: dict[int, list[int]], prompts: list[Any], given: Any, lines: Any
) -> None:
    one, two, three = servers
    admin = free_port()
    options = ["--admin", f"127.0.0.1:{admin}", "--flow", given.flow]
    options += ["--prefill", one.url, "--prefill", two.url, "--decode", three.url]
    with router(*options) as url, Load(url, alone, prompts, given) as load:
        roles = Roles(admin)

        def during(name: str) -> Any:
            return change(name, load, servers, lines, given)

        with during("none"):
            pass
        with during("a prefill server becomes a decode server"):
            roles.add("decode", two)
            roles.drain("prefill", two)
        with during("a decode server becomes a prefill server"):
            roles.add("prefill", three)
            roles.drain("decode", three)
        with during("a prefill server is drained and restarted"):
            roles.drain("prefill", one)
            restart(one)
            roles.add("prefill", one)
        with during("a decode server is drained and restarted"):
            roles.add("decode", one)
            roles.drain("decode", two)
            restart(two)
            roles.add("decode", two)
            roles.drain("decode", one)
        roles.add("prefill", one)
        roles.add("decode", three)
        for name, number in (("restarted without draining", signal.SIGTERM), ("killed", signal.SIGKILL)):
            with during(f"a prefill server is {name}"):
                restart(one, number)
            with during(f"a decode server is {name}"):
                restart(two, number)


def _server(number: int, recipe: Recipe, logs: Path, given: Any) -> Server:
    variant = named_variant(given.engine, {"insecure": True, "port": free_port(), **given.extra})
    config = variant.config("both", kv_load_failure_policy=given.policy)
    longest, drain_s = str(given.tokens + given.out + 128), str(given.drain_s)
    options = ["--max-model-len", longest, "--shutdown-timeout", drain_s, *(EXACT if given.cpu else ())]
    place = given.gpus.split(",")[number % 2]
    return served(recipe, logs, f"server{number}", place, config, given, options)


def main() -> None:
    given = command_line(
        __doc__,
        None,
        {
            "tokens": "of each prompt",
            "rate": "requests a second",
            "seconds": "of requests after each change",
            "flow": "of the router: sequential or parallel",
            "policy": "kv_load_failure_policy of the servers",
            "drain_s": "--shutdown-timeout of the servers",
        },
        tokens=(400, 4096),
        out=(12, 32),
        rate=(1.5, 4.0),
        seconds=(8.0, 8.0),
        drain_s=10,
        flow="sequential",
        policy="recompute",
        engine="nixl",
        extra={},
        gpus="0,1",
        kv_gib=(1, 10),
    )
    given.chunk = 512 if given.cpu else given.tokens
    with prepared(given, tiny="gqa", shape=_SHAPE, forks=True) as (recipe, logs, lines):
        servers = [_server(number, recipe, logs, given) for number in range(3)]
        with running(*servers):
            prompts = [random_prompt(given.tokens, seed) for seed in range(8)]
            alone = {at: ask(servers[0].url, prompt, given.out).tokens for at, prompt in enumerate(prompts)}
            measure(servers, alone, prompts, given, lines)


if __name__ == "__main__":
    main()
