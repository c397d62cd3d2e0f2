"""A decode server that is full receives KV into host memory: the prefill server frees its blocks at once."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-vllm")

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
        prompts = [random_prompt(length, 60 + number) for number, length in enumerate(LENGTHS)]
        handed = [prefill.prefilled(prompt) for prompt in prompts]
        before = decode.loaded_tokens()
        with ThreadPoolExecutor(1 + len(prompts)) as pool:
            # As long as this one runs no other gets blocks.
            first = pool.submit(decode.tokens, random_prompt(300, 59), max_tokens=600)
            time.sleep(0.5)
            waiting = [
                pool.submit(decode.tokens, prompt, kv_transfer_params=params)
                for prompt, params in zip(prompts, handed, strict=True)
            ]
            prefill.wait_idle()
            assert not any(answer.done() for answer in (first, *waiting)), "their blocks were free before"
            answers = [answer.result() for answer in waiting]
        assert decode.metrics(outcome="parked")["vllm:kvconnect_transfers_total"] == len(prompts) * (
            2 if ranks else 1
        )
        assert decode.loaded_tokens() > before
        assert decode.metrics().get("vllm:kvconnect_failures_total", 0) == 0
        assert answers == [prefill.local_tokens(prompt) for prompt in prompts]
        decode.wait_idle()
