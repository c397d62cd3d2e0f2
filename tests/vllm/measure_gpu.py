"""Figures of real vLLM pairs on two GPUs: ``python -m tests.vllm.measure_gpu --help``.

The prefill servers share the first GPU, the decode servers the second. All pairs are up at once and take
turns with the same prompt, so that what disturbs one disturbs all. Every finding is a JSON line, printed
when it is known. Nothing here asserts a time.

Tokens can be compared where every run cuts a prompt at the same places: lengths are a multiple of the
chunk, and one token more. Then the last token is computed alone, wherever the rest was.
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvconnect.node.children import BadAnswer, fetch
from tests.vllm.dense_model import Shape, write_model
from tests.vllm.pairs import Lines, Pair, Variant, brought_up, environment, gpu_options, tell_failure
from tests.vllm.servers import Server, random_prompt
from tests.vllm.tiny_models import Recipe

_ANSWER_TIMEOUT_S = 120
_METRICS_WITHIN_S = 3.0
_OUTPUT_TOKENS = 8
_NIXL = "NixlConnector"
_OUR_SERIES = {
    "bytes": "vllm:kvconnect_transfer_bytes_total",
    "transfer_s": "vllm:kvconnect_transfer_seconds_total",
    "load_s": "vllm:kvconnect_load_seconds_sum",
    "copies": "vllm:kvconnect_copies_total",
}
_NIXL_SERIES = {
    "bytes": "vllm:nixl_bytes_transferred_sum",
    "transfer_s": "vllm:nixl_xfer_time_seconds_sum",
    "posting_s": "vllm:nixl_post_time_seconds_sum",
    "copies": "vllm:nixl_num_descriptors_sum",
}
_REQUEST_SERIES = {
    "queued_s": "vllm:request_queue_time_seconds_sum",
    "step_s": "vllm:request_prefill_time_seconds_sum",
}
"""The decode server's own view: until it had the KV, and from then to the first token."""

_TIMES = ("prefill_s", "first_token_s", "local_s", "transfer_s", "posting_s", "load_s", "queued_s", "step_s")
_FACTS = re.compile(
    r"model runner|attention backend|AttentionBackend|FlashAttention|layout|KV cache size", re.I
)


@dataclass(frozen=True)
class Answer:
    """A streamed completion: seconds from asking to its first token, and all tokens."""

    first_token_s: float
    tokens: list[int]


def variants(connectors: Sequence[str], extras: Sequence[str]) -> list[Variant]:
    """One for every connector; of kvconnect one for every JSON object in ``extras``.

    Raises:
        ValueError: a connector is unknown, or two variants are the same.
    """
    found = []
    for connector in connectors:
        if connector == _NIXL:
            found.append(Variant(_NIXL, None))
        elif connector == "kvconnect":
            for text in extras or ['{"engine": "nixl"}']:
                extra = json.loads(text)
                said = ",".join(f"{key}={value}" for key, value in extra.items())
                found.append(Variant(f"kvconnect({said})", extra))
        else:
            raise ValueError(f"connector {connector!r} is unknown; accepted: kvconnect, {_NIXL}")
    if len({variant.name for variant in found}) < len(found):
        raise ValueError(f"the same variant twice: {', '.join(variant.name for variant in found)}")
    return found


def ask(server: Server, prompt: Sequence[int], **more: Any) -> Answer:
    """Stream a completion.

    Raises:
        BadAnswer: the server answered with an error, or with too few tokens.
    """
    body = {"model": "tiny", "prompt": list(prompt), "max_tokens": _OUTPUT_TOKENS, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True, "stream": True, **more}
    text = json.dumps(body)
    client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=_ANSWER_TIMEOUT_S)
    first_token_s, tokens = 0.0, []
    try:
        started = time.perf_counter()
        client.request("POST", "/v1/completions", text, {"Content-Type": "application/json"})
        answer = client.getresponse()
        if answer.status != 200:
            raise BadAnswer(f"{server.name} answered {answer.status}: {answer.read(500)!r}")
        for line in answer:
            arrived = time.perf_counter()
            if new := _streamed_tokens(server.name, line):
                first_token_s = first_token_s or arrived - started
                tokens += new
    finally:
        client.close()
    if len(tokens) != body["max_tokens"]:
        raise BadAnswer(f"{server.name} answered with {len(tokens)} tokens")
    return Answer(first_token_s, tokens)


def _streamed_tokens(name: str, line: bytes) -> list[int]:
    data = line.removeprefix(b"data: ").strip()
    if not data or data == b"[DONE]":
        return []
    chunk = json.loads(data)
    if "error" in chunk:
        raise BadAnswer(f"{name} answered {chunk['error']}")
    return [token for choice in chunk["choices"] for token in choice.get("token_ids") or []]


def _series(variant: Variant) -> Mapping[str, str]:
    """What is told of a transfer, and the series of the decode server's ``/metrics`` that has it."""
    return _NIXL_SERIES if variant.extra is None else _OUR_SERIES


def transferred(
    variant: Variant, before: Mapping[str, float], after: Mapping[str, float]
) -> dict[str, float]:
    """What one transfer was, by the growth of a decode server's metrics."""
    series = {**_series(variant), **_REQUEST_SERIES}
    grown = {what: after.get(name, 0.0) - before.get(name, 0.0) for what, name in series.items()}
    if grown["transfer_s"] > 0:
        grown["gb_per_s"] = grown["bytes"] / grown["transfer_s"] / 1e9
    return grown


def measured(pair: Pair, prompt: Sequence[int]) -> dict[str, Any]:
    """Hand one prompt over, and say what it took."""
    before = pair.decode.metrics()
    started = time.perf_counter()
    params = pair.prefill.prefilled(list(prompt))
    prefill_s = time.perf_counter() - started
    answer = ask(pair.decode, prompt, kv_transfer_params=params)
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


def scatter(server: Server, num_blocks: int, blocks_each: int, block_size: int) -> None:
    """Leave the next ``num_blocks`` free blocks of a server in an order where none is beside its neighbour.

    A fresh pool hands out adjacent blocks, and engines copy them in one piece; one that was in use does
    not. Prompts of one token are decoded side by side until each has ``blocks_each`` blocks: between two
    blocks of a prompt lies one of every other.
    """
    prompts = [[number % 256] for number in range(-(-num_blocks // blocks_each))]
    body = {"model": "tiny", "prompt": prompts, "ignore_eos": True}
    body["max_tokens"] = blocks_each * block_size - 1
    fetch(server.url + "/v1/completions", body, _ANSWER_TIMEOUT_S)


def _scatter_all(pairs: Sequence[Pair], given: argparse.Namespace, lines: Lines) -> None:
    num_blocks = max(given.lengths) // given.block_size + 64
    started = time.perf_counter()
    with ThreadPoolExecutor(2 * len(pairs)) as pool:
        # Not the same order on both sides: sorted by address it would be whole again.
        asked = [
            pool.submit(scatter, server, num_blocks, blocks_each, given.block_size)
            for pair in pairs
            for server, blocks_each in ((pair.prefill, 5), (pair.decode, 7))
        ]
    for future in asked:
        if error := future.exception():
            lines.write("failure", connector="all", error=f"the pool is not scattered: {error!r}"[-3000:])
    lines.write("scattered", seconds=round(time.perf_counter() - started, 1), blocks=num_blocks)


def summary(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians of the samples of one variant and length, and how many of them had the right tokens."""
    told: dict[str, Any] = {"rounds": len(samples)}
    for key in _TIMES:
        if values := [sample[key] for sample in samples if key in sample]:
            told[key.removesuffix("_s") + "_ms"] = round(statistics.median(values) * 1e3, 2)
    for key in ("bytes", "copies", "gb_per_s"):
        if values := [sample[key] for sample in samples if key in sample]:
            told[key] = round(statistics.median(values), 2)
    for key in ("like_local", "like_first"):
        told[key] = sum(sample[key] for sample in samples)
    return told


def _started(recipe: Recipe, given: argparse.Namespace, folder: Path) -> list[Pair]:
    options = gpu_options(given.chunk, given.kv_gib, given.block_size, given.attention_backend)
    options += ["--no-enable-prefix-caching", "--max-model-len", str(max(given.lengths) + 64)]
    options += ["--max-num-seqs", str(min(512, given.chunk))]
    roles = list(zip(("producer", "consumer"), given.gpus, strict=True))
    made = []
    for number, variant in enumerate(given.variants):
        servers = []
        for role, gpu in roles:
            name, config = f"pair{number}-{role}", variant.config(role)
            servers.append(Server(recipe, folder, name, "0", config, options, environment(gpu)))
        made.append(Pair(variant, *servers))
    return made


def _tell_facts(pair: Pair, lines: Lines) -> None:
    for server in pair.servers:
        lines.write("server", connector=pair.name, server=server.name, facts=_facts(server))


def _facts(server: Server) -> list[str]:
    said = [line for line in server.log.read_text(errors="replace").splitlines() if _FACTS.search(line)]
    return [line[-200:] for line in said[:20]]


def compare(pairs: list[Pair], lengths: Sequence[int], rounds: int, lines: Lines) -> None:
    """Hand prompts over with each pair in turn. A pair that fails is left out from then on."""
    for length in lengths:
        samples: dict[str, list[dict[str, Any]]] = {}
        # The first turn meets the peer, compiles kernels, and is not counted.
        for turn in range(rounds + 1):
            if not pairs:
                return
            prompt = random_prompt(length, length + turn)
            local = ask(pairs[0].prefill, prompt)
            first: list[int] | None = None
            for pair in list(pairs):
                name = pair.name
                try:
                    sample = measured(pair, prompt)
                except Exception:
                    tell_failure(pair, lines)
                    pairs.remove(pair)
                    continue
                first = first or sample["output"]
                sample["local_s"] = local.first_token_s
                sample["like_local"] = sample["output"] == local.tokens
                sample["like_first"] = sample["output"] == first
                lines.write("sample", connector=name, tokens=length, turn=turn, **sample)
                if turn:
                    samples.setdefault(name, []).append(sample)
        for name, taken in samples.items():
            lines.write("median", connector=name, tokens=length, **summary(taken))


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--connectors", default=f"kvconnect,{_NIXL}", help="comma separated")
    parser.add_argument(
        "--extra", action="append", default=[], metavar="JSON", help="of kvconnect; repeatable"
    )
    parser.add_argument("--lengths", default="1025,8193,32769", help="prompt tokens, comma separated")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument(
        "--chunk", type=int, default=1024, help="tokens of a prompt that are computed at once"
    )
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument(
        "--pool", choices=["scattered", "fresh"], default="scattered", help="free blocks lie so"
    )
    parser.add_argument("--kv-gib", type=int, default=12, help="KV cache of each server")
    parser.add_argument("--gpus", default="0,1", help="of the prefill servers, and of the decode servers")
    parser.add_argument("--attention-backend", default="FLASH_ATTN")
    parser.add_argument("--model", type=Path, help="where the model is, or is to be written (14 GB)")
    parser.add_argument("--logs", type=Path, help="where the servers' logs are to stay")
    parser.add_argument("--json", type=Path, help="a file that gets the JSON lines too")
    parser.add_argument("--write-model-only", action="store_true")
    given = parser.parse_args(arguments)
    given.lengths = [int(length) for length in given.lengths.split(",")]
    given.gpus = given.gpus.split(",")
    try:
        given.variants = variants([name for name in given.connectors.split(",") if name], given.extra)
    except ValueError as error:
        parser.error(str(error))
    if len(given.gpus) != 2:
        parser.error(f"--gpus is {','.join(given.gpus)}, it must be two")
    if given.write_model_only and given.model is None:
        parser.error("--write-model-only needs --model")
    return given


def main() -> None:
    given = parsed()
    with ExitStack() as stack:
        temporary = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        lines = Lines(stack.enter_context(given.json.open("a")) if given.json else None)
        started = time.perf_counter()
        recipe = write_model(given.model or temporary / "model", Shape(), f"cuda:{given.gpus[0]}")
        lines.write("model", seconds=round(time.perf_counter() - started, 1))
        if given.write_model_only:
            return
        logs = given.logs or temporary
        logs.mkdir(parents=True, exist_ok=True)
        started = time.perf_counter()
        with brought_up(_started(recipe, given, logs), lines) as pairs:
            for pair in pairs:
                _tell_facts(pair, lines)
            lines.write("up", seconds=round(time.perf_counter() - started, 1), pairs=len(pairs))
            if given.pool == "scattered":
                _scatter_all(pairs, given, lines)
            compare(pairs, given.lengths, given.rounds, lines)


if __name__ == "__main__":
    main()
