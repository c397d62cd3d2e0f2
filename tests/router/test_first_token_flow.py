"""A router that gives clients P's token: real sockets, scripted nodes."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest
from aiohttp import web

from kvconnect.router.decode_trials import FIRST_TOKEN
from kvconnect.router.first_answer import error_end
from tests.router.router_doubles import PARAMS, Node, answers, dead_url, in_loop, routed, streams, until
from tests.router.test_flow import in_turn, several

COUNTED = 'kvconnect_router_first_tokens_total{outcome="%s"}'
BODY = {"model": "m", "prompt": "x", "stream": True, "max_tokens": 9, "temperature": 0}
HANDED = {**PARAMS, "remote_num_tokens": 4, "kvconnect_handle": "h"}


def prefilled(text=" a", finish="length", **more):
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish, "token_ids": [5]}
    answer = {"id": "x", "created": 7, "model": "m", "choices": [choice], "usage": {"prompt_tokens": 4}}
    return {**answer, "kv_transfer_params": HANDED, **more}


def events(*texts, created=7):
    head = {"id": "x", "object": "text_completion", "created": created, "model": "m"}
    chunks = [{**head, "choices": [{"index": 0, "text": text, "finish_reason": None}]} for text in texts]
    return [f"data: {json.dumps(one)}\n\n".encode() for one in chunks]


END = b"data: [DONE]\n\n"


def taking_first(script):
    """A decode node that passes its trial, and serves everything else by a script."""

    async def answer(request):
        body = await request.read()
        asked = json.loads(body) if body else {}
        params = asked.get("kv_transfer_params", {})
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "m"}]})
        if asked.get("max_tokens") == 1 and params.keys() == {"first_token"}:
            return web.json_response({"choices": [{"token_ids": [params["first_token"]]}]})
        if asked.get("max_tokens") == 1 and params.keys() == {"prompt_token_ids"}:
            return web.json_response({"usage": {"prompt_tokens": len(params["prompt_token_ids"])}})
        return await script(request)

    return answer


@contextlib.asynccontextmanager
async def nodes(prefill, *decode, tried=True, **options):
    """A client, and the nodes behind its router, the decode nodes after their trials."""
    async with several([prefill], decode, first_token="prefill", **options) as (client, (p,), ds):
        await until(lambda: client.router.flow.trials.all_take(FIRST_TOKEN) or not tried)
        for d in ds:
            d.seen.clear()
        yield client, p, *ds


def texts(raw):
    blocks = raw.decode().split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    found = [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]
    return [one["error"]["message"] if "error" in one else one["choices"][0]["text"] for one in found]


@in_loop
async def test_ps_token_is_there_before_d_answers_and_d_is_given_it():
    may_answer = asyncio.Event()

    async def decode(request):
        await may_answer.wait()
        return await streams(*events(" a", " b", " c", created=9), END)(request)

    async with nodes(answers(body=prefilled()), taking_first(decode)) as (client, p, d):
        async with client.session.post(client.url + "/v1/completions", json=BODY) as response:
            assert response.content_type == "text/event-stream"
            first = await response.content.readany()
            may_answer.set()
            raw = first + await response.read()
        assert b'" a"' in first
        assert texts(raw) == [" a", " b", " c"]
        assert b'"created":9' not in raw
        (asked,) = d.seen
        assert asked.body["kv_transfer_params"] == {**HANDED, "first_token": 5}
        assert asked.body["max_tokens"] == 9
        assert p.seen[-1].body["return_token_ids"] is True
        assert await client.metric(COUNTED % "prefill") == 1


@pytest.mark.parametrize(
    ("decode", "names"),
    [
        (answers(500), "answered 500"),
        (streams(*events(" z", " b"), END), "differs"),
        (streams(), "empty"),
    ],
)
@in_loop
async def test_a_d_that_does_not_go_on_ends_the_stream_with_an_error(decode, names):
    async with nodes(answers(body=prefilled()), taking_first(decode)) as (client, _, _d):
        _, _, raw = await client.post(BODY)
        first, error = texts(raw)
        assert first == " a"
        assert names in error
        assert await client.metric(COUNTED % "differs") == ("differs" in names)


@pytest.mark.parametrize("flow", ["sequential", "parallel"])
@pytest.mark.parametrize("decode_fallback", [True, False])
@pytest.mark.parametrize(
    ("breaks", "says"),
    [
        (streams(pause_s=0.05, end="abort"), "broke off"),
        (streams(*events(""), pause_s=0.05, end="abort"), "broke off"),
        (answers(500), "answered with an error"),
        (streams(error_end("the engine ended")), "answered with an error"),
        (streams(*events(""), error_end("the engine ended"), pause_s=0.05), "answered with an error"),
    ],
    ids=["nothing", "a chunk without text", "refused", "an error", "an error after a chunk"],
)
@in_loop
async def test_behind_ps_token_another_d_computes_the_prompt_if_the_first_breaks_off(
    flow, decode_fallback, breaks, says
):
    left = []

    async def decode(request):
        # P's token is sent first.
        await asyncio.sleep(0.1 if flow == "parallel" else 0)
        return await (left.pop() if left else streams(*events(" a", " b", " c"), END))(request)

    scripts, options = [taking_first(decode)] * 2, {"flow": flow, "decode_fallback": decode_fallback}
    async with nodes(answers(body=prefilled()), *scripts, **options) as (client, p, d, other):
        # The first request is sequential in either flow.
        assert await client.status(BODY) == 200
        left.append(breaks)
        asked = len(p.seen)
        first, *rest = texts((await client.post(BODY))[2])
        assert first == " a"
        if decode_fallback:
            assert rest == [" b", " c"]
            params = [one.body["kv_transfer_params"] for one in d.seen + other.seen if one.body]
            assert {"first_token": 5} in params, "the KV was the broken node's"
        else:
            assert says in rest[0]
        assert await client.metric("kvconnect_router_repeats_total") == decode_fallback
        assert len(p.seen) == asked + 1
        in_parallel = await client.metric('kvconnect_router_flows_total{flow="parallel"}')
        assert in_parallel == (flow == "parallel")


@in_loop
async def test_behind_ps_token_no_third_node_is_asked():
    breaks = taking_first(streams(*events(""), pause_s=0.02, end="abort"))
    async with nodes(answers(body=prefilled()), breaks, breaks, breaks) as (client, _, *ds):
        first, error = texts((await client.post(BODY))[2])
        assert (first, "broke off" in error) == (" a", True)
        assert await client.metric("kvconnect_router_repeats_total") == 1
        seen = [one.body or {} for d in ds for one in d.seen]
        assert sum(body.get("max_tokens") == 9 for body in seen) == 2


@in_loop
async def test_a_d_that_was_not_seen_to_take_a_token_is_asked_as_ever():
    decode = streams(*events(" z"), END)
    async with nodes(answers(body=prefilled()), decode, tried=False) as (client, _, d):
        await until(lambda: len(d.seen) >= 1)
        _, _, raw = await client.post(BODY)
        assert texts(raw) == [" z"]
        assert "first_token" not in d.seen[-1].body["kv_transfer_params"]
        assert await client.metric(COUNTED % "not_tried") == 1


@pytest.mark.parametrize(
    "answer",
    [prefilled(""), prefilled(usage={"prompt_tokens": 5}), prefilled(usage=None), prefilled("\ufffd")],
)
@in_loop
async def test_what_is_no_first_token_of_the_answer_is_left_to_d(answer):
    """The second is that of a hybrid, whose last token of the prompt D computes."""
    async with nodes(answers(body=answer), taking_first(streams(*events(" z"), END))) as (client, _, d):
        _, _, raw = await client.post(BODY)
        assert texts(raw) == [" z"]
        assert d.seen[-1].body["kv_transfer_params"] == HANDED
        assert await client.metric(COUNTED % "withheld") == 1


@in_loop
async def test_an_answer_of_one_token_is_ps_alone():
    replies = prefilled(), prefilled("", "stop", kv_transfer_params=None)
    prefill = in_turn(*(answers(body=reply) for reply in replies))
    async with nodes(prefill, taking_first(streams(*events(" a"), END))) as (client, _, d):
        await client.post(BODY)
        _, _, raw = await client.post(BODY)
        assert texts(raw) == [""]
        assert b'"finish_reason":"stop"' in raw
        assert len(d.seen) == 1, "the first alone"
        assert await client.metric(COUNTED % "only") == 1


@pytest.mark.parametrize("stream", [True, False])
@in_loop
async def test_who_wants_one_token_is_answered_by_p_and_nothing_is_held(stream):
    script = streams(*events(" a"), END) if stream else answers(body=prefilled())
    async with nodes(script, taking_first(answers())) as (client, p, d):
        body = {**BODY, "stream": stream, "max_tokens": 1}
        status, _, raw = await client.post(body)
        assert status == 200
        assert b" a" in raw
        assert p.seen[-1].body == body
        assert not d.seen


@pytest.mark.parametrize("status", [500, 429])
@in_loop
async def test_one_token_that_p_does_not_give_is_computed_by_d(status):
    async with nodes(answers(status), taking_first(answers(body=prefilled()))) as (client, _, d):
        body = {**BODY, "stream": False, "max_tokens": 1}
        assert await client.status(body) == 200
        assert d.seen[-1].body == body
        assert await client.metric('kvconnect_router_fallbacks_total{reason="prefill_refused"}') == 1


@in_loop
async def test_one_token_is_computed_by_d_where_no_p_is_left():
    node = Node(taking_first(answers(body=prefilled())))
    async with node.serving(), routed([dead_url()], [node.url], first_token="prefill") as client:
        assert await client.status({**BODY, "stream": False, "max_tokens": 1}) == 200
        assert await client.metric('kvconnect_router_fallbacks_total{reason="prefill_unreachable"}') == 1


@in_loop
async def test_in_parallel_d_goes_on_behind_ps_token_and_is_asked_again_where_it_differs():
    streamed = [[" a"], [" a", " b"], [" z", " y"], [" a", " c"]]

    async def decode(request):
        texts_of = streamed.pop(0)
        # P has answered by then, and its token is with the client.
        await asyncio.sleep(0.2)
        return await streams(*events(*texts_of), END)(request)

    async with nodes(answers(body=prefilled()), taking_first(decode), flow="parallel") as (client, p, d):
        # The first one tells where P is fetched from.
        for expected in ([" a"], [" a", " b"], [" a", " c"]):
            _, _, raw = await client.post({**BODY, "temperature": 1})
            assert texts(raw) == expected
        first, second = d.seen[1], d.seen[-1]
        assert first.body["kv_transfer_params"]["transfer_id"]
        assert second.body["kv_transfer_params"] == {"first_token": 5}
        assert first.body["seed"] == p.seen[1].body["seed"], "both sample alike"
        assert await client.metric(COUNTED % "repeated") == 1


@in_loop
async def test_a_client_that_leaves_behind_the_first_token_leaves_d_too():
    async def hang(request):
        await asyncio.sleep(60)

    async with nodes(answers(body=prefilled()), taking_first(hang)) as (client, _, d):
        async with client.session.post(client.url + "/v1/completions", json=BODY) as response:
            await response.content.readany()
            await until(lambda: d.seen)
        await until(d.gone.is_set)


@pytest.mark.parametrize("takes", [True, False])
@in_loop
async def test_d_is_given_a_chats_tokens_if_it_takes_them(takes):
    answer = {"id": "x", "created": 7, "model": "m", "prompt_token_ids": [3, 4], "kv_transfer_params": HANDED}
    answer["choices"] = [
        {"index": 0, "message": {"role": "assistant", "content": "a"}, "finish_reason": "stop"}
    ]
    script = taking_first(answers(body={"a": 1}))

    async def decode(request):
        raw = await request.read()
        is_trial = b'"prompt_token_ids"' in raw and b'"max_tokens": 1' in raw
        return await (answers(400) if is_trial and not takes else script)(request)

    chat = {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 9}
    async with nodes(answers(body=answer), decode) as (client, p, d):
        assert (await client.post(chat, "/v1/chat/completions"))[0] == 200
        assert p.seen[-1].body.get("return_token_ids") is (True if takes else None)
        told = d.seen[-1].body["kv_transfer_params"]
        assert told == {**HANDED, **({"prompt_token_ids": [3, 4]} if takes else {})}


@in_loop
async def test_a_d_with_a_key_is_tried_with_the_key_of_its_servers(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "k")
    script = taking_first(streams(*events(" a", " b"), END))

    async def decode(request):
        is_let_in = request.headers.get("Authorization") in ("Bearer k", "Bearer client")
        return await (script if is_let_in else answers(401))(request)

    async with nodes(answers(body=prefilled()), decode) as (client, _, d):
        _, _, raw = await client.post(BODY, headers={"Authorization": "Bearer client"})
        assert texts(raw) == [" a", " b"]
        assert d.seen[-1].headers.getall("Authorization") == ["Bearer client"]
