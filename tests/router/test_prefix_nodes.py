"""The router by prefix before two real nodes that keep blocks in host memory."""

from __future__ import annotations

import asyncio
import json
import time

import aiohttp
import pytest

from kvconnect.node.children import Children, growth, read_metrics
from tests.ports import free_port

BLOCK = 16
POOL_BLOCKS = 40
"""Hardly more than two prompts."""
LENGTHS = (5 * BLOCK + 7, 18 * BLOCK, 19 * BLOCK + 3)


@pytest.fixture(scope="module")
def urls(tmp_path_factory):
    """The router's, and the nodes'."""
    config = {"kv_role": "kv_both", "kv_connector_extra_config": {"engine": "none"}}
    config["kv_connector_extra_config"]["offload"] = {"cpu_bytes": 64 << 20}
    with Children(tmp_path_factory.mktemp("nodes")) as children:
        nodes, ports = [], []
        for name in ("one", "other"):
            ports.append((free_port(), free_port()))
            published, replayed = (f"tcp://*:{port}" for port in ports[-1])
            events = {"enable_kv_cache_events": True, "endpoint": published, "replay_endpoint": replayed}
            serve = ["serve", "--model", "gqa", "--port", "0", "--num-blocks", str(POOL_BLOCKS)]
            serve += ["--block-size", str(BLOCK), "--kv-transfer-config", json.dumps(config)]
            nodes.append(children.start(name, *serve, "--kv-events-config", json.dumps(events)))
        found = [node.wait_ready() for node in nodes]
        options = ["router", "--port", "0", "--policy", "prefix"]
        for url, (published, replayed) in zip(found, ports, strict=True):
            options += ["--decode", url, "--kv-event-source", f"{url}=tcp://127.0.0.1:{published}"]
            options += ["--kv-event-replay-source", f"{url}=tcp://127.0.0.1:{replayed}"]
        # What they publish before the router is there it asks for.
        yield lambda: children.start("router", *options).wait_ready(), found


def ask(url, prompt):
    async def main():
        async with aiohttp.ClientSession() as session:
            body = {"model": "gqa", "prompt": prompt, "max_tokens": 8}
            async with session.post(f"{url}/v1/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
                return (await answer.json())["choices"][0]["token_ids"]

    return asyncio.run(main())


def restored_blocks(url):
    return growth({}, read_metrics(url), "kvconnect_offload_rows_total", move="restored", tier="cpu")


def known_blocks(router):
    return growth({}, read_metrics(router), "kvconnect_router_known_blocks")


def test_a_prompt_goes_to_the_node_whose_host_memory_has_it(urls):
    start_router, nodes = urls
    prompts = [[[at, length, *range(100, 98 + length)] for length in LENGTHS] for at in range(len(nodes))]
    expected = [[ask(url, prompt) for prompt in own] for url, own in zip(nodes, prompts, strict=True)]
    for at, url in enumerate(nodes):
        for filler in range(3):
            ask(url, [200 + at, filler, *range(200, 198 + 18 * BLOCK)])
    router = start_router()
    deadline, least = time.monotonic() + 30, len(nodes) * sum(length // BLOCK for length in LENGTHS)
    while known_blocks(router) < least and time.monotonic() < deadline:
        time.sleep(0.1)
    for number, length in enumerate(LENGTHS):
        for at in range(len(nodes)):
            before = [restored_blocks(url) for url in nodes]
            assert ask(router, prompts[at][number]) == expected[at][number]
            grown = [restored_blocks(url) - was for url, was in zip(nodes, before, strict=True)]
            assert grown == [(length - 1) // BLOCK * (other == at) for other in range(len(nodes))]
