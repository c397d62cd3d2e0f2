"""What each leg is sent, as a function of what the client sent."""

from __future__ import annotations

import json

import pytest

from kvconnect.router import bodies
from kvconnect.router.bodies import BadBody


def test_the_prefill_leg_asks_for_one_token_and_for_its_kv_cache() -> None:
    body = {
        "model": "m",
        "prompt": [1, 2],
        "max_tokens": 50,
        "n": 4,
        "best_of": 5,
        "min_tokens": 10,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.0,
    }
    assert bodies.prefill_body(body) == {
        "model": "m",
        "prompt": [1, 2],
        "max_tokens": 1,
        "stream": False,
        "temperature": 0.0,
        "kv_transfer_params": {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        },
    }
    assert body["max_tokens"] == 50, "the client's body is not changed"
    assert bodies.prefill_body({"max_completion_tokens": 9})["max_completion_tokens"] == 1
    assert "max_completion_tokens" not in bodies.prefill_body({})


def test_the_decode_leg_is_the_clients_with_the_params_verbatim() -> None:
    body = {"prompt": "x", "max_tokens": 5, "min_tokens": 2, "stream": True}
    params = {"remote_port": 1, "anything": [None, {"a": 1.5}]}
    assert bodies.decode_body(body, params) == {**body, "kv_transfer_params": params}
    assert bodies.decode_body(body, None) == body


@pytest.mark.parametrize("params", [{"remote_host": "evil"}, {}, None, 5, "x", [1]])
def test_a_client_cannot_bring_transfer_params(params: object) -> None:
    raw = json.dumps({"prompt": "x", "kv_transfer_params": params}).encode()
    assert bodies.parse_body(raw) == {"prompt": "x"}


def test_what_a_client_asks_for_its_session_reaches_both_nodes_untouched() -> None:
    hints = {"kv_hints": {"actions": [1, {"a": None}]}, "session_id": "s"}
    given = {"prompt": "x", "kv_hints": 1, "kv_transfer_params": {**hints, "remote_host": "evil"}}
    body = bodies.parse_body(json.dumps(given).encode())
    assert body == {"prompt": "x", "kv_hints": 1, "kv_transfer_params": hints}
    prefill = bodies.prefill_body(body)["kv_transfer_params"]
    assert prefill == {**hints, **bodies.ASK_FOR_REMOTE_DECODE}
    handed = {"remote_host": "P", "kv_hints": "P's own"}
    assert bodies.decode_body(body, handed)["kv_transfer_params"] == {**hints, **handed}
    assert bodies.decode_body(body, None)["kv_transfer_params"] == hints


@pytest.mark.parametrize("raw", [b"", b"{", b"[1]", b'"x"', b"\xff\xfe", b"[" * 100_000, b"null"])
def test_a_body_that_is_no_object_is_refused(raw: bytes) -> None:
    with pytest.raises(BadBody, match="request body"):
        bodies.parse_body(raw)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"prompt": "x"}, None),
        ({"prompt": [1, 2, 3], "n": 1}, None),
        ({"prompt": ["x"]}, None),
        ({"prompt": [[1, 2]]}, None),
        ({"prompt": "x", "n": 2}, None),
        ({"prompt": "x", "best_of": 3}, None),
        ({"prompt": "x", "use_beam_search": True}, "beam_search"),
        ({"prompt": ["x", "y"]}, None),
        ({"prompt": [[1], [2]]}, None),
        ({"prompt": "x", "prompt_logprobs": 0}, "prompt_logprobs"),
        ({"prompt": "x", "echo": True, "logprobs": 1}, "prompt_logprobs"),
        ({"prompt": "x", "echo": True}, None),
    ],
)
def test_which_requests_go_straight_to_decode(body: dict, reason: str | None) -> None:
    assert (bodies.direct_reason(body) or (None,))[0] == reason


def test_headers_of_one_connection_stay_on_it() -> None:
    pairs = [
        ("Connection", "keep-alive, X-Mine"),
        ("X-Mine", "1"),
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


@pytest.mark.parametrize(
    ("given", "is_kept"),
    [("", False), ("a b", False), ("x" * 513, False), ("ü", False), ("mine-1", True), ("x" * 512, True)],
)
def test_an_unfit_request_id_is_replaced(given: str, is_kept: bool) -> None:
    made = bodies.request_id_of({"X-Request-Id": given})
    assert (made == given) is is_kept
    assert is_kept or len(made) == 32


@pytest.mark.parametrize("handle", ["s2.a", None, 7, ""])
def test_a_handle_of_the_prefill_node_vouches_for_its_address_later(handle) -> None:
    handed = {"remote_host": "10.0.0.1", "remote_port": 5600, "remote_engine_id": "P"}
    channel = bodies.side_channel({**handed, "kvconnect_handle": handle})
    assert channel is not None
    assert channel == bodies.side_channel({**handed, "kvconnect_handle": "s2.b"}), "it is no other place"
    told = bodies.announced_decode("t", channel)
    assert told.get("kvconnect_peer") == (handle if handle == "s2.a" else None)
    assert "kvconnect_handle" not in told, "that would be what is fetched"
