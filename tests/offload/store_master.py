"""A Mooncake Store master of a test's own: on free ports, and gone when the test is over."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

from tests.ports import free_port

_BINARY = "mooncake_master"
_READY_S = 30.0


def master_binary() -> Path | None:
    """The program as the library's package brings it, or None."""
    found = importlib.util.find_spec("mooncake")
    if found is None or found.origin is None:
        return None
    path = Path(found.origin).parent / _BINARY
    return path if os.access(path, os.X_OK) else None


class StoreMaster:
    """A running master; a context manager. ``address`` is its ``host:port``.

    Args:
        port: where it shall listen; 0 for a free port.
    """

    def __init__(self, port: int = 0) -> None:
        binary = master_binary()
        if binary is None:
            raise FileNotFoundError(f"no {_BINARY}: pip install kvconnect[mooncake-cpu]")
        self.port = port or free_port()
        self.address = f"127.0.0.1:{self.port}"
        self._process = subprocess.Popen(
            [str(binary), f"--rpc_port={self.port}", f"--metrics_port={free_port()}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            self._wait_ready()
        except BaseException:
            self.kill()
            raise

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + _READY_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError as error:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"{_BINARY} did not begin to listen: {error}") from error
                time.sleep(0.02)

    def hang(self) -> None:
        """Have it answer no client, and keep its connections."""
        self._process.send_signal(signal.SIGSTOP)
        # The signal is under way until the last of its threads has stopped: one of them could still answer.
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def kill(self) -> None:
        """End it at once. Idempotent."""
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> StoreMaster:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
