"""Blocks that left vLLM's pool come back: every kind of model, a pool that is too small, and restarts.

What a server whose pool holds everything answers, by vLLM's own prefix cache alone, is what a hit must be:
as many tokens, and the same answer. Both servers cut a returning prompt at the same place, so that roundings
are the same too.
"""

from __future__ import annotations

import random
import time

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-vllm")

from tests.ports import free_port
from tests.vllm.servers import (
    NIXL_CONNECTOR,
    OBSERVED,
    Server,
    random_prompt,
    reference_pair,
    running,
    transfer_config,
)
from tests.vllm.tiny_models import write_model

pytestmark = [pytest.mark.timeout(1200), pytest.mark.servers]

SHORT = {"gqa"}
KINDS = [
    pytest.param(kind, marks=[] if kind in SHORT else [pytest.mark.full])
    for kind in ("gqa", "hybrid", "sliding", "mtp_gqa", "eagle", "fp8")
]
# Blocks of the small pool, hardly more than the longest prompt needs, and prompts that overwrite all of it.
POOL = {"hybrid": 64, "sliding": 64, "mla": 160}
USUAL_POOL = 24
FILLERS = {"hybrid": 10, "sliding": 10}
LENGTHS = [100, 129, 257, 513, 700, 1024, 1025, 1153, 1500]
FILLER_TOKENS = 1900
CPU_BYTES = 512 << 20


def options_of(kind: str, pool: int | None) -> list[str]:
    options = ["--max-model-len", "2048", "--enable-prefix-caching", "--enable-prompt-tokens-details"]
    return [*options, *(["--num-gpu-blocks-override", str(pool)] if pool else [])]


def offload(engine: str = "none", role: str = "both", **more) -> dict:
    own = {key: more.pop(key) for key in list(more) if key in ("cpu_bytes", "disk_path", "disk_bytes")}
    own |= {"disk_bytes": 4 << 30} if own.get("disk_path") else {}
    return transfer_config(role, engine, offload={"cpu_bytes": CPU_BYTES, **own}, **more)


class Asked:
    """Answers of one server to a list of prompts: tokens, and how many of the prompt's were cached."""

    def __init__(self, server: Server, prompts: list[list[int]]) -> None:
        answers = [server.ask(prompt, max_tokens=12) for prompt in prompts]
        self.tokens = [answer["choices"][0]["token_ids"] for answer in answers]
        self.cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]


def prompts_of(seed: int) -> list[list[int]]:
    return [random_prompt(length, seed + number) for number, length in enumerate(LENGTHS)]


def overwrite(server: Server, kind: str) -> None:
    """Fill the small pool with other prompts' blocks, one prompt after the other."""
    for number in range(FILLERS.get(kind, 2)):
        server.tokens(random_prompt(FILLER_TOKENS, random.getrandbits(30) + number), max_tokens=1)


@pytest.fixture(scope="module", params=KINDS)
def servers(request, tmp_path_factory):
    kind = request.param
    folder = tmp_path_factory.mktemp(kind)
    recipe = write_model(kind, folder)
    pool = POOL.get(kind, USUAL_POOL)
    small = Server(
        recipe, folder, "small", "0", offload(disk_path=str(folder / "disk")), options_of(kind, pool)
    )
    whole = Server(recipe, folder, "whole", "1", None, options_of(kind, None))
    with running(small, whole):
        yield kind, small, whole, folder


def assert_alike(small: Server, got: Asked, expected: Asked) -> None:
    assert got.cached == expected.cached, f"of prompts of {LENGTHS} tokens\n{small.logs()}"
    assert got.tokens == expected.tokens


def test_what_returns_is_found_as_in_a_pool_that_holds_everything(servers):
    kind, small, whole, _ = servers
    prompts = prompts_of(seed=1)
    first, expected_first = Asked(small, prompts), Asked(whole, prompts)
    assert first.tokens == expected_first.tokens
    overwrite(small, kind)
    before = small.loaded_tokens()
    got, expected = Asked(small, prompts), Asked(whole, prompts)
    assert_alike(small, got, expected)
    assert sum(expected.cached) > 0
    # All of it came from below: nothing of these prompts was left in the pool.
    assert small.loaded_tokens() - before == sum(got.cached)
    metrics = small.metrics()
    assert metrics["vllm:kvconnect_offload_rows_total"] > 0
    assert metrics.get("vllm:kvconnect_failures_total", 0) == 0
    small.wait_idle()


def test_the_same_prompt_with_more_behind_it_is_found_as_far_as_it_goes(servers):
    kind, small, whole, _ = servers
    prompts = [random_prompt(length, 500 + length) for length in (513, 1025)]
    longer = [[*prompt, *random_prompt(300, 600)] for prompt in prompts]
    Asked(small, prompts), Asked(whole, prompts)
    overwrite(small, kind)
    got, expected = Asked(small, longer), Asked(whole, longer)
    # Ends of answers are kept here too, and vLLM keeps fewer windows and states.
    assert all(ours >= theirs for ours, theirs in zip(got.cached, expected.cached, strict=True))
    assert sum(got.cached) > 0
    if got.cached == expected.cached:
        assert got.tokens == expected.tokens


def test_a_prompt_that_wants_log_probabilities_is_computed_anew(servers):
    kind, small, _, _ = servers
    prompt = random_prompt(600, 700)
    small.tokens(prompt)
    overwrite(small, kind)
    before = small.loaded_tokens()
    answer = small.ask(prompt, prompt_logprobs=1, max_tokens=4)
    assert len(answer["choices"][0]["prompt_logprobs"]) == 600
    assert small.loaded_tokens() == before


def test_clients_that_leave_while_their_prompt_is_restored_leave_nothing(servers):
    kind, small, _, _ = servers
    prompts = [random_prompt(length, 800 + number) for number, length in enumerate([1025, 1500, 700] * 2)]
    answers = [small.tokens(prompt) for prompt in prompts]
    overwrite(small, kind)
    for number, prompt in enumerate(prompts):
        small.abandon(prompt, after_s=0.002 * number)
    small.wait_idle()
    assert [small.tokens(prompt) for prompt in prompts] == answers or kind not in ("gqa", "fp8")
    small.wait_idle()


@pytest.mark.full
def test_a_restarted_server_finds_on_disk_what_it_kept(servers):
    _, small, whole, _ = servers
    prompts = prompts_of(seed=20)
    Asked(small, prompts), Asked(whole, prompts)
    wait_kept(small)
    small.end()
    small.start()
    small.wait_ready()
    got, expected = Asked(small, prompts), Asked(whole, prompts)
    assert_alike(small, got, expected)
    assert small.loaded_tokens() == sum(got.cached)


def wait_kept(server: Server, within_s: float = 30.0) -> None:
    """Wait until nothing is on its way to the disk. Numbers come with steps: a short prompt makes some."""
    deadline = time.monotonic() + within_s
    while True:
        server.tokens([1, 2, 3], max_tokens=2)
        open_ = server.metrics().get("vllm:kvconnect_offload_keeps_open", 0)
        if not open_:
            return
        assert time.monotonic() < deadline, f"{open_} jobs write for {within_s} s\n{server.logs()}"
        time.sleep(0.2)


@pytest.mark.full
def test_a_latent_cache_returns_where_all_but_one_token_does(tmp_path):
    """Here vLLM's CPU build computes a prompt whole or not at all, and keeps no prefixes by itself."""
    recipe = write_model("mla", tmp_path)
    lengths = [length for length in LENGTHS if length % 16 == 1]
    prompts = [random_prompt(length, 900 + length) for length in lengths]
    with reference_pair(recipe, tmp_path) as (prefill, decode):
        expected = [decode.from_prefill(prefill, prompt, max_tokens=12) for prompt in prompts]
    disk = str(tmp_path / "disk")
    server = Server(recipe, tmp_path, "small", "0", offload(disk_path=disk), options_of("mla", POOL["mla"]))
    with running(server):
        Asked(server, prompts)
        for _ in range(2):
            overwrite(server, "mla")
            got = Asked(server, prompts)
            assert got.cached == [length - 1 for length in lengths]
            assert got.tokens == expected
            # Of others more than a token would be left: they are computed.
            assert server.ask(prompts[-1][:700])["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            server.wait_idle()
            wait_kept(server)
            server.end()
            server.start()
            server.wait_ready()


@pytest.mark.full
@pytest.mark.parametrize("first", [True, False])
def test_a_connector_of_vllm_s_own_hands_over_and_ours_keeps_in_either_order(tmp_path, first):
    """vLLM passes on one handshake, and NixlConnector starts with no other than its own."""
    recipe = write_model("gqa", tmp_path)
    children = [offload(), NIXL_CONNECTOR] if first else [NIXL_CONNECTOR, offload()]
    config = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": children},
    }
    servers = [
        Server(
            recipe,
            tmp_path,
            name,
            cpu,
            config,
            options_of("gqa", USUAL_POOL),
            environment={"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())},
        )
        for name, cpu in (("prefill", "0"), ("decode", "1"))
    ]
    with running(*servers) as (prefill, decode):
        # Of these the prefill server's own last step has one token, as the decode server's first.
        prompts = [random_prompt(length, 70 + length) for length in (513, 1025, 1537)]
        expected = [prefill.local_tokens(prompt, max_tokens=12) for prompt in prompts]
        for round_ in range(2):
            restored = prefill.loaded_tokens()
            assert [decode.from_prefill(prefill, prompt, max_tokens=12) for prompt in prompts] == expected
            assert (prefill.loaded_tokens() > restored) is (round_ > 0)
            overwrite(prefill, "gqa")
            overwrite(decode, "gqa")
        for server in servers:
            server.wait_idle()


@pytest.mark.full
def test_every_rank_keeps_its_own_shard(tmp_path):
    recipe = write_model("gqa", tmp_path)
    options = ["--tensor-parallel-size", "2"]
    prompts = prompts_of(seed=5)
    alone = offload(disk_path=str(tmp_path / "disk")) | {"kv_connector_module_path": OBSERVED}
    whole = Server(recipe, tmp_path, "whole", "0|1", None, [*options_of("gqa", None), *options])
    with running(whole):
        first, expected = Asked(whole, prompts), Asked(whole, prompts)
    small = Server(recipe, tmp_path, "small", "0|1", alone, [*options_of("gqa", USUAL_POOL), *options])
    with running(small):
        assert Asked(small, prompts).tokens == first.tokens
        overwrite(small, "gqa")
        assert_alike(small, Asked(small, prompts), expected)
        wait_kept(small)
        small.end()
        small.start()
        small.wait_ready()
        assert_alike(small, Asked(small, prompts), expected)
