"""What happens to requests on real vLLM servers: aborted, rejected, late, many at a time."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-vllm")

from kvconnect.node.children import BadAnswer
from tests.vllm.comparing import assert_bytes_landed
from tests.vllm.servers import random_prompt, stopped

pytestmark = [pytest.mark.timeout(900), pytest.mark.servers]
PROMPTLY_S = 10
"""Far less than a lease of 120 s: blocks that are free by then were let go, not forgotten."""


def test_a_handle_that_is_not_known_is_an_error_and_the_server_goes_on(exact_pair):
    prefill, decode = exact_pair
    prompt = random_prompt(300, 2)
    params = prefill.prefilled(prompt)
    with pytest.raises(BadAnswer, match="answered 500"):
        decode.ask(prompt, kv_transfer_params={**params, "kvconnect_handle": "made up"})
    assert decode.tokens(prompt, kv_transfer_params=params) == prefill.local_tokens(prompt)
    prefill.wait_idle(PROMPTLY_S)


def test_what_the_decode_server_has_already_is_let_go_at_once(exact_pair):
    prefill, decode = exact_pair
    prompt = random_prompt(385, 3)
    decode.tokens(prompt)
    assert decode.from_prefill(prefill, prompt) == prefill.local_tokens(prompt)
    prefill.wait_idle(PROMPTLY_S)


def test_a_request_that_the_decode_server_rejects_frees_the_prefill_server(exact_pair):
    prefill, decode = exact_pair
    prompt = random_prompt(200, 4)
    params = prefill.prefilled(prompt)
    assert prefill.used_blocks() > 0
    with pytest.raises(BadAnswer, match="answered 400"):
        decode.ask(prompt, max_tokens=100_000, kv_transfer_params=params)
    prefill.wait_idle(PROMPTLY_S)


def test_a_request_that_reads_no_prefix_computes_itself_and_frees_the_prefill_server(exact_pair):
    prefill, decode = exact_pair
    prompt = random_prompt(200, 5)
    params = prefill.prefilled(prompt, prompt_logprobs=1)
    before = decode.loaded_tokens()
    got = decode.tokens(prompt, prompt_logprobs=1, kv_transfer_params=params)
    assert got == prefill.local_tokens(prompt)
    assert decode.loaded_tokens() == before
    prefill.wait_idle(PROMPTLY_S)


def test_a_client_that_leaves_while_its_kv_is_loaded(exact_pair):
    prefill, decode = exact_pair
    prompt = random_prompt(1000, 7)
    params = prefill.prefilled(prompt)
    with stopped(prefill):
        decode.abandon(prompt, 1.0, kv_transfer_params=params)
        # It can write to slots only: nobody's blocks have to wait for it.
        decode.wait_idle(PROMPTLY_S)
    decode.wait_idle(PROMPTLY_S)
    prefill.wait_idle(PROMPTLY_S)
    assert decode.tokens(prompt) == prefill.local_tokens(prompt)


def test_many_at_a_time_are_answered_and_every_byte_landed(exact_pair):
    prefill, decode = exact_pair
    prompts = [random_prompt(50 + 91 * n, 200 + n) for n in range(16)]

    def through_the_pair(prompt):
        return decode.from_prefill(prefill, prompt)

    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(through_the_pair, prompts))
    assert got == [prefill.local_tokens(prompt) for prompt in prompts]
    assert_bytes_landed(prefill, decode, 16)


@pytest.mark.full
def test_a_prefill_server_that_was_idle_for_a_minute(exact_pair):
    prefill, decode = exact_pair
    prompt = random_prompt(900, 9)
    params = prefill.prefilled(prompt)
    time.sleep(61)
    assert decode.tokens(prompt, kv_transfer_params=params) == prefill.local_tokens(prompt)
