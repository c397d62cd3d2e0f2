"""Ports for servers that a test starts."""

from __future__ import annotations

import os
import random
import socket

# Below the ports that a system gives to connections, and above those that Mooncake takes. A port that the
# system chose may belong to a connection by the time at which its server starts.
_PORTS = range(21_000, 32_000)
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    # Others look for ports at the same time, and theirs are free until a server has started.
    _PORTS = _PORTS[int(worker.removeprefix("gw")) :: int(os.environ["PYTEST_XDIST_WORKER_COUNT"])]
_RANDOM = random.SystemRandom()
_taken: set[int] = set()


def free_port() -> int:
    """A port that nothing listens on now, and that was not given before in this process."""
    while True:
        port = _RANDOM.choice(_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("0.0.0.0", port))
            except OSError:
                continue
        if port not in _taken:
            _taken.add(port)
            return port
