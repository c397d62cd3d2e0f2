"""Whether an address of this machine can be listened on. Only looks."""

from __future__ import annotations

import errno
import socket
from dataclasses import dataclass


@dataclass(frozen=True)
class PortState:
    """``taken``: something listens there. ``problem``: why nothing of ours ever can."""

    taken: bool = False
    problem: str = ""


def look_at_port(host: str, port: int) -> PortState:
    """Try to listen as a node would, for a moment; on any port where it is 0."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as tried:
            # As ZeroMQ does: what only waits for its time to pass is not in the way.
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(address)
            tried.listen(1)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return PortState(taken=True)
        return PortState(problem=error.strerror or str(error))
    return PortState()
