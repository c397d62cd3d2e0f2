"""D's memory wall: ``python -m tests.vllm.measure_wall --help``.

One pair whose decode server has room for few requests, and whose prefill server has room for some more. Many
clients ask at once, each the prefill server and then the decode server. The prefill server computed all
prompts before, for its own answers, and has them in host memory: so it is much faster than the decode server,
on a CPU too. Each run is of one setting of the decode server, which has offload: without parking, or with it.
In the first of two turns host memory is touched for the first time, which takes a CPU long. The JSON line of
a turn has the seconds until all answers were complete, those of the decode work (what the answers took from
their first token on, divided by the room), how long leases lasted on the prefill server, for how long it
computed nothing between its first prompt and its last, how many answers are its own, and how many requests a
second the decode server answered while it was full.

With ``--times`` requests then come, evenly and for ``--seconds``, at so many times that rate, with prompts
that no server has: the line ``overload`` has the prefill server's legs, ``idle`` those of the same arrivals
whose answers have one token, and each the requests a second of the second half. Nothing here asserts a time.

    python -m tests.vllm.measure_wall --cpu
    python -m tests.vllm.measure_wall --out 512 --times 1.5 --cpu-gib 36
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from kvconnect.config import ExtraConfig
from kvconnect.timeline import Moment, Record
from kvconnect.tools.inspect_runner import read_worker
from tests.ports import free_port
from tests.vllm.load_figures import quantile
from tests.vllm.pairs import GPU_BLOCK, ask, command_line, named_variant, prepared, served
from tests.vllm.servers import EXACT, MULTIPROCESSING, Server, random_prompt, running
from tests.vllm.tiny_models import Recipe

_HANDLE, _REQUEST = 2, 3
_LOADS = "vllm:kvconnect_transfers_total"
_DECODE_S = "vllm:request_decode_time_seconds_sum"


def spans(records: Iterable[Record], first: str, last: str, key: int) -> list[tuple[float, float]]:
    """The first time of one moment and the last one of another, by the field ``key`` of records."""
    began: dict[object, float] = {}
    ended: dict[object, float] = {}
    for record in records:
        if record[1] == first:
            began.setdefault(record[key], record[0])
        elif record[1] == last:
            ended[record[key]] = record[0]
    return [(at, ended[name]) for name, at in began.items() if name in ended]


def idle_s(busy: Sequence[tuple[float, float]]) -> float:
    """Seconds between the first and the last time that are in none of the intervals."""
    idle, until = 0.0, min(began for began, _ in busy)
    for began, ended in sorted(busy):
        idle, until = idle + max(0.0, began - until), max(until, ended)
    return idle


def measured(
    prefill: Server, decode: Server, prompts: Sequence[list[int]], alone: Sequence[list[int]], given: Any
) -> dict[str, Any]:
    """Ask for all answers at once."""
    warm = random_prompt(given.tokens, 1)
    ask(decode.url, warm, 4, kv_transfer_params=prefill.prefilled(warm))
    extra, address = ExtraConfig(insecure=True), ("127.0.0.1", given.port)
    parked = decode.metrics(outcome="parked").get(_LOADS, 0.0)
    before, seen = decode.metrics().get(_DECODE_S, 0.0), len(read_worker(extra, None, address).records)
    began, began_at = time.perf_counter(), time.monotonic()

    def answer(prompt: list[int]) -> tuple[float, float, list[int]]:
        params = prefill.prefilled(prompt)
        prefilled_s = time.perf_counter() - began
        got = ask(decode.url, prompt, given.out, kv_transfer_params=params)
        return prefilled_s, time.perf_counter() - began, got.tokens

    with ThreadPoolExecutor(given.requests) as pool:
        answers = list(pool.map(answer, prompts))
    records = read_worker(extra, None, address).records[seen:]
    leases = [end - start for start, end in spans(records, Moment.HELD, Moment.LEASE_ENDED, _HANDLE)]
    there = read_worker(extra, None, ("127.0.0.1", given.decode_port)).records
    parts = {
        name: [span for span in spans([*records, *there], first, last, _HANDLE) if span[0] >= began_at]
        for name, first, last in (
            ("to_decode", Moment.HELD, Moment.QUEUED),
            ("waits", Moment.QUEUED, Moment.LOAD_TAKEN),
            ("fetch", Moment.LOAD_TAKEN, Moment.LEASE_ENDED),
        )
    }
    busy = spans(records, Moment.ADMITTED, Moment.COMPUTED, _REQUEST)
    metrics = decode.metrics()
    ends = sorted(end for _, end, _ in answers)
    return {
        "requests_per_s": round((len(ends) - given.room) / (ends[-1] - ends[given.room - 1]), 3),
        "total_s": round(max(end for _, end, _ in answers), 2),
        "decode_s": round((metrics[_DECODE_S] - before) / given.room, 2),
        "last_prefill_s": round(max(prefilled for prefilled, _, _ in answers), 2),
        "prefill_idle_s": round(idle_s(busy), 2),
        "lease_s": _figures(leases),
        "lease_parts_s": {name: _figures([end - at for at, end in found]) for name, found in parts.items()},
        "leases": len(leases),
        "exact": f"{sum(got == own for (*_, got), own in zip(answers, alone, strict=True))} of {len(alone)}",
        "parked": decode.metrics(outcome="parked").get(_LOADS, 0.0) - parked,
        "failures": {name: count for name, count in metrics.items() if "failures_total" in name and count},
    }


def overloaded(
    prefill: Server, decode: Server, rate: float, out: int, seed: int, given: Any
) -> dict[str, Any]:
    """Let requests come evenly; the seconds of the prefill legs, and what was answered in the second half."""
    count, began = round(rate * given.seconds), time.perf_counter()
    prompts = [random_prompt(given.tokens, seed + number) for number in range(count)]

    def answer(number: int) -> tuple[float, float]:
        time.sleep(max(0.0, began + 1 + number / rate - time.perf_counter()))
        asked = time.perf_counter()
        params = prefill.prefilled(prompts[number])
        leg_s = time.perf_counter() - asked
        ask(decode.url, prompts[number], out, kv_transfer_params=params)
        return leg_s, time.perf_counter() - began - 1

    with ThreadPoolExecutor(count) as pool:
        answers = list(pool.map(answer, range(count)))
    legs = sorted(leg for leg, _ in answers)
    half = given.seconds / 2
    late = sum(half < end <= given.seconds for _, end in answers)
    return {
        "asked_per_s": round(rate, 3),
        "requests": count,
        "prefill_leg_s": {share: round(quantile(legs, share), 3) for share in (0.5, 0.9, 0.99)},
        "answered_per_s": round(late / half, 3),
        "last_s": round(max(end for _, end in answers), 2),
    }


def _figures(seconds: Sequence[float]) -> dict[str, float]:
    return {"median": round(statistics.median(seconds), 2), "longest": round(max(seconds), 2)}


def _server(
    role: str, name: str, room: int, parks: bool, recipe: Recipe, logs: Path, given: Any, port: int
) -> Server:
    offload = {"cpu_bytes": given.cpu_gib << 30, "park_share": given.park_share * parks}
    own = {"insecure": True, "port": port, "offload": offload | {"park_after_s": given.after_s}}
    config = named_variant(given.engine, own | given.extra).config(role)
    blocks = -(-(given.tokens + given.out) // (128 if given.cpu else GPU_BLOCK))
    options = ["--max-model-len", str(given.tokens + given.out + 1)]
    options += [*(EXACT if given.cpu else ()), "--num-gpu-blocks-override", str(1 + room * blocks)]
    # On a CPU as the tests do: each process more costs a minute of a machine that has few cores.
    settings = {MULTIPROCESSING: "0"} if given.cpu else {}
    place = given.gpus.split(",")[role == "consumer"]
    return served(recipe, logs, name, place, config, given, options, **settings)


def main() -> None:
    given = command_line(
        __doc__,
        None,
        {
            "tokens": "of each prompt",
            "room": "requests that the decode server's cache has room for",
            "prefill_room": "requests that the prefill server's cache has room for",
            "after_s": "park_after_s of the decode server",
            "park_share": "of host memory of the decode server",
            "times": "so many times the requests a second of a full decode server; 0 for no overload",
            "seconds": "of an overload",
            "modes": "whether the decode server parks: without, with",
        },
        requests=24,
        tokens=(3000, 8192),
        out=64,
        room=(2, 8),
        prefill_room=(4, 16),
        modes="without,with",
        after_s=0.25,
        park_share=0.5,
        times=0.0,
        seconds=20.0,
        engine="nixl",
        extra={},
        gpus="0,1",
        cpu_gib=(2, 24),
        chunk=(512, 8192),
        kv_gib=(1, 24),
    )
    given.port, names = free_port(), given.modes.split(",")
    ports = [free_port() for _ in names]
    prompts = [random_prompt(given.tokens, 1000 + number) for number in range(given.requests)]
    with prepared(given, tiny="gqa", forks=True) as (recipe, logs, lines):
        prefill = _server("producer", "prefill", given.prefill_room, False, recipe, logs, given, given.port)
        decodes = [
            _server("consumer", name, given.room, name == "with", recipe, logs, given, port)
            for name, port in zip(names, ports, strict=True)
        ]
        # A CPU has no room for all of them at one time.
        first = [prefill] if given.cpu else [prefill, *decodes]
        with running(*first):
            with ThreadPoolExecutor(given.prefill_room) as pool:
                alone = list(pool.map(lambda one: prefill.tokens(one, max_tokens=given.out), prompts))
            for name, given.decode_port, decode in zip(names, ports, decodes, strict=True):
                with running(decode) if given.cpu else nullcontext():
                    for turn in range(2):
                        found = measured(prefill, decode, prompts, alone, given)
                        lines.write("wall", parking=name, turn=turn, **found)
                    if given.times:
                        rate = given.times * found["requests_per_s"]
                        for kind, out in (("idle", 1), ("overload", given.out)):
                            seed = 10_000 * (2 * names.index(name) + (out > 1) + 1)
                            found = overloaded(prefill, decode, rate, out, seed, given)
                            lines.write(kind, parking=name, **found)


if __name__ == "__main__":
    main()
