"""A decode server that is full receives KV into host memory: the prefill server frees its blocks at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-vllm")

from tests.pair_kit import until
from tests.vllm.servers import EXACT, pair, random_prompt
from tests.vllm.tiny_models import write_model

pytestmark = [pytest.mark.timeout(1200), pytest.mark.servers]

# Prompts whose last step has one token on both servers, so that roundings are the same in any type.
LENGTHS = [513, 1025, 513, 1537]
OPTIONS = {"gqa": EXACT, "hybrid": (), "sliding": EXACT}
TWO = ("--tensor-parallel-size", "2")


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        ("gqa", ()),
        pytest.param("hybrid", (), marks=pytest.mark.full),
        pytest.param("sliding", (), marks=pytest.mark.full),
        pytest.param("gqa", TWO, marks=pytest.mark.full),
    ],
)
def test_what_waits_is_received_and_answered_as_ever(tmp_path, kind, ranks):
    recipe = write_model(kind, tmp_path)
    offload = {"cpu_bytes": 256 << 20, "park_after_s": 0.0}
    with pair(
        recipe,
        tmp_path,
        "nixl",
        decode={"offload": offload, "kv_load_failure_policy": "fail"},
        options=["--enable-prefix-caching", *OPTIONS[kind], *ranks],
        decode_options=["--max-num-seqs", "1"],
        cpus=("0|1", "0|1") if ranks else ("0", "1"),
    ) as (prefill, decode):
        prompts, others = (
            [random_prompt(length, seed + number) for number, length in enumerate(LENGTHS)]
            for seed in (60, 70)
        )
        before = decode.loaded_tokens()
        with waiting(prefill, decode, prompts, 59) as answers:
            pass
        assert [answer.result() for answer in answers] == [prefill.local_tokens(one) for one in prompts]
        assert decode.metrics(outcome="parked")["vllm:kvconnect_transfers_total"] == len(prompts) * (
            2 if ranks else 1
        )
        assert decode.loaded_tokens() > before
        # Once it is parked, the prefill server is not needed any more.
        expected = [prefill.local_tokens(one) for one in others]
        with waiting(prefill, decode, others, 58) as answers:
            prefill.kill()
        assert [answer.result() for answer in answers] == expected
        failures = decode.metrics()
        lost = decode.metrics(reason="peer_lost").get("vllm:kvconnect_failures_total", 0)
        assert failures.get("vllm:kvconnect_failures_total", 0) == lost
        decode.wait_idle()


@contextmanager
def waiting(prefill, decode, prompts, seed):
    """The answers to prompts whose KV was received while the decode server had no block for them."""
    handed = [prefill.prefilled(prompt) for prompt in prompts]
    with ThreadPoolExecutor(1 + len(prompts)) as pool:
        # As long as this one runs no other gets blocks.
        first = pool.submit(decode.tokens, random_prompt(300, seed), max_tokens=600)
        until(decode.used_blocks)
        answers = [
            pool.submit(decode.tokens, prompt, kv_transfer_params=params)
            for prompt, params in zip(prompts, handed, strict=True)
        ]
        prefill.wait_idle()
        assert not any(answer.done() for answer in (first, *answers)), "their blocks were free before"
        yield answers
