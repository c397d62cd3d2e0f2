"""The router over real sockets: what each side sees, health, draining, and the router as a process."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import logging
import socket
import time

import aiohttp
import pytest

from kvconnect.errors import ConfigError
from kvconnect.router.app import create_router_app, serve_router
from kvconnect.router.router_options import RouterOptions
from tests.router.router_doubles import (
    PARAMS,
    Node,
    answers,
    dead_url,
    in_loop,
    never,
    pair,
    routed,
    streams,
    until,
)
from tests.router.test_flow import in_turn

ASK = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 7, "min_tokens": 2, "temperature": 0}
STRICT = {"decode_fallback": False}
"""A prefill leg that fails is the answer: what happens otherwise is in test_flow."""


@pytest.mark.parametrize("handed", [PARAMS, {}])
@in_loop
async def test_what_came_of_hints_at_the_prefill_node_is_handed_on_and_is_no_kv(handed) -> None:
    done = {"message_id": "m", "actions": [{"action_id": "a", "outcome": "accepted"}]}
    hints = {"session_id": "s", "kv_hints": {"message_id": "m"}}
    told = {"kv_transfer_params": {**handed, "kv_hint_results": done}}
    async with pair(prefill=answers(body=told)) as (client, _, decode):
        sent = {**hints, "kv_hint_results": "a client's own"}
        assert (await client.post({**ASK, "kv_transfer_params": sent}))[0] == 200
        expected = {**hints, **handed, "kv_hint_results": done} if handed else hints
        assert decode.seen[0].body == {**ASK, "kv_transfer_params": expected}
        fallbacks = await client.metric('kvconnect_router_fallbacks_total{reason="empty_params"}')
        assert fallbacks == (not handed)


@in_loop
async def test_a_notice_goes_to_the_prefill_node_alone_and_its_answer_to_the_client() -> None:
    action = {"action_id": "a", "action_type": "prefetch", "payload": {"of": "prompt"}}
    hints = {"kv_hints": {"message_id": "m", "actions": [1, {}, {"payload": 2}, action]}}
    told = {"kv_transfer_params": {"kv_hint_results": {"message_id": "m"}}}
    async with pair(prefill=answers(body=told)) as (client, prefill, decode):
        for body in ({**ASK, "kv_transfer_params": hints}, {**ASK, **hints}):
            status, _, raw = await client.post(body)
            assert status == 200
            assert json.loads(raw) == told
            assert prefill.seen[-1].body == body
        assert not decode.seen
        assert await client.metric('kvconnect_router_fallbacks_total{reason="empty_params"}') == 0
    async with pair(prefill=answers(503)) as (client, _, decode):
        assert (await client.post({**ASK, "kv_transfer_params": hints}))[0] == 503
        assert not decode.seen, "no node computes what is only announced"


@in_loop
async def test_a_receipt_is_asked_of_both_and_ps_is_handed_on_and_is_no_kv() -> None:
    told = {"kv_transfer_params": {**PARAMS, "kvconnect_receipt": {"tokens": {"computed": 3}}}}
    async with pair(prefill=answers(body=told)) as (client, prefill, decode):
        await client.post({**ASK, "kv_transfer_params": {"kvconnect_receipt": True}})
        assert prefill.seen[0].body["kv_transfer_params"]["kvconnect_receipt"] is True
        assert decode.seen[0].body["kv_transfer_params"] == told["kv_transfer_params"]


@in_loop
async def test_no_params_from_prefill_means_decode_alone_counted_and_logged_once(caplog) -> None:
    empty = [{}, *({"kv_transfer_params": nothing} for nothing in (None, {}, [], "", 0, False))]
    prefills = in_turn(*(answers(body=body) for body in empty))
    with caplog.at_level(logging.WARNING, logger="kvconnect.router"):
        async with pair(prefill=prefills) as (client, prefill, decode):
            assert [await client.status(ASK) for _ in empty] == [200] * len(empty)
            assert [seen.body for seen in decode.seen] == [ASK] * len(empty)
            counted = 'kvconnect_router_fallbacks_total{reason="empty_params"}'
            assert await client.metric(counted) == len(empty)
            (said,) = [record.message for record in caplog.records if "empty_params" in record.message]
            assert f"prefill node {prefill.url} handed out no kv_transfer_params" in said
            assert "kv_producer or kv_both" in said


@in_loop
async def test_a_stream_passes_byte_for_byte_and_as_it_comes() -> None:
    chunks = [b'data: {"x":1}\n\n', b"data: \xf0\x9f", b"\x99\x82\n\n", b"data: [DONE]\n\n"]
    async with pair(decode=streams(*chunks, pause_s=0.15)) as (client, _, decode):
        body = {**ASK, "stream": True, "stream_options": {"include_usage": True}}
        async with client.session.post(client.url + "/v1/completions", json=body) as response:
            assert response.content_type == "text/event-stream"
            got = [chunk async for chunk in response.content.iter_any()]
        assert b"".join(got) == b"".join(chunks)
        assert len(got) >= 3, "chunks must not be gathered up"
        assert decode.seen[0].body["stream_options"] == {"include_usage": True}


@in_loop
async def test_a_body_that_is_not_packed_as_it_says_is_a_bad_request(caplog) -> None:
    async with pair() as (client, _, _):
        for packing in ("gzip", "deflate"):
            status, _, raw = await client.post(
                b"xxxx", headers={"Content-Encoding": packing, "Connection": "close"}
            )
            assert (status, b"cannot be read" in raw) == (400, True)
    assert "Traceback" not in caplog.text


@in_loop
async def test_a_packed_answer_passes_as_it_is() -> None:
    packed = gzip.compress(b'{"a": 1}')

    async def script(_request):
        return aiohttp.web.Response(body=packed, headers={"Content-Encoding": "gzip", "X-Other": "o"})

    async with pair(decode=script) as (client, prefill, decode):
        status, headers, raw = await client.post(ASK, headers={"Accept-Encoding": "gzip"})
        assert (status, raw) == (200, packed)
        assert (headers["Content-Encoding"], headers["X-Other"]) == ("gzip", "o")
        made = headers["X-Request-Id"]
        assert len(made) == 32, "where a client names none"
        assert prefill.seen[0].headers["X-Request-Id"] == decode.seen[0].headers["X-Request-Id"] == made
        assert decode.seen[0].headers["Accept-Encoding"] == "gzip"
        assert prefill.seen[0].headers["Accept-Encoding"] == "identity"


@pytest.mark.parametrize("leg", ["prefill", "decode"])
@in_loop
async def test_a_legs_own_refusal_reaches_the_client_unchanged(leg: str) -> None:
    said, statuses = {"error": {"message": "prompt of 9 tokens, 8 fit"}}, (400, 404, 429, 500, 503)
    refusals = in_turn(*(answers(status, said, **{"Retry-After": "3"}) for status in statuses))
    async with pair(**{leg: refusals}, **STRICT) as (client, prefill, decode):
        for count, status in enumerate(statuses, 1):
            got, headers, raw = await client.post(ASK, headers={"X-Request-Id": "r"})
            assert (got, json.loads(raw)) == (status, said)
            assert headers["Retry-After"] == "3"
            assert headers["X-Request-Id"] == "r"
            assert headers["Content-Type"].startswith("application/json")
            assert (len(prefill.seen), len(decode.seen)) == (count, 0 if leg == "prefill" else count)


@in_loop
async def test_a_slow_but_steady_stream_outlives_the_decode_timeout() -> None:
    steady = streams(*[b"x"] * 5, pause_s=0.2)
    async with pair(decode=steady, decode_timeout_s=0.6) as (client, _, _):
        assert (await client.post(ASK))[2] == b"xxxxx"


@in_loop
async def test_unreachable_prefill_is_tried_elsewhere_and_then_502() -> None:
    good = Node()
    async with good.serving(), routed([dead_url(), dead_url(), good.url], [good.url]) as client:
        for _ in range(3):
            assert await client.status(ASK) == 200
        assert await client.metric('kvconnect_router_retries_total{role="prefill"}') >= 2
    dead = [dead_url() for _ in range(5)]
    async with good.serving(), routed(dead, [good.url], retries=1, **STRICT) as client:
        status, _, raw = await client.post(ASK)
        assert status == 502
        assert json.loads(raw)["error"]["message"] == "a prefill node cannot be reached"
        assert await client.metric('kvconnect_router_retries_total{role="prefill"}') == 1, (
            "retries are bounded"
        )


@in_loop
async def test_unreachable_decode_is_502_and_ejection_makes_it_503_at_once() -> None:
    good, dead = Node(), dead_url()
    async with good.serving(), routed([good.url], [dead], failures_to_eject=3) as client:
        await asyncio.sleep(0.1)  # the health check at the start is the first of the three failures
        assert [await client.status(ASK) for _ in range(3)] == [502, 502, 503]
        assert (await client.post(ASK))[1]["Retry-After"] == "1"
        name = f'kvconnect_router_ejections_total{{node="{dead}",role="decode"}}'
        assert await client.metric(name) == 1


@in_loop
async def test_nodes_that_come_up_late_serve_the_first_request_after_that(caplog) -> None:
    """They are checked when they are wanted, and a node that was never there has left nothing."""
    with caplog.at_level(logging.WARNING, logger="kvconnect.router"):
        one, two = Node(), Node()
        urls = [dead_url(), dead_url()]
        ports = [int(url.rpartition(":")[2]) for url in urls]
        limits = {"failures_to_eject": 1, "check_interval_s": 60.0}
        async with routed(urls[:1], urls[1:], **limits) as client:
            await asyncio.sleep(0.1)
            assert await client.status(ASK) == 503
            async with one.serving(ports[0]), two.serving(ports[1]):
                assert await client.status(ASK) == 200
                assert len(one.seen) == len(two.seen) == 1
    assert "is not there yet" in caplog.text
    assert "left rotation" not in caplog.text


@in_loop
async def test_other_paths_are_refused_in_json() -> None:
    async with pair() as (client, _, _):
        status, text = await client.get("/v1/nothing")
        error = json.loads(text)["error"]
        assert (status, error["code"], json.loads(text)["detail"]) == (404, 404, "Not Found")
        assert error["message"] == "GET /v1/nothing is not served here: Not Found"


@pytest.mark.parametrize(("end", "timeout_s"), [("abort", 30.0), ("hang", 0.3)])
@in_loop
async def test_a_failure_after_the_first_byte_breaks_the_answer_off(end: str, timeout_s: float) -> None:
    script = streams(b"data: 1\n\n", end=end)
    async with pair(decode=script, decode_timeout_s=timeout_s) as (client, _, _):
        async with client.session.post(client.url + "/v1/completions", json=ASK) as response:
            assert response.status == 200
            assert await response.content.readany() == b"data: 1\n\n"
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.content.readany()
        assert client.router.in_flight == 0


@in_loop
async def test_a_client_that_leaves_in_the_middle_of_a_stream_is_seen_by_the_decode_node() -> None:
    async with pair(decode=streams(*[b"x\n\n"] * 500, pause_s=0.05)) as (client, _, decode):
        response = await client.session.post(client.url + "/v1/completions", json=ASK)
        assert await response.content.readany()
        response.close()
        await asyncio.wait_for(decode.gone.wait(), 2)
        assert await client.metric("kvconnect_router_clients_gone_total") == 1
        assert client.router.in_flight == 0
        assert all(node.in_flight == 0 for node in client.router.decode.view())


@in_loop
async def test_bodies_are_bounded_and_must_be_objects() -> None:
    async with pair(max_body_bytes=1000, body_timeout_s=0.3) as (client, prefill, _):
        status, headers, raw = await client.post({"prompt": "x" * 2000})
        assert (status, json.loads(raw)["error"]["code"]) == (413, 413)
        assert headers["X-Request-Id"]
        assert (await client.post(b"[1, 2]"))[0] == 400
        assert (await client.post(b"{"))[0] == 400
        reader, writer = await asyncio.open_connection("127.0.0.1", int(client.url.rpartition(":")[2]))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{")
        assert b" 408 " in await asyncio.wait_for(reader.readline(), 2)
        writer.close()
        assert prefill.seen == []


@in_loop
async def test_more_than_max_in_flight_is_refused() -> None:
    async with pair(prefill=never, max_in_flight=1) as (client, prefill, _):
        first = asyncio.create_task(client.post(ASK))
        await until(lambda: prefill.seen)
        status, headers, _ = await client.post(ASK)
        assert (status, headers["Retry-After"]) == (503, "1")
        first.cancel()


@in_loop
async def test_nothing_private_is_logged(caplog) -> None:
    with caplog.at_level(logging.DEBUG):
        async with pair() as (client, _, _):
            await client.post({**ASK, "prompt": "hush-prompt"}, headers={"Authorization": "Bearer hush-key"})
            await client.post(b'{"prompt": "hush-prompt"', headers={"Authorization": "Bearer hush-key"})
        async with pair(prefill=answers(500, {"e": "hush-answer"})) as (client, _, _):
            await client.post({**ASK, "prompt": "hush-prompt"})
    assert "/v1/completions" in caplog.text
    assert "hush" not in caplog.text


FAST = {**STRICT, "check_interval_s": 0.05, "check_timeout_s": 0.5, "failures_to_eject": 2}


@in_loop
async def test_draining_refuses_new_requests_and_finishes_those_under_way(capsys) -> None:
    slow = streams(*[b"x"] * 5, pause_s=0.1)
    async with pair(decode=slow) as (client, _, _):
        task = asyncio.create_task(client.post(ASK))
        await until(lambda: client.router.in_flight == 1)
        drain = asyncio.create_task(client.router.drain())
        await asyncio.sleep(0.02)
        status, headers, _ = await client.post(ASK)
        assert (status, headers["Connection"]) == (503, "close")
        assert (await client.get("/ready"))[0] == 503
        assert (await client.get("/health"))[0] == 200
        assert (await task)[2] == b"xxxxx"
        assert await drain


@in_loop
async def test_the_drain_is_bounded() -> None:
    async with pair(decode=streams(b"x", end="hang"), drain_timeout_s=0.2) as (client, _, _):
        task = asyncio.create_task(client.post(ASK))
        await until(lambda: client.router.in_flight == 1)
        assert not await client.router.drain()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@in_loop
async def test_an_address_in_use_is_a_config_error() -> None:
    node = Node()
    async with node.serving():
        app = create_router_app(RouterOptions(["http://b"], ["http://a"]))
        with pytest.raises(ConfigError, match="cannot listen on"):
            await serve_router(app, "127.0.0.1", int(node.url.rpartition(":")[2]), asyncio.Event())


@in_loop
async def test_ready_means_a_healthy_node_of_each_role() -> None:
    prefill, decode = Node(is_healthy=False), Node()
    async with prefill.serving(), decode.serving(), routed([prefill.url], [decode.url], **FAST) as client:

        async def is_not_ready() -> bool:
            return not await client.is_ready()

        await asyncio.sleep(0.3)
        status, text = await client.get("/ready")
        assert (status, "prefill" in text, "decode" in text) == (503, True, False)
        prefill.is_healthy = True
        await until(client.is_ready)
        decode.is_healthy = False
        await until(is_not_ready)
        assert (await client.get("/health"))[0] == 200


FAILURES = [
    ("prefill", never, 504, "timeout", "the prefill node did not answer within 0.3 s"),
    ("decode", never, 504, "timeout", "the decode node did not answer within 0.3 s"),
    # Headers alone are no answer: nothing is committed before the first byte.
    ("decode", streams(end="hang"), 504, "timeout", "the decode node did not answer within 0.3 s"),
    ("prefill", streams(end="abort"), 502, "broken", "the prefill node broke off"),
    ("decode", streams(end="abort"), 502, "broken", "the decode node broke off"),
    ("decode", streams(), 502, "empty", "the decode node's answer is empty"),
    ("prefill", streams(b"not json"), 502, "bad_answer", "is not JSON"),
    ("prefill", answers(body={"kv_transfer_params": [1]}), 502, "bad_answer", "are not an object"),
    ("prefill", answers(body={"x": "y" * 5000}), 502, "bad_answer", "longer than 1000 bytes"),
]


@pytest.mark.parametrize(("leg", "script", "status", "reason", "said"), FAILURES)
@in_loop
async def test_a_leg_that_fails_before_its_first_byte_is_named(leg, script, status, reason, said) -> None:
    limits = {f"{leg}_timeout_s": 0.3, "max_answer_bytes": 1000}
    async with pair(**{leg: script}, **limits, **STRICT) as (client, prefill, decode):
        begun = time.monotonic()
        got, _, raw = await client.post(ASK)
        assert time.monotonic() - begun < 2.0
        assert got == status
        assert said in json.loads(raw)["error"]["message"]
        assert leg == "decode" or decode.seen == []
        if reason == "timeout":
            await asyncio.wait_for((prefill if leg == "prefill" else decode).gone.wait(), 2)
        counted = f'kvconnect_router_node_request_failures_total{{reason="{reason}",role="{leg}"}}'
        assert await client.metric(counted) == 1


@in_loop
async def test_a_connect_timeout_is_504() -> None:
    # A listener whose backlog is full drops further handshakes, as a dead host does.
    with contextlib.ExitStack() as opened:
        full = opened.enter_context(socket.socket())
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(4):
            filler = opened.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        node, url = Node(), f"http://127.0.0.1:{full.getsockname()[1]}"
        async with node.serving(), routed([url], [node.url], connect_timeout_s=0.3, **STRICT) as client:
            status, _, body = await client.post(ASK)
            assert status == 504
            assert "no connection to a prefill node within 0.3 s" in body.decode()
