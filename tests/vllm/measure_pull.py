"""How fast a prompt's KV is pulled from another vLLM server: ``python -m tests.vllm.measure_pull --help``.

Two servers with host memory that are each other's sources, and a third without a connector, take turns. A
prompt is computed by one server, then asked of the other, which has not seen it, of the third, and of the
first again, which has it on its device. Then a conversation: each turn is prefilled by one server and decoded
by the other, where the answer's KV is; the prompt of the next turn has both. Every finding is a JSON line;
nothing here asserts a time.

    python -m tests.vllm.measure_pull --tokens 8192 --tokens 32768
    python -m tests.vllm.measure_pull --cpu
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.ports import free_port
from tests.vllm import dense_model
from tests.vllm.measure_gpu import ask
from tests.vllm.pairs import Lines, brought_up, environment, gpu_options, prepared
from tests.vllm.servers import Server, random_prompt, transfer_config
from tests.vllm.tiny_models import Recipe

_KEPT_WITHIN_S = 20.0
_STORED = "vllm:kvconnect_offload_rows_total"
_PULLED = "vllm:kvconnect_pulls_total"


@dataclass
class Servers:
    """Two that pull from each other, and a plain one."""

    name: str
    servers: tuple[Server, Server, Server]


def _config(given: argparse.Namespace, own: int, other: int) -> dict[str, Any]:
    extra: dict[str, Any] = {"engine": given.engine, "protocol": "auto", "port": own}
    extra |= {"sources": [f"127.0.0.1:{other}"]}
    extra |= {"offload": {"cpu_bytes": given.cpu_gib << 30}, **given.extra}
    return transfer_config("both", **extra, kv_load_failure_policy="recompute")


def _started(recipe: Recipe, folder: Path, given: argparse.Namespace) -> Servers:
    ports = free_port(), free_port()
    options = ["--max-model-len", str(max(given.tokens) + given.turns * (given.new + given.out) + 512)]
    if not given.cpu:
        options += [*gpu_options(given.chunk, given.kv_gib), "--no-enforce-eager"]
        options += ["--compilation-config", '{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}']
    made = []
    for number, config in enumerate([_config(given, *ports), _config(given, *ports[::-1]), None]):
        settings = environment(None if given.cpu else given.gpus.split(",")[number % 2])
        settings |= {"PYTHONHASHSEED": "0"}
        settings |= {"VLLM_CPU_KVCACHE_SPACE": "1"} if given.cpu else {"TORCHDYNAMO_DISABLE": "0"}
        made.append(Server(recipe, folder, f"server{number}", str(number % 2), config, options, settings))
    return Servers("pull", (made[0], made[1], made[2]))


def _counted(server: Server, series: str, **labels: str) -> float:
    # A worker's numbers come with a step that follows.
    server.tokens([1, 2, 3], max_tokens=2)
    return server.metrics(**labels).get(series, 0.0)


def _is_kept(server: Server) -> None:
    """Until no more rows are stored."""
    before, deadline = -1.0, time.monotonic() + _KEPT_WITHIN_S
    while time.monotonic() < deadline:
        now = _counted(server, _STORED, move="stored")
        if now == before:
            return
        before = now


def prompts_pulled(servers: Servers, tokens: int, given: argparse.Namespace, lines: Lines) -> None:
    """One length: first tokens by where the prompt is, and whether the answers are the same."""
    first, second, plain = servers.servers
    found: dict[str, list[float]] = {"pulled": [], "computed": [], "on_device": []}
    same = 0
    for turn in range(given.rounds + 2):
        prompt = random_prompt(tokens, seed=1000 * tokens + turn)
        source, target = (first, second) if turn % 2 else (second, first)
        ask(source, prompt)
        _is_kept(source)
        answers = {
            "pulled": ask(target, prompt),
            "computed": ask(plain, prompt),
            "on_device": ask(source, prompt),
        }
        if turn < 2:
            # Either way kernels are compiled, peers met, links calibrated, and the rate of prefills learned.
            continue
        for name, answer in answers.items():
            found[name].append(answer.first_token_s)
        # Both computed the same last tokens alone; who computed the whole prompt cut it elsewhere.
        same += answers["pulled"].tokens == answers["on_device"].tokens
    medians = {name: statistics.median(values) for name, values in found.items()}
    lines.write(
        "prompts",
        tokens=tokens,
        first_token_ms={name: round(1000 * value, 1) for name, value in medians.items()},
        over_computed=round(medians["pulled"] / medians["computed"], 3),
        same_tokens=f"{same} of {given.rounds}",
        pulls=_pulls(first, second),
    )


def _pulls(*servers: Server) -> Mapping[str, float]:
    outcomes = ("loaded", "missed", "not_worth_it", "unmeasured", "unanswered", "failed", "aborted")
    return {name: sum(_counted(server, _PULLED, outcome=name) for server in servers) for name in outcomes}


def conversation(servers: Servers, given: argparse.Namespace, lines: Lines) -> None:
    """Turns over a pair, P then D, and the same by the plain server."""
    prefill, decode, plain = servers.servers
    history = random_prompt(given.tokens[0], seed=7)
    other = list(history)
    for turn in range(given.turns):
        began = time.perf_counter()
        before = _computed(prefill)
        began = time.perf_counter()
        handed = prefill.prefilled(history)
        prefilled_s = time.perf_counter() - began
        answer = ask(decode, history, kv_transfer_params=handed, max_tokens=given.out)
        computed = _computed(prefill) - before
        alone = ask(plain, other, max_tokens=given.out)
        _is_kept(decode)
        lines.write(
            "turn",
            turn=turn,
            prompt_tokens=len(history),
            computed_tokens_by_prefill=computed,
            prefill_ms=round(1000 * prefilled_s, 1),
            first_token_ms=round(1000 * (prefilled_s + answer.first_token_s), 1),
            plain_first_token_ms=round(1000 * alone.first_token_s, 1),
            same_tokens=answer.tokens == alone.tokens if history == other else None,
        )
        question = random_prompt(given.new, seed=100 + turn)
        history = history + answer.tokens + question
        other = other + alone.tokens + question


def _computed(server: Server) -> float:
    """Prompt tokens that a server computed: neither cached nor loaded."""
    return server.metrics(source="local_compute").get("vllm:prompt_tokens_by_source_total", 0.0)


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--cpu", action="store_true", help="a tiny model on two cores")
    add("--tokens", type=int, action="append", help="of a prompt; repeatable")
    add("--rounds", type=int, default=4)
    add("--turns", type=int, default=6, help="of the conversation, which begins with the first --tokens")
    add("--new", type=int, help="tokens of each further question")
    add("--out", type=int, help="tokens of each answer")
    add("--engine", default="nixl")
    add("--extra", type=json.loads, default={}, metavar="JSON")
    add("--gpus", default="0,1", help="of the two servers; the plain one shares the first")
    add("--chunk", type=int, default=8192, help="tokens that are computed at once")
    add("--kv-gib", type=int, default=16, help="KV cache of each server")
    add("--cpu-gib", type=int, help="host memory of each server")
    add("--model", type=Path, help="where the model is, or is to be written (14 GB)")
    add("--logs", type=Path, help="where the servers' logs are to stay")
    add("--json", type=Path, help="a file that gets JSON lines")
    given = parser.parse_args(arguments)
    for name, here, there in (
        *(("tokens", [1024, 2048], [8192, 32768]), ("new", 128, 1024)),
        *(("out", 16, 128), ("cpu_gib", 1, 24)),
    ):
        if getattr(given, name) is None:
            setattr(given, name, here if given.cpu else there)
    return given


def main() -> None:
    given = parsed()
    shape = dense_model.Shape(positions=65536)
    with (
        prepared(given, given.gpus.split(",")[0], shape=shape) as (recipe, logs, lines),
        brought_up([_started(recipe, logs, given)], lines) as up,
    ):
        for servers in up:
            for tokens in given.tokens:
                prompts_pulled(servers, tokens, given, lines)
            conversation(servers, given, lines)


if __name__ == "__main__":
    main()
