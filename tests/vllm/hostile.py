"""What hostile frames do to the side channel of a vLLM server: ``python -m tests.vllm.hostile --help``.

The same frames for every connector. After each number of them an honest peer asks, and it is written down
whether it is answered, and whether the server calls itself healthy.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import zmq

from kvconnect.node.children import answers
from tests.faults import frames
from tests.ports import free_port
from tests.vllm.servers import NIXL_CONNECTOR, Server, members, running, transfer_config
from tests.vllm.tiny_models import write_model

CONNECTORS = ("NixlConnector", "kvconnect")
STEPS = (1, 10, 100, 1000, 10_000)
_HANDSHAKE = msgspec.msgpack.encode([b"get_meta_msg", 0, 0])
"""What a peer of NixlConnector asks for: the card of one rank."""
_ANSWER_S = 5.0


def _configured(connector: str, port: int) -> tuple[dict[str, Any], dict[str, str]]:
    if connector == "NixlConnector":
        return NIXL_CONNECTOR, {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port),
        }
    return transfer_config("both", "nixl", port=port, insecure=True), {}


def _is_answered(connector: str, port: int) -> bool:
    context = zmq.Context()
    peer = context.socket(zmq.DEALER)
    peer.setsockopt(zmq.LINGER, 0)
    try:
        peer.connect(f"tcp://127.0.0.1:{port}")
        # A peer of another version is answered, too: with a refusal.
        parts = [b"", _HANDSHAKE] if connector == "NixlConnector" else [msgspec.msgpack.encode(["alive"])]
        peer.send_multipart(parts)
        return bool(peer.poll(int(_ANSWER_S * 1000)))
    finally:
        peer.close()
        context.term()


def _send(port: int, count: int, rng: random.Random, well_framed: bool) -> int:
    """Send so many frames, some a connection. Returns how many the kernel took."""
    sent = 0
    while sent < count:
        made = [frames.broken_framing(rng)]
        if well_framed:
            made = [frames.greeting() + frames.ready()]
            for _ in range(min(20, count - sent)):
                payload = frames.zmq_frame(frames.mutate_message(_HANDSHAKE, rng))
                made.append(frames.zmq_frame(b"", more=True) + payload)
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=2.0) as one:
            for frame in made:
                one.sendall(frame)
            one.settimeout(0.01)
            one.recv(65536)
        sent += max(1, len(made) - 1)
    return sent


def _memory_mb(server: Server) -> int:
    pages = 0
    for pid in members(server):
        with contextlib.suppress(OSError):
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096 >> 20


def measure(connector: str, folder: Path, seed: int) -> dict[str, Any]:
    """One server, and ever more frames until an honest peer hears nothing any more."""
    port = free_port()
    config, environment = _configured(connector, port)
    recipe = write_model("gqa", folder)
    server = Server(recipe, folder, connector, "0", config, environment=environment)
    rng = random.Random(seed)
    with running(server):
        rows = [{"frames": 0, "answered": _is_answered(connector, port), "memory_mb": _memory_mb(server)}]
        total = 0
        for well_framed in (False, True):
            for step in STEPS:
                started = time.monotonic()
                total += _send(port, step, rng, well_framed)
                rows.append(
                    {
                        "frames": total,
                        "framing": "good" if well_framed else "broken",
                        "seconds": round(time.monotonic() - started, 1),
                        "answered": _is_answered(connector, port),
                        "healthy": answers(server.url + "/health"),
                        "memory_mb": _memory_mb(server),
                    }
                )
                if not rows[-1]["answered"]:
                    break
        rows.append({"generates": bool(server.tokens([1, 2, 3])), "healthy": answers(server.url + "/health")})
        log = server.log.read_text(errors="replace")
        ended = [
            line[-300:] for line in log.splitlines() if "Exception in thread" in line or "Error:" in line
        ]
    return {"connector": connector, "rows": rows, "log": ended[:5]}


def main() -> None:
    """Measure the connectors named, one server at a time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connector", action="append", choices=CONNECTORS)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    for connector in arguments.connector or CONNECTORS:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(measure(connector, Path(folder), arguments.seed)), flush=True)


if __name__ == "__main__":
    main()
