"""Nodes that come and go while the router runs: the admin address, names, and the pool."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest

from kvconnect.errors import ConfigError
from kvconnect.router.policy import KVEvents
from kvconnect.router.pool import NodeState
from kvconnect.router.prefix_index import Hit
from tests.ports import free_port
from tests.router.router_doubles import Client, Node, answers, dead_url, in_loop, routed, streams, until
from tests.router.test_policy import PROMPT, Server, heard, settled

ASK = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 8}


# The admin address


async def admin(client: Client, port: int, method: str, **named: object):
    url = f"http://127.0.0.1:{port}/nodes"
    async with client.session.request(method, url, json=named or None) as response:
        return response.status, await response.json()


@in_loop
async def test_nodes_are_added_drained_and_change_their_role_while_requests_run() -> None:
    port = free_port()
    first, second = (Node(answers(body={"text": name})) for name in ("first", "second"))
    slow = Node(streams(b"a", b"b", b"c", pause_s=0.3))
    async with contextlib.AsyncExitStack() as stack:
        for node in (first, second, slow):
            await stack.enter_async_context(node.serving())
        async with routed([first.url], [slow.url], admin=f"127.0.0.1:{port}") as client:
            assert (await client.get("/nodes"))[0] == 404, "not where clients send prompts"
            under_way = asyncio.create_task(client.post(ASK))
            await until(lambda: slow.seen)
            status, nodes = await admin(client, port, "POST", role="decode", url=second.url + "/")
            assert status == 200
            assert [(node["role"], node["url"]) for node in nodes] == [
                ("prefill", first.url),
                ("decode", slow.url),
                ("decode", second.url),
            ]
            status, nodes = await admin(client, port, "DELETE", role="decode", url=slow.url)
            assert nodes[1] == {"role": "decode", "url": slow.url, "state": "draining", "in_flight": 1}
            for _ in range(3):
                assert json.loads((await client.post(ASK))[2]) == {"text": "second"}
            assert (await under_way)[0::2] == (200, b"abc"), "what is under way ends"
            _, nodes = await admin(client, port, "GET")
            assert [node["url"] for node in nodes] == [first.url, second.url]
            # From D to P, and P to D.
            for method, role, node in [
                ("POST", "prefill", second),
                ("POST", "decode", first),
                ("DELETE", "prefill", first),
                ("DELETE", "decode", second),
            ]:
                status, nodes = await admin(client, port, method, role=role, url=node.url)
                assert status == 200
            assert json.loads((await client.post(ASK))[2]) == {"text": "first"}


@pytest.mark.parametrize(
    ("method", "named", "why"),
    [
        (
            "POST",
            {"role": "both", "url": "http://h"},
            "role is 'both'; accepted here: prefill, decode",
        ),
        ("POST", {"role": "decode", "url": "http://u:p@h"}, "must not hold credentials"),
        ("POST", {"role": "decode", "url": "dns+http://h"}, "a URL without dns+"),
        ("POST", {"role": "decode"}, "missing required field"),
        ("POST", {"role": "decode", "url": "http://h", "weight": 2}, "unknown field"),
        (
            "POST",
            {"role": "decode", "url": "http://h", "kv_event_source": "tcp://h:1"},
            "accepted: with --policy prefix",
        ),
        ("DELETE", {"role": "decode", "url": "http://h"}, "http://h is no decode node"),
    ],
)
@in_loop
async def test_what_is_no_order_is_refused_by_name_and_changes_nothing(method, named, why) -> None:
    port, urls = free_port(), ([dead_url()], [dead_url()])
    async with routed(*urls, admin=f"127.0.0.1:{port}") as client:
        status, answer = await admin(client, port, method, **named)
        assert status == 400
        assert why in answer["error"]
        assert [pool.urls for pool in client.router.pools] == [tuple(nodes) for nodes in urls]


@pytest.mark.parametrize("address", ["9000", "127.0.0.1:0", "127.0.0.1:http"])
@in_loop
async def test_what_is_no_admin_address(address) -> None:
    with pytest.raises(ConfigError, match="admin is"):
        async with routed([dead_url()], [dead_url()], admin=address):
            pass


# Names


@pytest.mark.parametrize("rank", ["", "@1"])
@in_loop
async def test_every_address_of_a_name_is_a_node_for_as_long_as_it_is_one(monkeypatch, rank) -> None:
    addresses: list[str] = []

    async def resolved(loop, host, port, **_):
        assert host == "decode.svc"
        if not addresses:
            raise OSError("no such name")
        return [(None, None, None, "", (address, port)) for address in addresses]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", resolved)
    monkeypatch.setattr("kvconnect.router.membership._LOOK_UP_S", 0.01)
    name = f"dns+http://decode.svc:8000{rank}"
    async with routed([dead_url()], [name]) as client:
        pool = client.router.decode
        assert (await client.post(ASK))[0] == 503
        assert (await client.get("/ready"))[0] == 503
        addresses[:] = ["10.0.0.1", "fd00::2"]
        both = {f"http://10.0.0.1:8000{rank}", f"http://[fd00::2]:8000{rank}"}
        await until(lambda: set(pool.urls) == both)
        lease = pool.take(avoid=[f"http://10.0.0.1:8000{rank}"])
        addresses.pop()
        await until(lambda: [node.state for node in pool.view()][1] is NodeState.DRAINING)
        pool.release(lease)
        assert pool.urls == (f"http://10.0.0.1:8000{rank}",)
        addresses.clear()
        await asyncio.sleep(0.05)
        assert pool.urls == (f"http://10.0.0.1:8000{rank}",), "a name server that fails takes no nodes away"
        pool.drain(f"http://10.0.0.1:8000{rank}")
        addresses[:] = ["10.0.0.3"]
        await until(lambda: pool.urls == (f"http://10.0.0.3:8000{rank}",))


@in_loop
async def test_a_name_that_cannot_be_one_is_reported_and_the_others_are_followed(monkeypatch, caplog) -> None:
    monkeypatch.setattr("kvconnect.router.membership._LOOK_UP_S", 0.01)
    async with routed([], [f"dns+http://{'a' * 70}.svc:8000", "dns+http://127.0.0.1:9"]) as client:
        await until(lambda: client.router.decode.urls == ("http://127.0.0.1:9",))
        await asyncio.sleep(0.05)
        assert caplog.text.count("cannot be looked up, and its 0 nodes stay") == 1


# Policy prefix


@contextlib.asynccontextmanager
async def published(*given: str, **options):
    """A server that publishes, and the options of a router by prefix that follows others."""
    async with contextlib.AsyncExitStack() as stack:
        server = Server()
        await stack.enter_async_context(server.serving())
        server.open(stack)
        yield server, {"policy": "prefix", "kv_event_source": list(given), **options}


@in_loop
async def test_a_node_that_is_added_is_followed_until_it_is_gone_and_its_blocks_with_it(monkeypatch) -> None:
    monkeypatch.setattr("kvconnect.router.policy._LOOK_S", 0.01)
    port, first = free_port(), dead_url()
    async with published(admin=f"127.0.0.1:{port}") as (server, options):
        where = {"kv_event_source": server.events, "kv_source": "10.0.0.7:5600"}
        async with routed([], [first], **options) as client:
            placing = client.router.flow.placing
            added = {"role": "decode", "url": server.url}
            status, told = await admin(client, port, "POST", **added, kv_event_source="tcp://*:1")
            assert (status, client.router.decode.urls) == (400, (first,))
            assert "accepted: as tcp://10.0.0.1:5557" in told["error"]
            assert (await admin(client, port, "POST", **added, **where))[0] == 200
            await heard(client, [server])
            server.store(PROMPT)
            await settled(client, server, PROMPT, Hit(len(PROMPT), len(PROMPT)))
            assert placing.sources == {server.url: "10.0.0.7:5600"}
            assert (await admin(client, port, "DELETE", **added))[0] == 200
            await until(lambda: not len(placing.index) and not placing.sources)
            server.store(PROMPT)
            await asyncio.sleep(0.1)
            assert not len(placing.index), "it is not followed any more"
            assert await client.metric("kvconnect_router_known_blocks") == 0
            # As often as it comes back.
            assert (await admin(client, port, "POST", **added))[0] == 200
            await heard(client, [server])


@in_loop
async def test_what_follows_a_node_and_ends_is_begun_anew_and_that_is_logged(monkeypatch, caplog) -> None:
    monkeypatch.setattr("kvconnect.router.policy._LOOK_S", 0.01)
    async with published() as (server, options):
        options["kv_event_source"] = [f"{server.url}={server.events}"]
        async with routed([], [server.url], **options) as client:
            await heard(client, [server])
            with monkeypatch.context() as broken:
                broken.setattr(KVEvents, "_apply", lambda *_: 1 / 0)
                server.store(PROMPT)
                await until(lambda: "are followed anew" in caplog.text)
                assert "division by zero" in caplog.text
                assert not len(client.router.flow.placing.index)
            await heard(client, [server])


@pytest.mark.parametrize("rank", ["", "@1"])
@in_loop
async def test_the_addresses_of_a_name_publish_at_its_ports(monkeypatch, rank) -> None:
    monkeypatch.setattr("kvconnect.router.policy._LOOK_S", 0.01)
    monkeypatch.setattr("kvconnect.router.membership._LOOK_UP_S", 0.01)
    addresses, resolve = ["127.0.0.1"], asyncio.BaseEventLoop.getaddrinfo

    async def resolved(loop, host, port, **more):
        if host != "decode.svc":
            return await resolve(loop, host, port, **more)
        return [(None, None, None, "", (address, port)) for address in addresses]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", resolved)
    async with published() as (server, options):
        name = f"dns+http://decode.svc:{server.url.rpartition(':')[2]}{rank}"
        options["kv_event_source"] = [f"{name}={server.events.replace('127.0.0.1', '*')}"]
        options["kv_source"] = [f"{name}=*:5600"]
        server.url += rank
        async with routed([], [name], **options) as client:
            index = client.router.flow.placing.index
            await heard(client, [server])
            assert client.router.flow.placing.sources == {server.url: "127.0.0.1:5600"}
            addresses[:] = ["127.0.0.9"]
            await until(lambda: not len(index))


@in_loop
async def test_without_a_node_a_request_by_prefix_has_an_answer(monkeypatch) -> None:
    port = free_port()
    async with routed([], [dead_url()], policy="prefix", admin=f"127.0.0.1:{port}") as client:
        url = client.router.decode.urls[0]
        assert (await admin(client, port, "DELETE", role="decode", url=url))[0] == 200
        assert (await client.post(ASK))[0] == 503
