"""kvconnect's own nodes behind vllm-router that reads KV events: as test_kv_aware has it, without vLLM."""

from __future__ import annotations

import json
import time

import pytest

from kvconnect.node.children import Children, growth, read_metrics
from tests.ports import free_port
from tests.routers.vllm_router import complete, find_router, routed, token_ids

pytestmark = pytest.mark.timeout(300)

BLOCK = 16
# Tokens: hardly more than two prompts.
POOL = 40 * BLOCK
TOKENS = (5 * BLOCK + 7, 18 * BLOCK, 19 * BLOCK + 3)
SETTLE_S = 2.0


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    """The URLs of two nodes with host memory, and where they publish."""
    find_router()
    config = {"kv_role": "kv_both", "kv_connector_extra_config": {"engine": "none"}}
    config["kv_connector_extra_config"]["offload"] = {"cpu_bytes": 64 << 20}
    with Children(tmp_path_factory.mktemp("nodes")) as children:
        made, published = [], []
        for name in ("one", "other"):
            published.append(f"tcp://127.0.0.1:{free_port()}")
            events = {"enable_kv_cache_events": True, "endpoint": published[-1].replace("127.0.0.1", "*")}
            serve = ["serve", "--model", "gqa", "--port", "0", "--num-blocks", str(POOL // BLOCK)]
            serve += ["--block-size", str(BLOCK), "--kv-transfer-config", json.dumps(config)]
            made.append(children.start(name, *serve, "--kv-events-config", json.dumps(events)))
        yield [node.wait_ready() for node in made], published


@pytest.fixture(scope="module")
def router(nodes, tmp_path_factory):
    urls, published = nodes
    arguments = ["--policy", "kv_aware", "--worker-urls", *urls]
    for url, endpoint in zip(urls, published, strict=True):
        arguments += ["--kv-event-source", f"{url}={endpoint}"]
    arguments += ["--kv-event-block-size", str(BLOCK), "--kv-event-model", "gqa"]
    with routed(tmp_path_factory.mktemp("router"), *arguments) as url:
        # It says that it is ready before it is connected, and never asks for what came until then.
        time.sleep(SETTLE_S)
        yield url


def ask(url, prompt):
    return token_ids(complete(url, {"model": "gqa", "prompt": prompt, "max_tokens": 8}))


def restored_blocks(url):
    return growth({}, read_metrics(url), "kvconnect_offload_rows_total", move="restored", tier="cpu")


def test_an_evicted_prompt_goes_to_the_node_whose_host_memory_has_it(nodes, router):
    urls, _ = nodes
    prompts = [[[at, length, *range(100, 98 + length)] for length in TOKENS] for at in range(len(urls))]
    expected = [[ask(url, prompt) for prompt in own] for url, own in zip(urls, prompts, strict=True)]
    for at, url in enumerate(urls):
        for filler in range(3):
            ask(url, [200 + at, filler, *range(200, 198 + 18 * BLOCK)])
    time.sleep(SETTLE_S)
    for number, length in enumerate(TOKENS):
        for at in range(len(urls)):
            before = [restored_blocks(url) for url in urls]
            assert ask(router, prompts[at][number]) == expected[at][number]
            grown = [restored_blocks(url) - was for url, was in zip(urls, before, strict=True)]
            whole = (length - 1) // BLOCK
            assert grown == [whole * (other == at) for other in range(len(urls))], (
                "restored where it was kept"
            )
