"""How a request runs through both nodes, in turn or at once, and every way in which one can spoil it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import random

import aiohttp
import pytest
from aiohttp import web

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

ASK = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 7, "min_tokens": 2, "stream": False}
STRICT = {"decode_fallback": False}
FAST = {"check_interval_s": 0.05, "check_timeout_s": 0.5, "failures_to_eject": 2}
DONE = answers(body={"token_ids": [5, 6]})
CHUNKS = (b"data: 1\n\n", b"data: 2\n\n")
FLOWS = pytest.mark.parametrize("flow", ["sequential", "parallel"])
FAILS = {
    "refused": answers(500, {"error": "the engine is dead"}),
    "broken": streams(end="abort"),
    "bad_answer": streams(b"{"),
    "timeout": never,
}
"""How a prefill leg fails at a node that is reached, by what is counted."""


def in_turn(*scripts):
    """One script per request."""
    left = list(scripts)

    async def script(request):
        return await left.pop(0)(request)

    return script


def after(event_or_s, then):
    """A script that waits before it answers."""

    async def script(request):
        await (event_or_s.wait() if isinstance(event_or_s, asyncio.Event) else asyncio.sleep(event_or_s))
        return await then(request)

    return script


def hands_out(**changes):
    """A prefill node's answer."""
    return answers(body={"kv_transfer_params": {**PARAMS, **changes}})


@contextlib.asynccontextmanager
async def learnt(prefill=(), decode=(), **options):
    """A pair whose router knows where P is fetched from. The scripts are of the requests after that."""
    scripts = {"prefill": in_turn(hands_out(), *prefill), "decode": in_turn(DONE, *decode)}
    async with pair(**scripts, **{"flow": "parallel", **options}) as (client, p, d):
        assert await client.status(ASK) == 200
        yield client, p, d


async def flows(client) -> tuple[float, ...]:
    """Requests that ran in turn, at once, and in turn after all."""
    names = ("sequential", "parallel", "resumed")
    return tuple([await client.metric(f'kvconnect_router_flows_total{{flow="{name}"}}') for name in names])


async def fallbacks(client, reason: str) -> float:
    return await client.metric(f'kvconnect_router_fallbacks_total{{reason="{reason}"}}')


@in_loop
async def test_the_first_request_is_sequential_and_later_ones_are_told_to_both_at_once() -> None:
    decode_was_asked = asyncio.Event()

    async def decoding(request):
        decode_was_asked.set()
        return await DONE(request)

    async with learnt([after(decode_was_asked, hands_out())], [decoding]) as (client, p, d):
        assert d.seen[0].body["kv_transfer_params"] == PARAMS
        body = {**ASK, "kv_transfer_params": {"transfer_id": "mine", "remote_host": "evil"}}
        status, headers, raw = await client.post(body, headers={"X-Request-Id": "chosen"})
        assert (status, json.loads(raw)) == (200, {"token_ids": [5, 6]})
        asked, told = p.seen[1].body, d.seen[1].body
        transfer_id = asked["kv_transfer_params"].pop("transfer_id")
        assert len(asked["kv_transfer_params"].pop("kvconnect_release")) == 32
        assert asked["kv_transfer_params"] == {"do_remote_decode": True, "do_remote_prefill": False}
        assert (asked["max_tokens"], asked["stream"], "min_tokens" in asked) == (1, False, False)
        named = {key: PARAMS[key] for key in ("remote_host", "remote_port", "remote_engine_id")}
        params = {"do_remote_prefill": True, "do_remote_decode": False, "transfer_id": transfer_id, **named}
        assert told == {**ASK, "kv_transfer_params": params}
        assert transfer_id not in ("mine", "chosen")
        for leg in (p.seen[1], d.seen[1]):
            assert leg.headers["X-Request-Id"] == headers["X-Request-Id"] == "chosen"
        assert await flows(client) == (1, 1, 0)


RANK = "X-data-parallel-rank"


@pytest.mark.parametrize("ranked", [False, True])
@FLOWS
@in_loop
async def test_every_prefill_node_is_learnt_by_its_own_first_request(flow, ranked) -> None:
    """Also where nodes are data-parallel ranks of one server, ``URL@RANK``: each is asked by name."""

    async def prefilled(request):
        return await hands_out(remote_port=4711 + int(request.headers[RANK]))(request)

    one, two = (Node(prefilled), Node()) if ranked else (Node(hands_out()), Node(hands_out(remote_port=4712)))
    decode = Node(DONE)
    async with one.serving(), two.serving(), decode.serving():
        urls = ([one.url, two.url], [decode.url])
        if ranked:
            urls = tuple([f"{node.url}@{rank}" for rank in (0, 1)] for node in (one, decode))
        async with routed(*urls, flow=flow) as client:
            for _ in range(6):
                status, _, raw = await client.post(ASK, headers={RANK.lower(): "7"})
                assert (status, json.loads(raw)) == (200, {"token_ids": [5, 6]})
            assert await flows(client) == ((2, 4, 0) if flow == "parallel" else (6, 0, 0))
        if ranked:
            for node in (one, decode):
                assert sorted(seen.headers.getall(RANK) for seen in node.seen) == [["0"]] * 3 + [["1"]] * 3
        ports = [seen.body["kv_transfer_params"]["remote_port"] for seen in decode.seen]
        assert sorted(ports) == [4711] * 3 + [4712] * 3


@pytest.mark.parametrize("status", [400, 429, 500, 503])
@in_loop
async def test_a_refusal_of_the_prefill_node_ends_the_decode_leg_and_reaches_the_client(status: int) -> None:
    refuses = answers(status, {"error": {"message": "too long"}}, **{"Retry-After": "3"})
    async with learnt([after(0.1, refuses)], [never], **STRICT) as (client, _, decode):
        got, headers, raw = await client.post(ASK)
        assert (got, json.loads(raw)["error"]["message"]) == (status, "too long")
        assert headers["Retry-After"] == "3"
        await asyncio.wait_for(decode.gone.wait(), 2)
        assert await flows(client) == (1, 1, 1)


@in_loop
async def test_an_unreachable_prefill_node_is_replaced_by_another_and_nobody_notices() -> None:
    one, two, decode = Node(hands_out()), Node(hands_out()), Node(DONE)

    def has_handle() -> bool:
        return "transfer_id" not in decode.seen[-1].body["kv_transfer_params"]

    async with decode.serving(), two.serving(), contextlib.AsyncExitStack() as stack:
        async with one.serving():
            router = routed([one.url, two.url], [decode.url], flow="parallel", failures_to_eject=99)
            client = await stack.enter_async_context(router)
            assert [await client.status(ASK) for _ in range(2)] == [200, 200]
        decode.script = lambda request: DONE(request) if has_handle() else never(request)
        assert await client.status(ASK) == 200
        assert (await flows(client))[2] == 1
        assert has_handle()


@pytest.mark.parametrize("decode_fails", [None, "status", "stream"])
@in_loop
async def test_a_restarted_prefill_node_is_found_again_without_the_client_noticing(decode_fails) -> None:
    """Its answer names another engine: what D was told is wrong, whether D has found out or not."""
    moved = {"remote_engine_id": "p-1", "remote_port": 4712}
    lost = {
        None: never,
        "status": answers(502, {"error": "is engine p-1, the request names p-0"}),
        "stream": streams(b'data: {"error": {"message": "lost"}}\n\n', b"data: [DONE]\n\n"),
    }[decode_fails]
    prefill = [after(0.1, hands_out(**moved)), hands_out(**moved)]
    async with learnt(prefill, [lost, DONE, DONE]) as (client, _, d):
        assert json.loads((await client.post(ASK))[2]) == {"token_ids": [5, 6]}
        assert d.seen[2].body["kv_transfer_params"] == {**PARAMS, **moved}
        assert await client.status(ASK) == 200
        assert d.seen[3].body["kv_transfer_params"]["remote_engine_id"] == "p-1"
        assert await flows(client) == (1, 2, 1)


@in_loop
async def test_a_prefill_node_that_holds_nothing_leaves_the_request_to_the_decode_node() -> None:
    nothing = answers(body={"kv_transfer_params": None})
    async with learnt([nothing, hands_out()], [never, DONE, DONE]) as (client, _, d):
        assert await client.status(ASK) == 200
        assert "kv_transfer_params" not in d.seen[2].body
        assert await fallbacks(client, "empty_params") == 1
        assert await client.status(ASK) == 200
        assert await flows(client) == (2, 1, 1)


@in_loop
async def test_a_decode_node_that_fails_while_the_prefill_was_good_is_the_answer() -> None:
    lost = answers(502, {"error": "the link is down"})
    async with learnt([after(0.1, hands_out())], [lost]) as (client, _, d):
        status, _, raw = await client.post(ASK)
        assert (status, json.loads(raw)) == (502, {"error": "the link is down"})
        assert len(d.seen) == 2


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (answers(503, {"error": "draining"}), (503,)),
        (streams(end="abort"), (502,)),
        # It needs no prefill.
        (streams(*CHUNKS, pause_s=0.1), (200, b"".join(CHUNKS))),
    ],
)
@in_loop
async def test_what_a_decode_node_says_by_itself_does_not_wait_for_the_prefill_and_ends_it(
    script, expected
) -> None:
    async with learnt([never], [script]) as (client, p, _):
        status, _, raw = await asyncio.wait_for(client.post(ASK), 3)
        assert (status, raw)[: len(expected)] == expected
        await asyncio.wait_for(p.gone.wait(), 2)


@in_loop
async def test_whatever_the_nodes_do_every_client_is_answered_and_nothing_is_left() -> None:
    """The double checks at its end that no lease and no request is left over."""
    rng = random.Random(5)
    prefills = [*(hands_out(),) * 4, hands_out(remote_port=4712), answers(body={}), answers(400)]
    decodes = [*(DONE,) * 3, answers(502), answers(503)]
    for scripts in (prefills, decodes):
        scripts += [streams(end="abort"), streams(b"x", end="abort"), never]

    def any_of(scripts):
        async def script(request):
            await asyncio.sleep(rng.random() * 0.1)
            return await rng.choice(scripts)(request)

        return script

    async def one(client) -> None:
        task = asyncio.create_task(client.status(ASK))
        if rng.random() < 0.2:
            await asyncio.sleep(rng.random() * 0.15)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return
        try:
            assert await task in (200, 400, 502, 503, 504)
        except OSError:
            pass  # cut off in the middle, as a failure after the first byte must be
        except Exception as error:
            assert type(error).__name__ in ("ClientPayloadError", "ServerDisconnectedError"), error

    limits = {"flow": "parallel", "prefill_timeout_s": 0.4, "decode_timeout_s": 0.4}
    async with pair(prefill=any_of(prefills), decode=any_of(decodes), **limits) as (client, _, _):
        for _ in range(15):
            await asyncio.gather(*(one(client) for _ in range(6)))
        _, at_once, resumed = await flows(client)
        assert at_once > 5
        assert resumed > 0


@FLOWS
@in_loop
async def test_a_body_that_cannot_be_written_again_is_refused_and_holds_no_node(flow, monkeypatch) -> None:
    """Reading may reach a little deeper than writing. The doubles check that no node counts as loaded."""

    def fails(*_args, **_options):
        raise RecursionError

    async with learnt([hands_out()], [DONE], flow=flow) as (client, _, _):
        monkeypatch.setattr("kvconnect.router.bodies.json.dumps", fails)
        async with client.session.post(client.url + "/v1/completions", data=b'{"prompt": [1]}') as response:
            monkeypatch.undo()
            assert (response.status, "nested" in await response.text()) == (400, True)
        assert await client.status(ASK) == 200


# --- what the decode node answers where no prefill node does ---


@FLOWS
@pytest.mark.parametrize("fails", FAILS)
@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_a_prefill_leg_that_fails_is_answered_by_the_decode_node(flow, fails, stream, caplog) -> None:
    node = streams(*CHUNKS) if stream else DONE
    decode = [never if flow == "parallel" else node, node]
    caplog.set_level(logging.WARNING, "kvconnect.router")
    timeout_s = 0.4 if fails == "timeout" else 30.0
    async with learnt([FAILS[fails]], decode, flow=flow, prefill_timeout_s=timeout_s) as (client, p, d):
        status, _, raw = await client.post({**ASK, "stream": stream})
        assert (status, raw) == (200, b"".join(CHUNKS) if stream else b'{"token_ids": [5, 6]}')
        # The router's own trials of a decode node may come after it.
        assert {**ASK, "stream": stream} in [one.body for one in d.seen], "without any parameters"
        assert await fallbacks(client, f"prefill_{fails}") == 1
        if flow == "parallel":
            await asyncio.wait_for(d.gone.wait(), 2)
            assert await flows(client) == (1, 1, 1)
        assert len(p.seen) == 2
    (said,) = [one.getMessage() for one in caplog.records if "decode node alone" in one.getMessage()]
    assert f"prefill_{fails}" in said


@FLOWS
@in_loop
async def test_what_is_wrong_with_the_request_itself_is_for_the_client(flow) -> None:
    statuses = [400, 401, 404, 413, 422]
    refuses = [after(0.05, answers(status, {"error": "too long"})) for status in statuses]
    async with learnt(refuses, [never] * len(statuses), flow=flow) as (client, _, d):
        assert [await client.status(ASK) for _ in statuses] == statuses
        assert len(d.seen) == (1 + len(statuses) if flow == "parallel" else 1)
        assert await fallbacks(client, "prefill_refused") == 0


@in_loop
async def test_what_is_wrong_with_the_prefill_node_is_not() -> None:
    statuses = [302, 408, 429, 503]
    async with pair(prefill=in_turn(*map(answers, statuses)), decode=DONE) as (client, _, d):
        assert [await client.status(ASK) for _ in statuses] == [200] * len(statuses)
        assert [seen.body for seen in d.seen] == [ASK] * len(statuses)
        assert await fallbacks(client, "prefill_refused") == len(statuses)


@FLOWS
@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_with_every_prefill_node_gone_the_decode_node_prefills_until_one_is_back(flow, stream) -> None:
    decode, urls = Node(streams(*CHUNKS) if stream else DONE), [dead_url(), dead_url()]
    async with decode.serving(), routed(urls, [decode.url], flow=flow, retries=1, **FAST) as client:
        for _ in range(4):
            status, _, raw = await client.post({**ASK, "stream": stream})
            assert (status, raw.startswith(b"data: 1")) == (200, stream)
        assert [seen.body for seen in decode.seen] == [{**ASK, "stream": stream}] * 4
        none, lost = [await fallbacks(client, f"prefill_{why}") for why in ("none_healthy", "unreachable")]
        assert none + lost == 4
        assert none >= 1, "after two failures each both are out of rotation"
        await until(client.is_ready)
        assert "prefill" in (await client.get("/ready"))[1], "the answer names what is missing"
        assert (await client.get("/ready?all"))[0] == 503
        async with Node(hands_out()).serving(int(urls[0].rpartition(":")[2])):
            while "kv_transfer_params" not in decode.seen[-1].body:
                assert await client.status(ASK) == 200


@FLOWS
@in_loop
async def test_without_the_option_a_prefill_leg_that_fails_is_the_answer(flow) -> None:
    decode = Node(DONE)
    fast = {**FAST, "failures_to_eject": 1, **STRICT}
    async with decode.serving(), routed([dead_url()], [decode.url], flow=flow, **fast) as client:
        while await client.status(ASK) != 503:
            await asyncio.sleep(0.02)
        assert (await client.get("/ready"))[0] == 503
    fails = [FAILS["refused"], FAILS["broken"], hands_out()]
    scripts = [never, never, DONE] if flow == "parallel" else [DONE]
    async with learnt(fails, scripts, flow=flow, **STRICT) as (client, _, _):
        assert [await client.status(ASK) for _ in range(3)] == [500, 502, 200]
        # One that broke off is learnt anew.
        assert flow == "sequential" or await flows(client) == (2, 2, 2)
    assert not decode.seen


# --- nodes that break off ---

ERROR = b'data: {"error": {"message": "EngineCore encountered an issue", "code": 500}}\n\n'
ABORTED = b'data: {"choices":[{"index":0,"text":"","logprobs":null,"finish_reason":"abort"}]}\n\n'
COUNTS = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":0}}\n\n'
ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
BREAKS = {
    "unanswered": FAILS["broken"],
    "no_byte": after(0.05, streams(end="abort")),
    # What vLLM answers as its engine ends.
    "refused": FAILS["refused"],
    "error_in_a_stream": after(0.05, streams(ERROR, b"data: [DONE]\n\n")),
    # What vLLM sends for each of its requests if it is stopped at once, with status 200.
    "aborted": after(0.05, streams(ABORTED, b"data: [DONE]\n\n")),
    "no_token": after(0.05, streams(COUNTS, b"data: [DONE]\n\n")),
    "no_token_of_a_chat": after(0.05, streams(ROLE, COUNTS, b"data: [DONE]\n\n")),
}


async def repeats(client) -> float:
    return await client.metric("kvconnect_router_repeats_total")


@contextlib.asynccontextmanager
async def several(prefill, decode, **options):
    """A router before a node for each script, each learnt; the first of each role gets the next request."""
    nodes = [[Node(script) for script in scripts] for scripts in (prefill, decode)]
    async with contextlib.AsyncExitStack() as stack:
        for node in itertools.chain(*nodes):
            await stack.enter_async_context(node.serving())
        urls = [[node.url for node in role] for role in nodes]
        yield await stack.enter_async_context(routed(*urls, **options)), *nodes


@FLOWS
@pytest.mark.parametrize("breaks", BREAKS)
@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_a_decode_node_that_breaks_off_is_replaced_with_the_prompt_prefilled_again(
    flow, breaks, stream, caplog
) -> None:
    whole = streams(*CHUNKS) if stream else DONE
    ps, ds = [hands_out()], [in_turn(whole, BREAKS[breaks]), whole]
    async with several(ps, ds, flow=flow) as (client, (p,), (one, two)):
        body = {**ASK, "stream": stream}
        for _ in range(2):
            assert await client.status(body) == 200
        status, _, raw = await client.post(body)
        assert (status, raw) == (200, b"".join(CHUNKS) if stream else b'{"token_ids": [5, 6]}')
        assert await repeats(client) == 1
        assert (len(p.seen), len(one.seen), len(two.seen)) == (4, 2, 2)
        named = [seen.body["kv_transfer_params"].get("kvconnect_release") for seen in p.seen]
        assert len(set(named)) == 4, "what P holds for the broken request is not the repeat's"
    assert sum("is run again by other nodes" in one.getMessage() for one in caplog.records) == 1


@FLOWS
@in_loop
async def test_a_prefill_node_that_breaks_off_is_replaced_before_the_decode_node_computes(flow) -> None:
    ps = [in_turn(hands_out(), FAILS["broken"]), hands_out()]
    async with several(ps, [after(0.2, DONE)], flow=flow) as (client, (one, two), _):
        for _ in range(3):
            assert await client.status(ASK) == 200
        assert (await repeats(client), await fallbacks(client, "prefill_broken")) == (1, 0)
        assert (len(one.seen), len(two.seen)) == (2, 2)


@FLOWS
@in_loop
async def test_a_request_of_which_two_nodes_die_gets_no_third(flow) -> None:
    async with several([hands_out()], [FAILS["broken"]] * 4, flow=flow) as (client, _, ds):
        assert await client.status(ASK) == 502
        assert sum(len(d.seen) for d in ds) == 2
        assert await repeats(client) == 1


@in_loop
async def test_a_plain_server_that_breaks_off_is_replaced() -> None:
    async with several([], [in_turn(DONE, FAILS["broken"]), DONE]) as (client, _, _):
        for _ in range(3):
            assert await client.status(ASK) == 200
        assert await repeats(client) == 1


@in_loop
async def test_what_the_client_has_begun_to_get_is_not_repeated() -> None:
    async with several([hands_out()], [streams(CHUNKS[0], pause_s=0.05, end="abort"), DONE]) as (client, *_):
        with pytest.raises(aiohttp.ClientError):
            await client.post({**ASK, "stream": True})
        assert await repeats(client) == 0


# --- several answers, and several prompts ---


@FLOWS
@in_loop
async def test_several_answers_are_prefilled_once_and_decoded_together(flow) -> None:
    async with pair(prefill=hands_out(kvconnect_handle="u1.x"), decode=DONE, flow=flow) as (client, p, d):
        assert [await client.status({**ASK, "n": 4}) for _ in range(2)] == [200, 200]
        assert not any("n" in seen.body for seen in p.seen)
        assert [seen.body["n"] for seen in d.seen] == [4, 4]
        assert all(seen.body["kv_transfer_params"]["do_remote_prefill"] for seen in d.seen)


BATCH = {"prompt": [[1, 2], [3, 4, 5]]}


@FLOWS
@pytest.mark.parametrize("more", [{}, {"n": 2}, {"stream": True}])
@in_loop
async def test_a_batch_of_prompts_has_one_transfer_id_under_which_each_finds_its_own(flow, more) -> None:
    async def prefill(request):
        # What a node of kvconnect hands out for a batch: of its first prompt, under the router's id.
        asked = (await request.json())["kv_transfer_params"]["transfer_id"]
        handed = {**PARAMS, "kvconnect_handle": "u2.x", "transfer_id": asked}
        return web.json_response({"kv_transfer_params": handed})

    async with pair(prefill=prefill, decode=DONE, flow=flow) as (client, p, d):
        assert [await client.status({**ASK, **BATCH, **more}) for _ in range(3)] == [200] * 3
        ids = set()
        named = {key: PARAMS[key] for key in ("remote_host", "remote_port", "remote_engine_id")}
        for asked, told in zip(p.seen, d.seen, strict=True):
            assert (asked.body["prompt"], "n" in asked.body) == (BATCH["prompt"], False)
            params = told.body.pop("kv_transfer_params")
            assert told.body == {**ASK, **BATCH, **more}
            transfer_id = asked.body["kv_transfer_params"]["transfer_id"]
            wanted = {"do_remote_prefill": True, "do_remote_decode": False, "transfer_id": transfer_id}
            assert params == {**wanted, **named, "kvconnect_peer": "u2.x"}
            ids.add(transfer_id)
        assert len(ids) == 3
        assert (await flows(client))[1] == (2 if flow == "parallel" else 0)


HANDED = {**PARAMS, "kvconnect_handle": "u2.x", "transfer_id": "t"}


@FLOWS
@pytest.mark.parametrize(
    ("more", "lacks"),
    [
        ({"n": 2}, "kvconnect_handle"),
        ({"best_of": 2}, "kvconnect_handle"),
        *((BATCH, lacks) for lacks in ("kvconnect_handle", "transfer_id", "remote_host")),
    ],
)
@in_loop
async def test_several_over_another_connector_go_to_the_decode_node_alone(flow, more, lacks) -> None:
    """Its prefill node may free the blocks with the first of several loads of them."""
    handed = {key: value for key, value in HANDED.items() if key != lacks}
    prefill, times = answers(body={"kv_transfer_params": handed}), 2 if lacks == "kvconnect_handle" else 1
    async with pair(prefill=prefill, decode=DONE, flow=flow) as (client, _, d):
        for _ in range(times):
            assert await client.status({**ASK, **more}) == 200
        assert [seen.body for seen in d.seen] == [{**ASK, **more}] * times
        assert await fallbacks(client, "several") == times
