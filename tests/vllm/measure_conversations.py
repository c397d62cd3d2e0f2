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

from tests.ports import free_port
from tests.routers.vllm_router import routed
from tests.vllm.load_figures import quantile
from tests.vllm.pairs import (
    Lines,
    ask,
    command_line,
    computed_tokens,
    prepared,
    pulling_pair,
    pulls,
    served,
)
from tests.vllm.servers import Server, random_prompt, router, running
from tests.vllm.tiny_models import Recipe

_SETTLE_S = 2.0
"""vllm-router is ready before it follows its nodes."""


@dataclass(frozen=True)
class Node:
    """A server, where it publishes its KV events and answers what was missed, and its side channel."""

    server: Server
    events: str
    replays: str
    source: str | None


Group = Sequence[Node]
"""Servers that are configured alike."""


def _started(name: str, recipe: Recipe, folder: Path, given: argparse.Namespace) -> Group:
    """Two servers of ``kvconnect`` or ``offloading``; not waited for."""
    longest = given.first + given.turns * (given.new + given.out) + 64
    options = ["--max-model-len", str(longest), "--enable-prefix-caching"]
    options += ["--max-num-seqs", str(given.in_flight)]
    options += ["--num-gpu-blocks-override", str(given.blocks)] if given.cpu else []
    places = [[f"tcp://127.0.0.1:{free_port()}" for _ in range(2)] for _ in range(2)]
    each = []
    for published, replayed in places:
        events = {"enable_kv_cache_events": True, "publisher": "zmq"}
        events |= {"endpoint": published.replace("127.0.0.1", "*"), "replay_endpoint": replayed}
        each.append([*options, "--kv-events-config", json.dumps(events)])
    made: Sequence[tuple[Server, str | None]]
    if name == "kvconnect":
        made = pulling_pair(recipe, folder, name, given, each)
    else:
        config: dict[str, Any] = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
        config["kv_connector_extra_config"] = {"cpu_bytes_to_use": given.cpu_gib << 30}
        made = [
            (served(recipe, folder, f"{name}{number}", where, config, given, own), None)
            for number, (where, own) in enumerate(zip(given.gpus.split(","), each, strict=True))
        ]
    return [Node(server, *place, source) for (server, source), place in zip(made, places, strict=True)]


@contextmanager
def by_prefix(group: Group, *_: object) -> Iterator[str]:
    """``kvconnect router`` that follows the servers' KV events."""
    more = ["--policy", "prefix", *_events(group)]
    for node in group:
        more += ["--kv-source", f"{node.server.url}={node.source}"] if node.source else []
    with router(*more, *_decodes(group)) as url:
        yield url


@contextmanager
def by_load(group: Group, *_: object) -> Iterator[str]:
    """``kvconnect router`` that knows how many requests are under way at each server, and nothing else."""
    with router(*_decodes(group)) as url:
        yield url


@contextmanager
def kv_aware(group: Group, folder: Path, given: argparse.Namespace) -> Iterator[str]:
    """vllm-router that follows the servers' KV events."""
    more = ["--policy", "kv_aware", "--worker-urls", *(node.server.url for node in group), *_events(group)]
    more += ["--kv-event-block-size", str(128 if given.cpu else 16), "--kv-event-model", "tiny"]
    with routed(folder, *more, program=str(given.vllm_router)) as url:
        time.sleep(_SETTLE_S)
        yield url


def _decodes(group: Group) -> list[str]:
    return [option for node in group for option in ("--decode", node.server.url)]


def _events(group: Group) -> list[str]:
    """The same options of both routers."""
    options = []
    for node in group:
        options += ["--kv-event-source", f"{node.server.url}={node.events}"]
        options += ["--kv-event-replay-source", f"{node.server.url}={node.replays}"]
    return options


_Router = Callable[[Group, Path, argparse.Namespace], Any]
SYSTEMS: Mapping[str, tuple[str, _Router]] = {
    "prefix": ("kvconnect", by_prefix),
    "least-loaded": ("kvconnect", by_load),
    "kv-aware-offloading": ("offloading", kv_aware),
    "least-loaded-offloading": ("offloading", by_load),
}


def warm_up(group: Group, given: argparse.Namespace, seed: int) -> None:
    """Both compute, and take what the other computed: then kernels, link and prefill rate are known."""
    for turn in range(3):
        one, other = (node.server for node in group[:: 1 if turn % 2 else -1])
        prompts = [random_prompt(given.first, seed + 10 * turn + number) for number in range(2)]
        for prompt in prompts:
            ask(one.url, prompt, 2)
        time.sleep(0.5)
        for prompt in prompts:
            ask(other.url, prompt, 2)


def conversed(url: str, given: argparse.Namespace, seed: int) -> tuple[list[list[float]], list[str]]:
    """The first tokens of each turn, and what failed."""
    rng = random.Random(seed)
    histories = [random_prompt(given.first, rng.getrandbits(32)) for _ in range(given.conversations)]
    found: list[list[float]] = []
    failures: list[str] = []

    def one(number: int) -> float | None:
        try:
            return ask(url, histories[number], given.out, with_tokens=False).first_token_s
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


def measured(
    name: str, group: Group, folder: Path, given: argparse.Namespace, seed: int, lines: Lines
) -> float:
    """One run of a system; the mean first token in seconds."""
    servers = [node.server for node in group]
    before, pulled = computed_tokens(*servers), pulls(*servers)
    with SYSTEMS[name][1](group, folder, given) as url:
        began = time.monotonic()
        turns, failures = conversed(url, given, seed)
        took_s = time.monotonic() - began
    after = pulls(*servers)
    seconds = [value for turn in turns for value in turn]
    mean = statistics.mean(seconds) if seconds else 0.0
    lines.write(
        "run",
        system=name,
        seed=seed,
        mean_first_token_ms=round(1000 * mean, 1),
        p50_p90_ms=[round(1000 * quantile(seconds, part), 1) for part in (0.5, 0.9)],
        by_turn_ms=[round(1000 * statistics.mean(turn), 1) for turn in turns if turn],
        computed_tokens=computed_tokens(*servers) - before,
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
            seed = given.seed + 1000 * turn + number
            mean = measured(name, groups[SYSTEMS[name][0]], folder, given, seed, lines)
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
    given = command_line(
        __doc__,
        arguments,
        {
            "system": f"of {', '.join(SYSTEMS)}; repeatable; all, without a GPU kvconnect's",
            "vllm_router": "the program; without it kv-aware-offloading is left out",
            "first": "tokens of each conversation's first prompt",
            "blocks": "of 128 tokens, of each server on a CPU",
        },
        system=[],
        vllm_router=Path,
        conversations=(8, 64),
        turns=4,
        first=(512, 1280),
        new=(128, 512),
        out=(8, 64),
        in_flight=(2, 16),
        rounds=1,
        engine="nixl",
        extra={},
        gpus="0,1",
        chunk=(512, 8192),
        kv_gib=(1, 12),
        blocks=24,
        cpu_gib=(1, 20),
        seed=1,
    )
    if unknown := set(given.system) - set(SYSTEMS):
        given.error(f"--system {', '.join(unknown)} is unknown; accepted: {', '.join(SYSTEMS)}")
    wanted = given.system or [
        name for name, (servers, _) in SYSTEMS.items() if servers == "kvconnect" or not given.cpu
    ]
    given.system = [name for name in wanted if SYSTEMS[name][1] is not kv_aware or given.vllm_router]
    return given


def main() -> None:
    given = parsed()
    with prepared(given) as (recipe, logs, lines):
        names = list(dict.fromkeys(SYSTEMS[name][0] for name in given.system))
        groups = {name: _started(name, recipe, logs, given) for name in names}
        with running(*(node.server for group in groups.values() for node in group)):
            compare(groups, logs, given, lines)


if __name__ == "__main__":
    main()
