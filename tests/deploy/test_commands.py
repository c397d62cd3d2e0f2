"""The commands of the deployment files serve: each is started, and a completion brings its KV along.

Here ``kvconnect serve`` stands in for ``vllm serve``; tests/vllm starts them with real servers.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import Any

import pytest

from kvconnect.node.children import fetch_json, growth, read_metrics
from kvconnect.peer.keyring import new_secret, write
from tests.deploy.commands import WITH_README, chart, deployment, named
from tests.deploy.running import END_TIMEOUT_S, localised, running

# A shared machine can be slow to read torch from its disk.
START_TIMEOUT_S = 180
pytestmark = pytest.mark.timeout(300)

SERVERS = ("prefill", "decode")
_PROMPT = [index * 7 % 250 + 1 for index in range(200)]


def _node(_name: str, command: list[str]) -> tuple[list[str], dict[str, str]]:
    """``vllm serve MODEL OPTIONS`` as a node of kvconnect: all of the options that it has."""
    options = command[2:]
    if command[0] == "vllm":
        assert command[1] == "serve"
        options = _without("--shutdown-timeout", command[3:])
    few = ["--num-threads", "1", "--num-blocks", "128"]
    return [sys.executable, "-m", "kvconnect", "serve", *few, *options], {}


def _without(option: str, words: list[str]) -> list[str]:
    (at,) = (index for index, word in enumerate(words) if word.partition("=")[0] == option)
    return words[:at] + words[at + (1 if "=" in words[at] else 2) :]


def _is_ready(name: str, config: dict[str, Any]) -> bool:
    """What the pod's readiness probe finds at an address of this machine."""
    (container,) = named(chart(), "Deployment", name)["spec"]["template"]["spec"]["containers"]
    *shell, script = container["readinessProbe"]["exec"]["command"]
    for found, here in (
        ("kvconnect inspect", f"{sys.executable} -m kvconnect inspect"),
        ("/run/secrets/kvconnect/key", config["key_file"]),
        ("$POD_IP:14600", f"{config['host']}:{config['port']}"),
    ):
        assert found in script
        script = script.replace(found, here)
    return subprocess.run([*shell, script], capture_output=True, timeout=60).returncode == 0


@pytest.mark.parametrize("kind", WITH_README)
def test_a_completion_through_the_commands_of_the_files_moves_kv(kind, tmp_path) -> None:
    parts = localised(deployment(kind, tmp_path), tmp_path)
    with running(parts, _node, tmp_path) as pair:
        # Each by itself first: a node that ends is reported with its log, not as a router that waits for it.
        for name in SERVERS:
            pair[name].wait_answer("/health", START_TIMEOUT_S)
        pair["router"].wait_answer("/ready?all", START_TIMEOUT_S)
        body = {"model": "gqa", "prompt": _PROMPT, "max_tokens": 8, "temperature": 0}
        before = read_metrics(pair["decode"].url)
        got = fetch_json(pair["router"].url + "/v1/completions", body)
        after = read_metrics(pair["decode"].url)
        assert growth(before, after, "kvconnect_transfer_bytes_total", direction="received") > 0
        expected = fetch_json(pair["prefill"].url + "/v1/completions", body)
        assert got["choices"][0]["token_ids"] == expected["choices"][0]["token_ids"]
        if kind == "kubernetes":
            write(tmp_path / "other", new_secret())
            prefill, decode = (parts[name].transfer["kv_connector_extra_config"] for name in SERVERS)
            assert _is_ready("prefill", prefill)
            assert _is_ready("decode", decode)
            assert not _is_ready("prefill", {**prefill, "key_file": str(tmp_path / "other")})
            pair["decode"].send(signal.SIGSTOP)
            assert not _is_ready("decode", decode)
            pair["decode"].send(signal.SIGCONT)
        assert {name: one.end(END_TIMEOUT_S) for name, one in pair.items()} == dict.fromkeys(pair, 0)
