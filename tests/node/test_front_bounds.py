"""What clients can make a front hold is bounded, and who stays within the bounds is served meanwhile."""

import asyncio
import contextlib
import json

import aiohttp
import pytest

from kvconnect.node.front.limits import FrontLimits
from kvconnect.node.front.port import NodeInfo, OpenRequests
from kvconnect.node.limits import Footprint, GroupSize, RequestLimits
from kvconnect.node.output import Output
from kvconnect.node.server import NodeServer

LIMITS = RequestLimits(100, 64, Footprint((GroupSize(16, None, False),), 128))
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"


class IdlePort:
    """An engine that answers a request when it is told to, and ends an aborted one no sooner."""

    info = NodeInfo("m", 0, 512, LIMITS)

    def __init__(self):
        self.open = OpenRequests()
        self.numbers = []
        self.aborted = []

    @property
    def num_open(self):
        return len(self.open)

    def start(self):
        pass

    async def stop(self):
        pass

    def submit(self, submission, sink):
        self.numbers.append(self.open.add(sink))
        return self.numbers[-1]

    def abort(self, number):
        if self.open.leave(number):
            self.aborted.append(number)

    async def alive(self):
        return True

    def end(self, number):
        self.open.deliver(number, Output((7,), finish_reason="length"))


class Front:
    """A server with these limits, its port, and ways to speak to it."""

    def __init__(self, **limits):
        self.port = IdlePort()
        self.server = NodeServer(self.port, FrontLimits(**limits))

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
        while len(self.port.numbers) < count:
            await asyncio.sleep(0.005)


def run(test, **limits):
    async def main():
        async with Front(**limits) as front:
            await test(front)

    asyncio.run(asyncio.wait_for(main(), 20))


async def status_of(reader):
    return int((await reader.readuntil(b"\r\n")).split()[1])


def test_requests_that_the_engine_has_not_ended_are_bounded():
    async def test(front):
        leaving, staying = (asyncio.create_task(front.post()) for _ in range(2))
        await front.submitted(2)
        status, answer = await front.post()
        assert status == 503
        assert answer["error"]["message"] == "the node serves 2 requests already"
        leaving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await leaving
        while not front.port.aborted:
            await asyncio.sleep(0.005)
        # Its client left, but the engine still has it.
        assert (await front.post())[0] == 503
        front.port.end(front.port.aborted[0])
        served = asyncio.create_task(front.post())
        await front.submitted(3)
        for number in front.port.numbers:
            front.port.end(number)
        assert (await served)[0] == (await staying)[0] == 200
        assert front.port.num_open == 0

    run(test, max_requests=2)


def test_connections_are_bounded():
    async def test(front):
        some = [await front.raw() for _ in range(3)]
        await asyncio.sleep(0.05)
        reader, _ = await front.raw(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert await status_of(reader) == 503
        assert (await reader.read()).endswith(b"\r\n\r\n"), "it is closed"
        some[0][1].close()
        await asyncio.sleep(0.05)
        reader, _ = await front.raw(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert await status_of(reader) == 200

    run(test, max_connections=3)


def test_large_bodies_are_bounded_together_and_small_ones_pass():
    async def test(front):
        first = await front.raw(HEAD % 4_000_000 + b" " * 900_000)
        await asyncio.sleep(0.1)
        second, _ = await front.raw(HEAD % 4_000_000 + b" " * 900_000)
        assert await status_of(second) == 503
        small = asyncio.create_task(front.post())
        await front.submitted(1)
        front.port.end(front.port.numbers[0])
        assert (await small)[0] == 200
        first[1].close()
        await asyncio.sleep(0.1)
        large, _ = await front.raw(HEAD % 900_000 + b" " * 900_000)
        assert await status_of(large) == 400, "all of it was read, and it is no JSON"

    run(test, max_bodies_bytes=1_500_000)


def test_a_body_that_does_not_arrive_is_given_up():
    async def test(front):
        reader, _ = await front.raw(HEAD % 100 + b'{"prompt"')
        assert await status_of(reader) == 408
        await reader.readuntil(b"\r\n\r\n")
        assert b"did not arrive within 0.2 s" in await reader.read(300)

    run(test, body_timeout_s=0.2)


@pytest.mark.parametrize("begun", [b"", b"POST /v1/comp"])
def test_a_connection_that_says_nothing_is_closed_and_one_that_did_is_kept(begun):
    async def test(front):
        silent, _ = await front.raw(begun)
        spoken, writer = await front.raw(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert await status_of(spoken) == 200
        started = asyncio.get_running_loop().time()
        assert await silent.read() == b""
        assert 0.3 < asyncio.get_running_loop().time() - started < 2.0
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        await spoken.readuntil(b"}")
        assert await status_of(spoken) == 200

    run(test, first_request_timeout_s=0.4)
