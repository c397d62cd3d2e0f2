"""What sending a prompt's KV while it is computed is worth: the time to the first token, with it and without.

Two pairs of nodes run side by side, each behind a router that asks both of its nodes at once. They differ
in one setting, and are asked in turn, so that whatever else the machine does is the same for both.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.options import Options as BaseOptions
from benchmarks.options import carrying_protocol, extra_option, option
from benchmarks.report import Report
from kvconnect.errors import KVConnectError
from kvconnect.node.children import Children, growth, read_metrics
from kvconnect.node.pair_demo import RESERVED_BLOCKS, ask, tokens_of

_BLOCK_TOKENS = 16
_VOCABULARY = 512
_WARM_UP = 2


@dataclass
class _Side:
    """A pair of nodes and their router, by their URLs."""

    prefill: str
    router: str
    seconds: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Options(BaseOptions):
    """What is measured."""

    engine: str = option("mooncake", "Engine of the nodes.")
    model: str = option("wide", "Model of the nodes; `wide` keeps most.")
    lengths: tuple[int, ...] = option(
        (16384, 256), "Tokens of a prompt (repeatable).", flag="tokens", least=1
    )
    prompts: int = option(9, "Prompts of each length, for either pair.", least=1)
    batched_tokens: int = option(1024, "Tokens that a step computes.", least=1)
    min_tokens: int = option(4096, "stream_min_tokens of one of the pairs.", least=0)
    extra: Mapping[str, Any] | None = extra_option()


def bench_streaming(options: Options, report: Report) -> int:
    """Time the first token of a pair that sends KV while it is computed, beside one that does not.

    Returns the exit code: 1 if any answers differ.

    Raises:
        KVConnectError: a node did not start, or gave no answer.
    """
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="kvconnect-bench-") as folder, Children(Path(folder)) as children:
        streamed = _start(children, options, "streamed", options.min_tokens)
        whole = _start(children, options, "whole", 0)
        rng = random.Random(0)
        for tokens in options.lengths:
            case = _measure(options, streamed, whole, tokens, rng)
            report.add({"engine": options.engine, "model": options.model, **case})
            wrong += case["wrong"]
    return 1 if wrong else 0


def _start(children: Children, options: Options, name: str, min_tokens: int) -> _Side:
    longest = max(options.lengths)
    common = (
        *("--model", options.model, "--port", "0", "--num-threads", "1"),
        *("--max-model-len", str(longest + 64), "--max-num-batched-tokens", str(options.batched_tokens)),
        *("--num-blocks", str(longest // _BLOCK_TOKENS + 64 + RESERVED_BLOCKS), "--no-enable-prefix-caching"),
    )
    nodes = []
    for side, role in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
        protocol = carrying_protocol(options.engine, "cpu")
        extra = {"engine": options.engine, "protocol": protocol, "stream_min_tokens": min_tokens}
        config = {
            "kv_role": role,
            "engine_id": f"{side}-{name}",
            "kv_connector_extra_config": {**extra, **(options.extra or {})},
        }
        more = ("--reserved-blocks", str(RESERVED_BLOCKS)) if side == "decode" else ()
        nodes.append(
            children.start(
                f"{side}-{name}", "serve", *common, *more, "--kv-transfer-config", json.dumps(config)
            )
        )
    prefill, decode = (node.wait_ready() for node in nodes)
    asked = ("--prefill", prefill, "--decode", decode, "--flow", "parallel")
    router = children.start(f"router-{name}", "router", "--port", "0", *asked)
    router.wait_ready()
    router.wait_answer("/ready?all")
    return _Side(prefill, router.url)


def _measure(
    options: Options, streamed: _Side, whole: _Side, tokens: int, rng: random.Random
) -> dict[str, Any]:
    """Prompts of one length. Times are medians in seconds.

    ``alone_s`` is a prompt on the prefill node alone; ``early`` is the part of the streamed bytes that
    left before their prefill ended. ``ratio`` is ``streamed_s / whole_s``, the median of all pairs of
    prompts; ``least`` and ``most`` are its quartiles.
    """

    def prompt() -> list[int]:
        return rng.choices(range(_VOCABULARY), k=tokens)

    for _ in range(_WARM_UP):
        for side in (streamed, whole):
            _timed(options, side.router, prompt())
        alone_s = _timed(options, whole.prefill, prompt())[0]
    for side in (streamed, whole):
        side.seconds.clear()
    alone, wrong = [alone_s], 0
    before = read_metrics(streamed.prefill)
    for number in range(options.prompts):
        one = prompt()
        # Who is asked first takes turns too.
        turn = (streamed, whole) if number % 2 else (whole, streamed)
        answers = []
        for side in turn:
            seconds, answer = _timed(options, side.router, one)
            side.seconds.append(seconds)
            answers.append(answer)
        wrong += answers[0] != answers[1]
        if number % 3 == 0:
            alone.append(_timed(options, whole.prefill, prompt())[0])
    after = read_metrics(streamed.prefill)
    ratios = [mine / theirs for mine, theirs in zip(streamed.seconds, whole.seconds, strict=True)]
    least, _, most = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    sent = growth(before, after, "kvconnect_transfer_bytes_total", direction="sent")
    early = growth(before, after, "kvconnect_streamed_bytes_total")
    return {
        "tokens": tokens,
        "prompts": options.prompts,
        "alone_s": round(statistics.median(alone), 4),
        "whole_s": round(statistics.median(whole.seconds), 4),
        "streamed_s": round(statistics.median(streamed.seconds), 4),
        "ratio": round(statistics.median(ratios), 4),
        "least": round(least, 4),
        "most": round(most, 4),
        "early": round(early / sent, 3) if sent else 0.0,
        "wrong": wrong,
    }


def _timed(options: Options, url: str, prompt: Sequence[int]) -> tuple[float, Any]:
    """How long the first token takes, and which one it is.

    Raises:
        KVConnectError: there is none.
    """
    start = time.perf_counter()
    answer = ask(url, options.model, prompt, max_tokens=1)
    seconds = time.perf_counter() - start
    tokens = tokens_of(answer)
    if not tokens:
        raise KVConnectError(f"{url} answered without a token: {answer}")
    return seconds, tokens
