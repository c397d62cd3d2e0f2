"""One engine with one model: start the processes, ask them, and judge the answers from outside, over HTTP."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from kvconnect.demo.children import Child, Children
from kvconnect.demo.http import BadAnswer, Samples, fetch_json, growth, read_metrics
from kvconnect.demo.pair_outcome import (
    PairOutcome,
    Tokens,
    all_differ,
    difference,
    judge_tokens,
    judge_transfer,
    tokens_of,
)
from kvconnect.router.bodies import ASK_FOR_REMOTE_DECODE

MAX_TOKENS = 12
CONCURRENCY = 4
REQUEST_TIMEOUT_S = 90.0
IDLE_TIMEOUT_S = 45.0
READY_TIMEOUT_S = 15.0

PROTOCOLS = {"mooncake": "tcp", "nixl": "UCX"}
"""By engine, for nodes with CPU caches: left at auto, those of one machine would not need the engine."""

# The decode node never uses these ids, so that the two sides cannot agree on ids by accident.
RESERVED_BLOCKS = 61


@dataclass(frozen=True, slots=True)
class Pair:
    """The three processes of one combination."""

    prefill: Child
    decode: Child
    router: Child


def start_reference(children: Children, model: str, *more: str) -> Child:
    """Start a single node: the same model, no connector, ``more`` options. Returns before it is ready."""
    return children.start(f"single-{model}", "serve", "--model", model, "--port", "0", *more)


def start_nodes(
    children: Children, engine: str, model: str, *options: str, device: str = "cpu"
) -> tuple[Child, Child]:
    """Start a prefill and a decode node, both with further ``options``. Returns before they are ready."""

    def start(side: str, role: str, *more: str) -> Child:
        name = f"{side}-{engine}-{model}"
        protocol = PROTOCOLS.get(engine, "auto") if device == "cpu" else "auto"
        extra = {"engine": engine, "protocol": protocol, "host": "127.0.0.1", "port": 0}
        config = json.dumps({"kv_role": role, "engine_id": name, "kv_connector_extra_config": extra})
        serve = ("serve", "--model", model, "--port", "0", "--kv-transfer-config", config)
        return children.start(name, *serve, *more, *options)

    own = ("--reserved-blocks", str(RESERVED_BLOCKS))
    return start("prefill", "kv_producer"), start("decode", "kv_consumer", *own)


def start_router(children: Children, engine: str, model: str, nodes: tuple[Child, Child]) -> Pair:
    """Wait for both nodes, then put a router before them and wait until it is ready to route.

    Raises ``ChildFailed``: one of them ended or was too slow, or the router did not find both nodes healthy.
    """
    prefill, decode = nodes
    urls = prefill.wait_ready(), decode.wait_ready()
    options = ("--port", "0", "--prefill", urls[0], "--decode", urls[1])
    router = children.start(f"router-{engine}-{model}", "router", *options)
    router.wait_ready()
    router.wait_answer("/ready?all", READY_TIMEOUT_S)
    return Pair(prefill, decode, router)


def ask(url: str, model: str, prompt: Sequence[int], **more: Any) -> Any:
    """One completion, as the whole answer. Raises BadAnswer: an error, or no answer."""
    body = {"model": model, "prompt": list(prompt), "max_tokens": MAX_TOKENS, "temperature": 0, **more}
    return fetch_json(url + "/v1/completions", body, REQUEST_TIMEOUT_S)


def ask_all(url: str, model: str, prompts: Sequence[Sequence[int]]) -> list[Tokens | BadAnswer]:
    """All prompts, several at a time. A failed one is its error, in its place."""

    def one(prompt: Sequence[int]) -> Tokens | BadAnswer:
        try:
            return tokens_of(ask(url, model, prompt))
        except BadAnswer as error:
            return error

    with ThreadPoolExecutor(CONCURRENCY) as pool:
        return list(pool.map(one, prompts))


def judge(
    outcome: PairOutcome,
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    expected: Sequence[Tokens | BadAnswer],
    by_hand: tuple[Sequence[int], Tokens | BadAnswer],
) -> None:
    """Send everything through a pair and write down what was found.

    ``by_hand`` is one more prompt with its expected tokens: it is sent to both nodes without the router,
    to see the block ids of both sides.
    """
    before = read_metrics(pair.decode.url)
    # One alone, so that the router knows the prefill node before it is asked for the others.
    got = ask_all(pair.router.url, outcome.model, prompts[:1])
    got += ask_all(pair.router.url, outcome.model, prompts[1:])
    after = read_metrics(pair.decode.url)
    judge_tokens(outcome, prompts, got, expected)
    judge_transfer(outcome, before, after, prompts)
    _judge_router(outcome, read_metrics(pair.router.url), prompts)
    _judge_block_ids(outcome, pair, *by_hand)
    _judge_idle(outcome, pair)


def _judge_router(outcome: PairOutcome, metrics: Samples, prompts: Sequence[Sequence[int]]) -> None:
    alone = growth({}, metrics, "kvconnect_router_fallbacks_total")
    # A prefill node of a recurrent model has nothing to hand out for one token.
    if alone > sum(len(prompt) == 1 for prompt in prompts):
        outcome.problems.append(f"the router sent {alone:.0f} requests to the decode node alone")


def _judge_block_ids(
    outcome: PairOutcome, pair: Pair, prompt: Sequence[int], expected: Tokens | BadAnswer
) -> None:
    model = outcome.model
    try:
        first = ask(pair.prefill.url, model, prompt, max_tokens=1, kv_transfer_params=ASK_FOR_REMOTE_DECODE)
        params = first.get("kv_transfer_params") or {}
        second = ask(pair.decode.url, model, prompt, kv_transfer_params=params, return_kv_block_ids=True)
        problem = difference(tokens_of(second), expected)
    except BadAnswer as error:
        outcome.problems.append(f"both requests by hand: {error}")
        return
    if problem:
        outcome.problems.append(f"both requests by hand: {problem}")
    theirs, mine = params.get("remote_block_ids"), second.get("kv_block_ids")
    outcome.block_ids_differ = all_differ(theirs, mine)
    if not outcome.block_ids_differ:
        outcome.problems.append(f"block ids do not differ: {theirs} on prefill, {mine} on decode")


def _judge_idle(outcome: PairOutcome, pair: Pair) -> None:
    deadline = time.monotonic() + IDLE_TIMEOUT_S
    for side, child in (("prefill", pair.prefill), ("decode", pair.decode)):
        while (state := fetch_json(child.url + "/debug/state"))["blocks"]["held"]:
            if time.monotonic() > deadline:
                outcome.problems.append(f"the {side} node did not come to rest: {state}")
                break
            time.sleep(0.1)
