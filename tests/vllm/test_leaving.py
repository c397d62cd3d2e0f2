"""Clients that leave at any moment: the prefill server soon holds nothing of theirs."""

from __future__ import annotations

import time

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-vllm")

from kvconnect.node.children import BadAnswer, fetch_json
from tests.vllm.servers import asking, random_prompt, stopped

pytestmark = [pytest.mark.timeout(900), pytest.mark.servers]

SOON_S = 10.0
"""A lease that is not ended lasts for 120 s."""


def body_of(length, **more):
    body = {"model": "tiny", "prompt": random_prompt(length, time.time_ns()), "max_tokens": 16}
    return body | {"temperature": 0, "ignore_eos": True, **more}


def assert_nothing_is_held(*servers):
    for server in servers:
        server.wait_idle(SOON_S)


@pytest.mark.parametrize(
    "after_s", [0.05, 0.5, *(pytest.param(s, marks=pytest.mark.full) for s in (0.0, 0.2, 1.0))]
)
@pytest.mark.parametrize("stream", [False, True])
def test_at_any_time(exact_pair, routing, after_s, stream):
    prefill, decode = exact_pair
    with asking(routing, body_of(3000, stream=stream, max_tokens=64)):
        time.sleep(after_s)
    # What runs ends with its step: of a prompt of 3 000 tokens in parts of 512, up to a second on two cores.
    time.sleep(1.0)
    assert_nothing_is_held(prefill, decode)


def test_between_the_legs(exact_pair, routing):
    """The decode server takes the request and does nothing: P holds the prompt when the client leaves."""
    prefill, decode = exact_pair
    held = len(prefill.observed("hold"))
    with stopped(decode):
        with asking(routing, body_of(700)):
            prefill.wait_observed("hold", held + 1)
            time.sleep(0.3)
            assert prefill.used_blocks() > 0
        assert_nothing_is_held(prefill)
    decode.wait_idle()


def test_while_the_prefill_server_stands_still(exact_pair, routing):
    prefill, decode = exact_pair
    with stopped(prefill), asking(routing, body_of(700)):
        time.sleep(0.3)
    time.sleep(1.0)
    assert_nothing_is_held(prefill, decode)


def test_a_decode_server_that_refuses(exact_pair, routing):
    """More tokens at least than at most: only D is told of the former."""
    prefill, decode = exact_pair
    with asking(routing, body_of(3000, min_tokens=99)) as client:
        assert client.getresponse().status == 400
    assert_nothing_is_held(prefill, decode)


def test_others_are_served_meanwhile(exact_pair, routing):
    prefill, decode = exact_pair
    body = body_of(600)
    with stopped(decode), asking(routing, body_of(700)):
        time.sleep(1.0)
    got = fetch_json(routing + "/v1/completions", body, 120)["choices"][0]["text"]
    alone = {**body, "cache_salt": str(time.time_ns())}
    assert got == fetch_json(prefill.url + "/v1/completions", alone, 120)["choices"][0]["text"]
    assert_nothing_is_held(prefill)
    decode.wait_idle()


def test_a_prefill_server_that_pauses_gives_up_what_it_holds(exact_pair):
    """As before it sleeps: vLLM waits until no request holds blocks."""
    prefill, decode = exact_pair
    prompt = random_prompt(900, 77)
    handed = prefill.prefilled(prompt)
    assert prefill.used_blocks() > 0
    prefill.fetch("/pause?mode=wait", {}, SOON_S)
    assert prefill.used_blocks() == 0
    with pytest.raises(BadAnswer, match="the prefill node is paused.*peer_stopping"):
        # By kv_load_failure_policy "fail", vLLM's default; D computes it by "recompute".
        decode.tokens(prompt, kv_transfer_params=handed)
    prefill.fetch("/resume", {})
    assert decode.from_prefill(prefill, random_prompt(900, 78))
    assert_nothing_is_held(*exact_pair)
