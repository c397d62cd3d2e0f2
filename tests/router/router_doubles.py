"""Scripted upstream nodes on loopback, and a router in front of them. Real sockets throughout."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import aiohttp
import zmq
import zmq.asyncio
from aiohttp import web

from kvconnect.node.http_server import app_runner
from kvconnect.router.app import ROUTER, Router, create_router_app
from kvconnect.router.router_options import RouterLimits, RouterOptions
from tests.ports import free_port

PARAMS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "p-0",
    "remote_block_ids": [[3, 1, 2], [9]],
    "remote_host": "10.0.0.7",
    "remote_port": 4711,
    "remote_handle": "opaque ü ⟂",
}


def in_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a test in an event loop of its own."""

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*arguments, **named), 60))

    return run


async def until(condition: Callable[[], Any], timeout_s: float = 5.0) -> None:
    """Wait until a condition holds, which may have to be awaited."""
    async with asyncio.timeout(timeout_s):
        while not (await held if asyncio.iscoroutine(held := condition()) else held):
            await asyncio.sleep(0.01)


Script = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Seen:
    """One request as an upstream received it."""

    path: str
    headers: Mapping[str, str]
    body: Any


@dataclass
class Node:
    """An upstream whose answers are scripted. ``gone`` is set when a caller's connection closed early."""

    script: Script | None = None
    is_healthy: bool = True
    seen: list[Seen] = field(default_factory=list)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    url: str = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        body = json.loads(raw) if raw and request.content_type == "application/json" else raw or None
        self.seen.append(Seen(request.path_qs, request.headers, body))
        try:
            if self.script is not None:
                return await self.script(request)
            return web.json_response({"object": "text_completion", "kv_transfer_params": PARAMS})
        except (asyncio.CancelledError, ConnectionError):
            self.gone.set()
            raise

    async def health(self, _request: web.Request) -> web.Response:
        return web.Response(status=200 if self.is_healthy else 503)

    @contextlib.asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator[Node]:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_get("/health", self.health)
        app.router.add_route("*", "/{tail:.*}", self.handle)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()


class Feed:
    """Publishes numbered messages as vLLM does, and repeats them for who asks."""

    def __init__(self, events: str, replay: str) -> None:
        self.count = 0
        self.last: list[tuple[bytes, bytes]] = []
        self._context = zmq.asyncio.Context()
        self._events, self._replay = self._context.socket(zmq.PUB), self._context.socket(zmq.ROUTER)
        self._events.bind(events)
        self._replay.bind(replay)
        self._task = asyncio.create_task(self._answer())

    def publish(self, payload: bytes) -> None:
        self.last.append((self.count.to_bytes(8, "big"), payload))
        self.count += 1
        self._events.send_multipart((b"", *self.last[-1]))

    async def _answer(self) -> None:
        while True:
            asking, _, first = await self._replay.recv_multipart()
            for message in [*self.last, (b"\xff" * 8, b"")]:
                if message[0] >= first:
                    await self._replay.send_multipart((asking, b"", *message))

    def close(self) -> None:
        self._task.cancel()
        self._context.destroy(linger=0)


def answers(status: int = 200, body: Any = None, **headers: str) -> Script:
    """A script that answers JSON."""

    async def script(_request: web.Request) -> web.StreamResponse:
        return web.json_response({} if body is None else body, status=status, headers=headers)

    return script


async def never(_request: web.Request) -> web.StreamResponse:
    """A script that does not answer."""
    await asyncio.sleep(60)
    raise AssertionError("the caller should have left")


def streams(*chunks: bytes, pause_s: float = 0.0, end: str = "eof") -> Script:
    """A script that streams; ``end`` is ``eof``, ``abort`` (connection cut) or ``hang``."""

    async def script(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for chunk in chunks:
            await response.write(chunk)
            await asyncio.sleep(pause_s)
        if end == "abort":
            assert request.transport is not None
            request.transport.abort()
        elif end == "hang":
            await asyncio.sleep(60)
        return response

    return script


def dead_url() -> str:
    """A URL on which nothing listens."""
    return f"http://127.0.0.1:{free_port()}"


@dataclass
class Client:
    """A client of the router under test."""

    url: str
    session: aiohttp.ClientSession
    router: Router

    async def post(
        self, body: Any, path: str = "/v1/completions", headers: dict[str, str] | None = None
    ) -> tuple[int, Mapping[str, str], bytes]:
        """Status, headers and body of the answer."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.session.post(self.url + path, data=data, headers=headers) as response:
            return response.status, response.headers, await response.read()

    async def status(self, body: Any) -> int:
        """That of a request's answer."""
        return (await self.post(body))[0]

    async def get(self, path: str) -> tuple[int, str]:
        async with self.session.get(self.url + path) as response:
            return response.status, await response.text()

    async def is_ready(self, path: str = "/ready") -> bool:
        return (await self.get(path))[0] == 200

    async def metric(self, name: str) -> float:
        """The value of a metric, labels included in its name, 0 if it is not there."""
        _, text = await self.get("/metrics")
        for line in text.splitlines():
            if line.rpartition(" ")[0] == name:
                return float(line.rpartition(" ")[2])
        return 0.0


@contextlib.asynccontextmanager
async def routed(prefill: list[str], decode: list[str], **limits: Any) -> AsyncIterator[Client]:
    """A router in front of these URLs, and its client. Each node is checked once unless asked for more.

    ``limits`` may hold ``RouterOptions`` too.
    """
    limits = {"check_interval_s": 3600.0, "connect_timeout_s": 1.0, "first_token": "decode", **limits}
    known = {one.name for one in fields(RouterOptions)}
    options = {name: limits.pop(name) for name in known & limits.keys()}
    app = create_router_app(RouterOptions(decode, prefill, **options), RouterLimits(**limits))
    runner = app_runner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with aiohttp.ClientSession(auto_decompress=False) as session:
            yield Client(url, session, app[ROUTER])
    finally:
        await runner.cleanup()
    # Whatever a test did, a router at rest holds nothing.
    assert app[ROUTER].in_flight == 0
    for pool in app[ROUTER].pools:
        assert [(node.in_flight, node.work) for node in pool.view()] == [(0, 0.0)] * len(pool.urls)


@contextlib.asynccontextmanager
async def pair(
    prefill: Script | None = None, decode: Script | None = None, **limits: Any
) -> AsyncIterator[tuple[Client, Node, Node]]:
    """A client, a prefill node and a decode node, with a router between them."""
    one, two = Node(prefill), Node(decode)
    async with one.serving(), two.serving(), routed([one.url], [two.url], **limits) as client:
        yield client, one, two
