"""Nodes and routers as processes of their own: how they are started, asked, and found at rest."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

from kvconnect.node.children import Child, Children, fetch_json, growth, read_metrics
from kvconnect.node.pair_demo import PROTOCOLS, ask

ASK_FOR_KV = {"do_remote_decode": True, "do_remote_prefill": False}
FOR_D = ("--reserved-blocks", "61")


def serve(
    children: Children,
    name: str,
    role: str,
    *options: str,
    model: str = "gqa",
    policy: str = "fail",
    **extra: Any,
) -> Child:
    """Start a node whose transfers the engine carries, with these settings of the connector."""
    engine = extra.get("engine", "nixl")
    config = {
        "kv_role": role,
        "engine_id": name,
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {"engine": engine, "protocol": PROTOCOLS[engine], **extra},
    }
    return alone(children, *options, "--kv-transfer-config", json.dumps(config), name=name, model=model)


def alone(children: Children, *options: str, name: str = "alone", model: str = "gqa") -> Child:
    """Start a node without a connector."""
    return children.start(name, "serve", "--model", model, "--port", "0", *options)


def route(children: Children, prefill: Sequence[str], decode: Sequence[str], *options: str) -> str:
    """A router that has found its nodes."""
    for role, urls in (("--prefill", prefill), ("--decode", decode)):
        options = (*options, *(word for url in urls for word in (role, url)))
    router = children.start("router", "router", "--port", "0", *options)
    router.wait_ready()
    router.wait_answer("/ready?all", 60)
    return router.url


def until(condition: Callable[[], object], timeout_s: float = 30.0, every_s: float = 0.05) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(every_s)


def tokens(url: str, prompt: list[int], model: str = "gqa", **more: Any) -> list[int]:
    """What a node or a router answers."""
    return list(ask(url, model, prompt, **more)["choices"][0]["token_ids"])


def prompt_of(length: int, seed: object) -> list[int]:
    """One that only this seed has, so that no node has it in its prefix cache."""
    return random.Random(str(seed)).choices(range(512), k=length)


def prefilled(url: str, prompt: list[int], **more: Any) -> Any:
    """What P hands out for a prompt."""
    params = {**ASK_FOR_KV, **more}
    return ask(url, "gqa", prompt, max_tokens=1, kv_transfer_params=params)["kv_transfer_params"]


def grown(url: str, before: Any, name: str, **labels: str) -> float:
    """By how much a counter grew since ``read_metrics``; ``before`` empty for all of it."""
    return growth(before, read_metrics(url), f"kvconnect_{name}", **labels)


_AT_REST = ("leases", "expected", "pending_fetches", "sendings", "loads")


def assert_at_rest(*urls: str, within_s: float = 20) -> None:
    """Nothing is held, sent or loaded, if not now then soon."""

    def is_at_rest() -> bool:
        states = [fetch_json(url + "/debug/state") for url in urls]
        return not any(
            state["blocks"]["held"] or any(state["connector"].get(key) for key in _AT_REST)
            for state in states
        )

    until(is_at_rest, within_s)
