"""The answer to a router in Mooncake's mode, and clients that are none."""

from __future__ import annotations

import socket
import time

import pytest

from kvconnect.errors import ConfigError
from kvconnect.node.children import BadAnswer, fetch, fetch_json
from kvconnect.peer.bootstrap import Bootstrap
from tests.ports import free_port

ANSWER = {"0": {"engine_id": "x"}}


@pytest.fixture
def bootstrap():
    port = free_port()
    made = Bootstrap("127.0.0.1", port, b'{"0":{"engine_id":"x"}}')
    yield made, f"http://127.0.0.1:{port}", port
    made.close()


def test_it_answers_one_question(bootstrap):
    _, url, _ = bootstrap
    for _ in range(3):
        assert fetch_json(url + "/query") == ANSWER
    for path in ("/", "/register", "/query2"):
        with pytest.raises(BadAnswer, match="404"):
            fetch(url + path)
    with pytest.raises(BadAnswer, match="404"):
        fetch(url + "/query", body={})


def test_a_client_that_sends_nothing_or_too_much_keeps_nobody_waiting_for_long(bootstrap):
    _, url, port = bootstrap
    with socket.create_connection(("127.0.0.1", port)), socket.create_connection(("127.0.0.1", port)) as loud:
        loud.sendall(b"GET /query HTTP/1.1\r\n" + b"x" * 100_000)
        socket.create_connection(("127.0.0.1", port)).close()
        began = time.monotonic()
        assert fetch_json(url + "/query") == ANSWER
        assert time.monotonic() - began < 5


def test_it_ends_when_it_is_closed(bootstrap):
    made, url, port = bootstrap
    made.close()
    made.close()
    with pytest.raises(BadAnswer):
        fetch(url + "/query", timeout_s=2)
    Bootstrap("127.0.0.1", port, b"{}").close()


def test_a_port_that_is_taken_is_named(bootstrap):
    _, _, port = bootstrap
    with pytest.raises(ConfigError, match=f"bootstrap_port is {port}, and 127.0.0.1 cannot be listened on"):
        Bootstrap("127.0.0.1", port, b"{}")
