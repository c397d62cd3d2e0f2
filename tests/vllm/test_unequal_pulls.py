"""Two real vLLM servers of unlike ranks and blocks, which ask each other for KV by name."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-vllm")

from tests.ports import free_port
from tests.vllm.servers import EXACT, Server, running, transfer_config
from tests.vllm.test_pulls import pulled
from tests.vllm.tiny_models import write_model

pytestmark = [pytest.mark.timeout(900), pytest.mark.servers]

SERVERS = {"two ranks": (2, 16, "0|1"), "one rank": (1, 64, "1")}
"""Ranks, tokens of a block, cores."""


def test_a_prefix_is_pulled_between_unlike_ranks_and_blocks(tmp_path):
    recipe = write_model("gqa", tmp_path)
    ports = {name: free_port() for name in SERVERS}
    made = []
    for name, (ranks, block_size, cpus) in SERVERS.items():
        config = transfer_config(
            "both",
            "mooncake",
            "tests.vllm.token_rows",
            insecure=True,
            port=ports[name],
            kv_load_failure_policy="recompute",
            sources=[f"127.0.0.1:{other}" for other in ports.values()],
            offload={"cpu_bytes": 256 << 20},
        )
        options = [*EXACT, "--tensor-parallel-size", str(ranks), "--block-size", str(block_size)]
        options += ["--enable-prompt-tokens-details"]
        made.append(Server(recipe, tmp_path, name, cpus, config, options, {"PYTHONHASHSEED": "0"}))
    with running(*made):
        for number, (source, target) in enumerate((made, made[::-1])):
            named = SERVERS[source.name][1]
            for turn, length in enumerate((1000, 333)):
                prompt, tokens, cached = pulled(source, target, length, 10 * number + turn)
                assert cached == (length - 1) // named * named, target.logs()
                assert tokens == target.local_tokens(prompt), target.logs()
        for server in made:
            server.wait_idle()
