"""What a client asks at each of vLLM's paths is answered through the router as by one server."""

from __future__ import annotations

import json
import time

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-vllm")

from kvconnect.config import ExtraConfig
from kvconnect.node.children import BadAnswer, fetch, fetch_json, growth, read_metrics
from kvconnect.tools.transfer_check import run_check
from tests.vllm.servers import random_prompt

pytestmark = [pytest.mark.timeout(900), pytest.mark.servers]

SAID = "Of rivers and of tides, a long tale. " * 8
MESSAGES = [{"role": "user", "content": SAID}]
TOKENS = random_prompt(300, 61)
EXACTLY = {"temperature": 0, "ignore_eos": True}
SPLIT = {
    "/v1/completions": {"prompt": TOKENS, "max_tokens": 9, **EXACTLY},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 9, **EXACTLY},
    "/v1/responses": {"input": SAID, "max_output_tokens": 9, **EXACTLY},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 9, "temperature": 0, "system": "Be brief."},
    "/inference/v1/generate": {"token_ids": TOKENS, "sampling_params": {"max_tokens": 9, **EXACTLY}},
}
ALONE = {
    "/v1/chat/completions/batch": (
        "endpoint",
        {"messages": [MESSAGES, MESSAGES], "max_tokens": 4, **EXACTLY},
    ),
    "/v1/completions": ("prompt_logprobs", {**SPLIT["/v1/completions"], "echo": True, "logprobs": 0}),
    "/v1/chat/completions": ("prompt_logprobs", {**SPLIT["/v1/chat/completions"], "echo": True}),
    "/inference/v1/generate": (
        "prompt_logprobs",
        {"token_ids": TOKENS, "sampling_params": {"max_tokens": 3, "prompt_logprobs": 1, **EXACTLY}},
    ),
}
PASSED = {
    "/tokenize": {"prompt": SAID},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/v1/chat/completions/render": {"messages": MESSAGES},
    "/v1/completions/render": {"prompt": SAID},
}
VARYING = {
    "id",
    "request_id",
    "created",
    "created_at",
    "completed_at",
    "kv_transfer_params",
    "item_id",
    "mm_hashes",
}


def test_the_pair_is_shown_to_transfer_kv(routing, exact_pair, capsys):
    """``kvconnect check``: through the router and without it."""
    for urls in ([routing], [server.url for server in exact_pair]):
        assert run_check(urls, ExtraConfig(), json_output=True) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["prefill"], found["decode"]) == tuple(server.url for server in exact_pair)
        assert found["loaded_tokens"] == found["prompt_tokens"] > 900
        assert found["total_bytes"] > 0
        assert found["answered_tokens"] == 8


def comparable(answer):
    """An answer without what differs from one request to the next."""
    if isinstance(answer, dict):
        return {key: comparable(value) for key, value in answer.items() if key not in VARYING}
    return [comparable(value) for value in answer] if isinstance(answer, list) else answer


def events(url, path, body):
    """The data of a stream's events."""
    text = fetch(url + path, body, 120).decode()
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def fallbacks(url, reason):
    return growth({}, read_metrics(url), "kvconnect_router_fallbacks_total", reason=reason)


def text_of(events):
    """All that a stream says, of whatever kind its events are."""
    parts = []
    for event in events:
        for choice in event.get("choices", ()):
            delta = choice.get("delta") or {}
            parts += [choice.get("text"), delta.get("content"), choice.get("token_ids")]
        delta = event.get("delta")
        parts.append(
            delta if isinstance(delta, str) else delta.get("text") if isinstance(delta, dict) else None
        )
    kept = [part for part in parts if part]
    # An event has several tokens where the server's output came faster than it was sent.
    tokens = [token for part in kept if isinstance(part, list) for token in part]
    return tokens or "".join(part for part in kept if isinstance(part, str))


@pytest.mark.parametrize("path", SPLIT)
def test_two_servers_answer_as_one(exact_pair, routing, path):
    prefill, decode = exact_pair
    body = {"model": "tiny", **SPLIT[path]}
    for is_stream in (False, True):
        salted = {**body, "cache_salt": str(time.time_ns())}
        before = decode.loaded_tokens()
        if is_stream:
            salted["stream"] = True
            got, wanted = (
                events(routing, path, salted),
                events(prefill.url, path, {**salted, "cache_salt": str(time.time_ns())}),
            )
            assert text_of(got) == text_of(wanted) != ""
        else:
            got = fetch_json(routing + path, salted, 120)
            wanted = fetch_json(prefill.url + path, {**salted, "cache_salt": str(time.time_ns())}, 120)
            assert comparable(got) == comparable(wanted)
        assert decode.loaded_tokens() - before > 200, "the prompt's KV came from the prefill server"


@pytest.mark.parametrize("path", ALONE)
def test_one_server_computes_what_cannot_be_shared_and_the_router_counts_it(exact_pair, routing, path):
    prefill, _ = exact_pair
    reason, more = ALONE[path]
    body = {"model": "tiny", **more}
    computed, counted = prefill.metrics()["vllm:prompt_tokens_total"], fallbacks(routing, reason)
    got = fetch_json(routing + path, body, 120)
    assert prefill.metrics()["vllm:prompt_tokens_total"] == computed
    assert fallbacks(routing, reason) == counted + 1
    wanted = fetch_json(prefill.url + path, body, 120)
    for answer in (got, wanted):
        answer["usage"].pop("prompt_tokens_details", None)
    assert comparable(got) == comparable(wanted)


@pytest.mark.parametrize("path", PASSED)
def test_what_needs_no_kv_is_passed(exact_pair, routing, path):
    body = {"model": "tiny", **PASSED[path]}
    got, wanted = (fetch_json(url + path, body, 120) for url in (routing, exact_pair[0].url))
    assert comparable(got) == comparable(wanted)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/score", "/v1/nothing"])
def test_a_path_that_no_server_has_is_not_found(exact_pair, routing, path):
    errors = []
    for url in (routing, exact_pair[0].url):
        with pytest.raises(BadAnswer, match="answered 404: ") as raised:
            fetch(url + path, {"model": "tiny", "input": "a"})
        errors.append(json.loads(str(raised.value).partition(" answered 404: ")[2])["detail"])
    assert errors[0] == errors[1]


def cached(answer):
    usage = answer["usage"]
    if "cache_read_input_tokens" in usage:
        return usage["cache_read_input_tokens"]
    return (usage.get("prompt_tokens_details") or usage["input_tokens_details"] or {"cached_tokens": 0})[
        "cached_tokens"
    ]


@pytest.mark.parametrize("path", SPLIT)
def test_the_usage_has_what_the_prefill_server_had_cached(routing, path):
    body = {"model": "tiny", **SPLIT[path], "cache_salt": str(time.time_ns())}
    counts = []
    for is_stream in (False, False, True):
        if is_stream:
            options = (
                {"stream_options": {"include_usage": True}} if "/v1/" in path[:4] and "s/" not in path else {}
            )
            told = [
                place["usage"]
                for event in events(routing, path, {**body, "stream": True, **options})
                for place in (event, event.get("response") or {}, event.get("message") or {})
                if place.get("usage")
            ]
            counts.append(cached({"usage": told[-1]}) if told else counts[-1])
        else:
            counts.append(cached(fetch_json(routing + path, body, 120)))
    # Blocks of 128 tokens: two of about 300.
    assert counts == [0, 256, 256]
