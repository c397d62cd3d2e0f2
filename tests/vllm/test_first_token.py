"""The first token from the prefill server: with it a body is answered as by one server, streamed or not."""

from __future__ import annotations

import json
import signal
import time
import urllib.request
from collections import Counter
from contextlib import ExitStack
from functools import cache

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-vllm")

from kvconnect.node.children import fetch, read_metrics
from tests.vllm.servers import random_prompt, router, stopped

pytestmark = [pytest.mark.timeout(900), pytest.mark.servers]

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "integer"}}}
SAMPLED = {"temperature": 0.9, "seed": 11}
EITHER = {
    "plain": {},
    "seeded": SAMPLED,
    "nucleus": {**SAMPLED, "top_p": 0.7, "top_k": 20, "min_p": 0.02},
    "penalties": {"presence_penalty": 1.5, "frequency_penalty": 0.7, "repetition_penalty": 1.3},
    "bias": {"logit_bias": {"65": 30, "66": -50}},
    "stop token": {"ignore_eos": False, "stop_token_ids": [*range(60, 120)]},
    "least tokens": {"ignore_eos": False, "min_tokens": 5, "stop_token_ids": [*range(60, 120)]},
    "all stop": {"ignore_eos": False, "stop_token_ids": [*range(256)]},
    "stop": {"stop": ["e", "x"]},
    "long stop": {"stop": ["abcdefgh", "zzzz"]},
    "stop shown": {"stop": ["a"], "include_stop_str_in_output": True},
    "one": {"max_tokens": 1},
    "two": {"max_tokens": 2},
    "usage": {"stream_options": {"include_usage": True}},
    "usage at each": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "several": {**SAMPLED, "n": 2},
    "bad words": {"bad_words": ["a", "b"]},
    "specials": {"skip_special_tokens": False, "spaces_between_special_tokens": False},
    "salt": {"cache_salt": "s"},
    "ids": {"return_token_ids": True},
}
BODIES = [
    *((TEXT, name, more) for name, more in EITHER.items()),
    (TEXT, "logprobs", {"logprobs": 3}),
    (TEXT, "logprobs of none", {"logprobs": 0}),
    (TEXT, "echo", {"echo": True}),
    (TEXT, "integer", {"response_format": SCHEMA, "ignore_eos": False}),
    (TEXT, "two prompts", {"prompt": [random_prompt(140, 1), random_prompt(150, 2)]}),
    (TEXT, "text", {"prompt": "The sea is wide. " * 12}),
    *((CHAT, name, more) for name, more in EITHER.items()),
    (CHAT, "logprobs", {"logprobs": True, "top_logprobs": 2}),
    (CHAT, "integer", {"response_format": SCHEMA, "ignore_eos": False}),
    (CHAT, "most", {"max_tokens": None, "max_completion_tokens": 6}),
]


# What is counted of a stream's first token, by the body's name: prefill if not named, nothing if None.
OUTCOMES = dict.fromkeys(("usage at each", "several", "ids", "echo", "two prompts"))
OUTCOMES |= dict.fromkeys(("all stop", "one"), "only")


@pytest.fixture(scope="module")
def routers(exact_pair):
    """By its flow, the URL of a router that has seen the decode server take a first token."""
    prefill, decode = exact_pair
    with ExitStack() as stack:

        @cache
        def router_of(flow):
            sides = ["--prefill", prefill.url, "--decode", decode.url]
            url = stack.enter_context(router("--flow", flow, *sides))
            deadline = time.monotonic() + 60
            while not counts(url)["prefill"]:
                assert time.monotonic() < deadline, "the decode server was not seen to take a first token"
                streamed(url, TEXT, uncached())
            return url

        yield router_of


@pytest.fixture(params=["sequential", "parallel"])
def routing(request, routers):
    # A test that names the flow beside other parameters would have a wider fixture made anew.
    return routers(request.param)


def counts(url):
    """How many first tokens the router has counted of each outcome."""
    name, seen = "kvconnect_router_first_tokens_total", read_metrics(url)
    return Counter({dict(labels)["outcome"]: count for (of, labels), count in seen.items() if of == name})


def body_of(path, more):
    body = {"model": "tiny", "max_tokens": 9, "temperature": 0, "ignore_eos": True}
    if path == TEXT:
        body["prompt"] = random_prompt(200, 77)
    else:
        body["messages"] = [{"role": "user", "content": "Of rivers and of tides, a long tale. " * 6}]
    body |= more
    return {key: value for key, value in body.items() if value is not None}


def uncached():
    """A completion that no server has in its prefix cache, and whose first token is whole characters."""
    return body_of(TEXT, {"cache_salt": str(time.time_ns())})


def streamed(url, path, body):
    """The data of a stream's events."""
    request = urllib.request.Request(
        url + path, json.dumps({**body, "stream": True}).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        assert answer.headers.get_content_type() == "text/event-stream"
        text = answer.read().decode()
    events = [block.removeprefix("data: ") for block in text.split("\n\n") if block]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


def given(shown):
    """The keys that have a value. Which others a release shows is no matter to a client."""
    return tuple(sorted(key for key, value in shown.items() if value is not None))


def joined(events):
    """What a client makes of a stream, by choice; and what chunks consist of."""
    texts, logprobs, ends, keys, usage = {}, {}, {}, set(), None
    for event in events:
        assert "error" not in event, event
        if event.get("usage") and not event["choices"]:
            usage = {key: event["usage"][key] for key in ("prompt_tokens", "completion_tokens")}
        keys.add(given(event))
        for choice in event["choices"]:
            at, delta = choice["index"], choice.get("delta")
            text = choice.get("text") if delta is None else delta.get("content")
            texts[at] = texts.get(at, "") + (text or "")
            keys.add((*given(choice), *given(delta or {})))
            for key, column in (choice.get("logprobs") or {}).items():
                logprobs.setdefault((at, key), []).extend(column or ())
            if choice.get("finish_reason"):
                assert at not in ends
                ends[at] = choice["finish_reason"], choice.get("stop_reason")
    assert len({(event["id"], event["created"]) for event in events}) == 1
    return texts, logprobs, ends, keys, usage


# What a body does is decided by code that both flows share.
CASES = [
    pytest.param(flow, *body, id=f"{flow}-{body[0][4:8]} {body[1]}", marks=[pytest.mark.full] * is_long)
    for flow in ("sequential", "parallel")
    for at, body in enumerate(BODIES)
    for is_long in [flow == "parallel" and at % 5 > 0]
]


@pytest.mark.parametrize(("routing", "path", "name", "more"), CASES, indirect=["routing"])
def test_a_body_is_answered_as_by_a_server_alone(exact_pair, routing, path, name, more):
    prefill, _ = exact_pair
    body = body_of(path, more)
    before = counts(routing)
    got = joined(streamed(routing, path, body))
    outcome = OUTCOMES.get(name, "prefill")
    assert counts(routing) - before == ({outcome: 1} if outcome else {})
    wanted = joined(streamed(prefill.url, path, body))
    assert got[:3] == wanted[:3]
    assert got[3] <= wanted[3], "chunks of the same shape"
    assert got[4] == wanted[4]
    body.pop("stream_options", None)
    whole, alone = (json.loads(fetch(url + path, body, 120)) for url in (routing, prefill.url))
    for answer in (whole, alone):
        for key in ("id", "created", "kv_transfer_params"):
            answer.pop(key, None)
        for choice in answer["choices"]:
            choice.pop("token_ids", None)
    assert whole == alone


def test_a_chat_whose_tokens_are_given_is_not_tokenised_again(exact_pair):
    """As the router tries, and does then: a release that knows no such tokens counts others."""
    _, decode = exact_pair
    body = body_of(CHAT, {"kv_transfer_params": {"prompt_token_ids": random_prompt(33, 5)}})
    assert json.loads(decode.fetch(CHAT, body))["usage"]["prompt_tokens"] == 33


def test_the_first_token_does_not_wait_for_the_decode_server(exact_pair, routing):
    prefill, decode = exact_pair
    body = uncached() | {"stream": True}
    request = urllib.request.Request(
        routing + TEXT, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with stopped(decode), urllib.request.urlopen(request, timeout=60) as answer:
        first = answer.readline()
        decode.send(signal.SIGCONT)
        raw = first + answer.read()
    got = joined([json.loads(block[6:]) for block in raw.decode().split("\n\n")[:-2]])
    assert got[0] == joined(streamed(prefill.url, TEXT, {**body, "cache_salt": "alone"}))[0]
