"""Health, readiness, recovery, draining, and the router as a process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import urllib.request

import pytest

from kvconnect.errors import ConfigError
from kvconnect.router.app import create_router_app, serve_router
from kvconnect.router.router_options import RouterLimits, RouterOptions, clean_url
from tests.router.router_doubles import Node, dead_url, pair, routed, streams

ASK = {"prompt": [1], "max_tokens": 2}


def run(coroutine) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 20))


async def until(condition, timeout_s: float = 3.0) -> None:
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not await condition():
        assert asyncio.get_running_loop().time() < deadline, "did not become true in time"
        await asyncio.sleep(0.02)


FAST = {
    "decode_fallback": False,
    "check_interval_s": 0.05,
    "check_timeout_s": 0.5,
    "failures_to_eject": 2,
}


def test_ready_means_a_healthy_node_of_each_role() -> None:
    async def main() -> None:
        prefill, decode = Node(is_healthy=False), Node()
        async with prefill.serving(), decode.serving(), routed([prefill.url], [decode.url], **FAST) as client:

            async def is_ready() -> bool:
                return (await client.get("/ready"))[0] == 200

            async def is_not_ready() -> bool:
                return not await is_ready()

            assert (await client.get("/health"))[0] == 200
            await asyncio.sleep(0.3)
            status, text = await client.get("/ready")
            assert (status, "prefill" in text, "decode" in text) == (503, True, False)
            prefill.is_healthy = True
            await until(is_ready)
            decode.is_healthy = False
            await until(is_not_ready)
            assert (await client.get("/health"))[0] == 200

    run(main())


def test_a_node_that_comes_back_returns_to_rotation() -> None:
    async def main() -> None:
        url = dead_url()
        decode = Node()
        async with decode.serving(), routed([url], [decode.url], **FAST) as client:

            async def is_ejected() -> bool:
                return (await client.post(ASK))[0] == 503

            async def serves() -> bool:
                return (await client.post(ASK))[0] == 200

            await until(is_ejected)
            async with Node().serving(int(url.rpartition(":")[2])):
                await until(serves)

    run(main())


def test_draining_refuses_new_requests_and_finishes_those_under_way(capsys) -> None:
    async def main() -> None:
        slow = streams(*[b"x"] * 5, pause_s=0.1)
        async with pair(decode=slow) as (client, _, _):
            task = asyncio.create_task(client.post(ASK))
            await until(lambda: _true(client.router.in_flight == 1))
            drain = asyncio.create_task(client.router.drain())
            await asyncio.sleep(0.02)
            status, headers, _ = await client.post(ASK)
            assert (status, headers["Connection"]) == (503, "close")
            assert (await client.get("/ready"))[0] == 503
            assert (await client.get("/health"))[0] == 200
            assert (await task)[2] == b"xxxxx"
            assert await drain

    run(main())


async def _true(value: bool) -> bool:
    return value


def test_the_drain_is_bounded() -> None:
    async def main() -> None:
        async with pair(decode=streams(b"x", end="hang"), drain_timeout_s=0.2) as (client, _, _):
            task = asyncio.create_task(client.post(ASK))
            await until(lambda: _true(client.router.in_flight == 1))
            assert not await client.router.drain()
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    run(main())


def test_an_address_in_use_is_a_config_error() -> None:
    async def main() -> None:
        node = Node()
        async with node.serving():
            app = create_router_app(RouterOptions(["http://b"], ["http://a"]))
            with pytest.raises(ConfigError, match="cannot listen on"):
                await serve_router(app, "127.0.0.1", int(node.url.rpartition(":")[2]), asyncio.Event())

    run(main())


@pytest.mark.parametrize(
    "url",
    [
        "",
        "host:8000",
        "ftp://host",
        "http://",
        "http://h:x",
        "http://h:99999",
        "http://u:p@h",
        "http://u:p@10",
        "http://h?q=1",
    ],
)
def test_what_is_no_node_url(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        clean_url(url)
    assert "u:p" not in str(caught.value)


def test_limits_are_checked() -> None:
    assert clean_url("http://h:1/") == "http://h:1"
    with pytest.raises(ConfigError, match="prefill_timeout_s is 0"):
        RouterLimits(prefill_timeout_s=0)
    with pytest.raises(ConfigError, match="retries is -1"):
        RouterLimits(retries=-1)


def test_the_process_says_when_it_is_ready_and_ends_on_sigterm() -> None:
    code = (
        "from kvconnect.router.app import create_router_app, run_router;"
        "from kvconnect.router.router_options import RouterOptions;"
        f"options = RouterOptions(['{dead_url()}'], ['{dead_url()}']);"
        "run_router(create_router_app(options), host='127.0.0.1', port=0)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("kvconnect router ready on http://127.0.0.1:")
        url = line.split()[-1]
        with urllib.request.urlopen(url + "/health", timeout=5) as answer:
            assert answer.status == 200
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait(5)
