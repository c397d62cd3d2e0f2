"""Both legs at once: what each node is told, and every way in which one of them can spoil it."""

from __future__ import annotations

import asyncio
import json
import random

import pytest

from kvconnect.errors import ConfigError
from kvconnect.router.router_options import RouterOptions
from tests.router.router_doubles import PARAMS, Node, answers, never, pair, routed, streams

ASK = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 7, "min_tokens": 2, "stream": False}
STRICT = {"flow": "parallel", "decode_fallback": False}
DONE = answers(body={"token_ids": [5, 6]})


def run(coroutine) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 30))


def in_turn(*scripts):
    """One script per request."""
    left = list(scripts)

    async def script(request):
        return await left.pop(0)(request)

    return script


def after(event_or_s, then):
    """A script that waits before it answers."""

    async def script(request):
        if isinstance(event_or_s, asyncio.Event):
            await event_or_s.wait()
        else:
            await asyncio.sleep(event_or_s)
        return await then(request)

    return script


def hands_out(**changes):
    """A prefill node's answer; ``None`` values leave a key out."""
    params = {key: value for key, value in {**PARAMS, **changes}.items() if value is not None}
    return answers(body={"kv_transfer_params": params})


async def learnt(client) -> None:
    """Let the router learn where its prefill node is fetched from."""
    assert (await client.post(ASK))[0] == 200


async def flows(client) -> dict[str, float]:
    names = ("sequential", "parallel", "resumed")
    return {name: await client.metric(f'kvconnect_router_flows_total{{flow="{name}"}}') for name in names}


def test_the_first_request_is_sequential_and_later_ones_are_told_to_both_at_once() -> None:
    async def main() -> None:
        decode_was_asked = asyncio.Event()

        async def decoding(request):
            decode_was_asked.set()
            return await DONE(request)

        prefill = in_turn(hands_out(), after(decode_was_asked, hands_out()))
        decode = in_turn(DONE, decoding)
        async with pair(prefill=prefill, decode=decode, flow="parallel") as (client, p, d):
            await learnt(client)
            assert d.seen[0].body["kv_transfer_params"] == PARAMS
            body = {**ASK, "kv_transfer_params": {"transfer_id": "mine", "remote_host": "evil"}}
            status, headers, raw = await client.post(body, headers={"X-Request-Id": "chosen"})
            assert (status, json.loads(raw)) == (200, {"token_ids": [5, 6]})
            asked, told = p.seen[1].body, d.seen[1].body
            transfer_id = asked["kv_transfer_params"].pop("transfer_id")
            assert asked["kv_transfer_params"] == {"do_remote_decode": True, "do_remote_prefill": False}
            assert (asked["max_tokens"], asked["stream"], "min_tokens" in asked) == (1, False, False)
            assert told == {
                **ASK,
                "kv_transfer_params": {
                    "do_remote_prefill": True,
                    "do_remote_decode": False,
                    "transfer_id": transfer_id,
                    "remote_host": PARAMS["remote_host"],
                    "remote_port": PARAMS["remote_port"],
                    "remote_engine_id": PARAMS["remote_engine_id"],
                },
            }
            assert transfer_id not in ("mine", "chosen")
            for leg in (p.seen[1], d.seen[1]):
                assert leg.headers["X-Request-Id"] == headers["X-Request-Id"] == "chosen"
            assert await flows(client) == {"sequential": 1, "parallel": 1, "resumed": 0}

    run(main())


def test_every_prefill_node_is_learnt_by_its_own_first_request() -> None:
    async def main() -> None:
        one, two, decode = Node(hands_out(remote_port=1)), Node(hands_out(remote_port=2)), Node(DONE)
        async with (
            one.serving(),
            two.serving(),
            decode.serving(),
            routed([one.url, two.url], [decode.url], flow="parallel") as client,
        ):
            for _ in range(6):
                assert (await client.post(ASK))[0] == 200
            assert await flows(client) == {"sequential": 2, "parallel": 4, "resumed": 0}
            ports = [seen.body["kv_transfer_params"]["remote_port"] for seen in decode.seen]
            assert sorted(ports) == [1, 1, 1, 2, 2, 2]

    run(main())


@pytest.mark.parametrize("status", [400, 429, 500, 503])
def test_a_refusal_of_the_prefill_node_ends_the_decode_leg_and_reaches_the_client(status: int) -> None:
    async def main() -> None:
        refuses = answers(status, {"error": {"message": "too long"}}, **{"Retry-After": "3"})
        prefill = in_turn(hands_out(), after(0.1, refuses))
        async with pair(prefill=prefill, decode=in_turn(DONE, never), **STRICT) as (client, _, decode):
            await learnt(client)
            got, headers, raw = await client.post(ASK)
            assert (got, json.loads(raw)["error"]["message"], headers["Retry-After"]) == (
                status,
                "too long",
                "3",
            )
            await asyncio.wait_for(decode.gone.wait(), 2)
            assert await flows(client) == {"sequential": 1, "parallel": 1, "resumed": 1}

    run(main())


def test_a_prefill_node_that_breaks_off_is_502_and_is_learnt_anew() -> None:
    async def main() -> None:
        prefill = in_turn(hands_out(), streams(end="abort"), hands_out())
        decode = in_turn(DONE, never, DONE)
        async with pair(prefill=prefill, decode=decode, **STRICT) as (client, _, d):
            await learnt(client)
            assert (await client.post(ASK))[0] == 502
            await asyncio.wait_for(d.gone.wait(), 2)
            await learnt(client)
            assert await flows(client) == {"sequential": 2, "parallel": 1, "resumed": 1}

    run(main())


def test_an_unreachable_prefill_node_is_replaced_by_another_and_nobody_notices() -> None:
    async def main() -> None:
        one, two, decode = Node(hands_out()), Node(hands_out()), Node()
        decode.script = DONE
        async with decode.serving(), two.serving():
            async with one.serving():
                urls = [one.url, two.url]
                router = routed(urls, [decode.url], flow="parallel", failures_to_eject=99)
                client = await router.__aenter__()
                for _ in urls:
                    await learnt(client)
            decode.script = lambda request: DONE(request) if _has_handle(decode) else never(request)
            assert [(await client.post(ASK))[0]] == [200]
            assert (await flows(client))["resumed"] == 1
            assert _has_handle(decode)
            await router.__aexit__(None, None, None)

    def _has_handle(decode: Node) -> bool:
        return "transfer_id" not in decode.seen[-1].body["kv_transfer_params"]

    run(main())


@pytest.mark.parametrize("decode_fails", [None, "status", "stream"])
def test_a_restarted_prefill_node_is_found_again_without_the_client_noticing(decode_fails) -> None:
    """Its answer names another engine: what D was told is wrong, whether D has found out or not."""

    async def main() -> None:
        moved = {"remote_engine_id": "p-1", "remote_port": 4712}
        prefill = in_turn(hands_out(), after(0.1, hands_out(**moved)), hands_out(**moved))
        lost = {
            None: never,
            "status": answers(502, {"error": "is engine p-1, the request names p-0"}),
            "stream": streams(b'data: {"error": {"message": "lost"}}\n\n', b"data: [DONE]\n\n"),
        }[decode_fails]
        decode = in_turn(DONE, lost, DONE, DONE)
        async with pair(prefill=prefill, decode=decode, flow="parallel") as (client, _, d):
            await learnt(client)
            assert json.loads((await client.post(ASK))[2]) == {"token_ids": [5, 6]}
            assert d.seen[2].body["kv_transfer_params"] == {**PARAMS, **moved}
            assert (await client.post(ASK))[0] == 200
            assert d.seen[3].body["kv_transfer_params"]["remote_engine_id"] == "p-1"
            assert await flows(client) == {"sequential": 1, "parallel": 2, "resumed": 1}

    run(main())


def test_a_prefill_node_that_holds_nothing_leaves_the_request_to_the_decode_node() -> None:
    async def main() -> None:
        prefill = in_turn(hands_out(), answers(body={"kv_transfer_params": None}), hands_out(), hands_out())
        decode = in_turn(DONE, never, DONE, DONE)
        async with pair(prefill=prefill, decode=decode, flow="parallel") as (client, _, d):
            await learnt(client)
            assert (await client.post(ASK))[0] == 200
            assert "kv_transfer_params" not in d.seen[2].body
            assert await client.metric('kvconnect_router_fallbacks_total{reason="empty_params"}') == 1
            await learnt(client)
            assert await flows(client) == {"sequential": 2, "parallel": 1, "resumed": 1}

    run(main())


def test_a_decode_node_that_fails_while_the_prefill_was_good_is_the_answer() -> None:
    async def main() -> None:
        prefill = in_turn(hands_out(), after(0.1, hands_out()))
        decode = in_turn(DONE, answers(502, {"error": "the link is down"}))
        async with pair(prefill=prefill, decode=decode, flow="parallel") as (client, _, d):
            await learnt(client)
            status, _, raw = await client.post(ASK)
            assert (status, json.loads(raw)) == (502, {"error": "the link is down"})
            assert len(d.seen) == 2

    run(main())


@pytest.mark.parametrize("script", [answers(503, {"error": "draining"}), streams(end="abort")])
def test_a_decode_node_that_fails_by_itself_does_not_wait_for_the_prefill(script) -> None:
    async def main() -> None:
        prefill = in_turn(hands_out(), never)
        async with pair(prefill=prefill, decode=in_turn(DONE, script), flow="parallel") as (client, p, _):
            await learnt(client)
            assert (await asyncio.wait_for(client.post(ASK), 3))[0] in (502, 503)
            await asyncio.wait_for(p.gone.wait(), 2)

    run(main())


def test_an_answer_that_needs_no_prefill_is_passed_on_at_once_and_ends_the_prefill_leg() -> None:
    async def main() -> None:
        prefill = in_turn(hands_out(), never)
        decode = in_turn(DONE, streams(b"data: 1\n\n", b"data: 2\n\n", pause_s=0.1))
        async with pair(prefill=prefill, decode=decode, flow="parallel") as (client, p, _):
            await learnt(client)
            status, _, raw = await client.post(ASK)
            assert (status, raw) == (200, b"data: 1\n\ndata: 2\n\n")
            await asyncio.wait_for(p.gone.wait(), 2)

    run(main())


def test_a_client_that_leaves_ends_both_legs() -> None:
    async def main() -> None:
        prefill, decode = in_turn(hands_out(), never), in_turn(DONE, never)
        async with pair(prefill=prefill, decode=decode, flow="parallel") as (client, p, d):
            await learnt(client)
            task = asyncio.create_task(client.post(ASK))
            while len(p.seen) < 2 or len(d.seen) < 2:
                await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.wait_for(asyncio.gather(p.gone.wait(), d.gone.wait()), 2)
            assert client.router.in_flight == 0

    run(main())


def test_an_unknown_flow_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="flow is 'both'; accepted: sequential, parallel"):
        RouterOptions(["http://b"], ["http://a"], flow="both")


def test_whatever_the_nodes_do_every_client_is_answered_and_nothing_is_left() -> None:
    """The double checks at its end that no lease and no request is left over."""
    rng = random.Random(5)
    prefills = [
        *(hands_out(),) * 4,
        hands_out(remote_port=4712),
        answers(body={}),
        answers(400),
        streams(end="abort"),
        streams(b"x", end="abort"),
        never,
    ]
    decodes = [*(DONE,) * 3, answers(502), answers(503)]
    decodes += [streams(end="abort"), streams(b"x", end="abort"), never]

    def any_of(scripts):
        async def script(request):
            await asyncio.sleep(rng.random() * 0.1)
            return await rng.choice(scripts)(request)

        return script

    async def one(client) -> None:
        if rng.random() < 0.2:
            task = asyncio.create_task(client.post(ASK))
            await asyncio.sleep(rng.random() * 0.15)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return
        try:
            assert (await client.post(ASK))[0] in (200, 400, 502, 503, 504)
        except OSError:
            pass  # cut off in the middle, as a failure after the first byte must be
        except Exception as error:
            assert type(error).__name__ in ("ClientPayloadError", "ServerDisconnectedError"), error

    async def main() -> None:
        limits = {"flow": "parallel", "prefill_timeout_s": 0.4, "decode_timeout_s": 0.4}
        async with pair(prefill=any_of(prefills), decode=any_of(decodes), **limits) as (client, _, _):
            for _ in range(15):
                await asyncio.gather(*(one(client) for _ in range(6)))
            ran = await flows(client)
            assert ran["parallel"] > 5
            assert ran["resumed"] > 0

    run(main())


@pytest.mark.parametrize("flow", ["sequential", "parallel"])
def test_a_body_that_cannot_be_written_again_is_refused_and_holds_no_node(flow, monkeypatch) -> None:
    """Reading may reach a little deeper than writing. The doubles check that no node counts as loaded."""

    def fails(*_args, **_options):
        raise RecursionError

    async def main() -> None:
        async with pair(prefill=hands_out(), decode=DONE, flow=flow) as (client, _, _):
            await learnt(client)
            monkeypatch.setattr("kvconnect.router.bodies.json.dumps", fails)
            raw = b'{"prompt": [1]}'
            async with client.session.post(client.url + "/v1/completions", data=raw) as response:
                monkeypatch.undo()
                assert (response.status, "nested" in await response.text()) == (400, True)
            assert (await client.post(ASK))[0] == 200

    run(main())


def test_a_script_is_not_asked_twice() -> None:
    """The doubles' own check: a request more than planned would be an IndexError, and a 500."""

    async def main() -> None:
        node = Node(in_turn(DONE))
        async with node.serving(), routed([node.url], [node.url]) as client:
            assert (await client.get("/v1/models"))[0] == 200
            assert (await client.get("/v1/models"))[0] == 500

    run(main())
