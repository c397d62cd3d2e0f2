"""First tokens over kvconnect, beside SGLang's own backends: ``python -m tests.sglang.measure --help``.

A tiny model on two cores. Each turn starts a pair over one backend, asks for prompts of each length, one and
several at a time, and ends it; the backends take turns. JSON objects of each turn, and at the end of all,
with seconds from asking both servers to the first token of D's stream; nothing here asserts.

    .venv-sglang/bin/python -m tests.sglang.measure

With ``--returning``: seconds to the token of a prompt that one server computes, or that another one restores
from host memory, or from disk; each asked for again once other prompts have taken its place.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from tests.sglang.own_backends import ENVIRONMENT
from tests.sglang.servers import (
    LINKED,
    Asked,
    SglangServer,
    decode_server,
    forked,
    pair,
    prefill_server,
    random_prompt,
    running,
)
from tests.sglang.stand_ins import sitecustomize  # noqa: F401

_SEEDS = itertools.count(1)


@contextmanager
def started(backend: str, model: Path, folder: Path) -> Iterator[tuple[SglangServer, SglangServer]]:
    """A pair over ``kvconnect:ENGINE``, or over a backend of SGLang's own."""
    name, _, engine = backend.partition(":")
    if name == "kvconnect":
        with pair(model, folder, engine) as both:
            yield both
    else:
        more = {"environment": ENVIRONMENT[name]}
        made = prefill_server(model, folder, name, **more), decode_server(model, folder, name, **more)
        with running(*made) as (prefill, decode):
            yield prefill, decode


def first_tokens(prefill: SglangServer, decode: SglangServer, length: int, at_once: int) -> list[float]:
    """Seconds to the first token of each of ``at_once`` prompts that are asked together."""

    def ask(prompt: list[int]) -> float:
        began = time.perf_counter()
        with Asked(prefill, decode, prompt, max_new_tokens=4, stream=True) as asked:
            lines = asked.lines()
            next(lines)
            took = time.perf_counter() - began
            for _ in lines:
                pass
        return took

    prompts = [random_prompt(length, next(_SEEDS)) for _ in range(at_once)]
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(ask, prompts))


def measured(
    backends: Sequence[str], lengths: Sequence[int], at_once: int, turns: int, rounds: int, model: Path
) -> dict[tuple[str, int, int], list[float]]:
    """Seconds by backend, length and how many at once: one, or ``at_once``."""
    found = defaultdict(list)
    for turn, backend in itertools.product(range(turns), backends):
        with (
            tempfile.TemporaryDirectory() as folder,
            started(backend, model, Path(folder)) as (prefill, decode),
        ):
            # The two servers meet with the first.
            first_tokens(prefill, decode, 100, 1)
            for length, many in itertools.product(lengths, (1, at_once)):
                took = [s for _ in range(rounds) for s in first_tokens(prefill, decode, length, many)]
                found[backend, length, many] += took
                show((backend, length, many), took, turn=turn)
    return found


SMALL_TOKENS, ROOM_BYTES = 4096, {"host": 1 << 30, "disk": 3 << 24}
"""Of the device, and host memory by where a prompt is that other prompts have evicted from the device."""


def returning(
    lengths: Sequence[int], turns: int, rounds: int, model: Path
) -> dict[tuple[str, int, int], list[float]]:
    """Seconds to the token of a prompt that comes again, by where it is: nowhere, on the device, or kept."""
    found = defaultdict(list)
    for turn, where in itertools.product(range(turns), ("nowhere", "device", *ROOM_BYTES)):
        options, environment = ["--max-total-tokens", str(SMALL_TOKENS)], {}
        with tempfile.TemporaryDirectory() as folder:
            if where in ROOM_BYTES:
                options += LINKED
                kept = {"cpu_bytes": ROOM_BYTES[where], "disk_path": folder, "disk_bytes": 1 << 32}
                environment["KVCONNECT_CONFIG"] = json.dumps({"offload": kept})
            with running(SglangServer(model, Path(folder), where, options, environment)) as (server,):
                for length in lengths:
                    took = [again(server, length, where) for _ in range(rounds)]
                    found[where, length, 1] += took
                    show((where, length, 1), took, turn=turn)
    return found


def again(server: SglangServer, length: int, where: str) -> float:
    """Seconds to the token of a prompt that was asked before; it must come from where it is."""
    prompt = random_prompt(length, next(_SEEDS))
    server.ask(prompt, max_new_tokens=1)
    for _ in range(2 * SMALL_TOKENS // 1500 if where != "device" else 0):
        server.ask(random_prompt(1500, next(_SEEDS)), max_new_tokens=1)
    began = time.perf_counter()
    answer = server.ask(prompt, max_new_tokens=1)
    took = time.perf_counter() - began
    assert (answer["meta_info"]["cached_tokens"] > length - 17) == (where != "nowhere"), answer["meta_info"]
    return took


def show(of: tuple[str, int, int], took: Sequence[float], **more: int) -> None:
    """Print the first tokens of one backend, length and number of requests at once."""
    line = {**more, **dict(zip(("backend", "tokens", "at_once"), of, strict=True)), "requests": len(took)}
    line |= {"median_s": round(statistics.median(took), 3), "min_s": round(min(took), 3)}
    print(json.dumps(line), flush=True)


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--backend", action="append", help="of SGLang, or kvconnect:ENGINE; repeatable")
    parser.add_argument("--length", action="append", type=int, help="of prompts; repeatable")
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--turns", type=int, default=3, help="of each backend, whose servers start anew")
    parser.add_argument("--rounds", type=int, default=3, help="of each length in a turn")
    parser.add_argument("--returning", action="store_true", help="prompts that one server has had before")
    given = parser.parse_args()
    backends = given.backend or ["kvconnect:nixl", "nixl", "kvconnect:mooncake", "mooncake"]
    lengths = given.length or [1000, 3000]
    from tests.vllm.tiny_models import write_model

    with tempfile.TemporaryDirectory() as folder, forked():
        model = write_model("gqa", Path(folder)).folder
        if given.returning:
            found = returning(lengths, given.turns, given.rounds, model)
        else:
            found = measured(backends, lengths, given.at_once, given.turns, given.rounds, model)
    for of, took in sorted(found.items()):
        show(of, took)


if __name__ == "__main__":
    main()
