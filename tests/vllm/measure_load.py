"""Real vLLM servers under load: ``python -m tests.vllm.measure_load --help``.

A pair with kvconnect and one with vLLM's NixlConnector take turns with the same prompts. Requests arrive as a
Poisson process and do not wait for each other; those of a load without a rate come from ``--in-flight``
clients that wait for their answers. Every finding is a JSON line; nothing here asserts a time.

    python -m tests.vllm.measure_load --nixl-gpus 2,3 --load 8192:128:2.5 --load 2048:128:8 --json F
    python -m tests.vllm.measure_load --load 8192:12 --in-flight 16 --cached
    python -m tests.vllm.measure_load --routed --load 8192:128:2.5
    python -m tests.vllm.measure_load --routed --first-token decode --load 8192:16 --in-flight 1
    python -m tests.vllm.measure_load --cpu

With ``--routed`` each pair is asked through ``kvconnect router``: kvconnect's clients have their first token
from the prefill server, or by ``--first-token`` from the decode server as those of NixlConnector.

Load times are histograms that the connectors count, and their quantiles are guessed within a bucket:
kvconnect's from the order to load until all has arrived, with ``--flow parallel`` from before the prefill,
NixlConnector's those of its transfers alone.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvconnect.node.children import fetch, growth, read_metrics
from tests.vllm import load_client
from tests.vllm.load_client import LETTERS, Job
from tests.vllm.load_figures import Load, buckets, figures, grown, over_rounds, ratios
from tests.vllm.pairs import (
    NIXL,
    Lines,
    Pair,
    Variant,
    both_served,
    command_line,
    named_variant,
    prepared,
)
from tests.vllm.servers import awake, router, running, stopped
from tests.vllm.tiny_models import Recipe


@dataclass(frozen=True)
class System:
    """A pair that answers requests, and the router that is asked in its place, if there is one."""

    pair: Pair
    router: str = ""

    @property
    def name(self) -> str:
        return self.pair.name

    @property
    def is_ours(self) -> bool:
        return self.pair.variant is not NIXL

    def job(self, load: Load, seed: int, given: argparse.Namespace) -> Job:
        """What it is asked in one run."""
        return Job(
            prefill=self.pair.prefill.url,
            decode=self.pair.decode.url,
            load=load,
            requests=given.requests,
            seed=seed,
            in_flight=given.in_flight if load.rate_per_s is None else 0,
            num_cached=given.prompts if given.cached and load.rate_per_s is None else 0,
            is_parallel=given.flow == "parallel" and self.is_ours,
            router=self.router,
        )

    def loads(self) -> dict[float, float]:
        """The histogram of load times."""
        # A worker's numbers come with a step that follows.
        for _ in range(2):
            self.pair.decode.tokens([1, 2, 3], max_tokens=2)
        series = "vllm:kvconnect_load_seconds" if self.is_ours else "vllm:nixl_xfer_time_seconds"
        return buckets(read_metrics(self.pair.decode.url), series)


def _started(recipe: Recipe, folder: Path, given: argparse.Namespace, places: str, variant: Variant) -> Pair:
    longest = max(load.tokens_in + load.tokens_out for load in given.loads)
    seats = "16" if given.cpu else "256"
    options = ["--max-model-len", str(longest + 64), "--max-num-seqs", seats]
    both, graphs = (options, [*options, "--no-enable-prefix-caching"]), ["--no-enforce-eager"]
    graphs += ["--compilation-config", given.compilation_config] if given.compilation_config else []
    return both_served(variant, recipe, folder, given, both, places.split(","), graphs=graphs)


@contextmanager
def _up(recipe: Recipe, folder: Path, given: argparse.Namespace) -> Iterator[list[System]]:
    """The systems that are asked for."""
    wanted = [(given.gpus, named_variant(given.engine, given.extra))]
    wanted += [(given.nixl_gpus, NIXL)] if given.nixl_gpus != "none" else []
    # Two cores start two servers at a time.
    batches = [[one] for one in wanted] if given.cpu else [wanted]
    with ExitStack() as stack:
        pairs = []
        for batch in batches:
            started = [_started(recipe, folder, given, *one) for one in batch]
            up = stack.enter_context(running(*(server for pair in started for server in pair.servers)))
            if given.cpu:
                stack.enter_context(stopped(*up))
            pairs += started
        yield [stack.enter_context(_routed(pair, given)) for pair in pairs]


@contextmanager
def _routed(pair: Pair, given: argparse.Namespace) -> Iterator[System]:
    """A pair, behind a router if that is asked for."""
    if not given.routed:
        yield System(pair)
        return
    first, flow = (given.first_token, given.flow) if System(pair).is_ours else ("decode", "sequential")
    options = ("--first-token", first, "--flow", flow)
    options += ("--prefill", pair.prefill.url, "--decode", pair.decode.url)
    with awake(pair.servers) if given.cpu else nullcontext(), router(*options) as url:
        deadline = time.monotonic() + 30
        body = {"model": "tiny", "prompt": LETTERS, "max_tokens": 2, "allowed_token_ids": LETTERS}
        # The router has to have seen that the decode server takes a first token.
        while first == "prefill" and time.monotonic() < deadline and not _first_tokens(url)["prefill"]:
            fetch(url + "/v1/completions", {**body, "stream": True}, 60)
            time.sleep(0.5)
        yield System(pair, url)


def _first_tokens(url: str) -> dict[str, float]:
    """Where a router's first tokens came from, so far."""
    name, seen = "kvconnect_router_first_tokens_total", read_metrics(url)
    return {outcome: growth({}, seen, name, outcome=outcome) for outcome in ("prefill", "decode")}


def measured(system: System, load: Load, seed: int, given: argparse.Namespace) -> dict[str, Any]:
    """The figures of one run of a load."""
    job = system.job(load, seed, given)
    with awake(system.pair.servers) if given.cpu else nullcontext():
        channel = load_client.warm_up(job, given.warm_up)
        before = system.loads()
        samples = load_client.run(job, channel)
        told = figures(samples, grown(before, system.loads()), load.tokens_out)
        if given.routed:
            return told | {"first_tokens_so_far": _first_tokens(system.router)}
    return told


def compare(systems: Sequence[System], given: argparse.Namespace, lines: Lines) -> None:
    """All loads in all rounds; tells every run, and of each load medians and ratios."""
    for number, load in enumerate(given.loads):
        rounds: dict[str, list[dict[str, Any]]] = {system.name: [] for system in systems}
        for turn in range(given.rounds):
            # Who goes first changes from round to round.
            for system in systems[:: -1 if turn % 2 else 1]:
                found = measured(system, load, given.seed + 1000 * number + turn, given)
                lines.write("run", connector=system.name, load=str(load), turn=turn, **found)
                rounds[system.name].append(found)
        _tell(load, {name: over_rounds(found) for name, found in rounds.items()}, lines)


def _tell(load: Load, found: Mapping[str, Mapping[str, Any]], lines: Lines) -> None:
    for name, one in found.items():
        lines.write("load", connector=name, load=str(load), **one)
    ours = next(name for name in found if name != NIXL.name)
    if NIXL.name in found:
        compared = ratios(found[ours], found[NIXL.name])
        lines.write("ratio", connector=ours, over=NIXL.name, load=str(load), **compared)


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    given = command_line(
        __doc__,
        arguments,
        {
            "load": "IN:OUT:RATE, in tokens, a second; repeatable",
            "in_flight": "so many clients that wait, for a load without a rate",
            "cached": "the prefill server has seen prompts of loads without a rate",
            "prompts": "how many differ with --cached",
            "requests": "of each load and round",
            "warm_up": "requests before each run",
            "flow": "of kvconnect: sequential or parallel",
            "routed": "through kvconnect router",
            "first_token": "of kvconnect with --routed: from prefill or decode",
            "nixl_gpus": "of NixlConnector's; those of kvconnect unless told; none leaves it out",
            "compilation_config": "JSON; vLLM's own unless told",
        },
        load=(["512:16:0.5"], ["8192:128:2.5"]),
        in_flight=0,
        cached=False,
        prompts=(4, 24),
        requests=(12, 300),
        rounds=3,
        warm_up=(2, 8),
        flow="sequential",
        routed=False,
        first_token="prefill",
        engine="nixl",
        extra={},
        gpus="0,1",
        nixl_gpus=str,
        compilation_config=str,
        chunk=(2048, 8192),
        kv_gib=(1, 48),
        seed=1,
    )
    try:
        given.loads = [Load.parse(text) for text in given.load]
    except ValueError as error:
        given.error(str(error))
    given.nixl_gpus = given.nixl_gpus or given.gpus
    if not given.in_flight and any(load.rate_per_s is None for load in given.loads):
        given.error("a load without a rate needs --in-flight")
    return given


def main() -> None:
    given = parsed()
    with prepared(given) as (recipe, logs, lines), _up(recipe, logs, given) as systems:
        compare(systems, given, lines)


if __name__ == "__main__":
    main()
