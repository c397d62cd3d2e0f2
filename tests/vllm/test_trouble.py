"""Real vLLM servers in trouble: a pool too small for what is asked, and a prefill server that is killed."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.ports import free_port

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-vllm")

from kvconnect.node.children import BadAnswer
from tests.vllm.comparing import assert_bytes_landed, assert_nothing_landed, became_of
from tests.vllm.servers import ASK_FOR_KV, EXACT, pair, random_prompt
from tests.vllm.tiny_models import write_model

pytestmark = [pytest.mark.timeout(900), pytest.mark.servers]
LEASE_S = 120
ONE_BY_ONE = ["--max-num-seqs", "1"]
"""Prompts that are computed at one time share steps: they are cut into other chunks than alone, and those of
more than 1024 tokens round as these do. With this, a prompt is cut as it is alone, whatever else is asked."""
PAGE_BYTES = 128 << 10
"""Of a layer of the model "gqa": 128 tokens."""
SPLIT_ALIKE = 512 + 1, 5 * 512 + 1
"""Tokens of prompts whose last step has one token wherever they are computed, as where they were loaded."""
FEW = {"max_tokens": 4}


@pytest.mark.parametrize("count", [60, pytest.param(200, marks=pytest.mark.full)])
def test_requests_with_aborts_on_servers_that_must_preempt(tmp_path, count):
    # 8 requests of up to 10 blocks each do not fit into 33.
    options = [*EXACT, "--num-gpu-blocks-override", "33"]
    recipe = write_model("gqa", tmp_path)
    rng = random.Random(5)
    outcomes = {"answered": 0, "abandoned": 0, "failed": 0}

    def one(number):
        prompt = random_prompt(rng.randrange(1, 900), number)
        fate = rng.random()
        if fate < 0.1:
            prefill.abandon(prompt, rng.random() * 0.5, max_tokens=1, kv_transfer_params=ASK_FOR_KV)
            outcomes["abandoned"] += 1
            return
        params = prefill.prefilled(prompt)
        if fate < 0.25:
            decode.abandon(prompt, rng.random(), max_tokens=100, kv_transfer_params=params)
            outcomes["abandoned"] += 1
            return
        if fate < 0.3:
            # Nobody comes for it: its lease has to end by itself.
            outcomes["abandoned"] += 1
            return
        try:
            got = decode.tokens(prompt, kv_transfer_params=params, max_tokens=rng.choice([1, 16, 300]))
        except BadAnswer:
            outcomes["failed"] += 1
            return
        answered[number] = (prompt, got)
        outcomes["answered"] += 1

    answered: dict[int, tuple[list[int], list[int]]] = {}
    with pair(recipe, tmp_path, "nixl", options=options, lease_s=5) as (prefill, decode):
        asked = preempted = 0
        # How many come together, and so whether one is preempted, depends on the machine.
        while not preempted and asked < 4 * count:
            with ThreadPoolExecutor(8) as pool:
                list(pool.map(one, range(asked, asked + count)))
            asked += count
            preempted = decode.metrics()["vllm:num_preemptions_total"]
        assert prefill.process.poll() is None
        assert decode.process.poll() is None
        prefill.wait_idle()
        decode.wait_idle()
        assert preempted > 0, "the test has to make the decode server preempt"
        # A request whose lease was over before it could be loaded fails; the others must not.
        assert outcomes["answered"] > asked / 2, outcomes
        # A preempted request computes its own output again in one chunk.
        for prompt, got in list(answered.values())[:20]:
            assert prefill.local_tokens(prompt, max_tokens=len(got)) == got


@pytest.mark.parametrize("policy", [pytest.param("fail", marks=pytest.mark.full), "recompute"])
def test_a_prefill_server_is_killed_during_transfers_and_comes_back(tmp_path, policy):
    recipe = write_model("gqa", tmp_path)
    prefill_config = {"port": free_port(), "lease_s": LEASE_S}
    decode_config = {"kv_load_failure_policy": policy, "load_timeout_s": 15}
    # All are loaded at one time, but computed one by one.
    configs = {"prefill": prefill_config, "decode": decode_config, "decode_options": ONE_BY_ONE}
    # One page in a slot, and requests take turns: when a short one has arrived, long ones have not.
    with pair(recipe, tmp_path, "nixl", slot_bytes=PAGE_BYTES, num_slots=1, **configs) as (prefill, decode):
        prompts = [random_prompt(SPLIT_ALIKE[n % 3 == 2], 900 + n) for n in range(12)]
        params = [prefill.prefilled(prompt) for prompt in prompts]

        def ask(index):
            try:
                return decode.tokens(prompts[index], kv_transfer_params=params[index], **FEW)
            except BadAnswer as error:
                return str(error)

        prefill.wait_observed("hold", len(params))
        got = [ask(0)]
        with ThreadPoolExecutor(8) as pool:
            answers = [pool.submit(ask, index) for index in range(1, 9)]
            decode.wait_observed("load", 2)
            prefill.kill()
            # Each within the time that ``tokens`` gives it: a lease lasts as long.
            got += [answer.result() for answer in answers]
        got += [ask(9), ask(10)]
        decode.wait_idle()
        prefill.start()
        prefill.wait_ready()
        got.append(ask(11))

        handles = [param["kvconnect_handle"] for param in params]
        became = [became_of(decode, handle) for handle in handles]
        assert (became[0], became[9:]) == ("load", ["failed"] * 3)
        assert "failed" in became[1:9], "the prefill server has to die before it has sent everything"
        for handle in handles[9:]:
            assert_nothing_landed(prefill, decode, handle)
        for prompt, tokens, outcome in zip(prompts, got, became, strict=True):
            if (policy, outcome) == ("fail", "failed"):
                assert "answered 500" in tokens
            else:
                assert tokens == decode.local_tokens(prompt, **FEW)
        for outcome, counted in (("load", "ok"), ("failed", "failed")):
            received = decode.metrics(direction="received", outcome=counted)
            assert received["vllm:kvconnect_transfers_total"] == became.count(outcome)

        prompt = random_prompt(700, 950)
        before = decode.loaded_tokens()
        expected = prefill.local_tokens(prompt)
        assert decode.from_prefill(prefill, prompt) == expected
        assert decode.loaded_tokens() - before == 700
        assert_bytes_landed(prefill, decode, became.count("load") + 1)
