"""Policy prefix: requests go to the node that publishes that it has their prefix, real sockets throughout."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass, field

import msgspec
import pytest
from aiohttp import web

from kvconnect.errors import ConfigError
from kvconnect.router.app import ROUTER, create_router_app
from kvconnect.router.placing import NodeChoice
from kvconnect.router.policy import Published
from kvconnect.router.prefix_index import Hit
from kvconnect.router.router_options import RouterOptions
from tests.ports import free_port
from tests.router.router_doubles import Feed, Node, answers, in_loop, routed, until
from tests.router.test_flow import after

SIZE = 16


PROMPT = list(range(1000, 1000 + 40 * SIZE))


def stored_event(hashes, tokens):
    told = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": None, "token_ids": tokens}
    return {**told, "block_size": SIZE, "lora_id": None, "medium": "GPU", "lora_name": None}


@dataclass
class Server(Node):
    """A node that publishes its blocks."""

    events: str = field(default_factory=lambda: f"tcp://127.0.0.1:{free_port()}")
    replay: str = field(default_factory=lambda: f"tcp://127.0.0.1:{free_port()}")

    def open(self, stack):
        self.feed = Feed(self.events, self.replay)
        stack.callback(self.feed.close)

    def publish(self, *events):
        self.feed.publish(msgspec.msgpack.encode([1.0, events, 0]))

    def store(self, tokens, medium="GPU", salt=0, **more):
        """All whole blocks of these tokens, in one event."""
        hashes = [hash((salt, *tokens[:end])) % 2**63 for end in range(SIZE, len(tokens) + 1, SIZE)]
        told = stored_event(hashes, tokens[: len(hashes) * SIZE]) | {"medium": medium}
        self.publish({**told, **more})
        return hashes

    @property
    def completions(self):
        return [seen for seen in self.seen if seen.path == "/v1/completions"]


def by_prefix(events, replays=None, sources=None):
    """The options of a router that follows these, each by the node's URL."""
    given = {"kv_event_source": events, "kv_event_replay_source": replays, "kv_source": sources}
    return {"policy": "prefix"} | {
        name: [f"{url}={value}" for url, value in (of or {}).items()] for name, of in given.items()
    }


@contextlib.asynccontextmanager
async def servers(count=2, is_pair=False, sources=()):
    """A router that follows so many servers; plain ones, or prefill nodes before a decode node."""
    async with contextlib.AsyncExitStack() as stack:
        found = [Server() for _ in range(count)]
        for server in found:
            await stack.enter_async_context(server.serving())
            server.open(stack)
        urls = [server.url for server in found]
        policy = by_prefix(
            {server.url: server.events for server in found},
            {server.url: server.replay for server in found},
            dict(zip(urls, sources, strict=False)),
        )
        decode = Node()
        await stack.enter_async_context(decode.serving())
        shape = (urls, [decode.url]) if is_pair else ([], urls)
        client = await stack.enter_async_context(routed(*shape, **policy, retries=0))
        await heard(client, found)
        yield client, found


async def heard(client, found):
    """Until the router follows each: a block of a publisher that is not subscribed to yet is lost."""
    for server in found:
        known = client.router.flow.placing.index
        for attempt in range(500):
            server.store([attempt] * SIZE)
            await asyncio.sleep(0.01)
            if known.hits([server.url], [attempt] * SIZE)[server.url].num_tokens:
                break
        else:
            raise AssertionError(f"{server.url} is not followed")


async def settled(client, server, tokens, hit):
    """Until the router knows so much of a prompt at a server."""
    index = client.router.flow.placing.index
    await until(lambda: index.hits([server.url], tokens)[server.url] == hit)


@in_loop
async def test_a_prompt_goes_where_most_of_it_is_in_any_tier():
    async with servers(3) as (client, (first, second, third)):
        first.store(PROMPT[: 8 * SIZE])
        second.store(PROMPT[: 30 * SIZE], medium="CPU")
        third.store(PROMPT[: 8 * SIZE], medium="STORAGE")
        await settled(client, first, PROMPT, Hit(8 * SIZE, 8 * SIZE))
        await settled(client, second, PROMPT, Hit(0, 30 * SIZE))
        await settled(client, third, PROMPT, Hit(0, 8 * SIZE))
        for _ in range(4):
            assert (await client.post({"model": "m", "prompt": PROMPT}))[0] == 200
        assert [len(server.completions) for server in (first, second, third)] == [0, 4, 0]
        assert await client.metric('kvconnect_router_placements_total{by="prefix"}') == 4
        # What is gone counts no more.
        second.publish(
            {
                "type": "BlockRemoved",
                "block_hashes": [hash((0, *PROMPT[: 2 * SIZE])) % 2**63],
                "medium": "CPU",
            }
        )
        await settled(client, second, PROMPT, Hit(0, SIZE))
        await client.post({"model": "m", "prompt": PROMPT})
        assert len(first.completions) == 1


@in_loop
async def test_load_outweighs_a_prefix():
    async with servers() as (client, (first, second)):
        first.store(PROMPT)
        await settled(client, first, PROMPT, Hit(len(PROMPT), len(PROMPT)))
        release = asyncio.Event()
        first.script = second.script = after(release, answers())
        other = [7] * (3 * len(PROMPT))
        first.store(other[: 2 * SIZE], salt=1)
        await settled(client, first, other, Hit(2 * SIZE, 2 * SIZE))
        # Most of this one has to be computed, and the next waits for that where its prefix is.
        waiting = [asyncio.create_task(client.post({"model": "m", "prompt": other}))]
        await until(lambda: first.completions)
        waiting.append(asyncio.create_task(client.post({"model": "m", "prompt": PROMPT})))
        await until(lambda: second.completions)
        release.set()
        await asyncio.gather(*waiting)


@in_loop
async def test_what_was_published_before_and_what_was_missed_is_asked_for():
    async with contextlib.AsyncExitStack() as stack:
        server = Server()
        await stack.enter_async_context(server.serving())
        server.open(stack)
        server.store(PROMPT)
        policy = by_prefix({server.url: server.events}, {server.url: server.replay})
        client = await stack.enter_async_context(routed([], [server.url], **policy))
        await settled(client, server, PROMPT, Hit(len(PROMPT), len(PROMPT)))
        # Its socket loses a message; the number of the next shows it.
        lost = msgspec.msgpack.encode([1.0, [stored_event([5], [5] * SIZE)], 0])
        server.feed.last.append((server.feed.count.to_bytes(8, "big"), lost))
        server.feed.count += 1
        await asyncio.sleep(0.3)
        server.store([6] * SIZE)
        await settled(client, server, [5] * SIZE, Hit(SIZE, SIZE))
        await settled(client, server, [6] * SIZE, Hit(SIZE, SIZE))
        assert await client.metric("kvconnect_router_kv_events_missed_total") == 0


@in_loop
async def test_a_publisher_that_begins_anew_has_nothing_of_what_it_had():
    async with servers(1) as (client, (server,)):
        server.store(PROMPT)
        await settled(client, server, PROMPT, Hit(len(PROMPT), len(PROMPT)))
        server.feed.count = 0
        server.feed.last.clear()
        server.store([3] * SIZE)
        await settled(client, server, PROMPT, Hit())
        await settled(client, server, [3] * SIZE, Hit(SIZE, SIZE))


@in_loop
async def test_messages_that_are_no_events_are_counted_and_others_go_on():
    async with servers(1) as (client, (server,)):
        for payload in (
            b"",
            b"\xc1",
            msgspec.msgpack.encode({"no": "batch"}),
            msgspec.msgpack.encode([1.0, [7]]),
        ):
            server.feed.publish(payload)
        # It can be read, and no token is so large.
        server.publish({**stored_event([9], [9] * SIZE), "token_ids": [2**63] * SIZE})
        await asyncio.sleep(0.1)
        server.publish({"type": "AllBlocksCleared"}, stored_event([9], [9] * SIZE))
        await settled(client, server, [9] * SIZE, Hit(SIZE, SIZE))
        name = f'kvconnect_router_kv_events_unread_total{{node="{server.url}"}}'
        assert await client.metric(name) == 5
        server.publish({**stored_event([8], [8] * SIZE), "parent_block_hash": 77})
        server.publish(stored_event([7], [7] * SIZE))
        await settled(client, server, [7] * SIZE, Hit(SIZE, SIZE))
        assert await client.metric("kvconnect_router_blocks_left_out_total") == 1


@in_loop
async def test_prompts_as_text_and_chats_are_tokenized_by_a_server():
    async with servers() as (client, (first, second)):
        second.store(PROMPT)
        await settled(client, second, PROMPT, Hit(len(PROMPT), len(PROMPT)))

        async def script(request):
            is_asked = request.path == "/tokenize"
            return web.json_response({"tokens": PROMPT, "count": len(PROMPT)} if is_asked else {})

        first.script = second.script = script
        chat = {"messages": [{"role": "user", "content": "hello"}], "add_generation_prompt": True}
        for body, path in (({"prompt": "hello"}, "/v1/completions"), (chat, "/v1/chat/completions")):
            before = len(second.seen)
            assert (await client.post({"model": "m", "max_tokens": 3, **body}, path))[0] == 200
            assert path in [seen.path for seen in second.seen[before:]]
            (asked,) = [seen.body for seen in first.seen + second.seen if seen.path == "/tokenize"][-1:]
            assert asked == {"model": "m", **body}


@in_loop
async def test_a_server_that_cannot_tokenize_gets_requests_by_load():
    async with servers(1) as (client, (server,)):
        for count, status in enumerate((200, 404, 500), 1):
            server.script = cannot_tokenize(status)
            assert await client.status({"model": "m", "prompt": "hello"}) == 200
            assert await client.metric('kvconnect_router_placements_total{by="load"}') == count, status


def cannot_tokenize(status):
    """A script that answers /tokenize so, without tokens, and all else well."""

    async def script(request):
        return web.json_response({"tokens": None}, status=status if request.path == "/tokenize" else 200)

    return script


@in_loop
async def test_a_request_without_one_prompt_is_served_by_load():
    prompts = [[], ["a", "b"], [[1], [2]], [1, "a"], [1, -1], [1, 2**40], None, 5, {}]
    async with servers(1) as (client, (server,)):
        for prompt in prompts:
            assert await client.status({"model": "m", "prompt": prompt}) == 200, prompt
        assert [seen.body["prompt"] for seen in server.completions] == prompts


@in_loop
async def test_a_salted_prompt_is_found_under_its_salt_alone():
    async with servers() as (client, (first, second)):
        count = len(PROMPT) // SIZE
        first.store(PROMPT)
        second.store(PROMPT, salt=1, extra_keys=[["s"], *[None] * (count - 1)])
        await settled(client, first, PROMPT, Hit(len(PROMPT), len(PROMPT)))
        await asyncio.sleep(0.2)
        for _ in range(3):
            await client.post({"model": "m", "prompt": PROMPT, "cache_salt": "s"})
        assert (len(first.completions), len(second.completions)) == (0, 3)


@pytest.mark.parametrize("by", ["header", "body"])
@in_loop
async def test_a_session_stays_where_it_was_if_nothing_else_is_known(by):
    async with servers() as (client, found):
        for server in found:
            # No tokens are known of a text.
            server.script = cannot_tokenize(404)
        for _ in range(4):
            for name in ("s", "t"):
                headers = {"X-Session-ID": name} if by == "header" else {}
                body = {"model": "m", "prompt": name, **({} if by == "header" else {"session_id": name})}
                assert (await client.post(body, headers=headers))[0] == 200
                # What is of no session is served by load, between them.
                await client.post({"model": "m", "prompt": "none"})
        for name in ("s", "t"):
            each = [[seen.body["prompt"] for seen in server.completions].count(name) for server in found]
            assert sorted(each) == [0, 4]
        passed = [seen for server in found for seen in server.completions if seen.body["prompt"] == "s"]
        given = "X-Session-ID" if by == "header" else "session_id"
        assert all((seen.headers if by == "header" else seen.body)[given] == "s" for seen in passed)


@in_loop
async def test_a_session_goes_where_its_prefix_is_and_is_remembered_up_to_a_bound(monkeypatch):
    monkeypatch.setattr("kvconnect.router.placing._MOST_SESSIONS", 2)
    async with servers() as (client, (first, second)):
        await client.post({"model": "m", "prompt": "s", "session_id": "s"})
        has = second if first.completions else first
        has.store(PROMPT)
        await settled(client, has, PROMPT, Hit(len(PROMPT), len(PROMPT)))
        await client.post({"model": "m", "prompt": PROMPT, "session_id": "s"})
        placing = client.router.flow.placing
        assert placing._sessions == {"s": has.url}
        for name in "tsu":
            await client.post({"model": "m", "prompt": "x", "session_id": name})
        assert list(placing._sessions) == ["s", "u"]


@in_loop
async def test_a_node_that_has_less_is_told_of_the_one_that_has_more():
    async with servers(2, sources=["10.0.0.1:1", "10.0.0.2:2"]) as (client, (first, second)):
        first.store(PROMPT)
        await settled(client, first, PROMPT, Hit(len(PROMPT), len(PROMPT)))
        release = asyncio.Event()
        first.script = after(release, answers())
        tasks = [asyncio.create_task(client.post({"model": "m", "prompt": [7] * 600})) for _ in range(3)]
        await until(lambda: len(first.completions + second.completions) == 3)
        before = len(second.completions)
        tasks.append(asyncio.create_task(client.post({"model": "m", "prompt": PROMPT})))
        await until(lambda: len(second.completions) > before)
        assert second.completions[-1].body["kv_transfer_params"] == {"kv_sources": ["10.0.0.1:1"]}
        release.set()
        await asyncio.gather(*tasks)


@in_loop
async def test_prefill_nodes_are_chosen_likewise():
    async with servers(is_pair=True) as (client, (first, second)):
        second.store(PROMPT)
        await settled(client, second, PROMPT, Hit(len(PROMPT), len(PROMPT)))
        for _ in range(3):
            assert (await client.post({"model": "m", "prompt": PROMPT}))[0] == 200
        assert (len(first.completions), len(second.completions)) == (0, 3)
        # Its answer names where it is fetched from: others may pull from there what it has.
        placing = client.router.flow.placing
        assert placing.sources == {second.url: "10.0.0.7:4711"}


def test_what_a_node_has_to_pull_costs_less_than_what_it_computes():
    hits = {"a": Hit(1000, 1000), "b": Hit(0, 0), "c": Hit(0, 1000)}
    alone = NodeChoice(1600, hits)
    assert alone.work == {"a": 600, "b": 1600, "c": 750}
    told = NodeChoice(1600, hits, {"a": "h:1"})
    assert told.work == {"a": 600, "b": 800, "c": 750}
    assert told.params("b") == {"kv_sources": ["h:1"]}
    assert told.params("b", broken=["a"]) == {}
    assert told.params("a") == told.params("c") == alone.params("b") == {}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"events": {}}, "no node publishes KV events"),
        ({"events": {"http://a": "tcp://*:5557"}}, "accepted: as tcp://10.0.0.1:5557"),
        ({"events": {"http://a": "http://b"}}, "accepted: as tcp://10.0.0.1:5557"),
        ({"events": {"http://a": "tcp://b:1"}, "sources": {"http://a": "b"}}, "accepted: host:port"),
        ({"events": {"http://a": "tcp://b:1"}, "sources": {"http://a": "b:x"}}, "accepted: host:port"),
        ({"events": {"http://other": "tcp://b:1"}}, "http://other is no node of this router"),
        ({"events": {"dns+http://h": "tcp://a:1"}}, r"accepted: as tcp://\*:5557"),
    ],
)
def test_a_policy_that_cannot_work_says_why(options, problem):
    with pytest.raises(ConfigError, match=problem):
        create_router_app(RouterOptions(["http://a"], **by_prefix(**options)))


def test_options_by_node_are_read():
    made = by_prefix({"http://a:1": "tcp://b:1"}) | {"kv_source": ["http://a:1/=h:2"]}
    router = create_router_app(RouterOptions(["http://a:1"], **made))[ROUTER]
    assert router._followed.published == {"http://a:1": Published("tcp://b:1", kv_source="h:2")}
    made["kv_source"] = ["http://a:1"]
    with pytest.raises(ConfigError, match="--kv-source is 'http://a:1'; accepted: URL=VALUE"):
        create_router_app(RouterOptions(["http://a:1"], **made))


@in_loop
async def test_plain_servers_need_no_prefill_node():
    one = Node()
    async with one.serving(), routed([], [one.url], check_interval_s=0.05) as client:
        status, _, raw = await client.post({"model": "m", "prompt": "hello", "n": 2})
        assert (status, json.loads(raw)["object"]) == (200, "text_completion")
        assert "kv_transfer_params" not in one.seen[-1].body
        await until(lambda: client.is_ready("/ready?all"))
        assert json.loads((await client.get("/ready?all"))[1]) == {"status": "ready", "missing": []}
