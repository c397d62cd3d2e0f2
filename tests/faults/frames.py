"""What an attacker sends: garbage, broken framing, and mutations of what was recorded. Pure and seeded.

Nothing here is written for one version of the messages: a recorded frame is taken apart as MessagePack or
JSON, and any of its values is replaced.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Sequence
from typing import Any

import msgspec

_EDGES: tuple[Any, ...] = (
    *(0, 1, -1, 127, 128, 255, 256, 2**31 - 1, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**64 - 1, -(2**63)),
    *(0.0, -0.0, 1e308, float("inf"), float("-inf"), float("nan")),
    *(None, True, False, "", "x", "a" * 600, "\x00", "../../etc/passwd", "127.0.0.1", "\u2028"),
    *(b"", b"\xff" * 64, [], {}, [[]], [None] * 300, {"": {}}, [[[[[[[[]]]]]]]]),
)
_LONG = 0x02
_MORE = 0x01
COMMAND = 0x04


# ZeroMQ's framing


def greeting(mechanism: bytes = b"NULL") -> bytes:
    """The 64 bytes that begin a connection."""
    signature = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00"
    return signature + mechanism.ljust(20, b"\0")[:20] + bytes(32)


def zmq_frame(payload: bytes, *, more: bool = False, command: bool = False) -> bytes:
    flags = _MORE * more | COMMAND * command
    if len(payload) > 255:
        return bytes([flags | _LONG]) + struct.pack(">Q", len(payload)) + payload
    return bytes([flags, len(payload)]) + payload


def ready(socket_type: bytes = b"DEALER", identity: bytes = b"") -> bytes:
    """The command with which a connection without security becomes ready."""
    body = b"\x05READY"
    for name, value in ((b"Socket-Type", socket_type), (b"Identity", identity)):
        body += bytes([len(name)]) + name + struct.pack(">I", len(value)) + value
    return zmq_frame(body, command=True)


def split_frames(stream: bytes) -> tuple[list[tuple[int, bytes]], bytes]:
    """Flags and bodies of the complete frames in what follows a greeting, and what is left."""
    found: list[tuple[int, bytes]] = []
    at = 0
    while at + 2 <= len(stream):
        begin, flags = at, stream[at]
        if flags & _LONG:
            if at + 9 > len(stream):
                break
            (length,) = struct.unpack_from(">Q", stream, at + 1)
            at += 9
        else:
            length = stream[at + 1]
            at += 2
        if at + length > len(stream):
            return found, stream[begin:]
        found.append((flags, stream[at : at + length]))
        at += length
    return found, stream[at:]


def parse_messages(stream: bytes) -> list[bytes]:
    """The messages of one part in a recorded connection."""
    return [body for flags, body in split_frames(stream[64:])[0] if not flags & (COMMAND | _MORE)]


def broken_framing(rng: random.Random) -> bytes:
    """The bytes of a connection whose framing is wrong somewhere."""
    hello = greeting() + ready()
    cut = bytearray(hello)
    cut[rng.randrange(len(cut))] = rng.randrange(256)
    handshake = rng.choice((b"\x05HELLO", b"\x08INITIATE")) + rng.randbytes(rng.randrange(300))
    choices = (
        rng.randbytes(rng.randrange(1, 400)),
        greeting(rng.randbytes(20)) + rng.randbytes(50),
        hello + bytes([_LONG]) + struct.pack(">Q", rng.choice((2**63, 2**64 - 1, 2**31, 1 << 40))),
        hello + zmq_frame(b"x", more=True) * rng.randrange(1, 200),
        hello + zmq_frame(rng.randbytes(rng.randrange(200)), command=True),
        greeting() + ready(rng.choice((b"PUB", b"REQ", b"", b"ROUTER" * 30))),
        greeting() + ready(identity=rng.choice((b"\0", b"x" * 255, b"x" * 4000, b"same"))),
        greeting(rng.choice((b"CURVE", b"PLAIN", b"GSSAPI"))) + zmq_frame(handshake, command=True),
        hello + bytes([rng.randrange(256)]) + rng.randbytes(rng.randrange(1, 100)),
        bytes(cut[: rng.randrange(1, len(cut) + 1)]),
    )
    return rng.choice(choices)


# Payloads


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """The same bytes with some of them flipped, cut out, doubled or replaced."""
    made = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(made) + 1)
        match rng.randrange(5):
            case 0 if made:
                made[at % len(made)] ^= 1 << rng.randrange(8)
            case 1:
                del made[at : at + rng.randrange(1, 20)]
            case 2:
                made[at:at] = made[at : at + 20]
            case 3:
                made[at:at] = rng.randbytes(rng.randrange(1, 9))
            case _:
                del made[at:]
    return bytes(made)


def mutate_value(value: Any, rng: random.Random) -> Any:
    """The same value with one part, at any depth, replaced, dropped or doubled."""
    if isinstance(value, list) and value and rng.random() < 0.8:
        made = list(value)
        at = rng.randrange(len(made))
        match rng.randrange(8):
            case 0:
                del made[at]
            case 1:
                made.insert(at, made[at])
            case _:
                made[at] = mutate_value(made[at], rng)
        return made
    if isinstance(value, dict) and value and rng.random() < 0.8:
        key = rng.choice(list(value))
        changed = dict(value)
        if rng.random() < 0.15:
            del changed[key]
        else:
            changed[key] = mutate_value(value[key], rng)
        return changed
    if isinstance(value, int) and not isinstance(value, bool) and rng.random() < 0.5:
        return value + rng.choice((-1, 1, 7, -4096, 4096))
    if isinstance(value, str) and value and rng.random() < 0.5:
        at = rng.randrange(len(value))
        return value[:at] + chr(rng.randrange(32, 127)) + value[at + 1 :]
    return rng.choice(_EDGES)


def mutate_message(frame: bytes, rng: random.Random) -> bytes:
    """A recorded message with something wrong, in its bytes or in its values; or as it was, out of place."""
    chosen = rng.random()
    if chosen < 0.1:
        return frame
    if chosen < 0.4:
        return mutate_bytes(frame, rng)
    try:
        value = msgspec.msgpack.decode(frame)
        for _ in range(rng.randrange(1, 3)):
            value = mutate_value(value, rng)
        return msgspec.msgpack.encode(value)
    except (msgspec.MsgspecError, OverflowError, RecursionError, ValueError, TypeError):
        return mutate_bytes(frame, rng)


def deep_message(depth: int) -> bytes:
    """Lists in lists."""
    return b"\x91" * depth + b"\x90"


# HTTP


def http_request(body: bytes) -> bytes:
    """A POST of ``body`` over a connection that is kept."""
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Connection: keep-alive\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def broken_http(rng: random.Random) -> bytes:
    """The bytes of a connection that is no proper request."""
    choices = (
        rng.randbytes(rng.randrange(1, 500)),
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n",
        b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\n" + b"".join(b"X-%d: y\r\n" % i for i in range(2000)) + b"\r\n",
        b"GET /health HTTP/1.1\r\nX: " + b"z" * 100_000 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nX-Request-Id: " + rng.randbytes(30) + b"\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(200),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + rng.randbytes(40),
    )
    return rng.choice(choices)


def json_bomb(rng: random.Random) -> bytes:
    """A body that is expensive, deep or not quite JSON."""
    deep = rng.randrange(100, 50_000)
    choices = (
        b"[" * deep,
        b'{"a":' * deep + b"1" + b"}" * deep,
        b'{"prompt": [' + b"1," * 50_000 + b"1]}",
        b'{"prompt": ' + b"9" * 5_000 + b"}",
        b'{"prompt": [1e999, NaN, -Infinity]}',
        b'{"prompt": "\\ud800", "max_tokens": 1}',
        b'{"prompt": [1], "kv_transfer_params": ' + b'{"a":' * 900 + b"1" + b"}" * 900 + b"}",
        b'{"prompt": [1], "kv_transfer_params": [' + b"{}," * 20_000 + b"{}]}",
        b"\xff\xfe" + rng.randbytes(100),
        b"null",
        b'"' + b"\\u0000" * 10_000 + b'"',
    )
    return rng.choice(choices)


def mutate_body(body: Any, rng: random.Random) -> bytes:
    """A JSON body with something wrong."""
    for _ in range(rng.randrange(1, 3)):
        body = mutate_value(body, rng)
    return json.dumps(body, default=lambda value: repr(value)).encode()


def mutate_params(body: Any, params: Sequence[Any], rng: random.Random) -> bytes:
    """A request whose transfer parameters are those of another, mutated, or of no use."""
    chosen = rng.choice(params) if params else {}
    mutated = mutate_value(chosen, rng) if rng.random() < 0.8 else chosen
    return json.dumps({**body, "kv_transfer_params": mutated}, default=lambda value: repr(value)).encode()
