"""How fast a prompt's KV is pulled from another vLLM server: ``python -m tests.vllm.measure_pull --help``.

Two servers that are each other's sources, and a third without a connector, take turns. A prompt is computed
by one server, then asked of the other, which has not seen it, of the third, and of the first again, which has
it on its device. Then a conversation: each turn is prefilled by one server and decoded by the other, where
the answer's KV is; the prompt of the next turn has both. In turns with it another one is asked through
``kvconnect router``, whose client has the prefill server's token. First with servers that share their prefix
cache, then with servers that keep KV in host memory. Every finding is a JSON line; nothing here asserts a
time.

    python -m tests.vllm.measure_pull --tokens 8192 --tokens 32768
    python -m tests.vllm.measure_pull --cpu --place device
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from tests.vllm import dense_model
from tests.vllm.load_client import LETTERS
from tests.vllm.pairs import (
    Lines,
    ask,
    command_line,
    computed_tokens,
    counted,
    prepared,
    pulling_pair,
    pulls,
    served,
)
from tests.vllm.servers import Server, random_prompt, router, running
from tests.vllm.tiny_models import Recipe

_KEPT_WITHIN_S, _TRIED_S = 20.0, 5.0
_STORED = "vllm:kvconnect_offload_rows_total"


Servers = tuple[Server, Server, Server]
"""Two that pull from each other, and a plain one."""


def _started(recipe: Recipe, folder: Path, given: argparse.Namespace, place: str) -> Servers:
    options = ["--max-model-len", str(max(given.tokens) + given.turns * (given.new + given.out) + 512)]
    (one, _), (other, _) = pulling_pair(recipe, folder, f"{place}-", given, [options, options], place=place)
    where = given.gpus.split(",")[0]
    return one, other, served(recipe, folder, f"{place}-plain", where, None, given, options)


def _is_kept(server: Server) -> None:
    """Until no more rows are stored."""
    before, deadline = -1.0, time.monotonic() + _KEPT_WITHIN_S
    while time.monotonic() < deadline:
        now = counted(server, _STORED, move="stored")
        if now == before:
            return
        before = now


def prompts_pulled(
    place: str, servers: Servers, tokens: int, given: argparse.Namespace, lines: Lines
) -> None:
    """One length: first tokens by where the prompt is, and whether the answers are the same."""
    first, second, plain = servers
    found: dict[str, list[float]] = {"pulled": [], "computed": [], "on_device": []}
    same = 0
    for turn in range(given.rounds + 2):
        prompt = random_prompt(tokens, seed=1000 * tokens + turn)
        source, target = (first, second) if turn % 2 else (second, first)
        ask(source.url, prompt)
        _is_kept(source)
        answers = {
            "pulled": ask(target.url, prompt),
            "computed": ask(plain.url, prompt),
            "on_device": ask(source.url, prompt),
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
        place=place,
        tokens=tokens,
        first_token_ms={name: round(1000 * value, 1) for name, value in medians.items()},
        over_computed=round(medians["pulled"] / medians["computed"], 3),
        same_tokens=f"{same} of {given.rounds}",
        pulls=pulls(first, second),
    )


def conversation(place: str, servers: Servers, url: str, given: argparse.Namespace, lines: Lines) -> None:
    """Turns over a pair, P then D, the same by the plain server, and others through the router at ``url``."""
    prefill, decode, plain = servers
    rng = random.Random(8)
    routed = rng.choices(LETTERS, k=given.tokens[0])
    history = random_prompt(given.tokens[0], seed=7)
    other = list(history)
    for turn in range(given.turns):
        before = computed_tokens(prefill)
        began = time.perf_counter()
        handed = prefill.prefilled(history)
        prefilled_s = time.perf_counter() - began
        answer = ask(decode.url, history, kv_transfer_params=handed, max_tokens=given.out)
        computed = computed_tokens(prefill) - before
        alone = ask(plain.url, other, max_tokens=given.out)
        answered = ask(url, routed, given.out, in_letters=True)
        _is_kept(decode)
        lines.write(
            "turn",
            place=place,
            turn=turn,
            prompt_tokens=len(history),
            computed_tokens_by_prefill=computed,
            prefill_ms=round(1000 * prefilled_s, 1),
            first_token_ms=round(1000 * (prefilled_s + answer.first_token_s), 1),
            routed_first_token_ms=round(1000 * answered.first_token_s, 1),
            plain_first_token_ms=round(1000 * alone.first_token_s, 1),
            same_tokens=answer.tokens == alone.tokens if history == other else None,
        )
        question = random_prompt(given.new, seed=100 + turn)
        history = history + answer.tokens + question
        other = other + alone.tokens + question
        routed += answered.tokens + rng.choices(LETTERS, k=given.new)


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    return command_line(
        __doc__,
        arguments,
        {
            "tokens": "of a prompt; repeatable",
            "place": "device or host: where prompts are pulled from; repeatable",
            "turns": "of the conversation, which begins with the first --tokens",
            "gpus": "of the two servers; the plain one shares the first",
        },
        tokens=([1024, 2048], [8192, 32768]),
        place=["device", "host"],
        rounds=4,
        turns=6,
        new=(128, 1024),
        out=(16, 128),
        engine="nixl",
        extra={},
        gpus="0,1",
        chunk=(512, 8192),
        kv_gib=(1, 16),
        cpu_gib=(1, 24),
    )


def main() -> None:
    given = parsed()
    shape = dense_model.Shape(positions=65536)
    with prepared(given, shape=shape) as (recipe, logs, lines):
        for place in given.place:
            # One after the other: servers that only wait take time of two cores, and memory of two GPUs.
            with running(*_started(recipe, logs, given, place)) as servers:
                for tokens in given.tokens:
                    prompts_pulled(place, servers, tokens, given, lines)
                with router("--prefill", servers[0].url, "--decode", servers[1].url) as url:
                    # The router tries whether the decode server takes a first token.
                    time.sleep(_TRIED_S)
                    conversation(place, servers, url, given, lines)


if __name__ == "__main__":
    main()
