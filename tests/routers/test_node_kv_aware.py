"""kvconnect's own nodes behind vllm-router that reads KV events: as test_kv_aware has it, without vLLM."""

from __future__ import annotations

import time

import pytest

from tests.router.test_prefix_nodes import BLOCK, asked_alone, assert_asked_where_they_are, nodes
from tests.routers.vllm_router import find_router, routed

__all__ = ["nodes"]
pytestmark = pytest.mark.timeout(300)
SETTLE_S = 2.0


def test_an_evicted_prompt_goes_to_the_node_whose_host_memory_has_it(request, tmp_path):
    find_router()
    urls, published, _ = request.getfixturevalue("nodes")
    arguments = ["--policy", "kv_aware", "--worker-urls", *urls]
    for url, (events, _) in zip(urls, published, strict=True):
        arguments += ["--kv-event-source", f"{url}={events}"]
    arguments += ["--kv-event-block-size", str(BLOCK), "--kv-event-model", "gqa"]
    with routed(tmp_path, *arguments) as router:
        # It says that it is ready before it is connected, and never asks for what came until then.
        time.sleep(SETTLE_S)
        expected = asked_alone(urls)
        time.sleep(SETTLE_S)
        assert_asked_where_they_are(router, urls, expected)
