"""The front's process: waits for the engine's first message, then serves HTTP until it is told to stop.

It imports no tensor library, and its imports are done while the engine's process builds a model. The engine's
process is its only reason to live: it ends with it, however that ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import resource
import signal
import socket
import sys
from dataclasses import replace

from kvconnect.node.front.limits import FrontLimits
from kvconnect.node.front.link import LinkPort
from kvconnect.node.front.messages import Frames, Hello
from kvconnect.node.server import NodeServer

_PR_SET_PDEATHSIG = 1
_MOST_SOCKETS = 16
_GREETING_BYTES = 1 << 16
_LAST_ANSWERS_S = 1.0
_OTHER_FILES = 64


def main() -> None:
    """Serve the process that ``sys.argv`` names, over the file descriptor that it names."""
    link_fd, parent = int(sys.argv[1]), int(sys.argv[2])
    # A terminal's Ctrl-C and a supervisor's SIGTERM go to both processes: the engine's says what follows.
    ignored = (signal.SIGINT, signal.SIGTERM)
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ignored)
    _die_with(parent)
    link = socket.socket(fileno=link_fd)
    greeted = _greeting(link)
    if greeted is None:
        return
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    asyncio.run(_serve(link, *greeted, _bounded_by_files(FrontLimits())))


def _die_with(parent: int) -> None:
    """Be killed when the engine's process ends, also where we do not look at the link."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def _greeting(link: socket.socket) -> tuple[Hello, list[socket.socket]] | None:
    """The first message and the sockets that came with it. None: there is nobody to serve."""
    frames = Frames(Hello)
    fds: list[int] = []
    while True:
        data, more, _flags, _address = socket.recv_fds(link, _GREETING_BYTES, _MOST_SOCKETS)
        fds += more
        if not data:
            return None
        if found := frames.feed(data):
            return found[0], [socket.socket(fileno=fd) for fd in fds]


def _bounded_by_files(limits: FrontLimits) -> FrontLimits:
    """As many connections as the system lets this process have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = limits.max_connections + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return replace(limits, max_connections=max(1, soft - _OTHER_FILES))
    return limits


async def _serve(
    link: socket.socket, hello: Hello, sockets: list[socket.socket], limits: FrontLimits
) -> None:
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    # There is nothing to bring to an end: who computed the answers is gone.
    port = LinkPort(hello.info, on_lost=lambda: None if stopping.is_set() else os._exit(1))
    server = NodeServer(port, limits)
    port.on_refuse = server.refuse
    port.on_stop = stopping.set
    transport, _ = await loop.create_unix_connection(lambda: port, sock=link)
    await server.start_on(sockets)
    # What is here now stays.
    gc.collect()
    gc.freeze()
    port.listening()
    await stopping.wait()
    await server.stop(_LAST_ANSWERS_S)
    transport.close()
