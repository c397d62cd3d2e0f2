"""Real vLLM servers under load: ``python -m tests.vllm.measure_load --help``.

kvconnect and vLLM's NixlConnector, each on GPUs of its own, get the same prompts at the same moments; those
that share a GPU take turns, with the same again. Requests arrive as a Poisson process and do not wait for
each other; those of a load without a rate come from ``--in-flight`` clients that wait for their answers. A
table on standard output, JSON lines in a file; nothing here asserts a time.

    python -m tests.vllm.measure_load --nixl-gpus 2,3 --load 8192:128:2.5 --load 2048:128:8 --json F
    python -m tests.vllm.measure_load --nixl-gpus 2,3 --load 8192:12 --in-flight 16 --cached
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
import itertools
import multiprocessing
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvconnect.config import ExtraConfig
from kvconnect.errors import KVConnectError
from kvconnect.node.children import BadAnswer, fetch
from kvconnect.tools.inspect_runner import run_trace
from tests.ports import free_port
from tests.vllm import load_client
from tests.vllm.load_client import LETTERS, Job
from tests.vllm.load_figures import PARTS, Load, buckets, figures, grown, over_rounds, ratios
from tests.vllm.pairs import (
    NIXL,
    Lines,
    Variant,
    brought_up,
    command_line,
    environment,
    gpu_options,
    named_variant,
    prepared,
    stopped,
)
from tests.vllm.servers import Server, awake, router
from tests.vllm.tiny_models import Recipe

_OURS = "vllm:kvconnect_load_seconds"
_THEIRS = "vllm:nixl_xfer_time_seconds"
_PLAIN = "plain"
_STARTS_AFTER_S = 1.0
"""Time for the clients' processes to write their prompts."""
_ROWS = {
    "first_token_ms": "first token, ms",
    "second_token_ms": "from there to the second, ms",
    "prefill_leg_ms": "prefill leg, ms",
    "decode_leg_ms": "decode leg, ms",
    "load_ms": "load, ms (from buckets)",
    "decode_gap_ms": "decode gap, ms",
    "requests_per_s": "requests a second",
    "tokens_per_s": "tokens a second",
    "requests": "requests",
    "failed": "failed",
    "slow_loads": "loads over 3 medians",
    "slow_decode_legs": "legs over 3 medians",
    "client_late_ms": "client late, ms",
}


@dataclass(frozen=True)
class System:
    """Servers that answer requests together: a pair, or two ``plain`` ones that take them in turn."""

    name: str
    places: frozenset[str]
    servers: tuple[Server, ...]
    series: str | None = None
    side_channels: tuple[str, ...] = ()
    router: str = ""

    @property
    def decode(self) -> tuple[Server, ...]:
        """Those that answer the client."""
        return self.servers if self.series is None else self.servers[1:]

    def job(self, load: Load, seed: int, given: argparse.Namespace) -> Job:
        """What it is asked in one run."""
        return Job(
            prefill="" if self.series is None else self.servers[0].url,
            decode=tuple(server.url for server in self.decode),
            load=load,
            requests=given.requests,
            seed=seed,
            in_flight=given.in_flight if load.rate_per_s is None else 0,
            num_cached=given.prompts if given.cached and load.rate_per_s is None else 0,
            is_parallel=given.flow == "parallel" and self.series == _OURS,
            router=self.router,
            timeout_s=given.timeout_s,
        )

    def loads(self) -> dict[float, float]:
        """The histogram of load times; empty where there is none."""
        if self.series is None:
            return {}
        server = self.servers[-1]
        try:
            # A worker's numbers come with a step that follows.
            for _ in range(2):
                server.tokens([1, 2, 3], max_tokens=2)
            return buckets(server.fetch("/metrics").decode(), self.series)
        except BadAnswer:
            return {}


def _options(role: str, given: argparse.Namespace) -> list[str]:
    longest = max(load.tokens_in + load.tokens_out for load in given.loads)
    options = ["--max-model-len", str(longest + 64), "--max-num-seqs", str(given.max_num_seqs)]
    if given.cpu:
        options += ["--max-num-batched-tokens", "2048"]
    else:
        options += gpu_options(given.chunk, given.kv_gib, given.block_size, given.attention_backend)
        if not given.enforce_eager:
            options.append("--no-enforce-eager")
        if given.compilation_config:
            options += ["--compilation-config", given.compilation_config]
    if role == "consumer":
        options.append("--no-enable-prefix-caching")
    return [*options, *given.server_option]


def _started(
    recipe: Recipe, folder: Path, given: argparse.Namespace, places: str, variant: Variant | None
) -> System:
    """The processes of a pair, or of two plain servers; not waited for."""
    name = variant.name if variant else _PLAIN
    made, side_channels = [], []
    for role, place in zip(("producer", "consumer"), places.split(","), strict=True):
        settings = environment(None if given.cpu else place)
        if given.cpu:
            settings["VLLM_CPU_KVCACHE_SPACE"] = str(given.kv_gib)
        elif not given.enforce_eager:
            settings["TORCHDYNAMO_DISABLE"] = "0"
        settings |= dict(setting.split("=", 1) for setting in given.environment)
        config = variant.config(role) if variant else None
        if config and variant is not NIXL:
            port = config["kv_connector_extra_config"].setdefault("port", free_port())
            side_channels.append(f"127.0.0.1:{port}")
        options = _options(role if variant else _PLAIN, given)
        cpu = place if given.cpu else "0"
        made.append(Server(recipe, folder, f"{name}-{role}", cpu, config, options, settings))
    series = None if variant is None else _THEIRS if variant is NIXL else _OURS
    return System(name, frozenset(places.split(",")), tuple(made), series, tuple(side_channels))


def side_by_side(systems: Sequence[System]) -> list[list[System]]:
    """Groups of systems that share no GPU: those of a group are measured at the same time."""
    groups: list[list[System]] = []
    for system in systems:
        for group in groups:
            if all(system.places.isdisjoint(other.places) for other in group):
                group.append(system)
                break
        else:
            groups.append([system])
    return groups


@contextmanager
def _up(recipe: Recipe, folder: Path, given: argparse.Namespace, lines: Lines) -> Iterator[list[System]]:
    """The systems that are asked for, as far as they come up."""
    wanted: list[tuple[Variant | None, str]] = [(named_variant(given.engine, given.extra), given.gpus)]
    wanted += [(NIXL, given.nixl_gpus)] if given.nixl_gpus != "none" else []
    wanted += [(None, given.plain)] if given.plain else []
    # Two cores start two servers at a time.
    batches = [[one] for one in wanted] if given.cpu else [wanted]
    systems = []
    with ExitStack() as stack:
        for batch in batches:
            started = [_started(recipe, folder, given, places, variant) for variant, places in batch]
            up = stack.enter_context(brought_up(started, lines))
            if given.cpu:
                stack.enter_context(stopped([server for system in up for server in system.servers]))
            systems += up
        yield [stack.enter_context(_routed(system, given)) if given.routed else system for system in systems]


@contextmanager
def _routed(system: System, given: argparse.Namespace) -> Iterator[System]:
    """A pair behind a router; plain servers as they are."""
    if system.series is None:
        yield system
        return
    first = given.first_token if system.series == _OURS else "decode"
    flow = given.flow if system.series == _OURS else "sequential"
    prefill, decode = system.servers
    options = ("--first-token", first, "--flow", flow, "--prefill", prefill.url, "--decode", decode.url)
    with ExitStack() as stack:
        if given.cpu:
            stack.enter_context(awake(system.servers))
        url = stack.enter_context(router(*options))
        deadline = time.monotonic() + 30
        body = {"model": "tiny", "prompt": LETTERS, "max_tokens": 2, "allowed_token_ids": LETTERS}
        # The router has to have seen that the decode server takes a first token.
        while first == "prefill" and time.monotonic() < deadline and "prefill" not in _first_tokens(url):
            fetch(url + "/v1/completions", {**body, "stream": True}, 60)
            time.sleep(0.5)
        yield replace(system, router=url)


def _first_tokens(url: str) -> dict[str, float]:
    """Where a router's first tokens came from, so far."""
    name = "kvconnect_router_first_tokens_total"
    found = re.findall(rf'^{name}{{outcome="(\w+)"}} (\S+)$', fetch(url + "/metrics").decode(), re.MULTILINE)
    return {outcome: float(count) for outcome, count in found}


def measured(
    group: Sequence[System], load: Load, seed: int, pool: ProcessPoolExecutor, given: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """One run of a load at each of the group, at the same time: figures by name."""
    jobs = [system.job(load, seed, given) for system in group]
    with ExitStack() as stack:
        if given.cpu:
            stack.enter_context(awake([server for system in group for server in system.servers]))
        channels = list(pool.map(load_client.warm_up, jobs, itertools.repeat(given.warm_up)))
        before = [system.loads() for system in group]
        starts_at = time.monotonic() + _STARTS_AFTER_S
        runs = list(pool.map(load_client.run, jobs, channels, itertools.repeat(starts_at)))
        after = [system.loads() for system in group]
        for system in group if given.routed else ():
            print(f"{system.name}: first tokens so far {_first_tokens(system.router)}", flush=True)
        for system in group if given.traces else ():
            _trace(system, given.traces / f"{system.name}-{seed}.json", given.requests)
    return {
        system.name: figures(samples, grown(first, last), load.tokens_out)
        for system, samples, first, last in zip(group, runs, before, after, strict=True)
    }


def _trace(system: System, out: Path, requests: int) -> None:
    """Write what happened to the requests of a run, and print the slowest loads; of kvconnect alone."""
    if system.side_channels:
        try:
            run_trace(system.side_channels, ExtraConfig(), last=requests, out=out)
        except KVConnectError as error:
            # What was measured is worth more.
            print(f"no trace of {system.name}: {error}", flush=True)


def compare(systems: Sequence[System], given: argparse.Namespace, lines: Lines) -> None:
    """All loads in all rounds; tells every run, and of each load medians and ratios."""
    groups = side_by_side(systems)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(len(systems), context) as pool:
        for number, load in enumerate(given.loads):
            rounds: dict[str, list[dict[str, Any]]] = {system.name: [] for system in systems}
            for turn in range(given.rounds):
                seed = given.seed + 1000 * number + turn
                # Who goes first changes from round to round.
                first = turn % len(groups)
                for group in [*groups[first:], *groups[:first]]:
                    for name, found in measured(group, load, seed, pool, given).items():
                        lines.write("run", connector=name, load=str(load), turn=turn, **found)
                        rounds[name].append(found)
            _tell(load, {name: over_rounds(found) for name, found in rounds.items()}, lines)


def _tell(load: Load, found: Mapping[str, Mapping[str, Any]], lines: Lines) -> None:
    for name, one in found.items():
        lines.write("load", connector=name, load=str(load), **one)
    ours = next((name for name in found if name not in (NIXL.name, _PLAIN)), None)
    compared: dict[str, Any] = {}
    if ours and NIXL.name in found:
        compared = ratios(found[ours], found[NIXL.name])
        lines.write("ratio", connector=ours, over=NIXL.name, load=str(load), **compared)
    print("\n".join(table(load, found, compared)), flush=True)


def table(load: Load, found: Mapping[str, Mapping[str, Any]], compared: Mapping[str, Any]) -> list[str]:
    """Lines for people: a column for each system, and one of ratios if there are any."""
    columns = {**found, **({f"ratio to {NIXL.name}": compared} if compared else {})}
    rows = [[f"{load} (p50 / p90 / p99)", *columns]]
    for name, title in _ROWS.items():
        rows.append([title, *(_shown(column.get(name)) for column in columns.values())])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    shown = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    for name, one in found.items():
        shown += [f"{name}: {count} x {reason}" for reason, count in one.get("failures", {}).items()]
    return ["", *shown]


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return " / ".join(_shown(value[part]) for part in PARTS)
    return "-" if value is None else f"{value:g}"


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
            "plain": "GPUs of two plain servers, which are measured too",
            "enforce_eager": "no CUDA graphs, nothing compiled",
            "compilation_config": "JSON; vLLM's own unless told",
            "timeout_s": "of a leg",
            "traces": "a folder for kvconnect's traces, named by seed; prints the slowest loads",
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
        plain=str,
        enforce_eager=False,
        compilation_config=str,
        chunk=8192,
        block_size=16,
        attention_backend="FLASH_ATTN",
        max_num_seqs=(16, 256),
        kv_gib=(1, 48),
        server_option=[],
        environment=[],
        timeout_s=120.0,
        seed=1,
        traces=Path,
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
    with prepared(given, given.gpus.split(",")[0], is_shown=False) as (recipe, logs, lines):
        if given.traces:
            given.traces.mkdir(parents=True, exist_ok=True)
        with _up(recipe, logs, given, lines) as systems:
            for system in systems:
                lines.write(
                    "system", connector=system.name, places=sorted(system.places), load_series=system.series
                )
            if systems:
                compare(systems, given, lines)


if __name__ == "__main__":
    main()
