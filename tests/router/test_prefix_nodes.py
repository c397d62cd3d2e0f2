"""The router by prefix before two real nodes that keep blocks in host memory."""

from __future__ import annotations

import json
import time

import pytest

from kvconnect.node.children import Children, fetch_json, growth, read_metrics
from tests.ports import free_port

BLOCK = 16
POOL_BLOCKS = 40
"""Hardly more than two prompts."""
LENGTHS = (5 * BLOCK + 7, 18 * BLOCK, 19 * BLOCK + 3)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    """The URLs of two nodes with host memory, where they publish, and what starts a router before them."""
    offload = {"engine": "none", "offload": {"cpu_bytes": 64 << 20}}
    config = json.dumps({"kv_role": "kv_both", "kv_connector_extra_config": offload})
    with Children(tmp_path_factory.mktemp("nodes")) as children:
        made, ends = [], [(free_port(), free_port()) for _ in range(2)]
        for name, (port, replay_port) in zip(("one", "other"), ends, strict=True):
            events = {"endpoint": f"tcp://*:{port}", "replay_endpoint": f"tcp://*:{replay_port}"}
            events["enable_kv_cache_events"] = True
            serve = ["serve", "--model", "gqa", "--port", "0", "--num-blocks", str(POOL_BLOCKS)]
            serve += ["--block-size", str(BLOCK), "--kv-transfer-config", config]
            made.append(children.start(name, *serve, "--kv-events-config", json.dumps(events)))
        urls = [node.wait_ready() for node in made]
        published = [[f"tcp://127.0.0.1:{port}" for port in both] for both in ends]
        yield urls, published, lambda *options: children.start("router", "router", *options).wait_ready()


def ask(url, prompt):
    body = {"model": "gqa", "prompt": prompt, "max_tokens": 8}
    return fetch_json(f"{url}/v1/completions", body)["choices"][0]["token_ids"]


def restored_blocks(url):
    return growth({}, read_metrics(url), "kvconnect_offload_rows_total", move="restored", tier="cpu")


def asked_alone(urls):
    """The answers to prompts of each node, which are in its host memory alone then."""
    prompts = [[[at, length, *range(100, 98 + length)] for length in LENGTHS] for at in range(len(urls))]
    expected = [
        [(prompt, ask(url, prompt)) for prompt in own] for url, own in zip(urls, prompts, strict=True)
    ]
    for at, url in enumerate(urls):
        for filler in range(3):
            ask(url, [200 + at, filler, *range(200, 198 + 18 * BLOCK)])
    return expected


def assert_asked_where_they_are(router, urls, expected):
    """Every prompt is restored by the node that has it."""
    for of_a_length in zip(*expected, strict=True):
        for at, (prompt, answer) in enumerate(of_a_length):
            before = [restored_blocks(url) for url in urls]
            assert ask(router, prompt) == answer
            grown = [restored_blocks(url) - was for url, was in zip(urls, before, strict=True)]
            assert grown == [(len(prompt) - 1) // BLOCK * (other == at) for other in range(len(urls))]


def test_a_prompt_goes_to_the_node_whose_host_memory_has_it(nodes):
    urls, published, start_router = nodes
    expected = asked_alone(urls)
    options = ["--port", "0", "--policy", "prefix"]
    for url, (events, replay) in zip(urls, published, strict=True):
        options += ["--decode", url, "--kv-event-source", f"{url}={events}"]
        options += ["--kv-event-replay-source", f"{url}={replay}"]
    # What they published before the router is there it asks for.
    router = start_router(*options)
    least = len(urls) * sum(length // BLOCK for length in LENGTHS)
    deadline = time.monotonic() + 30
    while growth({}, read_metrics(router), "kvconnect_router_known_blocks") < least:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert_asked_where_they_are(router, urls, expected)
