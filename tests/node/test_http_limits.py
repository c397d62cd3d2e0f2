"""What clients can make the HTTP server hold is bounded; clients within the bounds are served meanwhile."""

import asyncio
import contextlib
import json

import aiohttp
import pytest

from kvconnect.node.node_options import NodeOptions
from kvconnect.node.request import Output
from kvconnect.node.server import HttpLimits, NodeServer

BODY_TOKENS = 100
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"


class IdleEngine:
    """An engine that ends a request when it is told to, and an aborted one no sooner."""

    options = NodeOptions(model="m", max_model_len=BODY_TOKENS)
    vocab_size = 512
    alive = True

    def __init__(self):
        self.requests = {}
        self.ids = []
        self.aborted = []

    def start(self):
        pass

    def refusal(self, num_prompt_tokens, max_tokens):
        return None

    def stop(self):
        pass

    def submit(self, request):
        self.ids.append(request.request_id)
        self.requests[request.request_id] = request

    def abort(self, engine_id):
        self.aborted.append(engine_id)

    def end(self, engine_id):
        request = self.requests.pop(engine_id, None)
        if request is not None:
            request.sink(Output((7,), finish_reason="length"))


class Served:
    """A server with these limits, its engine, and ways to speak to it."""

    def __init__(self, **limits):
        self.engine = IdleEngine()
        self.server = NodeServer(self.engine, HttpLimits(**limits))

    async def __aenter__(self):
        self.number = await self.server.start("127.0.0.1", 0)
        self.http = aiohttp.ClientSession(f"http://127.0.0.1:{self.number}")
        return self

    async def __aexit__(self, *_):
        await self.http.close()
        await self.server.stop(0.0)

    async def post(self, **body):
        body = {"prompt": [1], "max_tokens": 1, **body}
        async with self.http.post("/v1/completions", data=json.dumps(body)) as response:
            return response.status, await response.json()

    async def raw(self, data=b""):
        reader, writer = await asyncio.open_connection("127.0.0.1", self.number)
        writer.write(data)
        await writer.drain()
        return reader, writer

    async def submitted(self, count):
        while len(self.engine.ids) < count:
            await asyncio.sleep(0.005)


def run(test, **limits):
    async def main():
        async with Served(**limits) as node:
            await test(node)

    asyncio.run(asyncio.wait_for(main(), 20))


async def status_of(reader):
    return int((await reader.readuntil(b"\r\n")).split()[1])


def test_requests_that_the_engine_has_not_ended_are_bounded():
    async def test(node):
        leaving, staying = (asyncio.create_task(node.post()) for _ in range(2))
        await node.submitted(2)
        status, answer = await node.post()
        assert status == 503
        assert answer["error"]["message"] == "the node serves 2 requests already"
        leaving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await leaving
        while not node.engine.aborted:
            await asyncio.sleep(0.005)
        # Its client left, but the engine still has it.
        assert (await node.post())[0] == 503
        node.engine.end(node.engine.aborted[0])
        served = asyncio.create_task(node.post())
        await node.submitted(3)
        for engine_id in node.engine.ids:
            node.engine.end(engine_id)
        assert (await served)[0] == (await staying)[0] == 200
        assert not node.engine.requests

    run(test, max_requests=2)


def test_connections_are_bounded():
    async def test(node):
        some = [await node.raw() for _ in range(3)]
        await asyncio.sleep(0.05)
        reader, _ = await node.raw(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert await status_of(reader) == 503
        assert (await reader.read()).endswith(b"\r\n\r\n"), "it is closed"
        some[0][1].close()
        await asyncio.sleep(0.05)
        reader, _ = await node.raw(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert await status_of(reader) == 200

    run(test, max_connections=3)


def test_bodies_are_bounded_each_by_the_longest_prompt_and_together_by_their_bytes():
    async def test(node):
        large, _ = await node.raw(HEAD % 300_000 + b" " * 300_000)
        assert await status_of(large) == 413, "a prompt of the model's length is far smaller"
        begun = [await node.raw(HEAD % 250_000 + b" " * 200_000) for _ in range(2)]
        await asyncio.sleep(0.1)
        refused, _ = await node.raw(HEAD % 250_000 + b" " * 200_000)
        assert await status_of(refused) == 503
        small = asyncio.create_task(node.post())
        await node.submitted(1)
        node.engine.end(node.engine.ids[0])
        assert (await small)[0] == 200
        begun[0][1].close()
        await asyncio.sleep(0.1)
        whole, _ = await node.raw(HEAD % 200_000 + b" " * 200_000)
        assert await status_of(whole) == 400, "all of it was read, and it is no JSON"

    run(test, max_bodies_bytes=300_000)


def test_a_body_of_the_longest_prompt_is_read_whatever_the_bound():
    async def test(node):
        whole, _ = await node.raw(HEAD % 260_000 + b" " * 260_000)
        assert await status_of(whole) == 400

    run(test, max_bodies_bytes=1)


def test_bodies_that_never_arrive_keep_nobody_out_and_hold_up_no_stop():
    async def test(node):
        begun = [await node.raw(HEAD % 100 + b"{") for _ in range(3)]
        await asyncio.sleep(0.1)
        served = asyncio.create_task(node.post())
        submitted = asyncio.create_task(node.submitted(1))
        await asyncio.wait([served, submitted], return_when=asyncio.FIRST_COMPLETED)
        assert not served.done()
        node.engine.end(node.engine.ids[0])
        assert (await served)[0] == 200
        started = asyncio.get_running_loop().time()
        await node.server.stop(10.0)
        assert asyncio.get_running_loop().time() - started < 5.0
        assert len(begun) == 3

    run(test, max_requests=2)


def test_the_event_loop_is_woken_once_for_all_outputs_that_are_there(monkeypatch):
    async def test(node):
        posts = [asyncio.create_task(node.post()) for _ in range(5)]
        await node.submitted(5)
        loop = asyncio.get_running_loop()
        wake, woken = loop.call_soon_threadsafe, []
        with monkeypatch.context() as patch:
            patch.setattr(loop, "call_soon_threadsafe", lambda *call: (woken.append(call), wake(*call)))
            for request in node.engine.requests.values():
                request.sink(Output((3,)))
                request.sink(Output((7,), finish_reason="length"))
        assert len(woken) == 1
        for status, answer in await asyncio.gather(*posts):
            assert status == 200
            assert answer["choices"][0]["token_ids"] == [3, 7]

    run(test)


def test_a_second_last_output_is_dropped(caplog):
    async def test(node):
        post = asyncio.create_task(node.post())
        await node.submitted(1)
        request = node.engine.requests[node.engine.ids[0]]
        for _ in range(2):
            request.sink(Output((7,), finish_reason="length"))
        assert (await post)[0] == 200

    run(test)
    assert not caplog.records


def test_a_body_that_does_not_arrive_is_given_up():
    async def test(node):
        reader, _ = await node.raw(HEAD % 100 + b'{"prompt"')
        assert await status_of(reader) == 408
        await reader.readuntil(b"\r\n\r\n")
        assert b"did not arrive within 0.2 s" in await reader.read(300)

    run(test, body_timeout_s=0.2)


@pytest.mark.parametrize("begun", [b"", b"POST /v1/comp"])
def test_a_connection_without_a_request_is_closed_and_one_that_is_served_is_not(begun):
    async def test(node):
        silent, _ = await node.raw(begun)
        served = asyncio.create_task(node.post())
        await node.submitted(1)
        started = asyncio.get_running_loop().time()
        assert await silent.read() == b""
        assert 0.3 < asyncio.get_running_loop().time() - started < 2.0
        node.engine.end(node.engine.ids[0])
        assert (await served)[0] == 200

    run(test, idle_timeout_s=0.4)
