"""Data parallelism: each rank has its own handles, ports, events and folders; any fetches from any."""

from __future__ import annotations

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.ports import free_port

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-vllm")

from tests.vllm.servers import OBSERVED, Server, random_prompt, routed, router, running, transfer_config
from tests.vllm.tiny_models import write_model

pytestmark = [pytest.mark.timeout(900), pytest.mark.servers]

TWO = ("--data-parallel-size", "2")
BOTH = "0|1"


def prefilled_by(server: Server, prompt: list[int], rank: int) -> dict[str, object]:
    """The parameters for a decode server, of the rank that the header names."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 1}
    data = json.dumps({**body, "kv_transfer_params": {"do_remote_decode": True}}).encode()
    headers = {"Content-Type": "application/json", "X-data-parallel-rank": str(rank)}
    request = urllib.request.Request(server.url + "/v1/completions", data, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["kv_transfer_params"]


def loads_by_rank(server: Server) -> list[float]:
    return [
        server.metrics(engine=str(rank), direction="received", outcome="ok").get(
            "vllm:kvconnect_transfers_total", 0.0
        )
        for rank in (0, 1)
    ]


def test_two_ranks_to_two_behind_our_router(tmp_path):
    """Internal load balancing: the router names the rank in both legs, and places by the ranks' events."""
    recipe, port, events = write_model("gqa", tmp_path), free_port(), free_port()
    kept = {"cpu_bytes": 32 << 20, "disk_path": str(tmp_path / "disk"), "disk_bytes": 64 << 20}
    published = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{events}"}
    config = transfer_config("producer", "nixl", OBSERVED, port=port, lease_s=20, offload=kept)
    events_options = ["--kv-events-config", json.dumps(published)]
    prefill = Server(recipe, tmp_path, "prefill", BOTH, config, [*TWO, *events_options])
    decode = Server(recipe, tmp_path, "decode", BOTH, transfer_config("consumer", "nixl", OBSERVED), TWO)
    with running(prefill, decode):
        for rank in (0, 1):
            prompt = random_prompt(200, 950 + rank)
            params = prefilled_by(prefill, prompt, rank)
            assert params["remote_port"] == port + rank
            assert params["remote_engine_id"].endswith(f"_dp{rank}")
            assert decode.tokens(prompt, kv_transfer_params=params) == prefill.local_tokens(prompt)
        pair, ranks = (("prefill", prefill), ("decode", decode)), (0, 1)
        nodes = [f"--{role}={server.url}@{rank}" for role, server in pair for rank in ranks]
        sources = [
            f"--kv-event-source={prefill.url}@{rank}=tcp://127.0.0.1:{events + rank}" for rank in ranks
        ]
        before = loads_by_rank(decode)
        prompts = [random_prompt(300 + 70 * number, number) for number in range(8)]
        with router(*nodes, *sources, "--flow", "parallel", "--policy", "prefix") as url:
            with ThreadPoolExecutor(4) as pool:
                got = list(pool.map(routed, [url] * 8, prompts))
            assert [tokens for (tokens,) in got] == [prefill.local_tokens(prompt) for prompt in prompts]
            loads = [after - was for after, was in zip(loads_by_rank(decode), before, strict=True)]
            assert sum(loads) == 8
            assert min(loads) > 0
            # More of a prompt: the rank that has its beginning computes the rest, and so it hits.
            hits = prefill.metrics()["vllm:prefix_cache_hits_total"]
            for number, prompt in enumerate(prompts[4:]):
                routed(url, [*prompt, *random_prompt(50, 300 + number)])
            grown = prefill.metrics()["vllm:prefix_cache_hits_total"] - hits
            assert grown == sum(len(prompt) // 128 * 128 for prompt in prompts[4:])
        prefill.wait_idle()
        decode.wait_idle()
        folders = [tmp_path / "disk", tmp_path / "disk" / "dp1"]
        assert all(list(folder.glob("*-rank0/*.kv")) for folder in folders), "each rank has its own"


@pytest.mark.full
@pytest.mark.parametrize("balancing", ["internal", "external", "hybrid"])
def test_ranks_that_compute_in_step_hand_over(tmp_path, balancing):
    """A mixture of experts, whose layers the ranks share: with one that computes the other does."""
    recipe, port, rpc = write_model("moe", tmp_path), free_port(), str(free_port())
    config = transfer_config("producer", "nixl", OBSERVED, port=port, lease_s=20, engine_id="P")
    if balancing == "internal":
        prefill = [Server(recipe, tmp_path, "prefill", BOTH, config, TWO)] * 2
    else:
        shared = [*TWO, "--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", rpc]
        start = {"external": "--data-parallel-rank", "hybrid": "--data-parallel-start-rank"}[balancing]
        local = ["--data-parallel-hybrid-lb", "--data-parallel-size-local", "1"]
        more = local if balancing == "hybrid" else []
        prefill = [
            Server(recipe, tmp_path, f"prefill{rank}", str(rank), config, [*shared, *more, start, str(rank)])
            for rank in (0, 1)
        ]
    decode = Server(recipe, tmp_path, "decode", "1", transfer_config("consumer", "nixl", OBSERVED))
    with running(*dict.fromkeys(prefill), decode):
        for number in range(4):
            rank, prompt = number % 2, random_prompt(300 + 40 * number, number)
            if balancing == "internal":
                params = prefilled_by(prefill[rank], prompt, rank)
            else:
                params = prefill[rank].prefilled(prompt)
            assert (params["remote_engine_id"], params["remote_port"]) == (f"P_dp{rank}", port + rank)
            got = decode.tokens(prompt, kv_transfer_params=params)
            assert got == prefill[rank].local_tokens(prompt)
        assert decode.loaded_tokens() == sum(300 + 40 * number for number in range(4))
