"""What happens to requests on real vLLM servers: aborted, rejected, preempted, late, many at a time."""

from __future__ import annotations

import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.ports import free_port

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-vllm")

from kvconnect.node.children import BadAnswer
from tests.vllm.comparing import assert_bytes_landed, assert_nothing_landed, became_of
from tests.vllm.servers import ASK_FOR_KV, EXACT, members, pair, random_prompt
from tests.vllm.tiny_models import write_model

pytestmark = [pytest.mark.timeout(900), pytest.mark.servers]
LEASE_S = 120
PROMPTLY_S = 10
"""Far less than a lease: blocks that are free by then were let go, not forgotten."""
ONE_BY_ONE = ["--max-num-seqs", "1"]
"""Prompts that are computed at one time share steps: they are cut into other chunks than alone, and those of
more than 1024 tokens round as these do. With this, a prompt is cut as it is alone, whatever else is asked."""
PAGE_BYTES = 128 << 10
"""Of a layer of the model "gqa": 128 tokens."""
SPLIT_ALIKE = 512 + 1, 5 * 512 + 1
"""Tokens of prompts whose last step has one token wherever they are computed, as where they were loaded."""


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("life")
    options = ["--async-scheduling"]
    with pair(
        write_model("gqa", folder),
        folder,
        "nixl",
        options=options,
        prefill_options=ONE_BY_ONE,
        lease_s=LEASE_S,
    ) as both:
        yield both


def test_a_handle_that_is_not_known_is_an_error_and_the_server_goes_on(servers):
    prefill, decode = servers
    prompt = random_prompt(300, 2)
    params = prefill.prefilled(prompt)
    with pytest.raises(BadAnswer, match="answered 500"):
        decode.ask(prompt, kv_transfer_params={**params, "kvconnect_handle": "made up"})
    assert decode.tokens(prompt, kv_transfer_params=params) == prefill.local_tokens(prompt)
    prefill.wait_idle(PROMPTLY_S)


def test_what_the_decode_server_has_already_is_let_go_at_once(servers):
    prefill, decode = servers
    prompt = random_prompt(385, 3)
    decode.tokens(prompt)
    assert decode.from_prefill(prefill, prompt) == prefill.local_tokens(prompt)
    prefill.wait_idle(PROMPTLY_S)


def test_a_request_that_the_decode_server_rejects_frees_the_prefill_server(servers):
    prefill, decode = servers
    prompt = random_prompt(200, 4)
    params = prefill.prefilled(prompt)
    assert prefill.used_blocks() > 0
    with pytest.raises(BadAnswer, match="answered 400"):
        decode.ask(prompt, max_tokens=100_000, kv_transfer_params=params)
    prefill.wait_idle(PROMPTLY_S)


def test_a_request_that_reads_no_prefix_computes_itself_and_frees_the_prefill_server(servers):
    prefill, decode = servers
    prompt = random_prompt(200, 5)
    params = prefill.prefilled(prompt, prompt_logprobs=1)
    before = decode.loaded_tokens()
    got = decode.tokens(prompt, prompt_logprobs=1, kv_transfer_params=params)
    assert got == prefill.local_tokens(prompt)
    assert decode.loaded_tokens() == before
    prefill.wait_idle(PROMPTLY_S)


def test_several_answers_to_one_prompt(servers):
    prefill, decode = servers
    prompt = random_prompt(300, 6)
    params = prefill.prefilled(prompt)
    answer = decode.ask(prompt, n=3, temperature=0.0001, seed=1, kv_transfer_params=params)
    expected = prefill.local_tokens(prompt)
    assert [choice["token_ids"] for choice in answer["choices"]] == [expected] * 3
    prefill.wait_idle(PROMPTLY_S)
    decode.wait_idle(PROMPTLY_S)


def test_a_client_that_leaves_while_its_kv_is_loaded(servers):
    prefill, decode = servers
    prompt = random_prompt(1000, 7)
    params = prefill.prefilled(prompt)
    for pid in members(prefill):
        os.kill(pid, signal.SIGSTOP)
    try:
        decode.abandon(prompt, 1.0, kv_transfer_params=params)
        # It can write to slots only: nobody's blocks have to wait for it.
        decode.wait_idle(PROMPTLY_S)
    finally:
        for pid in members(prefill):
            os.kill(pid, signal.SIGCONT)
    decode.wait_idle(PROMPTLY_S)
    prefill.wait_idle(PROMPTLY_S)
    assert decode.tokens(prompt) == prefill.local_tokens(prompt)


def test_a_client_that_leaves_while_its_prompt_is_prefilled(servers):
    prefill, _ = servers
    # Each another prompt, none of which is computed by then: what is computed is held as long as its lease.
    for number, after_s in enumerate((0.02, 0.05, 0.1)):
        prompt = random_prompt(3500, 80 + number)
        prefill.abandon(prompt, after_s, max_tokens=1, kv_transfer_params=ASK_FOR_KV)
    prefill.wait_idle(PROMPTLY_S)


def test_many_at_a_time_are_answered_and_every_byte_landed(servers):
    prefill, decode = servers
    prompts = [random_prompt(50 + 61 * n, 200 + n) for n in range(24)]

    def through_the_pair(prompt):
        return decode.from_prefill(prefill, prompt)

    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(through_the_pair, prompts))
    assert got == [prefill.local_tokens(prompt) for prompt in prompts]
    assert_bytes_landed(prefill, decode, 24)


@pytest.mark.full
def test_a_prefill_server_that_was_idle_for_a_minute(servers):
    prefill, decode = servers
    prompt = random_prompt(900, 9)
    params = prefill.prefilled(prompt)
    time.sleep(61)
    assert decode.tokens(prompt, kv_transfer_params=params) == prefill.local_tokens(prompt)


def test_two_hundred_requests_with_aborts_on_servers_that_must_preempt(tmp_path):
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
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(one, range(200)))
        assert prefill.process.poll() is None
        assert decode.process.poll() is None
        prefill.wait_idle()
        decode.wait_idle()
        preempted = decode.metrics()["vllm:num_preemptions_total"]
        assert preempted > 0, "the test has to make the decode server preempt"
        # A request whose lease was over before it could be loaded fails; the others must not.
        assert outcomes["answered"] > 100, outcomes
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
        prompts = [random_prompt(SPLIT_ALIKE[n % 2], 900 + n) for n in range(12)]
        params = [prefill.prefilled(prompt) for prompt in prompts]

        def ask(index):
            try:
                return decode.tokens(prompts[index], kv_transfer_params=params[index])
            except BadAnswer as error:
                return str(error)

        prefill.wait_observed("hold", len(params))
        got = [ask(0)]
        with ThreadPoolExecutor(8) as pool:
            answers = [pool.submit(ask, index) for index in range(1, 9)]
            decode.wait_observed("load", 2)
            prefill.kill()
            started = time.monotonic()
            got += [answer.result(timeout=60) for answer in answers]
        assert time.monotonic() - started < 45, "a load's deadline, and the prompts computed again"
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
                assert tokens == decode.local_tokens(prompt)
        for outcome, counted in (("load", "ok"), ("failed", "failed")):
            received = decode.metrics(direction="received", outcome=counted)
            assert received["vllm:kvconnect_transfers_total"] == became.count(outcome)

        prompt = random_prompt(700, 950)
        before = decode.loaded_tokens()
        expected = prefill.local_tokens(prompt)
        assert decode.from_prefill(prefill, prompt) == expected
        assert decode.loaded_tokens() - before == 700
        assert_bytes_landed(prefill, decode, became.count("load") + 1)
