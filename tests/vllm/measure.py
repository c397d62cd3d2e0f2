"""First tokens of real vLLM pairs, or what they cost when idle: ``python -m tests.vllm.measure --help``.

The prefill servers share the first GPU or core, the decode servers the second. All pairs are up at once and
take turns with the same prompt, so that what disturbs one disturbs all; on a CPU those that wait stand still.
Every finding is a JSON line, printed when it is known. Nothing here asserts a time.

Tokens can be compared where every run cuts a prompt at the same places: lengths are a multiple of the
chunk, and one token more. Then the last token is computed alone, wherever the rest was.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

from kvconnect.node.children import fetch
from tests.vllm.pairs import (
    GPU_BLOCK,
    NIXL,
    Lines,
    Pair,
    Variant,
    ask,
    both_served,
    command_line,
    named_variant,
    prepared,
)
from tests.vllm.servers import Server, awake, members, random_prompt, running, stopped
from tests.vllm.tiny_models import Recipe

_METRICS_WITHIN_S = 3.0
_OURS = {
    "bytes": "vllm:kvconnect_transfer_bytes_total",
    "transfer_s": "vllm:kvconnect_transfer_seconds_total",
    "load_s": "vllm:kvconnect_load_seconds_sum",
    "copies": "vllm:kvconnect_copies_total",
}
_THEIRS = {
    "bytes": "vllm:nixl_bytes_transferred_sum",
    "transfer_s": "vllm:nixl_xfer_time_seconds_sum",
    "posting_s": "vllm:nixl_post_time_seconds_sum",
    "copies": "vllm:nixl_num_descriptors_sum",
}
_REQUEST = {
    "queued_s": "vllm:request_queue_time_seconds_sum",
    "step_s": "vllm:request_prefill_time_seconds_sum",
}
"""The decode server's own view: until it had the KV, and from then to the first token."""


def transferred(
    variant: Variant, before: Mapping[str, float], after: Mapping[str, float]
) -> dict[str, float]:
    """What one transfer was, by the growth of a decode server's metrics."""
    series = {**(_THEIRS if variant.extra is None else _OURS), **_REQUEST}
    grown = {what: after.get(name, 0.0) - before.get(name, 0.0) for what, name in series.items()}
    if grown["transfer_s"] > 0:
        grown["gb_per_s"] = grown["bytes"] / grown["transfer_s"] / 1e9
    return grown


def measured(pair: Pair, prompt: Sequence[int]) -> dict[str, Any]:
    """Hand one prompt over, and say what it took."""
    before = pair.decode.metrics()
    began = time.perf_counter()
    params = pair.prefill.prefilled(list(prompt))
    prefill_s = time.perf_counter() - began
    answer = ask(pair.decode.url, prompt, kv_transfer_params=params)
    # A worker's numbers come with the steps that follow.
    deadline = time.monotonic() + _METRICS_WITHIN_S
    while True:
        moved = transferred(pair.variant, before, pair.decode.metrics())
        if (moved["bytes"] > 0 and moved["step_s"] > 0) or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return {
        "prefill_s": prefill_s,
        "first_token_s": answer.first_token_s,
        **moved,
        "output": answer.tokens,
    }


def _scatter_all(pairs: Sequence[Pair], given: argparse.Namespace, lines: Lines) -> None:
    """Leave the free blocks that the longest prompt gets in an order where none is beside its neighbour.

    A fresh pool hands out adjacent blocks, and engines copy them in one piece; one that was in use does
    not. Prompts of one token are decoded side by side until each has so many blocks: between two blocks of a
    prompt lies one of every other.
    """
    num_blocks = max(given.lengths) // GPU_BLOCK + 64
    began = time.perf_counter()

    def scatter(server: Server, blocks_each: int) -> None:
        prompts = [[number % 256] for number in range(-(-num_blocks // blocks_each))]
        body = {"model": "tiny", "prompt": prompts, "ignore_eos": True}
        fetch(server.url + "/v1/completions", body | {"max_tokens": blocks_each * GPU_BLOCK - 1}, 120)

    # Not the same order on both sides: sorted by address it would be whole again.
    asked = [(server, blocks) for pair in pairs for server, blocks in ((pair.prefill, 5), (pair.decode, 7))]
    with ThreadPoolExecutor(len(asked)) as pool:
        list(pool.map(scatter, *zip(*asked, strict=True)))
    lines.write("scattered", seconds=round(time.perf_counter() - began, 1), blocks=num_blocks)


def summary(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians of the samples of one variant and length, and how many of them had the right tokens."""
    told: dict[str, Any] = {"rounds": len(samples)}
    for key in dict.fromkeys(key for sample in samples for key in sample):
        values = [sample[key] for sample in samples if key in sample]
        if key.startswith("like_"):
            told[key] = sum(values)
        elif key in ("bytes", "copies", "gb_per_s"):
            told[key] = round(statistics.median(values), 2)
        elif key.endswith("_s"):
            told[key.removesuffix("_s") + "_ms"] = round(statistics.median(values) * 1e3, 2)
    return told


def _started(recipe: Recipe, given: argparse.Namespace, folder: Path) -> list[Pair]:
    options, places = ["--max-model-len", str(max(given.lengths) + 128)], given.gpus.split(",")
    options += [] if given.cpu else ["--max-num-seqs", str(min(512, given.chunk))]
    both = [[*options, "--no-enable-prefix-caching"]] * 2
    if given.cpu:
        # Prompts are computed once for all turns, by both cores: nobody else computes meanwhile.
        both[0], places[0] = options, "0-1"
    return [
        both_served(variant, recipe, folder, given, both, places, graphs=()) for variant in given.variants
    ]


def compare(pairs: Sequence[Pair], given: argparse.Namespace, lines: Lines) -> None:
    """Hand prompts over with each pair in turn."""
    for length in given.lengths:
        samples: dict[str, list[dict[str, Any]]] = {}
        begins = random_prompt(length - 8, length)
        # The first turn meets the peer, compiles kernels, and is not counted.
        for turn in range(given.rounds + 1):
            prompt = begins + random_prompt(8, turn) if given.cpu else random_prompt(length, length + turn)
            first: list[int] | None = None
            for pair in pairs:
                with awake(pair.servers) if given.cpu else nullcontext():
                    sample = measured(pair, prompt)
                    local = ask(pair.prefill.url, prompt)
                first = first or sample["output"]
                sample["local_s"] = local.first_token_s
                sample["like_local"] = sample["output"] == local.tokens
                sample["like_first"] = sample["output"] == first
                lines.write("sample", connector=pair.name, tokens=length, turn=turn, **sample)
                if turn:
                    samples.setdefault(pair.name, []).append(sample)
        for name, taken in samples.items():
            lines.write("median", connector=name, tokens=length, **summary(taken))


def idle(pairs: Sequence[Pair], seconds: float, lines: Lines) -> None:
    """Cores that each pair uses after it has met and handed over a request, the others standing still."""
    for pair in pairs:
        with awake(pair.servers):
            prompt = random_prompt(300, 1)
            pair.decode.tokens(prompt, kv_transfer_params=pair.prefill.prefilled(prompt))
            time.sleep(3)
            before = [_cpu_s(server) for server in pair.servers]
            time.sleep(seconds)
            cores = [
                round((_cpu_s(server) - was) / seconds, 4)
                for server, was in zip(pair.servers, before, strict=True)
            ]
        lines.write("idle", connector=pair.name, prefill_cores=cores[0], decode_cores=cores[1])


def _cpu_s(server: Server) -> float:
    stats = (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in members(server))
    return sum(int(fields[11]) + int(fields[12]) for fields in stats) / os.sysconf("SC_CLK_TCK")


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    given = command_line(
        __doc__,
        arguments,
        {
            "connectors": "comma separated: NixlConnector, kvconnect-ENGINE or kvconnect-ENGINE:PROTOCOL",
            "lengths": "prompt tokens, comma separated",
            "idle_s": "measure idle pairs for so long, and nothing else",
        },
        connectors="kvconnect-nixl,NixlConnector",
        extra={},
        lengths=("1024,4096", "1025,8193,32769"),
        rounds=8,
        chunk=(2048, 1024),
        kv_gib=(3, 12),
        gpus="0,1",
        idle_s=0.0,
    )
    given.lengths = [int(length) for length in given.lengths.split(",")]
    given.variants = []
    # A CPU takes minutes for a long prompt.
    more = {**({"load_timeout_s": 300, "lease_s": 300} if given.cpu else {}), **given.extra}
    for name in given.connectors.split(","):
        if name != NIXL.name and not name.startswith("kvconnect-"):
            given.error(f"connector {name!r} is unknown; accepted: {NIXL.name}, kvconnect-ENGINE")
        given.variants.append(
            NIXL if name == NIXL.name else named_variant(name.removeprefix("kvconnect-"), more)
        )
    return given


def main() -> None:
    given = parsed()
    tiny = "gqa" if given.idle_s else "heavy"
    with prepared(given, tiny=tiny) as (recipe, logs, lines), ExitStack() as stack:
        pairs = _started(recipe, given, logs)
        servers = stack.enter_context(running(*(server for pair in pairs for server in pair.servers)))
        if given.cpu or given.idle_s:
            # Some connectors keep a core busy when idle.
            stack.enter_context(stopped(*servers))
        else:
            _scatter_all(pairs, given, lines)
        if given.idle_s:
            idle(pairs, given.idle_s, lines)
        else:
            compare(pairs, given, lines)


if __name__ == "__main__":
    main()
