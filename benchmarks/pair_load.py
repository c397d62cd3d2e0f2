"""Longer measurements over a running pair: a soak, and what an idle connected node costs.

Seen from outside, over HTTP and the operating system's accounts, like the demo.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvconnect.demo.children import Child, Children
from kvconnect.demo.http import BadAnswer, fetch_json, growth, read_metrics
from kvconnect.demo.outcome import difference, tokens_of
from kvconnect.demo.pair import Pair, ask, start_nodes, start_reference, start_router
from kvconnect.errors import KVConnectError

_SOAK_TOKENS = 4
_LONGEST_PROMPT = 160
_VOCABULARY = 512
_REST_TIMEOUT_S = 60.0
_REMEMBERED = ("leases", "sendings", "loads")


@contextmanager
def _running_pair(engine: str, model: str, *node_options: str) -> Iterator[tuple[Children, Pair]]:
    with tempfile.TemporaryDirectory(prefix="kvconnect-bench-") as folder, Children(Path(folder)) as children:
        nodes = start_nodes(children, engine, model, *node_options)
        yield children, start_router(children, engine, model, nodes)


def bench_soak(*, engine: str, model: str, prompts: int, concurrency: int, seed: int, compare: bool) -> int:
    """Send many prompts through a pair, some of them cut short by their client, then look for what is left.

    Prints one JSON object. Returns the exit code: 1 if an answer was wrong or anything is left over.

    Raises:
        KVConnectError: the pair did not start.
    """
    made = _soak_prompts(prompts, seed)
    node_options = ("--max-num-seqs", str(concurrency), "--num-blocks", "2048")
    with _running_pair(engine, model, *node_options) as (children, pair):
        started = time.monotonic()
        answers = _ask_many(pair.router.url, model, made, concurrency)
        seconds = time.monotonic() - started
        left = {
            child.name: rest
            for child in (pair.prefill, pair.decode)
            if (rest := _left_over(child)) is not None
        }
        metrics = read_metrics(pair.decode.url)
        wrong = [str(answer) for answer in answers if isinstance(answer, BadAnswer)]
        if compare:
            single = start_reference(children, model, *node_options)
            url = single.wait_ready()
            expected = _ask_many(url, model, made, concurrency)
            wrong += [
                problem for a, b in zip(answers, expected, strict=True) if (problem := difference(a, b))
            ]
        report = {
            "engine": engine,
            "model": model,
            "prompts": prompts,
            "concurrency": concurrency,
            "answered": sum(not isinstance(answer, BadAnswer) for answer in answers),
            "wrong": len(wrong),
            "compared": compare,
            "received": int(
                growth({}, metrics, "kvconnect_transfers_total", direction="received", outcome="ok")
            ),
            "kv_bytes": int(growth({}, metrics, "kvconnect_transfer_bytes_total", direction="received")),
            "seconds": round(seconds, 2),
            "prompts_per_s": round(prompts / seconds, 2),
            "left_over": left,
        }
        print(json.dumps(report), flush=True)
        for problem in wrong[:5]:
            print(f"wrong: {problem}", flush=True)
    return 1 if wrong or left else 0


def bench_idle(*, engine: str, model: str, seconds: float) -> int:
    """Measure the processor time of idle nodes: one without a connector, and a pair that has met.

    Prints one JSON object; ``cores`` are fractions of one core. Returns the exit code, always 0.

    Raises:
        KVConnectError: a node did not start.
    """
    with _running_pair(engine, model) as (children, pair):
        single = start_reference(children, model)
        single.wait_ready()
        for url in (single.url, pair.router.url):
            ask(url, model, list(range(1, 100)))
        time.sleep(1.0)
        nodes = {"alone": single, "prefill": pair.prefill, "decode": pair.decode}
        before = {name: _cpu_seconds(child.pid) for name, child in nodes.items()}
        started = time.monotonic()
        time.sleep(seconds)
        waited = time.monotonic() - started
        cores = {
            name: round((_cpu_seconds(child.pid) - before[name]) / waited, 4) for name, child in nodes.items()
        }
    extra = {side: round(cores[side] - cores["alone"], 4) for side in ("prefill", "decode")}
    print(
        json.dumps(
            {
                "engine": engine,
                "model": model,
                "seconds": round(waited, 1),
                "cores": cores,
                "more_than_alone": extra,
            }
        )
    )
    return 0


def _soak_prompts(count: int, seed: int) -> list[list[int]]:
    """Random prompts of all lengths; a third of them begin like another one."""
    rng = random.Random(seed)
    stems = [[rng.randrange(_VOCABULARY) for _ in range(64)] for _ in range(8)]
    made = []
    for _ in range(count):
        own = [rng.randrange(_VOCABULARY) for _ in range(rng.randint(1, _LONGEST_PROMPT))]
        made.append(rng.choice(stems) + own if rng.random() < 1 / 3 else own)
    return made


def _ask_many(url: str, model: str, prompts: Sequence[Sequence[int]], concurrency: int) -> list[Any]:
    def one(prompt: Sequence[int]) -> Any:
        try:
            return tokens_of(ask(url, model, prompt, max_tokens=_SOAK_TOKENS))
        except BadAnswer as error:
            return error

    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(one, prompts))


def _left_over(child: Child) -> Any:
    """What a node still holds once it had time to come to rest; None if nothing."""

    def at_rest(state: Any) -> bool:
        blocks = state["blocks"]
        return bool(
            blocks["free"] + blocks["held"] == blocks["total"]
            and blocks["held"] == 0
            and not any(state["connector"][name] for name in _REMEMBERED)
        )

    return _until(lambda: fetch_json(child.url + "/debug/state"), at_rest)


def _until(read: Callable[[], Any], good: Callable[[Any], bool]) -> Any:
    deadline = time.monotonic() + _REST_TIMEOUT_S
    while True:
        value = read()
        if good(value):
            return None
        if time.monotonic() > deadline:
            return value
        time.sleep(0.2)


def _cpu_seconds(pid: int) -> float:
    """User and system time of a process and its threads so far.

    Raises:
        KVConnectError: this is no Linux, or the process is gone.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError as error:
        raise KVConnectError(f"the processor time of process {pid} cannot be read: {error}") from error
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
