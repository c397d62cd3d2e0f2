"""A real pair behind a router that asks both at once: long prompts arrive while they are computed."""

from __future__ import annotations

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvconnect.node.children import Children, fetch_json, growth, read_metrics
from kvconnect.node.demo import PROTOCOLS, ask
from tests.test_pair import EXTRA, until_ready

STREAMING = {"protocol": PROTOCOLS["nixl"], "slot_bytes": 65536, "stream_min_tokens": 200}
STEPS = ("--max-num-batched-tokens", "128")


def node_options(model, name, role):
    extra = {"engine": "nixl", **EXTRA, **STREAMING}
    transfer = {"kv_role": role, "engine_id": name, "kv_connector_extra_config": extra}
    return ["serve", "--model", model, "--port", "0", "--kv-transfer-config", json.dumps(transfer), *STEPS]


@pytest.fixture(scope="module", params=["sliding", "hybrid"])
def nodes(request, tmp_path_factory):
    """P, D, a node alone, and a router that asks P and D at once; and the model's name."""
    model = request.param
    with Children(tmp_path_factory.mktemp("streaming")) as children:
        made = {
            "prefill": children.start("prefill", *node_options(model, "P", "kv_producer")),
            "decode": children.start(
                "decode", *node_options(model, "D", "kv_consumer"), "--reserved-blocks", "61"
            ),
            "alone": children.start("alone", "serve", "--model", model, "--port", "0"),
        }
        urls = {name: child.wait_ready() for name, child in made.items()}
        options = ("--prefill", urls["prefill"], "--decode", urls["decode"], "--flow", "parallel")
        urls["router"] = children.start("router", "router", "--port", "0", *options).wait_ready()
        until_ready(urls["router"])
        yield urls, model


def tokens(answer):
    return answer["choices"][0]["token_ids"]


def test_prompts_of_all_lengths_are_exact_and_long_ones_are_sent_early(nodes):
    urls, model = nodes
    rng = random.Random(3)
    prompts = [rng.choices(range(512), k=length) for length in (30, 700, 150, 900, 260, 60, 1200, 199)]
    expected = [tokens(ask(urls["alone"], model, prompt)) for prompt in prompts]
    got = [tokens(ask(urls["router"], model, prompts[0]))]
    before = read_metrics(urls["prefill"])
    with ThreadPoolExecutor(3) as pool:
        got += [tokens(answer) for answer in pool.map(lambda p: ask(urls["router"], model, p), prompts[1:])]
    assert got == expected
    after = read_metrics(urls["prefill"])
    assert 1 <= growth(before, after, "kvconnect_streamed_requests_total") <= 4
    assert growth(before, after, "kvconnect_streamed_bytes_total") > 0
    failed = growth({}, read_metrics(urls["decode"]), "kvconnect_transfers_total", outcome="failed")
    assert failed == 0
    deadline = time.monotonic() + 20
    while True:
        states = [fetch_json(urls[name] + "/debug/state") for name in ("prefill", "decode")]
        keys = ("leases", "expected", "pending_fetches", "streaming_prefills", "sendings", "loads")
        if not any(state["blocks"]["held"] or any(state["connector"][k] for k in keys) for state in states):
            return
        assert time.monotonic() < deadline, states
        time.sleep(0.1)
