"""Conversations over two vLLM servers behind a router: ``python -m tests.vllm.measure_conversations --help``.

Two servers with kvconnect that pull from each other, behind ``kvconnect router`` by prefix and by load; two
with vLLM's OffloadingConnector, behind vllm-router by KV events and behind ``kvconnect router`` by load. All
servers are up at once, and one router after the other gets conversations of its own, equal in their sizes and
order. Every turn of all conversations comes before the next one of any, which is what evicts most. Every
finding is a JSON line; nothing here asserts a time.

    python -m tests.vllm.measure_conversations --vllm-router /path/to/vllm-router
    python -m tests.vllm.measure_conversations --cpu
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kvconnect.node.children import COMMAND, ENVIRONMENT, BadAnswer, Child
from tests.ports import free_port
from tests.vllm.load_client import streamed_tokens
from tests.vllm.load_figures import quantile
from tests.vllm.pairs import Lines, brought_up, environment, gpu_options, prepared
from tests.vllm.servers import Server, random_prompt, transfer_config
from tests.vllm.tiny_models import Recipe

_TIMEOUT_S = 120
_SETTLE_S = 2.0
"""vllm-router is ready before it follows its nodes."""
_MODEL = "tiny"


@dataclass(frozen=True)
class Node:
    """A server, where it publishes its KV events and answers what was missed, and its side channel."""

    server: Server
    events: str
    replays: str
    source: str | None


@dataclass(frozen=True)
class Group:
    """Two servers that are configured alike, and those of them that are routed to."""

    name: str
    all_nodes: tuple[Node, Node]
    nodes: Sequence[Node]

    @property
    def servers(self) -> tuple[Server, Server]:
        return self.all_nodes[0].server, self.all_nodes[1].server


def _started(name: str, recipe: Recipe, folder: Path, given: argparse.Namespace) -> Group:
    """Two servers of ``kvconnect`` or ``offloading``; not waited for."""
    ports = free_port(), free_port()
    made = []
    for number, (own, other) in enumerate([ports, ports[::-1]]):
        published, replayed = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
        events = {"enable_kv_cache_events": True, "publisher": "zmq"}
        events |= {"endpoint": published.replace("127.0.0.1", "*"), "replay_endpoint": replayed}
        longest = given.first + given.turns * (given.new + given.out) + 64
        options = ["--max-model-len", str(longest), "--enable-prefix-caching"]
        options += ["--max-num-seqs", str(given.in_flight), "--kv-events-config", json.dumps(events)]
        if given.cpu:
            options += ["--num-gpu-blocks-override", str(given.blocks)]
        else:
            options += [*gpu_options(given.chunk, given.kv_gib), "--no-enforce-eager"]
            options += ["--compilation-config", '{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}']
        settings = environment(None if given.cpu else given.gpus.split(",")[number])
        settings |= {"PYTHONHASHSEED": "0"}
        settings |= {"VLLM_CPU_KVCACHE_SPACE": "1"} if given.cpu else {"TORCHDYNAMO_DISABLE": "0"}
        if name == "kvconnect":
            extra: dict[str, Any] = {"engine": given.engine, "protocol": "auto", "port": own}
            extra |= {"sources": [f"127.0.0.1:{other}"]}
            extra |= {"offload": {"cpu_bytes": given.cpu_gib << 30}, **given.extra}
            config = transfer_config("both", **extra, kv_load_failure_policy="recompute")
        else:
            config = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
            config["kv_connector_extra_config"] = {"cpu_bytes_to_use": given.cpu_gib << 30}
        server = Server(recipe, folder, f"{name}{number}", str(number), config, options, settings)
        made.append(Node(server, published, replayed, f"127.0.0.1:{own}" if name == "kvconnect" else None))
    return Group(name, (made[0], made[1]), made[: given.servers])


@contextmanager
def _own_router(group: Group, folder: Path, *more: str) -> Iterator[str]:
    command = [*COMMAND, "router", "--port", "0", *more]
    for node in group.nodes:
        command += ["--decode", node.server.url]
    child = Child("router", command, folder / f"router-{free_port()}.log", ENVIRONMENT).start()
    try:
        yield child.wait_ready()
    finally:
        child.end(5)


@contextmanager
def by_prefix(group: Group, folder: Path, _: argparse.Namespace) -> Iterator[str]:
    """``kvconnect router`` that follows the servers' KV events."""
    more = ["--policy", "prefix"]
    for node in group.nodes:
        more += ["--kv-event-source", f"{node.server.url}={node.events}"]
        more += ["--kv-event-replay-source", f"{node.server.url}={node.replays}"]
        more += ["--kv-source", f"{node.server.url}={node.source}"] if node.source else []
    with _own_router(group, folder, *more) as url:
        yield url


@contextmanager
def by_load(group: Group, folder: Path, _: argparse.Namespace) -> Iterator[str]:
    """``kvconnect router`` that knows how many requests are under way at each server, and nothing else."""
    with _own_router(group, folder) as url:
        yield url


@contextmanager
def kv_aware(group: Group, folder: Path, given: argparse.Namespace) -> Iterator[str]:
    """vllm-router that follows the servers' KV events."""
    port = free_port()
    command = [str(given.vllm_router), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-port", str(free_port()), "--policy", "kv_aware"]
    command += ["--worker-urls", *(node.server.url for node in group.nodes)]
    for node in group.nodes:
        command += ["--kv-event-source", f"{node.server.url}={node.events}"]
        command += ["--kv-event-replay-source", f"{node.server.url}={node.replays}"]
    block = 128 if given.cpu else 16
    command += ["--kv-event-block-size", str(block), "--kv-event-model", _MODEL]
    url = f"http://127.0.0.1:{port}"
    child = Child("vllm-router", command, folder / f"vllm-router-{port}.log", url=url).start()
    try:
        child.wait_answer("/health", 60)
        time.sleep(_SETTLE_S)
        yield url
    finally:
        child.end(10)


_Router = Callable[[Group, Path, argparse.Namespace], Any]
SYSTEMS: Mapping[str, tuple[str, _Router]] = {
    "prefix": ("kvconnect", by_prefix),
    "least-loaded": ("kvconnect", by_load),
    "kv-aware-offloading": ("offloading", kv_aware),
    "least-loaded-offloading": ("offloading", by_load),
}


def first_token_s(url: str, prompt: Sequence[int], tokens: int) -> float:
    """Stream a completion. Raises BadAnswer: an error, or too few tokens."""
    parts = urlsplit(url)
    # A request for token ids is one whose prompt vllm-router does not look up.
    body = {"model": _MODEL, "prompt": list(prompt), "max_tokens": tokens, "temperature": 0}
    body |= {"ignore_eos": True, "stream": True}
    body |= {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    client = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=_TIMEOUT_S)
    first, seen = 0.0, 0
    try:
        began = time.perf_counter()
        client.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = client.getresponse()
        if answer.status != 200:
            raise BadAnswer(f"{url} answered {answer.status}: {answer.read(500)!r}")
        for line in answer:
            if (so_far := streamed_tokens(line)) > seen:
                first = first or time.perf_counter() - began
                seen = so_far
    finally:
        client.close()
    if seen != tokens:
        raise BadAnswer(f"{url} answered with {seen} of {tokens} tokens")
    return first


def warm_up(group: Group, given: argparse.Namespace, seed: int) -> None:
    """Both compute, and take what the other computed: then kernels, link and prefill rate are known."""
    for turn in range(3):
        one, other = group.servers[:: 1 if turn % 2 else -1]
        prompts = [random_prompt(given.first, seed + 10 * turn + number) for number in range(2)]
        for prompt in prompts:
            first_token_s(one.url, prompt, 2)
        time.sleep(0.5)
        for prompt in prompts:
            first_token_s(other.url, prompt, 2)


def served(url: str, given: argparse.Namespace, seed: int) -> tuple[list[list[float]], list[str]]:
    """The first tokens of each turn, and what failed."""
    rng = random.Random(seed)
    histories = [random_prompt(given.first, rng.getrandbits(32)) for _ in range(given.conversations)]
    found: list[list[float]] = []
    failures: list[str] = []

    def one(number: int) -> float | None:
        try:
            return first_token_s(url, histories[number], given.out)
        except Exception as error:
            failures.append(f"{type(error).__name__}: {error}"[:300])
            return None

    with ThreadPoolExecutor(given.in_flight) as pool:
        for _ in range(given.turns):
            order = list(range(given.conversations))
            rng.shuffle(order)
            found.append([seconds for seconds in pool.map(one, order) if seconds is not None])
            # What was answered is not asked for: the next turn has other tokens there, for all systems.
            for history in histories:
                history += random_prompt(given.out + given.new, rng.getrandbits(32))
    return found, failures


def _computed(group: Group) -> float:
    series = "vllm:prompt_tokens_by_source_total"
    return sum(server.metrics(source="local_compute").get(series, 0.0) for server in group.servers)


def _pulls(group: Group) -> dict[str, float]:
    series = "vllm:kvconnect_pulls_total"
    outcomes = ("loaded", "missed", "not_worth_it", "unmeasured", "unanswered", "failed", "aborted")
    return {
        name: sum(server.metrics(outcome=name).get(series, 0.0) for server in group.servers)
        for name in outcomes
    }


def measured(
    name: str, group: Group, folder: Path, given: argparse.Namespace, seed: int, lines: Lines
) -> float:
    """One run of a system; the mean first token in seconds."""
    before, pulled = _computed(group), _pulls(group)
    with SYSTEMS[name][1](group, folder, given) as url:
        began = time.monotonic()
        turns, failures = served(url, given, seed)
        took_s = time.monotonic() - began
    after = _pulls(group)
    seconds = [value for turn in turns for value in turn]
    mean = statistics.mean(seconds) if seconds else 0.0
    lines.write(
        "run",
        system=name,
        seed=seed,
        mean_first_token_ms=round(1000 * mean, 1),
        p50_p90_ms=[round(1000 * quantile(seconds, part), 1) for part in (0.5, 0.9)],
        by_turn_ms=[round(1000 * statistics.mean(turn), 1) for turn in turns if turn],
        computed_tokens=_computed(group) - before,
        pulls={outcome: after[outcome] - pulled[outcome] for outcome in after},
        took_s=round(took_s, 1),
        requests=len(seconds),
        failed=failures[:3],
    )
    return mean


def compare(groups: Mapping[str, Group], folder: Path, given: argparse.Namespace, lines: Lines) -> None:
    """All systems in all rounds; tells every run, and the ratios of their means."""
    for number, group in enumerate(groups.values()):
        warm_up(group, given, 1_000_000 * (1 + number))
    means: dict[str, list[float]] = {}
    for turn in range(given.rounds):
        for number, name in enumerate(given.system):
            if group := groups.get(SYSTEMS[name][0]):
                seed = given.seed + 1000 * turn + number
                mean = measured(name, group, folder, given, seed, lines)
                means.setdefault(name, []).append(mean)
    medians = {name: statistics.median(values) for name, values in means.items()}
    own = medians.get("prefix")
    ratios = {name: round(own / value, 3) for name, value in medians.items() if own and value}
    lines.write(
        "mean first token",
        ms={name: round(1000 * m, 1) for name, m in medians.items()},
        prefix_over=ratios,
    )


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--cpu", action="store_true", help="a tiny model on two cores")
    add("--system", action="append", choices=list(SYSTEMS), help="repeatable; all, without a GPU kvconnect's")
    add("--vllm-router", type=Path, help="the program; without it kv-aware-offloading is left out")
    add("--conversations", type=int)
    add("--turns", type=int, default=4)
    add("--first", type=int, help="tokens of each conversation's first prompt")
    add("--new", type=int, help="tokens of each further question")
    add("--out", type=int, help="tokens of each answer")
    add("--in-flight", type=int, help="conversations that wait for an answer at once")
    add("--servers", type=int, choices=[1, 2], default=2, help="of each kind that get conversations")
    add("--rounds", type=int, default=1)
    add("--engine", default="nixl")
    add("--extra", type=json.loads, default={}, metavar="JSON")
    add("--gpus", default="0,1")
    add("--chunk", type=int, default=8192, help="tokens that are computed at once")
    add("--kv-gib", type=int, default=12, help="KV cache of each server on a GPU")
    add("--blocks", type=int, default=24, help="of 128 tokens, of each server on a CPU")
    add("--cpu-gib", type=int, help="host memory of each server")
    add("--seed", type=int, default=1)
    add("--model", type=Path, help="where the model is, or is to be written (14 GB)")
    add("--logs", type=Path, help="where the logs are to stay")
    add("--json", type=Path, help="a file that gets JSON lines")
    given = parser.parse_args(arguments)
    for name, here, there in (
        *(("conversations", 8, 64), ("first", 512, 1280), ("new", 128, 512)),
        *(("out", 8, 64), ("in_flight", 2, 16), ("cpu_gib", 1, 20)),
    ):
        if getattr(given, name) is None:
            setattr(given, name, here if given.cpu else there)
    wanted = given.system or [
        name for name, (servers, _) in SYSTEMS.items() if servers == "kvconnect" or not given.cpu
    ]
    given.system = [name for name in wanted if SYSTEMS[name][1] is not kv_aware or given.vllm_router]
    if given.gpus.count(",") != 1:
        parser.error(f"GPUs are {given.gpus!r}, they must be two")
    return given


def main() -> None:
    given = parsed()
    with prepared(given, given.gpus.split(",")[0]) as (recipe, logs, lines):
        names = list(dict.fromkeys(SYSTEMS[name][0] for name in given.system))
        started = [_started(name, recipe, logs, given) for name in names]
        with brought_up(started, lines) as up:
            compare({group.name: group for group in up}, logs, given, lines)


if __name__ == "__main__":
    main()
