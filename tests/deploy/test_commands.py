"""The commands of the deployment files serve: each is started, and a completion brings its KV along.

Here ``kvconnect serve`` stands in for ``vllm serve``; tests/vllm starts them with real servers.
"""

from __future__ import annotations

import sys

import pytest

from kvconnect.node.children import fetch_json, growth, read_metrics
from tests.deploy.commands import WITH_README, deployment
from tests.deploy.running import END_TIMEOUT_S, localised, running

# A shared machine can be slow to read torch from its disk.
START_TIMEOUT_S = 180
pytestmark = pytest.mark.timeout(300)

_PROMPT = [index * 7 % 250 + 1 for index in range(200)]


def _node(_name: str, command: list[str]) -> tuple[list[str], dict[str, str]]:
    """``vllm serve MODEL OPTIONS`` as a node of kvconnect: all of the options that it has."""
    options = command[2:]
    if command[0] == "vllm":
        assert command[1] == "serve"
        options = command[3:]
        at = options.index("--shutdown-timeout")
        del options[at : at + 2]
    few = ["--num-threads", "1", "--num-blocks", "128"]
    return [sys.executable, "-m", "kvconnect", "serve", *few, *options], {}


@pytest.mark.parametrize("kind", WITH_README)
def test_a_completion_through_the_commands_of_the_files_moves_kv(kind, tmp_path) -> None:
    parts = localised(deployment(kind, tmp_path), tmp_path)
    with running(parts, _node, tmp_path) as pair:
        # Each by itself first: a node that ends is reported with its log, not as a router that waits for it.
        for name in ("prefill", "decode"):
            pair[name].wait_answer("/health", START_TIMEOUT_S)
        pair["router"].wait_answer("/ready?all", START_TIMEOUT_S)
        body = {"model": "gqa", "prompt": _PROMPT, "max_tokens": 8, "temperature": 0}
        before = read_metrics(pair["decode"].url)
        got = fetch_json(pair["router"].url + "/v1/completions", body)
        after = read_metrics(pair["decode"].url)
        assert growth(before, after, "kvconnect_transfer_bytes_total", direction="received") > 0
        expected = fetch_json(pair["prefill"].url + "/v1/completions", body)
        assert got["choices"][0]["token_ids"] == expected["choices"][0]["token_ids"]
        assert {name: one.end(END_TIMEOUT_S) for name, one in pair.items()} == dict.fromkeys(pair, 0)
