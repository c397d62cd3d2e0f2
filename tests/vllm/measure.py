"""Figures of real vLLM servers on two cores: ``python -m tests.vllm.measure --help``.

Nothing here asserts a time. What is compared runs alternately, in one run; whoever is not being measured
is stopped by a signal, because some connectors keep a core busy while they are idle.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.ports import free_port
from tests.vllm.servers import (
    ASK_FOR_KV,
    MULTIPROCESSING,
    NIXL_CONNECTOR,
    Server,
    awake,
    members,
    random_prompt,
    running,
    send_signal,
    transfer_config,
)
from tests.vllm.tiny_models import write_model

_ANSWER_TIMEOUT_S = 5400
"""A prompt of 32k tokens takes vLLM's CPU build many minutes."""

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def _config(connector: str, role: str) -> dict[str, Any] | None:
    if connector == "none":
        return None
    if connector == "NixlConnector":
        return NIXL_CONNECTOR
    _, engine, *protocol = connector.split("-")
    more = {"protocol": protocol[0] if protocol else "auto"}
    return transfer_config(role, engine, load_timeout_s=300, lease_s=300, **more)


def _server(
    recipe, folder: Path, connector: str, role: str, cpu: str, space_gib: int, *options: str
) -> Server:
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": str(space_gib),
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        # Measured is what operators run.
        MULTIPROCESSING: None,
    }
    name = f"{connector}-{role}"
    return Server(
        recipe,
        folder,
        name,
        cpu,
        _config(connector, role),
        options,
        environment,
        answer_timeout_s=_ANSWER_TIMEOUT_S,
    )


def first_token(
    connectors: list[str], lengths: list[int], rounds: int, space_gib: int
) -> list[dict[str, Any]]:
    """Seconds from asking a decode server to its first token, its KV taken from the prefill server."""
    samples: dict[tuple[str, int], list[float]] = {}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        recipe = write_model("heavy", folder)
        options = ["--max-model-len", str(max(lengths) + 128), "--max-num-batched-tokens", "2048"]
        pairs = {}
        for connector in connectors:
            made = (
                # Both cores for the prompts: nobody else computes meanwhile.
                _server(recipe, folder, connector, "producer", "0-1", space_gib, *options),
                _server(
                    recipe,
                    folder,
                    connector,
                    "consumer",
                    "1",
                    space_gib,
                    *options,
                    "--no-enable-prefix-caching",
                ),
            )
            pairs[connector] = stack.enter_context(running(*made))
            for server in made:
                send_signal(server, signal.SIGSTOP)
        # A stopped process does not end: they are woken before they are ended.
        stack.callback(
            lambda: [send_signal(server, signal.SIGCONT) for two in pairs.values() for server in two]
        )
        for length in lengths:
            prompt = random_prompt(length, length)
            expected: dict[str, list[int]] = {}
            for turn in range(rounds + 1):
                for connector, (prefill, decode) in pairs.items():
                    with awake((prefill, decode)):
                        params = prefill.ask(prompt, max_tokens=1, kv_transfer_params=ASK_FOR_KV)
                        started = time.perf_counter()
                        got = decode.tokens(
                            prompt, max_tokens=1, kv_transfer_params=params["kv_transfer_params"]
                        )
                        took = time.perf_counter() - started
                    assert expected.setdefault("any", got) == got
                    # The first turn meets the peer, and prefills what later ones find in the prefix cache.
                    if turn:
                        samples.setdefault((connector, length), []).append(took)
            _report(samples, length, connectors)
    return [
        {"connector": connector, "tokens": length, "median_ms": round(statistics.median(times) * 1e3, 1)}
        for (connector, length), times in samples.items()
    ]


def _report(samples: dict[tuple[str, int], list[float]], length: int, connectors: list[str]) -> None:
    medians = {name: statistics.median(samples[name, length]) for name in connectors}
    base = medians[connectors[-1]]
    parts = [f"{name} {value * 1e3:.0f} ms ({value / base:.2f})" for name, value in medians.items()]
    print(f"{length} tokens: " + ", ".join(parts), flush=True)


def idle(connectors: list[str], seconds: float) -> list[dict[str, Any]]:
    """Cores that an idle pair uses after it has met and handed over a request."""
    found = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe = write_model("gqa", folder)
        for connector in connectors:
            made = [
                _server(recipe, folder, connector, role, cpu, 1)
                for role, cpu in (("producer", "0"), ("consumer", "1"))
            ]
            with running(*made) as (prefill, decode):
                prompt = random_prompt(300, 1)
                params = None
                if connector != "none":
                    params = prefill.ask(prompt, max_tokens=1, kv_transfer_params=ASK_FOR_KV)[
                        "kv_transfer_params"
                    ]
                decode.tokens(prompt, **({"kv_transfer_params": params} if params else {}))
                time.sleep(3)
                before = [_cpu_s(server) for server in made]
                time.sleep(seconds)
                cores = [(_cpu_s(server) - was) / seconds for server, was in zip(made, before, strict=True)]
            found.append(
                {
                    "connector": connector,
                    "prefill_cores": round(cores[0], 4),
                    "decode_cores": round(cores[1], 4),
                }
            )
            print(json.dumps(found[-1]), flush=True)
    return found


def _cpu_s(server: Server) -> float:
    total = 0
    for pid in members(server):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / _TICKS_PER_S


def long_prompts(connector: str, length: int, requests: int, space_gib: int) -> list[dict[str, Any]]:
    """Prompts of many thousand tokens through a pair: are they exact, and how long does D take?"""
    found = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe = write_model("heavy", folder)
        options = ["--max-model-len", str(length + 128), "--max-num-batched-tokens", "2048"]
        prefill = _server(recipe, folder, connector, "producer", "0-1", space_gib, *options)
        decode = _server(
            recipe, folder, connector, "consumer", "1", space_gib, *options, "--no-enable-prefix-caching"
        )
        with running(prefill, decode):
            # One prefix for all, so that the prefill server computes it once; what is moved is all of it.
            prefix = random_prompt(length - 8, 1)
            for number in range(requests):
                prompt = prefix + random_prompt(8, 2 + number)
                params = prefill.ask(prompt, max_tokens=1, kv_transfer_params=ASK_FOR_KV)[
                    "kv_transfer_params"
                ]
                started = time.perf_counter()
                got = decode.tokens(prompt, kv_transfer_params=params)
                took = time.perf_counter() - started
                exact = got == prefill.tokens(prompt)
                found.append({"tokens": length, "request": number, "exact": exact, "seconds": round(took, 2)})
                print(json.dumps(found[-1]), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["ttft", "idle", "long"])
    parser.add_argument(
        "--connectors", default="", help="NixlConnector, kvconnect-ENGINE, kvconnect-ENGINE-PROTOCOL"
    )
    parser.add_argument("--lengths", default="1024,4096,16384")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--requests", type=int, default=5)
    parser.add_argument("--space-gib", type=int, default=3)
    given = parser.parse_args()
    names = [name for name in given.connectors.split(",") if name]
    lengths = [int(length) for length in given.lengths.split(",")]
    if given.what == "ttft":
        names = names or ["kvconnect-nixl", "NixlConnector"]
        results = first_token(names, lengths, given.rounds, given.space_gib)
    elif given.what == "idle":
        names = names or ["none", "kvconnect-nixl", "kvconnect-mooncake", "NixlConnector"]
        results = idle(names, given.seconds)
    else:
        results = long_prompts(
            (names or ["kvconnect-mooncake"])[0], lengths[-1], given.requests, given.space_gib
        )
    for result in results:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
