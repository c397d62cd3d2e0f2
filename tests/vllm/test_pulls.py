"""Two real vLLM servers that ask each other by name for what they keep, or have on the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-vllm")

from tests.ports import free_port
from tests.vllm.servers import EXACT, Server, random_prompt, running, transfer_config
from tests.vllm.tiny_models import write_model

pytestmark = [pytest.mark.timeout(900), pytest.mark.servers]

BLOCK_TOKENS = 128
"""Blocks are equally long: vLLM's kernel for CPUs keeps those of one as a whole that cannot be divided."""


def started(
    folder: Path, sides: list[tuple[str, list[str]]], module: str = "kvconnect.vllm", **kept: Any
) -> list[Server]:
    """Servers that are each other's sources, by cores, options and what they keep. Not waited for."""
    recipe, ports, made = write_model("gqa", folder), [free_port() for _ in sides], []
    for number, (cpus, options) in enumerate(sides):
        config = transfer_config(
            "both",
            "mooncake",
            module,
            kv_load_failure_policy="recompute",
            insecure=True,
            port=ports[number],
            sources=[f"127.0.0.1:{port}" for port in ports],
            **kept,
        )
        options = [*options, "--enable-prompt-tokens-details"]
        made.append(Server(recipe, folder, f"{number}", cpus, config, options, {"PYTHONHASHSEED": "0"}))
    return made


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    kept = {"offload": {"cpu_bytes": 256 << 20}}
    # A prompt that was pulled is computed in other steps than a whole one.
    sides = [("0", [*EXACT]), ("1", [*EXACT])]
    with running(*started(tmp_path_factory.mktemp("pulls"), sides, **kept)) as made:
        yield made


def asked(server: Server, prompt: list[int]) -> tuple[list[int], int]:
    """The tokens of an answer, and how many of the prompt were not computed for it."""
    answer = server.ask(prompt)
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return answer["choices"][0]["token_ids"], cached


def pulled(source: Server, target: Server, length: int, seed: int) -> tuple[list[int], list[int], int]:
    """A prompt that ``target`` got from ``source``, the answer of both, and how much was not computed.

    The first ones may be computed: nothing is loaded before a node knows how fast its link is, and before it
    has computed prompts only what is surely quicker.
    """
    for turn in range(20):
        prompt = random_prompt(length, 100 * seed + turn)
        expected, cached = asked(source, prompt)
        assert cached == 0
        before = num_pulls(target)
        tokens, cached = asked(target, prompt)
        assert tokens == expected, target.logs()
        if num_pulls(target) == before + 1:
            return prompt, tokens, cached
        assert cached == 0
    raise AssertionError(f"{target.name} pulled none of 20 prompts: {target.logs()}")


def num_pulls(server: Server) -> float:
    return server.metrics(outcome="loaded").get("vllm:kvconnect_pulls_total", 0.0)


def test_a_prefix_is_pulled_from_the_device_between_unlike_ranks_and_blocks(tmp_path):
    """With attention whose blocks can be divided. Before the other servers of this file are up."""
    blocks, both = (16, 64), []
    for ranks, block_size, cpus in ((2, blocks[0], "0|1"), (1, blocks[1], "1")):
        options = [*EXACT, "--tensor-parallel-size", str(ranks), "--block-size", str(block_size)]
        both.append((cpus, options))
    with running(*started(tmp_path, both, "tests.vllm.token_rows", share_prefix_cache=True)) as made:
        for number, (source, target) in enumerate((made, made[::-1])):
            for turn, length in enumerate((1000, 333)):
                prompt, tokens, cached = pulled(source, target, length, 10 * number + turn)
                assert cached == (length - 1) // blocks[number] * blocks[number], target.logs()
                assert tokens == target.local_tokens(prompt), target.logs()
        for server in made:
            server.wait_idle()


def test_a_server_gets_what_the_other_has_computed(servers):
    for number, (source, target) in enumerate((servers, servers[::-1])):
        prompt, _, cached = pulled(source, target, 1000, 10 + number)
        assert cached == 999 // BLOCK_TOKENS * BLOCK_TOKENS, target.logs()
        before = num_pulls(target)
        assert asked(target, prompt)[1] > 0
        assert num_pulls(target) == before, "it has it now"
    for server in servers:
        server.wait_idle()


def test_a_server_whose_source_is_gone_computes(servers):
    source, target = servers
    prompt, other = random_prompt(700, 20), random_prompt(700, 21)
    expected = [asked(source, made)[0] for made in (prompt, other)]
    assert asked(target, prompt)[0] == expected[0]
    source.end()
    assert asked(target, other) == (expected[1], 0)
    target.wait_idle()
