"""What the decode node answers where no prefill node does: both flows, streamed or not."""

from __future__ import annotations

import asyncio
import logging

import pytest
from aiohttp import web

from tests.router.router_doubles import PARAMS, Node, answers, dead_url, never, pair, routed, streams
from tests.router.test_router_parallel import ASK, DONE, after, flows, hands_out, in_turn, learnt

FAST = {"check_interval_s": 0.05, "check_timeout_s": 0.5, "failures_to_eject": 2}
CHUNKS = (b"data: 1\n\n", b"data: 2\n\n")
FLOWS = pytest.mark.parametrize("flow", ["sequential", "parallel"])
FAILS = {
    "refused": answers(500, {"error": "the engine is dead"}),
    "broken": streams(end="abort"),
    "bad_answer": streams(b"{"),
    "timeout": never,
}
"""How a prefill leg fails at a node that is reached, by what is counted."""


def run(coroutine) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 30))


async def fallbacks(client, reason: str) -> float:
    return await client.metric(f'kvconnect_router_fallbacks_total{{reason="prefill_{reason}"}}')


@FLOWS
@pytest.mark.parametrize("fails", FAILS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_prefill_leg_that_fails_is_answered_by_the_decode_node(flow, fails, stream, caplog) -> None:
    async def main() -> None:
        node = streams(*CHUNKS) if stream else DONE
        waits = never if flow == "parallel" else node
        prefill, decode = in_turn(hands_out(), *(FAILS[fails],) * 2), in_turn(DONE, waits, node, node)
        async with pair(prefill=prefill, decode=decode, flow=flow, prefill_timeout_s=0.3) as (client, p, d):
            await learnt(client)
            status, _, raw = await client.post({**ASK, "stream": stream})
            assert status == 200
            assert raw == (b"".join(CHUNKS) if stream else b'{"token_ids": [5, 6]}')
            assert d.seen[-1].body == {**ASK, "stream": stream}, "without any parameters"
            assert await fallbacks(client, fails) == 1
            if flow == "parallel":
                await asyncio.wait_for(d.gone.wait(), 2)
                assert await flows(client) == {"sequential": 1, "parallel": 1, "resumed": 1}
            assert len(p.seen) == 2

    with caplog.at_level(logging.WARNING, "kvconnect.router"):
        run(main())
    said = [record.getMessage() for record in caplog.records if "decode node alone" in record.getMessage()]
    assert len(said) == 1
    assert f"prefill_{fails}" in said[0]


@FLOWS
@pytest.mark.parametrize("status", [400, 401, 404, 413, 422])
def test_what_is_wrong_with_the_request_itself_is_for_the_client(flow, status) -> None:
    async def main() -> None:
        prefill = in_turn(hands_out(), after(0.05, answers(status, {"error": "too long"})))
        decode = in_turn(DONE, never)
        async with pair(prefill=prefill, decode=decode, flow=flow) as (client, _, d):
            await learnt(client)
            assert (await client.post(ASK))[0] == status
            assert len(d.seen) == (2 if flow == "parallel" else 1)
            assert await fallbacks(client, "refused") == 0

    run(main())


@pytest.mark.parametrize("status", [302, 408, 429, 503])
def test_what_is_wrong_with_the_prefill_node_is_not(status) -> None:
    async def main() -> None:
        async with pair(prefill=answers(status), decode=DONE) as (client, _, d):
            assert (await client.post(ASK))[0] == 200
            assert d.seen[0].body == ASK
            assert await fallbacks(client, "refused") == 1

    run(main())


@FLOWS
@pytest.mark.parametrize("stream", [False, True])
def test_with_every_prefill_node_gone_the_decode_node_prefills(flow, stream) -> None:
    async def main() -> None:
        decode = Node(streams(*CHUNKS) if stream else DONE)
        urls = [dead_url(), dead_url()]
        async with decode.serving(), routed(urls, [decode.url], flow=flow, retries=1, **FAST) as client:
            for _ in range(4):
                status, _, raw = await client.post({**ASK, "stream": stream})
                assert (status, raw.startswith(b"data: 1")) == (200, stream)
            assert [seen.body for seen in decode.seen] == [{**ASK, "stream": stream}] * 4
            none, lost = [await fallbacks(client, reason) for reason in ("none_healthy", "unreachable")]
            assert none + lost == 4
            assert none >= 1, "after two failures each both are out of rotation"
            while (await client.get("/ready"))[0] != 200:
                await asyncio.sleep(0.02)
            assert "prefill" in (await client.get("/ready"))[1], "the answer names what is missing"
            assert (await client.get("/ready?all"))[0] == 503

    run(main())


@FLOWS
def test_prefill_nodes_that_come_back_are_used_again(flow) -> None:
    async def main() -> None:
        url = dead_url()
        decode = Node(DONE)
        async with decode.serving(), routed([url], [decode.url], flow=flow, **FAST) as client:
            assert (await client.post(ASK))[0] == 200
            async with Node(hands_out()).serving(int(url.rpartition(":")[2])):
                while "kv_transfer_params" not in decode.seen[-1].body:
                    assert (await client.post(ASK))[0] == 200

    run(main())


@FLOWS
def test_without_the_option_a_prefill_leg_that_fails_is_the_answer(flow) -> None:
    async def main() -> None:
        decode = Node(DONE)
        fast = {**FAST, "failures_to_eject": 1, "decode_fallback": False}
        async with decode.serving(), routed([dead_url()], [decode.url], flow=flow, **fast) as client:
            while (await client.post(ASK))[0] != 503:
                await asyncio.sleep(0.02)
            assert (await client.get("/ready"))[0] == 503
        prefill = in_turn(hands_out(), FAILS["refused"], FAILS["broken"])
        decode_script = in_turn(DONE, *(never if flow == "parallel" else DONE,) * 2)
        async with pair(prefill=prefill, decode=decode_script, flow=flow, decode_fallback=False) as both:
            await learnt(both[0])
            assert [(await both[0].post(ASK))[0] for _ in range(2)] == [500, 502]
            assert not decode.seen

    run(main())


@FLOWS
def test_several_answers_are_prefilled_once_and_decoded_together(flow) -> None:
    async def main() -> None:
        prefill = hands_out(kvconnect_handle="u1.x")
        async with pair(prefill=prefill, decode=DONE, flow=flow) as (client, p, d):
            for _ in range(2):
                assert (await client.post({**ASK, "n": 4}))[0] == 200
            assert not any("n" in seen.body for seen in p.seen)
            assert [seen.body["n"] for seen in d.seen] == [4, 4]
            assert all(seen.body["kv_transfer_params"]["do_remote_prefill"] for seen in d.seen)

    run(main())


@FLOWS
@pytest.mark.parametrize("more", [{"n": 2}, {"best_of": 2}])
def test_several_answers_over_another_connector_go_to_the_decode_node_alone(flow, more) -> None:
    """Its prefill node may free the blocks with the first of several loads of them."""

    async def main() -> None:
        async with pair(prefill=hands_out(), decode=DONE, flow=flow) as (client, _, d):
            for _ in range(2):
                assert (await client.post({**ASK, **more}))[0] == 200
            assert [seen.body for seen in d.seen] == [{**ASK, **more}] * 2
            assert await client.metric('kvconnect_router_fallbacks_total{reason="several"}') == 2

    run(main())


BATCH = {**ASK, "prompt": [[1, 2], [3, 4, 5]]}


def names_its_transfer(request_body: dict) -> dict:
    """What a prefill node of kvconnect hands out for a batch: of its first prompt, under the router's id."""
    asked = request_body["kv_transfer_params"]
    return {**PARAMS, "kvconnect_handle": "u2.x", "transfer_id": asked["transfer_id"]}


@FLOWS
@pytest.mark.parametrize("more", [{}, {"n": 2}, {"stream": True}])
def test_a_batch_of_prompts_has_one_transfer_id_under_which_each_finds_its_own(flow, more) -> None:
    async def main() -> None:
        async def prefill(request):
            return web.json_response({"kv_transfer_params": names_its_transfer(await request.json())})

        async with pair(prefill=prefill, decode=DONE, flow=flow) as (client, p, d):
            for _ in range(3):
                assert (await client.post({**BATCH, **more}))[0] == 200
            ids = set()
            for asked, told in zip(p.seen, d.seen, strict=True):
                assert (asked.body["prompt"], "n" in asked.body) == (BATCH["prompt"], False)
                params = told.body.pop("kv_transfer_params")
                assert told.body == {**BATCH, **more}
                assert params == {
                    "do_remote_prefill": True,
                    "do_remote_decode": False,
                    "transfer_id": asked.body["kv_transfer_params"]["transfer_id"],
                    "remote_host": PARAMS["remote_host"],
                    "remote_port": PARAMS["remote_port"],
                    "remote_engine_id": PARAMS["remote_engine_id"],
                    "kvconnect_peer": "u2.x",
                }
                ids.add(params["transfer_id"])
            assert len(ids) == 3
            assert (await flows(client))["parallel"] == (2 if flow == "parallel" else 0)

    run(main())


@FLOWS
@pytest.mark.parametrize("lacks", ["kvconnect_handle", "transfer_id", "remote_host"])
def test_a_batch_over_another_connector_goes_to_the_decode_node_alone(flow, lacks) -> None:
    async def main() -> None:
        handed = {**PARAMS, "kvconnect_handle": "u2.x", "transfer_id": "t"}
        del handed[lacks]
        prefill = answers(body={"kv_transfer_params": handed})
        async with pair(prefill=prefill, decode=DONE, flow=flow) as (client, _, d):
            assert (await client.post(BATCH))[0] == 200
            assert d.seen[-1].body == BATCH
            assert await client.metric('kvconnect_router_fallbacks_total{reason="several"}') == 1

    run(main())
