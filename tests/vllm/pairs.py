"""What measurements of real vLLM servers share: how these are connected, started, asked and told of."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from kvconnect.node.children import BadAnswer
from tests.ports import free_port
from tests.vllm import dense_model, tiny_models
from tests.vllm.load_client import LETTERS
from tests.vllm.load_figures import streamed, tokens_so_far
from tests.vllm.servers import (
    MULTIPROCESSING,
    NIXL_CONNECTOR,
    ROOT,
    Server,
    asking,
    forked,
    transfer_config,
)
from tests.vllm.tiny_models import Recipe

GRAPHS = ["--no-enforce-eager", "--compilation-config", '{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}']
GPU_BLOCK = 16
_PATIENCE_S = 5400
"""A prompt of 32k tokens takes vLLM's CPU build many minutes."""
_HELP = {
    "chunk": "tokens of a prompt that are computed at once",
    "cpu_gib": "host memory of each server",
    "engine": "of kvconnect: engine or engine:protocol",
    "extra": "of kvconnect",
    "gpus": "of prefill and decode server; cores with --cpu",
    "in_flight": "so many clients that wait for their answers",
    "json": "a file that gets JSON lines",
    "kv_gib": "KV cache of each server",
    "logs": "where the servers' logs are to stay",
    "model": "where the model is, or is to be written (14 GB)",
    "new": "tokens of each further question",
    "out": "tokens of each answer",
    "requests": "of each run",
}


def command_line(
    about: str | None, arguments: Sequence[str] | None, help: Mapping[str, str], **options: Any
) -> argparse.Namespace:
    """What a measurement is told: its ``options`` with their defaults, and what all of them take.

    A default of two is one with ``--cpu`` and one without; a type stands for none; False is a switch; a list
    is of what may be repeated, and has one more element, their type, if it is not text.
    """
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=about, formatter_class=form)
    parser.add_argument("--cpu", action="store_true", help="a tiny model on two cores")
    options |= {"model": Path, "logs": Path, "json": Path}
    for name, default in options.items():
        _, like = default if isinstance(default, tuple) else (None, default)
        says = {"help": (help | {"": ""}).get(name, _HELP.get(name))}
        if like is False:
            says["action"] = "store_true"
        elif isinstance(like, list):
            says |= {"action": "append", "type": type(like[0]) if like else str, "default": None}
        else:
            says |= {"type": json.loads if like == {} else like if isinstance(like, type) else type(like)}
        parser.add_argument("--" + name.replace("_", "-"), **says)
    given = parser.parse_args(arguments)
    for name, default in options.items():
        if getattr(given, name) is None and not isinstance(default, type):
            here, there = default if isinstance(default, tuple) else (default, default)
            setattr(given, name, here if given.cpu else there)
    for name in ("gpus", "nixl_gpus"):
        left_out = (None, "", "none") if name == "nixl_gpus" else (None, "")
        if (value := getattr(given, name, None)) not in left_out and value.count(",") != 1:
            parser.error(f"--{name.replace('_', '-')} is {value!r}, it must be two")
    given.error = parser.error
    return given


@dataclass(frozen=True)
class Answer:
    """A streamed completion: seconds from asking to its first token, and its tokens if they were wanted."""

    first_token_s: float
    tokens: list[int] = field(default_factory=list)


def ask(
    url: str,
    prompt: Sequence[int],
    max_tokens: int = 8,
    *,
    with_tokens: bool = True,
    in_letters: bool = False,
    **more: Any,
) -> Answer:
    """Stream a completion. Raises ``BadAnswer``: the server answered with an error, or with too few tokens.

    A router that looks up a prompt's blocks does not do so for a request that wants tokens as numbers. It
    passes the prefill server's token on only where neither these nor their count are wanted: with
    ``in_letters`` each token is a letter, and is read from the text.
    """
    body = {"model": "tiny", "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, **more}
    body |= {"ignore_eos": True, "stream": True}
    if in_letters:
        body["allowed_token_ids"] = LETTERS
    else:
        body |= {"return_token_ids": True} if with_tokens else {}
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    first_token_s, seen, tokens = 0.0, 0, []
    began = time.perf_counter()
    with asking(url, body, _PATIENCE_S) as client:
        answer = client.getresponse()
        if answer.status != 200:
            raise BadAnswer(f"{url} answered {answer.status}: {answer.read(500)!r}")
        for line in answer:
            arrived = time.perf_counter()
            chunk = streamed(line)
            if "error" in chunk:
                raise BadAnswer(f"{url} answered {chunk['error']}")
            for choice in chunk.get("choices", ()):
                letters = choice["text"] if in_letters else ""
                tokens += choice.get("token_ids") or [LETTERS[ord(letter) - ord("a")] for letter in letters]
            if (so_far := len(tokens) if in_letters else tokens_so_far(chunk)) > seen:
                first_token_s, seen = first_token_s or arrived - began, so_far
    if seen != max_tokens:
        raise BadAnswer(f"{url} answered with {seen} of {max_tokens} tokens")
    return Answer(first_token_s, tokens)


def counted(server: Server, series: str, **labels: str) -> float:
    """A series of ``/metrics``. A worker's numbers come with a step that follows, so one is made."""
    server.tokens([1, 2, 3], max_tokens=2)
    return server.metrics(**labels).get(series, 0.0)


def computed_tokens(*servers: Server) -> float:
    """Prompt tokens that servers computed: neither cached nor loaded."""
    series = "vllm:prompt_tokens_by_source_total"
    return sum(server.metrics(source="local_compute").get(series, 0.0) for server in servers)


def pulls(*servers: Server) -> dict[str, float]:
    """What came of KV that servers asked each other for, by outcome."""
    outcomes = ("loaded", "missed", "not_worth_it", "unmeasured", "unanswered", "failed", "aborted")
    series = "vllm:kvconnect_pulls_total"
    return {name: sum(counted(server, series, outcome=name) for server in servers) for name in outcomes}


@dataclass(frozen=True)
class Variant:
    """What a pair is connected with: ``extra`` for kvconnect, None for vLLM's own NixlConnector."""

    name: str
    extra: Mapping[str, Any] | None

    def config(self, role: str, **more: Any) -> dict[str, Any]:
        """The ``kv_transfer_config`` of a ``producer``, ``consumer`` or ``both``; ``more`` are keys of it."""
        if self.extra is None:
            return {**NIXL_CONNECTOR, **more}
        return transfer_config(role, **{"engine": "nixl", "protocol": "auto", **self.extra, **more})


NIXL = Variant("NixlConnector", None)


@dataclass
class Pair:
    """A prefill and a decode server that are up."""

    variant: Variant
    prefill: Server
    decode: Server

    @property
    def name(self) -> str:
        return self.variant.name

    @property
    def servers(self) -> tuple[Server, Server]:
        return self.prefill, self.decode


class Lines:
    """JSON lines on standard output, and in a file if there is one."""

    def __init__(self, copy: TextIO | None = None) -> None:
        self._copy = copy

    def write(self, kind: str, **finding: Any) -> None:
        line = json.dumps({"kind": kind, **finding})
        print(line, flush=True)
        if self._copy is not None:
            print(line, file=self._copy, flush=True)


@contextmanager
def prepared(
    given: argparse.Namespace,
    *,
    tiny: str = "heavy",
    shape: dense_model.Shape | None = None,
    forks: bool = False,
) -> Iterator[tuple[Recipe, Path, Lines]]:
    """What a measurement begins with by its ``--cpu``, ``--model``, ``--logs`` and ``--json``: the model, the
    folder of logs, and where findings are told. ``tiny`` is the model of a CPU, whose servers may be forked;
    ``shape`` is that of a GPU."""
    with ExitStack() as stack:
        if given.cpu and forks:
            stack.enter_context(forked())
        temporary = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        lines = Lines(stack.enter_context(given.json.open("a")) if given.json else None)
        if given.cpu:
            recipe = tiny_models.write_model(tiny, temporary)
        else:
            where = given.model or temporary / "model"
            recipe = dense_model.write_model(where, shape or dense_model.Shape(), device(given))
        logs = given.logs or temporary
        logs.mkdir(parents=True, exist_ok=True)
        yield recipe, logs, lines


def device(given: argparse.Namespace) -> str:
    """Where random weights are drawn."""
    return "cpu" if given.cpu else f"cuda:{given.gpus.split(',')[0]}"


def named_variant(named: str, extra: Mapping[str, Any]) -> Variant:
    """kvconnect over an engine, or ``engine:protocol``."""
    engine, _, protocol = named.partition(":")
    settings = {"engine": engine, "protocol": protocol or "auto", **extra}
    return Variant("-".join(filter(None, ("kvconnect", engine, protocol))), settings)


def served(
    recipe: Recipe,
    folder: Path,
    name: str,
    place: str,
    config: dict[str, Any] | None,
    given: argparse.Namespace,
    options: Sequence[str] = (),
    graphs: Sequence[str] = GRAPHS,
    **settings: str | None,
) -> Server:
    """A server on a GPU, or with ``--cpu`` on cores, which is started and not waited for.

    ``graphs`` are what a GPU's decode steps are captured by; with none it runs eagerly. ``settings`` are of
    its environment. It names blocks as others do.
    """
    own: dict[str, str | None] = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "PYTHONHASHSEED": "0",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        # Measured is what operators run.
        MULTIPROCESSING: None,
    }
    if given.cpu:
        own["VLLM_CPU_KVCACHE_SPACE"] = str(given.kv_gib)
    else:
        own["CUDA_VISIBLE_DEVICES"], place = place, "0"
        own |= {"TORCHDYNAMO_DISABLE": "0"} if graphs else {}
        # Said in bytes: servers that start at the same time would count each other's memory. The other one
        # is only compared with what is free at the start.
        memory = ["--kv-cache-memory-bytes", str(given.kv_gib << 30), "--gpu-memory-utilization", "0.1"]
        where = ["--attention-backend", "FLASH_ATTN", "--block-size", str(GPU_BLOCK)]
        options = [*where, *memory, *graphs, *options]
    options, own = ["--max-num-batched-tokens", str(given.chunk), *options], own | settings
    return Server(recipe, folder, name, place, config, options, own, answer_timeout_s=_PATIENCE_S)


def both_served(
    variant: Variant,
    recipe: Recipe,
    folder: Path,
    given: argparse.Namespace,
    options: Sequence[Sequence[str]],
    places: Sequence[str],
    *,
    policy: str = "fail",
    **more: Any,
) -> Pair:
    """The two servers of a pair, as ``served``, each with its options and place."""
    roles = zip(("producer", "consumer"), options, places, strict=True)
    made = []
    for role, own, place in roles:
        name, config = f"{variant.name}-{role}", variant.config(role, kv_load_failure_policy=policy)
        made.append(served(recipe, folder, name, place, config, given, own, **more))
    return Pair(variant, *made)


def pulling_pair(
    recipe: Recipe,
    folder: Path,
    name: str,
    given: argparse.Namespace,
    options: Sequence[Sequence[str]],
    *,
    place: str = "host",
) -> list[tuple[Server, str]]:
    """Two servers that pull from each other, each with its side channel.

    They keep KV in ``host`` memory, or share what their ``device`` has.
    """
    kept: dict[str, Any] = {"share_prefix_cache": True}
    if place == "host":
        kept = {"offload": {"cpu_bytes": given.cpu_gib << 30}}
    ports, made = (free_port(), free_port()), []
    for number, (own, other) in enumerate([ports, ports[::-1]]):
        extra = {"port": own, "sources": [f"127.0.0.1:{other}"], **kept, **given.extra}
        config = named_variant(given.engine, extra).config("both", kv_load_failure_policy="recompute")
        where = given.gpus.split(",")[number]
        server = served(recipe, folder, f"{name}{number}", where, config, given, options[number])
        made.append((server, f"127.0.0.1:{own}"))
    return made
