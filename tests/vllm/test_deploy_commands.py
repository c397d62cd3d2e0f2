"""The commands of the deployment files with real vLLM servers: the KV moves, and a stopping server waits.

The files' own commands run, with a tiny model named the way a user names one, addresses of this machine,
and vLLM's server module in place of ``vllm serve``, which the CPU build's package has not.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-vllm")

from kvconnect.node.children import fetch_json, growth, read_metrics
from tests.deploy.commands import KINDS, deployment
from tests.deploy.running import localised, running
from tests.vllm.servers import ASK_FOR_KV
from tests.vllm.tiny_models import write_model

pytestmark = [pytest.mark.timeout(900), pytest.mark.servers]
START_TIMEOUT_S = 400
SERVE_ARGS = (
    "--served-model-name tiny --skip-tokenizer-init --enforce-eager --max-model-len 4096 --dtype bfloat16 "
    "--block-size 128 --max-num-seqs 8 --max-num-batched-tokens 512"
)
PROMPT = [index * 37 % 256 for index in range(400)]


def server(name: str, command: list[str]) -> tuple[list[str], dict[str, str]]:
    assert command[:2] == ["vllm", "serve"]
    cores = {"prefill": "0", "decode": str(min(1, os.cpu_count() - 1))}
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": cores[name],
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    entry = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"]
    return [*entry, *command[2:]], environment


def ask(running_part, prompt, **more):
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    return fetch_json(
        running_part.url + "/v1/completions",
        {**body, "return_token_ids": True, "detokenize": False, **more},
        120,
    )


def tokens(running_part, prompt, **more):
    return ask(running_part, prompt, **more)["choices"][0]["token_ids"]


def loaded_tokens(running_part) -> float:
    return growth({}, read_metrics(running_part.url), "vllm:external_prefix_cache_hits_total")


# tests/deploy runs the same commands with nodes in place of vLLM's servers.
@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_the_commands_of_the_files_serve_and_move_kv(kind, tmp_path):
    given = {"MODEL": str(write_model("gqa", tmp_path).folder), "SERVE_ARGS": SERVE_ARGS}
    parts = localised(deployment(kind, tmp_path, given), tmp_path)
    with running(parts, server, tmp_path) as pair:
        for name in ("prefill", "decode"):
            pair[name].wait_answer("/health", START_TIMEOUT_S)
            # Not with a decode as the first forward: on some processors vLLM's kernel dies of it.
            tokens(pair[name], [1, 2, 3, 4, 5])
        pair["router"].wait_answer("/ready?all", 60)
        got = tokens(pair["router"], PROMPT)
        assert loaded_tokens(pair["decode"]) > 0, "the decode server computed the prompt by itself"
        assert got == tokens(pair["prefill"], PROMPT)
        if kind == KINDS[0]:
            a_server_that_stops_waits_for_its_kv_to_be_fetched(pair)


def a_server_that_stops_waits_for_its_kv_to_be_fetched(pair):
    prompt = PROMPT[::-1]
    expected = tokens(pair["prefill"], prompt)
    held = ask(pair["prefill"], prompt, max_tokens=1, kv_transfer_params=ASK_FOR_KV)["kv_transfer_params"]
    os.kill(pair["prefill"].process.pid, signal.SIGTERM)
    time.sleep(3)
    assert pair["prefill"].process.poll() is None
    before = loaded_tokens(pair["decode"])
    assert tokens(pair["decode"], prompt, kv_transfer_params=held) == expected
    assert loaded_tokens(pair["decode"]) > before
    deadline = time.monotonic() + 40
    while pair["prefill"].process.poll() is None:
        assert time.monotonic() < deadline, "it holds nothing more, and does not end"
        time.sleep(0.2)
