"""What each leg is sent, as a function of what the client sent."""

from __future__ import annotations

import pytest

from kvconnect.router import bodies


def test_headers_of_one_connection_stay_on_it() -> None:
    pairs = [
        ("Connection", "X-Mine"),
        ("X-Mine", "1"),
        ("Keep-Alive", "timeout=3"),
        ("TE", "trailers"),
        ("Transfer-Encoding", "chunked"),
        ("Content-Length", "5"),
        ("Content-Type", "text/plain"),
        ("Host", "router"),
        ("Upgrade", "h2c"),
        ("Proxy-Authorization", "secret"),
        ("x-prefiller-host-port", "10.0.0.1:1"),
        ("X-Encoder-Hosts-Ports", "10.0.0.1:1"),
        ("x-data-parallel-host-port", "10.0.0.1:1"),
        ("x-kv-cache-source-host-port", "10.0.0.1:1"),
        ("Authorization", "Bearer k"),
        ("traceparent", "00-1"),
        ("X-Request-Id", "theirs"),
    ]
    assert bodies.request_headers(pairs, "ours") == [
        ("Authorization", "Bearer k"),
        ("traceparent", "00-1"),
        ("Content-Type", "application/json"),
        ("X-Request-Id", "ours"),
    ]
    answer = [("Connection", "close"), ("Set-Cookie", "a"), ("Set-Cookie", "b"), ("x-request-id", "theirs")]
    assert bodies.answer_headers(answer, "ours") == [
        ("Set-Cookie", "a"),
        ("Set-Cookie", "b"),
        ("X-Request-Id", "ours"),
    ]


@pytest.mark.parametrize("handle", ["s2.a", None, 7, ""])
def test_a_handle_of_the_prefill_node_vouches_for_its_address_later(handle) -> None:
    handed = {"remote_host": "10.0.0.1", "remote_port": 5600, "remote_engine_id": "P"}
    channel = bodies.side_channel({**handed, "kvconnect_handle": handle})
    assert channel is not None
    assert channel == bodies.side_channel({**handed, "kvconnect_handle": "s2.b"}), "it is no other place"
    told = bodies.announced_decode("t", channel)
    assert told.get("kvconnect_peer") == (handle if handle == "s2.a" else None)
    assert "kvconnect_handle" not in told, "that would be what is fetched"
