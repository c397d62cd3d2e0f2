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
import os
import re
import statistics
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from kvconnect.demo.http import BadAnswer, fetch
from tests.ports import free_port
from tests.vllm.servers import (
    NIXL_CONNECTOR,
    ROOT,
    Server,
    random_prompt,
    running,
    transfer_config,
)
from tests.vllm.tiny_models import VOCABULARY, Recipe, _write_tokenizer

_ANSWER_TIMEOUT_S = 120
_METRICS_WITHIN_S = 3.0
_OUTPUT_TOKENS = 8
_NIXL = "NixlConnector"
_WRITERS = 8
_SHARPNESS = 2.0
"""Weight of the query and key norms. Attention scores then spread by the square of it, and a few tokens of
any prompt decide what is attended to; with 1 a long prompt blurs into its average."""

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
class Shape:
    """A dense model. The default has the layers of one with eight thousand million parameters."""

    layers: int = 36
    hidden: int = 4096
    intermediate: int = 12288
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    positions: int = 40960


@dataclass(frozen=True)
class Variant:
    """What a pair is connected with: ``extra`` for kvconnect, None for vLLM's own NixlConnector."""

    name: str
    extra: Mapping[str, Any] | None

    @property
    def series(self) -> Mapping[str, str]:
        """What is told of a transfer, and the series of the decode server's ``/metrics`` that has it."""
        return _NIXL_SERIES if self.extra is None else _OUR_SERIES

    def config(self, role: str) -> dict[str, Any]:
        """The ``kv_transfer_config`` of a ``producer`` or ``consumer``."""
        if self.extra is None:
            return NIXL_CONNECTOR
        return transfer_config(role, **{"engine": "nixl", **self.extra})


@dataclass
class Pair:
    """A prefill and a decode server that are up."""

    variant: Variant
    prefill: Server
    decode: Server


@dataclass(frozen=True)
class Answer:
    """A streamed completion: seconds from asking to its first token, and all tokens."""

    first_token_s: float
    tokens: list[int]


class Lines:
    """JSON lines on standard output, and in a file if there is one."""

    def __init__(self, copy: TextIO | None = None) -> None:
        self._copy = copy

    def write(self, kind: str, **finding: Any) -> None:
        """Tell one finding."""
        line = json.dumps({"kind": kind, **finding})
        print(line, flush=True)
        if self._copy is not None:
            print(line, file=self._copy, flush=True)


def write_model(folder: Path, shape: Shape, device: str) -> Recipe:
    """Write a model with random weights, drawn on ``device``, unless ``folder`` has it already.

    Every part adds to the residual stream about as much as the others: no layer's KV drowns.
    """
    recipe = Recipe("gpu", folder)
    if (folder / "config.json").exists():
        return recipe
    folder.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(folder)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.positions,
        tie_word_embeddings=False,
        pad_token_id=VOCABULARY - 3,
        bos_token_id=VOCABULARY - 2,
        eos_token_id=VOCABULARY - 1,
    )
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in Qwen3ForCausalLM(config).named_parameters()}
    files: dict[str, dict[str, torch.Size]] = {}
    for name, size in shapes.items():
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        files.setdefault(f"layer{layer[1]}" if layer else "rest", {})[name] = size

    def write(seed: int, name: str) -> None:
        generator = torch.Generator(device).manual_seed(seed)
        weights = {key: _weight(key, size, generator).cpu() for key, size in files[name].items()}
        save_file(weights, folder / f"{name}.safetensors", {"format": "pt"})

    with ThreadPoolExecutor(_WRITERS) as pool:
        list(pool.map(write, range(len(files)), files))
    if device != "cpu":
        torch.cuda.empty_cache()
    config.architectures = ["Qwen3ForCausalLM"]
    config.dtype = torch.bfloat16
    # Last: a folder that has it is whole.
    (folder / "config.json").write_text(config.to_json_string())
    return recipe


def _weight(name: str, size: torch.Size, generator: torch.Generator) -> torch.Tensor:
    weight = torch.empty(size, dtype=torch.bfloat16, device=generator.device)
    if weight.dim() < 2:
        return weight.fill_(_SHARPNESS if name.endswith(("q_norm.weight", "k_norm.weight")) else 1.0)
    scale = 1.0 if "embed_tokens" in name else size[1] ** -0.5
    return weight.normal_(0, scale, generator=generator)


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


def transferred(
    variant: Variant, before: Mapping[str, float], after: Mapping[str, float]
) -> dict[str, float]:
    """What one transfer was, by the growth of a decode server's metrics."""
    series = {**variant.series, **_REQUEST_SERIES}
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


@contextmanager
def _pairs(recipe: Recipe, given: argparse.Namespace, folder: Path, lines: Lines) -> Iterator[list[Pair]]:
    """Those that come up; what the others said is told."""
    options = ["--attention-backend", given.attention_backend, "--no-enable-prefix-caching"]
    options += ["--max-model-len", str(max(given.lengths) + 64), "--max-num-batched-tokens", str(given.chunk)]
    options += ["--max-num-seqs", str(min(512, given.chunk)), "--block-size", str(given.block_size)]
    # Said in bytes: servers that start at the same time would count each other's memory. The other one
    # is only compared with what is free at the start.
    options += ["--kv-cache-memory-bytes", str(given.kv_gib << 30), "--gpu-memory-utilization", "0.1"]
    roles = list(zip(("producer", "consumer"), given.gpus, strict=True))
    made = []
    for number, variant in enumerate(given.variants):
        servers = []
        for role, gpu in roles:
            environment = {
                "CUDA_VISIBLE_DEVICES": gpu,
                "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
            }
            name = f"pair{number}-{role}"
            config = variant.config(role)
            servers.append(Server(recipe, folder, name, "0", config, options, environment))
        made.append(Pair(variant, *servers))
    with ExitStack() as stack:
        up = []
        # Before any of them is waited for: what comes next may fail.
        for pair in made:
            stack.callback(pair.decode.end)
            stack.callback(pair.prefill.end)
        for pair in made:
            try:
                stack.enter_context(running(pair.prefill, pair.decode))
            except Exception:
                _tell_failure(pair, lines)
                continue
            up.append(pair)
            for server in (pair.prefill, pair.decode):
                lines.write("server", connector=pair.variant.name, server=server.name, facts=_facts(server))
        yield up


def _facts(server: Server) -> list[str]:
    said = [line for line in server.log.read_text(errors="replace").splitlines() if _FACTS.search(line)]
    return [line[-200:] for line in said[:20]]


def _tell_failure(pair: Pair, lines: Lines) -> None:
    tails = {server.name: server.tail() for server in (pair.prefill, pair.decode)}
    lines.write("failure", connector=pair.variant.name, error=traceback.format_exc(limit=-3)[-3000:])
    for name, tail in tails.items():
        print(f"--- log of {name}:\n{tail}", flush=True)


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
                name = pair.variant.name
                try:
                    sample = measured(pair, prompt)
                except Exception:
                    _tell_failure(pair, lines)
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
        with _pairs(recipe, given, logs, lines) as pairs:
            lines.write("up", seconds=round(time.perf_counter() - started, 1), pairs=len(pairs))
            if given.pool == "scattered":
                _scatter_all(pairs, given, lines)
            compare(pairs, given.lengths, given.rounds, lines)


if __name__ == "__main__":
    main()
