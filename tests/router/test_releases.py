"""A prefill node is told of what nobody will fetch, whenever a client leaves or a decode node fails."""

from __future__ import annotations

import asyncio
import contextlib
import logging

import pytest

from kvconnect.router.decode_trials import FIRST_TOKEN
from tests.router.router_doubles import PARAMS, Node, answers, dead_url, in_loop, never, pair, routed, until
from tests.router.test_flow import DONE, FLOWS, after, hands_out, in_turn

ASK = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 7, "temperature": 0}
OURS = hands_out(kvconnect_handle="s3.x")
COUNT = 'kvconnect_router_releases_total{outcome="%s"}'


def names(node):
    """By request of a prefill node: the name of what it holds, and whether that is released."""
    params = [seen.body["kv_transfer_params"] for seen in node.seen if seen.body]
    return [(one.get("kvconnect_release"), one["do_remote_prefill"]) for one in params]


async def assert_released(client, p, *, asked=1):
    """The last request of so many was released, and no other."""
    await until(lambda: len(p.seen) > asked)
    told = names(p)
    assert [is_release for _, is_release in told] == [False] * asked + [True]
    assert told[-1][0] == told[-2][0] != told[0][0]
    await until(lambda: client.metric(COUNT % "sent"))
    release = p.seen[-1]
    assert (release.path, release.body["model"][:9]) == ("/v1/completions", "kvconnect")
    assert release.headers["Authorization"] == "Bearer k"
    assert "X-Request-Id" not in release.headers


async def leaves(client, count, *nodes):
    """A client that leaves as soon as each of these nodes has seen so many requests."""
    task = asyncio.create_task(client.post(ASK, headers={"Authorization": "Bearer k", "X-Request-Id": "i"}))
    await until(lambda: all(len(node.seen) == count for node in nodes))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@FLOWS
@pytest.mark.parametrize("moment", ["prefill", "decode"])
@in_loop
async def test_a_client_that_leaves_before_the_first_byte_ends_every_leg_under_way(flow, moment) -> None:
    released = answers(404, {})
    late = OURS if moment == "decode" else never
    async with pair(in_turn(OURS, late, released), in_turn(DONE, never), flow=flow) as (client, p, d):
        assert await client.status(ASK) == 200
        legs = {"decode": [d], "prefill": [p, d] if flow == "parallel" else [p]}[moment]
        await leaves(client, 2, *legs)
        await assert_released(client, p, asked=2)
        for leg in legs:
            await asyncio.wait_for(leg.gone.wait(), 2)
        assert len(d.seen) == (2 if legs[-1] is d else 1)


@FLOWS
@in_loop
async def test_what_was_fetched_is_not_released(flow) -> None:
    async with pair(OURS, DONE, flow=flow) as (client, p, _):
        for _ in range(3):
            assert await client.status(ASK) == 200
        await asyncio.sleep(0.1)
        assert [is_release for _, is_release in names(p)] == [False] * 3
        assert len({name for name, _ in names(p)}) == 3, "each has its own name"


@pytest.mark.parametrize("status", [400, 500])
@in_loop
async def test_a_decode_node_refuses(status) -> None:
    async with pair(in_turn(OURS, OURS, answers(404)), in_turn(DONE, answers(status))) as (client, p, _):
        headers = {"Authorization": "Bearer k"}
        assert (await client.post(ASK, headers=headers))[0] == 200
        assert (await client.post(ASK, headers=headers))[0] == status
        await assert_released(client, p, asked=2)


@in_loop
async def test_no_decode_node_can_be_reached() -> None:
    p = Node(in_turn(OURS, answers(404)))
    async with p.serving(), routed([p.url], [dead_url()], retries=0) as client:
        assert await client.status(ASK) == 502
        await until(lambda: len(p.seen) == 2)
        assert names(p)[1] == (names(p)[0][0], True)


@pytest.mark.parametrize("status", [400, 503])
@in_loop
async def test_a_prefill_node_that_refused_holds_nothing(status) -> None:
    async with pair(in_turn(OURS, answers(status)), DONE) as (client, p, _):
        assert await client.status(ASK) == 200
        assert await client.status(ASK) == (400 if status == 400 else 200)
        await asyncio.sleep(0.1)
        assert len(p.seen) == 2


@in_loop
async def test_a_prefill_node_that_was_not_reached_holds_nothing() -> None:
    p, gone = Node(OURS), contextlib.AsyncExitStack()
    await gone.enter_async_context(p.serving())
    async with Node(DONE).serving() as d, routed([p.url], [d.url], retries=0, failures_to_eject=9) as client:
        assert await client.status(ASK) == 200
        await gone.aclose()
        assert await client.status(ASK) == 200, "the decode node computes it"
        await client.router.flow.releases.ended()
        assert await client.metric(COUNT % "failed") == 0


@in_loop
async def test_another_connector_is_not_asked_for_what_it_would_not_understand() -> None:
    async with pair(in_turn(hands_out(), hands_out()), in_turn(DONE, never)) as (client, p, d):
        assert await client.status(ASK) == 200
        await leaves(client, 2, d)
        await asyncio.sleep(0.1)
        assert len(p.seen) == 2


@in_loop
async def test_a_prefill_node_that_is_gone_is_logged_and_counted(caplog) -> None:
    p, d, gone = Node(in_turn(OURS, OURS)), Node(in_turn(DONE, never)), contextlib.AsyncExitStack()
    await gone.enter_async_context(p.serving())
    caplog.set_level(logging.INFO)
    async with d.serving(), routed([p.url], [d.url]) as client:
        assert await client.status(ASK) == 200
        task = asyncio.create_task(client.post(ASK))
        await until(lambda: len(d.seen) == 2)
        await gone.aclose()
        task.cancel()
        await until(lambda: client.metric(COUNT % "failed"))
        assert f"prefill node {p.url} did not answer a release" in caplog.text


@in_loop
async def test_a_router_that_ends_has_told_all() -> None:
    p, d = Node(in_turn(OURS, OURS, after(0.5, answers(404)))), Node(in_turn(DONE, never))
    async with p.serving(), d.serving():
        async with routed([p.url], [d.url]) as client:
            assert await client.status(ASK) == 200
            await leaves(client, 2, d)
            await until(lambda: len(p.seen) == 3)
            metrics = client.router.metrics
        assert b'releases_total{outcome="sent"} 1.0' in metrics.text()


@in_loop
async def test_an_answer_that_is_the_prefill_nodes_alone_is_released_at_once() -> None:
    stopped = {"text": "", "finish_reason": "stop", "stop_reason": 2, "token_ids": [2], "logprobs": None}
    params = {**PARAMS, "kvconnect_handle": "s3.x", "remote_num_tokens": 3}
    body = {"id": "c", "created": 1, "model": "m", "choices": [{"index": 0, **stopped}]}
    whole = answers(body={**body, "usage": {"prompt_tokens": 3}, "kv_transfer_params": params})
    async with pair(in_turn(whole, answers(404)), DONE, first_token="prefill") as (client, p, d):
        client.router.flow.trials._taken[d.url, 0] = {FIRST_TOKEN}
        status, _, raw = await client.post({**ASK, "stream": True})
        assert (status, raw[-14:], d.seen) == (200, b"data: [DONE]\n\n", [])
        await until(lambda: len(p.seen) == 2)
        assert names(p)[1] == (names(p)[0][0], True)
