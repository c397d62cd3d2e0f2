"""The demo's child processes: started together, waited for, and ended in every case.

Each runs in a process group of its own and writes to a log file of its own. Knows command lines and
nothing of what the processes do.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from kvconnect.errors import KVConnectError

_READY = re.compile(r"^kvconnect (?:node|router) ready on (http://\S+)", re.MULTILINE)
_TERM_GRACE_S = 5.0

# What a child runs. This interpreter, and not whatever "kvconnect" the PATH names.
COMMAND = (sys.executable, "-m", "kvconnect")


class ChildFailed(KVConnectError):
    """A child ended early or was not ready in time. The text holds the end of its log."""


class Child:
    """One ``kvconnect`` process."""

    def __init__(self, name: str, arguments: Sequence[str], folder: Path) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self.url = ""
        with self.log.open("wb") as out:
            self._process = subprocess.Popen(
                [*COMMAND, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        # Its group's too.
        self.pid = self._process.pid

    def wait_ready(self, deadline: float) -> str:
        """The URL it serves, once it is ready; ``deadline`` is on the monotonic clock.

        Raises:
            ChildFailed: it ended, or the deadline passed.
        """
        while not (found := _READY.search(self.log.read_text(errors="replace"))):
            if (code := self.exit_code()) is not None:
                raise ChildFailed(f"{self.name} ended with code {code} before it was ready\n{self.tail()}")
            if time.monotonic() > deadline:
                raise ChildFailed(f"{self.name} was not ready in time\n{self.tail()}")
            time.sleep(0.05)
        self.url = found[1]
        return self.url

    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def tail(self, lines: int = 30) -> str:
        """The end of its log, for an error report."""
        text = self.log.read_text(errors="replace").splitlines()[-lines:]
        return "\n".join([f"--- end of the log of {self.name} ---", *text])

    def ask_to_end(self) -> None:
        """SIGTERM to the whole group."""
        self._signal(signal.SIGTERM)

    def end(self, deadline: float) -> None:
        """Wait until the deadline, then SIGKILL to the whole group. Idempotent."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, deadline - time.monotonic()))
        # The group may outlive its leader.
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)


class Children:
    """Everything that was started within a ``with`` block; leaving it ends all of it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._all: list[Child] = []

    def __enter__(self) -> Children:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def start(self, name: str, *arguments: str) -> Child:
        """Start ``kvconnect ARGUMENTS`` and return at once."""
        child = Child(name, arguments, self._folder)
        self._all.append(child)
        return child

    def tails(self) -> str:
        """The ends of all logs."""
        return "\n".join(child.tail() for child in self._all)

    def end(self) -> None:
        """End all: SIGTERM to every one, then SIGKILL to what is left."""
        for child in self._all:
            child.ask_to_end()
        deadline = time.monotonic() + _TERM_GRACE_S
        for child in self._all:
            child.end(deadline)
        self._all.clear()


_libc = ctypes.CDLL(None) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1


def _die_with_parent() -> None:
    """In the child, before it becomes kvconnect: end too if the demo itself is killed."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
