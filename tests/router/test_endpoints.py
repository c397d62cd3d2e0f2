"""What each path is split by, as a function of what the client sent; and which paths are served at all."""

from __future__ import annotations

import contextlib
import json
import re

import aiohttp
import pytest

from kvconnect.node.http_server import BadRequest
from kvconnect.router import bodies
from kvconnect.router.endpoints import ALONE, PASSED, SPLIT, STORED
from tests.router.router_doubles import PARAMS, Node, answers, dead_url, in_loop, pair, routed, streams
from tests.router.test_flow import after, hands_out, in_turn

TEXT, CHAT, RESPONSES = SPLIT["/v1/completions"], SPLIT["/v1/chat/completions"], SPLIT["/v1/responses"]
GENERATE = SPLIT["/inference/v1/generate"]
KEEP = bodies.ASK_FOR_REMOTE_DECODE


@pytest.mark.parametrize(
    ("path", "body", "changes"),
    [
        ("/v1/completions", {"prompt": [1], "max_tokens": 50, "n": 4, "best_of": 5}, {"max_tokens": 1}),
        ("/v1/completions", {"prompt": "a", "min_tokens": 3, "temperature": 0.5}, {"max_tokens": 1}),
        ("/v1/chat/completions", {"messages": [], "max_tokens": 9}, {"max_tokens": 1}),
        (
            "/v1/chat/completions",
            {"messages": [], "max_completion_tokens": 9},
            {"max_tokens": 1, "max_completion_tokens": 1},
        ),
        (
            "/v1/responses",
            {"input": "a", "max_output_tokens": 9, "background": True, "store": True},
            {"max_output_tokens": 1, "background": False, "store": False},
        ),
        ("/v1/messages", {"messages": [], "max_tokens": 9, "thinking": {"a": 1}}, {"max_tokens": 1}),
        ("/cohere/v2/chat", {"messages": []}, {"max_tokens": 1}),
        (
            "/inference/v1/generate",
            {"token_ids": [1], "sampling_params": {"max_tokens": 9, "n": 2, "min_tokens": 2, "seed": 3}},
            {"sampling_params": {"max_tokens": 1, "seed": 3}},
        ),
        ("/inference/v1/generate", {"token_ids": [1]}, {"sampling_params": {"max_tokens": 1}}),
    ],
)
def test_the_prefill_leg_asks_for_one_token_and_for_its_kv_cache(path, body, changes) -> None:
    body = {**body, "model": "m", "stream": True, "stream_options": {"include_usage": True}}
    before = json.dumps(body)
    kept = {k: v for k, v in body.items() if k not in ("n", "best_of", "min_tokens", "stream_options")}
    expected = {**kept, **changes, "stream": False, "kv_transfer_params": KEEP}
    assert SPLIT[path].prefill_body(body, KEEP) == expected
    assert json.dumps(body) == before, "the client's body is not changed"


@pytest.mark.parametrize("params", [{"remote_host": "evil"}, {}, None, 5, "x", [1]])
def test_a_client_cannot_bring_transfer_params(params: object) -> None:
    body = {"prompt": "x", "kv_transfer_params": params}
    assert TEXT.parse(json.dumps(body).encode()) == {"prompt": "x"}
    sampling = {"seed": 1, "extra_args": {"a": 1, "kv_transfer_params": params}}
    body = {"token_ids": [1], "sampling_params": sampling, "kv_transfer_params": params}
    parsed = GENERATE.parse(json.dumps(body).encode())
    assert parsed == {"token_ids": [1], "sampling_params": {"seed": 1, "extra_args": {"a": 1}}}


def test_what_a_client_asks_for_its_session_reaches_both_nodes_untouched() -> None:
    hints = {"kv_hints": {"actions": [1, {"a": None}]}, "session_id": "s"}
    given = {"prompt": "x", "kv_hints": 1, "kv_transfer_params": {**hints, "remote_host": "evil"}}
    body = TEXT.parse(json.dumps(given).encode())
    assert body == {"prompt": "x", "kv_hints": 1, "kv_transfer_params": hints}
    assert TEXT.prefill_body(body, KEEP)["kv_transfer_params"] == {**hints, **KEEP}
    handed = {"remote_host": "P", "kv_hints": "P's own"}
    assert TEXT.decode_body(body, handed)["kv_transfer_params"] == {**hints, **handed}
    assert TEXT.decode_body(body, None)["kv_transfer_params"] == hints


def test_the_decode_leg_is_the_clients_with_the_params_verbatim() -> None:
    body = {"prompt": "x", "max_tokens": 5, "min_tokens": 2, "stream": True}
    params = {"remote_port": 1, "anything": [None, {"a": 1.5}]}
    assert TEXT.decode_body(body, params) == {**body, "kv_transfer_params": params}
    assert TEXT.decode_body(body, None) == body


@pytest.mark.parametrize(
    ("endpoint", "body", "is_text"),
    [
        (TEXT, {"prompt": "x"}, True),
        (TEXT, {"prompt": "x", "echo": True}, False),
        (TEXT, {"prompt": [1, 2]}, False),
        (TEXT, {"prompt": ["x"]}, False),
        (CHAT, {"messages": [{"role": "user"}]}, True),
        (CHAT, {"messages": "x"}, False),
        (RESPONSES, {"input": "x"}, False),
        (SPLIT["/v1/messages"], {"messages": [{"role": "user"}]}, False),
        (GENERATE, {"token_ids": [1]}, False),
    ],
)
def test_where_a_decode_node_is_spared_tokenising(endpoint, body, is_text) -> None:
    assert endpoint.is_text(body) is is_text


@pytest.mark.parametrize(
    ("answer", "tokens"),
    [
        ({"choices": [{"prompt_token_ids": [5, 6]}], "prompt_token_ids": [7]}, ([5, 6], [7])),
        ({"choices": [], "prompt_token_ids": None}, (None, None)),
        ({"choices": [{"prompt_token_ids": []}], "prompt_token_ids": [True]}, (None, None)),
        ({"choices": [{"prompt_token_ids": "56"}], "prompt_token_ids": {"a": 1}}, (None, None)),
        ({}, (None, None)),
    ],
)
def test_the_tokens_in_a_prefill_nodes_answer(answer, tokens) -> None:
    assert (TEXT.tokens_of(answer), CHAT.tokens_of(answer)) == tokens


def test_a_decode_node_gets_tokens_in_place_of_a_text_or_beside_a_chat() -> None:
    params = {"remote_port": 1}
    sent = TEXT.decode_body({"prompt": "x", "seed": 1}, params, [5, 6])
    assert sent == {"prompt": [5, 6], "seed": 1, "kv_transfer_params": params}
    chat = {"messages": [{"role": "user", "content": "x"}]}
    told = {"remote_port": 1, "prompt_token_ids": [5, 6]}
    assert CHAT.decode_body(chat, params, [5, 6]) == {**chat, "kv_transfer_params": told}


@pytest.mark.parametrize("sampling", [None, 5, "x", [1]])
def test_sampling_parameters_that_are_none_are_refused(sampling) -> None:
    with pytest.raises(BadRequest, match="sampling_params must be a JSON object, not "):
        GENERATE.parse(json.dumps({"sampling_params": sampling}).encode())


@pytest.mark.parametrize(
    ("endpoint", "body", "reason"),
    [
        (TEXT, {"prompt": "x"}, None),
        (TEXT, {"prompt": [1, 2, 3], "n": 1}, None),
        (TEXT, {"prompt": ["x"]}, None),
        (TEXT, {"prompt": [[1, 2]]}, None),
        (TEXT, {"prompt": "x", "n": 2}, None),
        (TEXT, {"prompt": "x", "best_of": 3}, None),
        (TEXT, {"prompt": "x", "use_beam_search": True}, "beam_search"),
        (TEXT, {"prompt": ["x", "y"]}, None),
        (TEXT, {"prompt": [[1], [2]]}, None),
        (TEXT, {"prompt": "x", "prompt_logprobs": 0}, "prompt_logprobs"),
        (TEXT, {"prompt": "x", "echo": True, "logprobs": 1}, "prompt_logprobs"),
        (TEXT, {"prompt": "x", "echo": True, "logprobs": 0}, "prompt_logprobs"),
        (TEXT, {"prompt": "x", "echo": True}, None),
        (TEXT, {"prompt": "x", "echo": True, "max_tokens": 0}, "no_tokens"),
        (CHAT, {"messages": [], "echo": True}, "prompt_logprobs"),
        (CHAT, {"messages": [], "echo": False, "logprobs": True}, None),
        (CHAT, {"messages": [], "max_tokens": 5, "max_completion_tokens": 0}, "no_tokens"),
        (RESPONSES, {"input": "x", "max_output_tokens": 5}, None),
        (RESPONSES, {"input": "x", "previous_response_id": "resp_1"}, "previous_response"),
        (GENERATE, {"token_ids": [1], "sampling_params": {"prompt_logprobs": 2}}, "prompt_logprobs"),
        (
            GENERATE,
            {"token_ids": [1], "sampling_params": {"prompt_logprob_token_ids": [1]}},
            "prompt_logprobs",
        ),
        (GENERATE, {"token_ids": [1], "sampling_params": {"n": 3}}, None),
    ],
)
def test_which_requests_one_node_serves(endpoint, body: dict, reason: str | None) -> None:
    assert (endpoint.direct_reason(body) or (None,))[0] == reason


@in_loop
async def test_both_nodes_are_asked_at_the_clients_path() -> None:
    async with pair(decode=answers(body={"a": 1})) as (client, p, d):
        for path in SPLIT:
            status, _, raw = await client.post({"model": "m", "messages": [], "max_tokens": 3}, path + "?q=1")
            assert (status, json.loads(raw)) == (200, {"a": 1})
            assert p.seen[-1].path == d.seen[-1].path == path + "?q=1"
            assert d.seen[-1].body["kv_transfer_params"]["remote_port"] == 4711
            counted = f'kvconnect_router_requests_total{{endpoint="{path}",status="200"}}'
            assert await client.metric(counted) == 1
        for role in ("prefill", "decode"):
            timed = f'kvconnect_router_node_request_seconds_count{{role="{role}"}}'
            assert await client.metric(timed) == len(SPLIT)


@in_loop
async def test_one_node_serves_what_its_answer_does_not_let_share_and_that_is_counted() -> None:
    async with pair(decode=answers(body={"a": 1})) as (client, p, d):
        for path in ALONE:
            body = {"model": "m", "kv_transfer_params": {"remote_host": "evil"}}
            assert (await client.post(body, path))[0] == 200
            assert (d.seen[-1].path, d.seen[-1].body) == (path, {"model": "m"})
        assert not p.seen
        assert await client.metric('kvconnect_router_fallbacks_total{reason="endpoint"}') == len(ALONE)


@in_loop
async def test_what_needs_no_kv_is_passed_to_a_decode_node() -> None:
    async with pair(decode=answers(418, {"a": 1})) as (client, p, d):
        for method, path in PASSED:
            sent = {} if method == "GET" else {"json": {"input": "x", "kv_transfer_params": {"a": 1}}}
            async with client.session.request(method, client.url + path + "?q=1", **sent) as answer:
                assert (answer.status, await answer.json()) == (418, {"a": 1}), path
            assert d.seen[-1].path == path + "?q=1"
            assert d.seen[-1].body == (None if method == "GET" else {"input": "x"})
        assert not p.seen


@in_loop
async def test_a_form_is_passed_as_it_is() -> None:
    async with pair(decode=answers(body={"text": "hm"})) as (client, _, d):
        form = aiohttp.FormData()
        form.add_field("file", b"\x00\xff", filename="a.wav")
        async with client.session.post(client.url + "/v1/audio/transcriptions", data=form) as answer:
            assert await answer.json() == {"text": "hm"}
        kind = d.seen[0].headers["Content-Type"]
        assert kind.startswith("multipart/form-data; boundary=")
        assert b"\x00\xff" in d.seen[0].body
        assert kind.partition("boundary=")[2].encode() in d.seen[0].body


@pytest.mark.parametrize("kind", ["Multipart/x", "MULTIPART/form-data", " multipart/x"])
@in_loop
async def test_no_client_names_a_peer_in_json_that_is_called_a_form(kind) -> None:
    body = json.dumps(
        {"model": "m", "kv_transfer_params": {"do_remote_prefill": True, "remote_host": "evil"}}
    )
    async with pair(decode=answers(body={})) as (client, _, d):
        for path in ("/invocations", "/pooling", "/v1/completions"):
            await client.post(body.encode(), path, {"Content-Type": kind})
        passed = [
            seen for seen in d.seen if not seen.headers["Content-Type"].strip().startswith("application")
        ]
        assert all(seen.headers["Content-Type"].lower().startswith("multipart/") for seen in passed)
        read = [seen.body for seen in d.seen if seen not in passed]
        assert not any("evil" in str(one) for one in read), "a node reads these as JSON"
        assert passed or read


@in_loop
async def test_a_stored_response_is_found_at_the_node_that_has_it() -> None:
    p, *nodes = (Node(answers(404, {"error": "no such"})) for _ in range(4))
    async with contextlib.AsyncExitStack() as stack:
        for node in (p, *nodes):
            await stack.enter_async_context(node.serving())
        async with routed([p.url], [node.url for node in nodes]) as client:
            assert (await client.get("/v1/responses/resp_1?stream=true"))[0] == 404
            assert [len(node.seen) for node in nodes] == [1, 1, 1]
            nodes[1].script = answers(body={"id": "resp_1"})
            assert await client.get("/v1/responses/resp_1") == (200, '{"id": "resp_1"}')
            assert (await client.post(b"", "/v1/responses/resp_1/cancel"))[0] == 200
            body = {"input": "and?", "previous_response_id": "resp_1"}
            status, _, _ = await client.post(body, "/v1/responses")
            assert (status, nodes[1].seen[-1].body, p.seen) == (200, body, [])
            name = 'kvconnect_router_requests_total{endpoint="/v1/responses/{response_id}",status="200"}'
            assert await client.metric(name) == 1, "a label does not grow with the ids"
            assert await client.metric('kvconnect_router_fallbacks_total{reason="previous_response"}') == 1


@in_loop
async def test_a_stored_response_is_found_though_another_node_is_gone() -> None:
    node = Node(answers(body={"id": "resp_1"}))
    async with node.serving(), routed([], [dead_url(), node.url]) as client:
        for _ in range(3):
            assert (await client.get("/v1/responses/resp_1"))[0] == 200
            status, _, _ = await client.post({"previous_response_id": "resp_1"}, "/v1/responses")
            assert status == 200


def test_no_path_is_served_twice_and_none_controls_a_server() -> None:
    served = [*(("POST", path) for path in (*SPLIT, *ALONE)), *STORED, *PASSED]
    assert len(set(served)) == len(served)
    controls = re.compile("sleep|wake|reset|lora|profile|collective|pause|abort|weight|scale_")
    assert not [path for _, path in served if controls.search(path)]


USAGE = b'"usage":{"prompt_tokens":500,"prompt_tokens_details":{"cached_tokens":%d}}'


@pytest.mark.parametrize("is_stream", [False, True])
@in_loop
async def test_in_the_parallel_flow_the_usage_has_what_the_prefill_node_had_cached(is_stream) -> None:
    whole = b'{"text":"a \\"cached_tokens\\":9",%s}'
    events = [b'data: {"text":"a"}\n\n', b"data: {%s}\n\n" % (USAGE % 500), b"data: [DONE]\n\n"]
    p_answer = {"kv_transfer_params": {**PARAMS, "remote_prefill_cached_tokens": 128}}
    decode = streams(*events) if is_stream else streams(whole % (USAGE % 500))
    prefill = in_turn(hands_out(), after(0.3, answers(body=p_answer)))
    async with pair(prefill, in_turn(answers(body={}), decode), flow="parallel") as (client, _, _):
        assert await client.status({"prompt": [1]}) == 200
        status, headers, raw = await client.post({"prompt": [1], "stream": is_stream})
        wanted = b"".join(events).replace(b"500}}", b"128}}") if is_stream else whole % (USAGE % 128)
        assert (status, raw) == (200, wanted)
        assert headers.get("Content-Length") in (None, str(len(raw)))


@in_loop
async def test_a_batch_is_told_what_the_prefill_node_had_cached() -> None:
    params = {**PARAMS, "kvconnect_handle": "s3.x", "transfer_id": "t"}
    usages = [{"prompt_tokens_details": {"cached_tokens": count}} for count in (7, 301)]
    p_answer = answers(body={"kv_transfer_params": params, "usage": usages[0]})
    async with pair(p_answer, answers(body={"usage": usages[1]})) as (client, _, _):
        _, _, raw = await client.post({"prompt": [[1], [2]]})
        assert json.loads(raw) == {"usage": usages[0]}
