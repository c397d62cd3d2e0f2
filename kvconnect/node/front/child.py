"""Starts a front's process, and ends it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import kvconnect
from kvconnect.node.front.messages import Hello, encode_frame

_PROGRAM = """\
import sys
sys.path[:] = [{root!r}, *filter(None, sys.path)]
import kvconnect
del sys.path[0]
from kvconnect.node.front.process import main
main()
"""
"""This package and no other, and nothing from whatever folder the node was started in."""


class FrontProcess:
    """A front that waits to be greeted. Make it on the main thread: the kernel ends it with its thread.

    ``link`` is our end of the socket pair that is all it has of us; whoever serves it closes it.
    """

    def __init__(self) -> None:
        self.link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        program = _PROGRAM.format(root=str(Path(kvconnect.__file__).parents[1]))
        # Held back until it ignores them: both may come while it starts.
        held = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", program, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )
        except BaseException:
            self.link.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, held)
            theirs.close()

    def greet(self, hello: Hello, fds: Sequence[int]) -> None:
        """Say what it serves, and hand it the listening sockets.

        Raises:
            OSError: it has ended.
        """
        socket.send_fds(self.link, [encode_frame(hello)], list(fds))

    def end(self, timeout_s: float = 0.0) -> int:
        """Wait so long for it to end, then kill it. Returns its exit code, negative for a signal."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()
