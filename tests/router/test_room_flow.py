"""Requests to SGLang servers: both are asked at once with a room, and again in another where one fails."""

from __future__ import annotations

import asyncio

import pytest

from kvconnect.errors import ConfigError
from kvconnect.router.router_options import RouterOptions
from tests.router.router_doubles import Node, answers, dead_url, in_loop, never, pair, routed, streams, until
from tests.router.test_flow import in_turn, several

ASK = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 7, "stream": False}
DONE = answers(body={"output_ids": [5, 6]})
FAILED = answers(500, {"error": {"message": "transfer failed"}})
PORT = {"bootstrap_port": ["8998"]}


def rooms(*nodes: Node) -> list[list[object]]:
    return [[seen.body["bootstrap_room"] for seen in node.seen] for node in nodes]


@in_loop
async def test_both_are_asked_at_once_with_one_room_and_the_clients_own_is_dropped() -> None:
    decode_was_asked = asyncio.Event()

    async def decoding(request):
        decode_was_asked.set()
        return await DONE(request)

    async def prefilling(request):
        await decode_was_asked.wait()
        return await answers(body={"output_ids": [5]})(request)

    async with pair(prefilling, decoding, **PORT) as (client, prefill, decode):
        given = {**ASK, "bootstrap_host": "10.0.0.9", "bootstrap_room": 1}
        for path in ("/v1/completions", "/generate"):
            status, _, raw = await client.post(given, path)
            assert (status, raw) == (200, b'{"output_ids": [5, 6]}')
        assert rooms(prefill) == rooms(decode)
        assert len(set(rooms(prefill)[0])) == 2
        for seen in (*prefill.seen, *decode.seen):
            room = seen.body.pop("bootstrap_room")
            assert 0 <= room < 1 << 63
            assert seen.body == {**ASK, "bootstrap_host": "127.0.0.1", "bootstrap_port": 8998}
        assert await client.metric('kvconnect_router_flows_total{flow="room"}') == 2


@in_loop
async def test_a_failed_request_is_sent_again_in_another_room_to_another_prefill_node() -> None:
    legs = [FAILED, DONE], [in_turn(never, DONE)]
    async with several(*legs, **PORT) as (client, (failing, good), (decode,)):
        assert await client.status(ASK) == 200
        await until(decode.gone.is_set)
        assert len(failing.seen) == len(good.seen) == 1
        assert rooms(decode) == [[*rooms(failing)[0], *rooms(good)[0]]]


@in_loop
async def test_a_decode_node_that_breaks_off_is_asked_again_where_it_is_the_only_one() -> None:
    async with pair(DONE, in_turn(streams(end="abort"), DONE), **PORT) as (client, _, decode):
        assert await client.status(ASK) == 200
        assert len(decode.seen) == 2


@pytest.mark.parametrize("script", [FAILED, streams(b'data: {"error": {"message": "no KV"}}\n\n')])
@in_loop
async def test_an_error_that_lasts_is_the_clients_answer(script) -> None:
    async with pair(never, script, **PORT, retries=1) as (client, prefill, decode):
        _, _, raw = await client.post(ASK)
        assert b"error" in raw
        assert len(decode.seen) == len(prefill.seen) == 2
        await until(prefill.gone.is_set)


@in_loop
async def test_a_refused_request_is_not_sent_again() -> None:
    async with pair(answers(400), never, **PORT) as (client, prefill, decode):
        assert await client.status(ASK) == 400
        assert len(prefill.seen) == 1
        await until(decode.gone.is_set)


@in_loop
async def test_a_prefill_node_that_is_gone() -> None:
    decode = Node(never)
    async with decode.serving(), routed([dead_url()], [decode.url], **PORT, retries=1) as client:
        assert await client.status(ASK) == 502


@in_loop
async def test_a_client_that_leaves_closes_both_connections() -> None:
    async with pair(never, never, **PORT) as (client, prefill, decode):
        asking = asyncio.create_task(client.post(ASK))
        await until(lambda: prefill.seen and decode.seen)
        asking.cancel()
        await until(lambda: prefill.gone.is_set() and decode.gone.is_set())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"bootstrap_port": ["http://p:1=8998"]}, "no --prefill"),
        ({"bootstrap_port": ["x"]}, "PORT, or URL=PORT"),
        ({"bootstrap_port": ["0"]}, "PORT, or URL=PORT"),
        ({**PORT, "prefill": []}, "no prefill node"),
        ({**PORT, "policy": "prefix", "admin": "127.0.0.1:9000"}, "least-loaded"),
    ],
)
@in_loop
async def test_options_that_do_not_fit_are_refused(options, text) -> None:
    from kvconnect.router.app import create_router_app

    with pytest.raises(ConfigError, match=text):
        create_router_app(RouterOptions(["http://d:1"], **{"prefill": ["http://q:1"], **options}))


@in_loop
async def test_a_port_of_one_node() -> None:
    node, decode = Node(DONE), Node(DONE)
    async with (
        node.serving(),
        decode.serving(),
        routed([node.url], [decode.url], bootstrap_port=["1", f"{node.url}/=9000"]) as client,
    ):
        assert await client.status(ASK) == 200
        assert decode.seen[0].body["bootstrap_port"] == 9000


@in_loop
async def test_a_node_without_a_port_is_an_error_and_its_lease_is_returned() -> None:
    """That no lease is left is looked at where the router ends."""
    one, other, decode = Node(FAILED), Node(DONE), Node(DONE)
    async with (
        one.serving(),
        other.serving(),
        decode.serving(),
        routed([one.url, other.url], [decode.url], bootstrap_port=[f"{other.url}=9000"], retries=0) as client,
    ):
        for _ in range(4):
            await client.status(ASK)
        assert not one.seen
        assert await client.status(ASK) in (200, 502)
