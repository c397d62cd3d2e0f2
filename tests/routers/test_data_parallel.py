"""Data-parallel vLLM servers behind vllm-router, which chooses the rank itself or leaves it to the server."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-routers")

from tests.ports import free_port
from tests.routers.vllm_router import complete, find_router, routed, token_ids
from tests.vllm.servers import EXACT, OBSERVED, Server, random_prompt, running, transfer_config
from tests.vllm.test_data_parallel import loads_by_rank
from tests.vllm.tiny_models import write_model

pytestmark = [pytest.mark.timeout(900), pytest.mark.servers]

TWO = (*EXACT, "--data-parallel-size", "2")


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    find_router()
    folder = tmp_path_factory.mktemp("servers")
    recipe = write_model("gqa", folder)
    made = [
        Server(recipe, folder, name, "0|1", transfer_config(role, "nixl", OBSERVED), TWO)
        for name, role in (("prefill", "producer"), ("decode", "consumer"))
    ]
    with running(*made):
        yield made


def ask(url, prompt):
    asked = {"model": "tiny", "prompt": prompt, "max_tokens": 16, "temperature": 0}
    return token_ids(complete(url, {**asked, "ignore_eos": True, "return_token_ids": True}))[0]


@pytest.mark.parametrize("ranks", [(), ("--intra-node-data-parallel-size", "2")])
def test_any_rank_hands_over_to_any(servers, ranks, tmp_path):
    prefill, decode = servers
    seed = 100 * len(ranks)
    prompts = [random_prompt(300 + 70 * number, seed + number) for number in range(8)]
    before, by_rank = decode.loaded_tokens(), loads_by_rank(decode)
    arguments = ["--policy", "round_robin", *ranks, "--prefill", prefill.url, "--decode", decode.url]
    with routed(tmp_path, "--vllm-pd-disaggregation", *arguments) as url, ThreadPoolExecutor(4) as pool:
        got = list(pool.map(ask, [url] * 8, prompts))
    assert got == [prefill.local_tokens(prompt) for prompt in prompts]
    assert decode.loaded_tokens() - before == sum(map(len, prompts))
    grown = [count - was for count, was in zip(loads_by_rank(decode), by_rank, strict=True)]
    assert sum(grown) == 8
    assert min(grown) > 0
    assert not decode.observed("failed")


def test_ranks_that_are_servers_of_their_own_hand_over(tmp_path):
    """External load balancing: of a mixture of experts, since vLLM has it for no other model."""
    find_router()
    recipe, port, rpc = write_model("moe", tmp_path), free_port(), str(free_port())
    config = transfer_config("producer", "nixl", OBSERVED, port=port, lease_s=20, engine_id="P")
    shared = [*TWO, "--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", rpc]
    prefill = [
        Server(recipe, tmp_path, f"prefill{rank}", rank, config, [*shared, "--data-parallel-rank", rank])
        for rank in ("0", "1")
    ]
    decode = Server(recipe, tmp_path, "decode", "1", transfer_config("consumer", "nixl", OBSERVED), EXACT)
    prompts = [random_prompt(300 + 40 * number, 700 + number) for number in range(6)]
    with running(*prefill, decode):
        nodes = [option for server in prefill for option in ("--prefill", server.url)]
        arguments = ["--policy", "round_robin", *nodes, "--decode", decode.url]
        with routed(tmp_path, "--vllm-pd-disaggregation", *arguments) as url:
            got = [ask(url, prompt) for prompt in prompts]
        assert got == [decode.local_tokens(prompt) for prompt in prompts]
        assert decode.loaded_tokens() == sum(map(len, prompts))
        sent = [
            server.metrics(direction="sent", outcome="ok").get("vllm:kvconnect_transfers_total", 0.0)
            for server in prefill
        ]
        assert sum(sent) == len(prompts)
        assert min(sent) > 0, "both ranks were asked"
