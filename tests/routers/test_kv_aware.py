"""vllm-router that reads KV events: a prompt whose blocks left the device goes where host memory has them."""

from __future__ import annotations

import json
import random
import time

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-routers")

from tests.ports import free_port
from tests.routers.vllm_router import complete, find_router, routed
from tests.vllm.servers import Server, random_prompt, running, transfer_config
from tests.vllm.tiny_models import write_model

pytestmark = [pytest.mark.timeout(900), pytest.mark.servers]

BLOCK = 128
# Hardly more blocks than the longest prompt needs.
POOL = 24
SETTLE_S = 2.0
FILLER_TOKENS = 1900
TOKENS = (5 * BLOCK + 7, 8 * BLOCK, 9 * BLOCK + 100)
"""Of the prompts: the last token's block is never restored."""


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """Two servers with host memory, and the endpoints where they publish and where they are asked again."""
    find_router()
    folder = tmp_path_factory.mktemp("aware")
    recipe = write_model("gqa", folder)
    config = transfer_config("both", "none", offload={"cpu_bytes": 256 << 20})
    made, endpoints = [], []
    for name, cpu in (("one", "0"), ("other", "1")):
        ends = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
        # Without a topic: the router ignores what comes under one.
        events = {"enable_kv_cache_events": True, "publisher": "zmq"}
        events |= {"endpoint": ends[0].replace("127.0.0.1", "*"), "replay_endpoint": ends[1]}
        options = ["--num-gpu-blocks-override", str(POOL), "--enable-prefix-caching"]
        options += ["--max-model-len", "2048", "--kv-events-config", json.dumps(events)]
        made.append(Server(recipe, folder, name, cpu, config, options))
        endpoints.append(ends)
    with running(*made):
        yield made, endpoints


@pytest.fixture(scope="module")
def router(servers, tmp_path_factory):
    made, endpoints = servers
    arguments = ["--policy", "kv_aware", "--worker-urls", *(server.url for server in made)]
    for server, (published, asked) in zip(made, endpoints, strict=True):
        arguments += ["--kv-event-source", f"{server.url}={published}"]
        arguments += ["--kv-event-replay-source", f"{server.url}={asked}"]
    arguments += ["--kv-event-block-size", str(BLOCK), "--kv-event-model", "tiny"]
    with routed(tmp_path_factory.mktemp("router"), *arguments) as url:
        # It says that it is ready before it is connected, and never asks for what came until then.
        time.sleep(SETTLE_S)
        yield url


def ask(url, prompt):
    # A prompt in a request for token ids is one that the router does not look up.
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    return complete(url, body)["choices"][0]["text"]


def overwrite(server):
    for _ in range(2):
        server.tokens(random_prompt(FILLER_TOKENS, random.getrandbits(30)), max_tokens=1)


def test_an_evicted_prompt_goes_to_the_server_whose_host_memory_has_it(servers, router):
    made, _ = servers
    prompts = {
        server.name: [random_prompt(length, 100 * at + length) for length in TOKENS]
        for at, server in enumerate(made)
    }
    expected = {}
    for server in made:
        for prompt in prompts[server.name]:
            ask(server.url, prompt)
            # Of blocks on the device: cut where a restored prompt is, it rounds as that does.
            expected[tuple(prompt)] = ask(server.url, prompt)
    for server in made:
        overwrite(server)
    time.sleep(SETTLE_S)
    for length in range(len(TOKENS)):
        for server in made:
            prompt = prompts[server.name][length]
            before = [one.loaded_tokens() for one in made]
            assert ask(router, prompt) == expected[tuple(prompt)]
            grown = {one.name: one.loaded_tokens() - was for one, was in zip(made, before, strict=True)}
            whole = (len(prompt) - 1) // BLOCK * BLOCK
            assert grown == {one.name: whole * (one is server) for one in made}, "restored where it was kept"
    for server in made:
        server.wait_idle()
