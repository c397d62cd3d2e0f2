"""Child processes: started together, polled over HTTP until they answer, and ended in every case."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from kvconnect.errors import KVConnectError, PeerError

_READY = re.compile(r"^kvconnect (?:node|router) ready on (http://\S+)", re.MULTILINE)
START_TIMEOUT_S = 120.0
_TERM_GRACE_S = 5.0
_POLLED_EACH_S = 0.5
_PR_SET_PDEATHSIG = 1

# The command of a child: this interpreter's package, not a "kvconnect" on the PATH.
COMMAND = (sys.executable, "-m", "kvconnect")
# Several children share a machine, and their logs are read while they run.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}

# The children are on this machine: no proxy of the environment may be used.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ChildFailed(KVConnectError):
    """A child ended early or was not ready in time. The text holds the end of its log."""


class BadAnswer(PeerError):
    """A server answered with an error, or not at all."""


def fetch(
    url: str,
    body: Mapping[str, Any] | None = None,
    timeout_s: float = 60.0,
    headers: Mapping[str, str] = MappingProxyType({}),
) -> bytes:
    """GET ``url``, or POST ``body`` to it as JSON.

    Raises ``BadAnswer`` for no answer, or a status other than 200; its text has the beginning of the body.
    """
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json", **headers})
    try:
        with _opener.open(request, timeout=timeout_s) as answer:
            return bytes(answer.read())
    except urllib.error.HTTPError as error:
        text = error.read(500).decode(errors="replace")
        raise BadAnswer(f"{url} answered {error.code}: {text}") from error
    except OSError as error:
        raise BadAnswer(f"{url} gave no answer: {error}") from error


def fetch_json(
    url: str,
    body: Mapping[str, Any] | None = None,
    timeout_s: float = 60.0,
    headers: Mapping[str, str] = MappingProxyType({}),
) -> Any:
    """``fetch`` with the JSON parsed. Raises ``BadAnswer``: no answer, an error, or no JSON."""
    raw = fetch(url, body, timeout_s, headers)
    try:
        return json.loads(raw)
    except ValueError as error:
        raise BadAnswer(f"{url} answered something that is not JSON: {raw[:200]!r}") from error


def answers(url: str, timeout_s: float = 5.0) -> bool:
    """Whether a URL answers with 200."""
    try:
        fetch(url, timeout_s=timeout_s)
    except BadAnswer:
        return False
    return True


Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]
"""Metrics: (name, sorted labels) -> value."""


def parse_metrics(text: str) -> Samples:
    """Parse Prometheus' text format."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def read_metrics(url: str) -> Samples:
    """The metrics of a child."""
    return parse_metrics(fetch(url + "/metrics").decode())


def growth(before: Samples, after: Samples, name: str, **labels: str) -> float:
    """The growth of a counter, summed over all samples that carry ``labels``."""
    return sum(
        value - before.get((sample, pairs), 0.0)
        for (sample, pairs), value in after.items()
        if sample == name and labels.items() <= dict(pairs).items()
    )


class Child:
    """A process in its own process group, which may be started again once it has ended.

    Output is appended to ``log``; None: to this process's. ``environment`` changes variables; None removes
    one. ``url`` is the child's base URL, which a ``kvconnect`` child prints.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path | None = None,
        environment: Mapping[str, str | None] | None = None,
        url: str = "",
        **popen: Any,
    ) -> None:
        self.name = name
        self.command = command
        self.log = log
        self.url = url
        # An object with ``poll`` and ``wait`` as of ``subprocess.Popen``.
        self.process: Any = None
        # Also the id of its process group.
        self.pid = 0
        self._environment = {**os.environ, **(environment or {})}
        self._popen = popen
        self._log_start = 0
        self._is_asked = False

    def start(self) -> Child:
        """Start the process, and return at once."""
        if self.log is not None:
            self.log.touch()
            self._log_start = self.log.stat().st_size
        self._is_asked = False
        self.process = self._spawn()
        self.pid = self.process.pid
        return self

    def _spawn(self) -> Any:
        with contextlib.ExitStack() as opened:
            out = None if self.log is None else opened.enter_context(self.log.open("ab"))
            files = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out}
            return subprocess.Popen(
                self.command,
                env={name: value for name, value in self._environment.items() if value is not None},
                preexec_fn=functools.partial(_begin, os.getpid()),
                **{**files, **self._popen},
            )

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> str:
        """The URL that a ``kvconnect`` process serves, once it is ready; raises as ``wait_until`` does."""
        self.wait_until(lambda: bool(_READY.findall(self.output())), timeout_s)
        self.url = _READY.findall(self.output())[0]
        return self.url

    def wait_answer(self, path: str, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until ``path`` is answered with 200; raises as ``wait_until`` does."""
        self.wait_until(lambda: answers(self.url + path, timeout_s=2.0), timeout_s)

    def wait_until(self, is_ready: Callable[[], bool], timeout_s: float) -> None:
        """Poll ``is_ready``. Raises ``ChildFailed`` if the child ends or the time is over."""
        deadline = time.monotonic() + timeout_s
        while not is_ready():
            self.check(" before it was ready")
            if time.monotonic() > deadline:
                raise ChildFailed(f"{self.name} was not ready in time\n{self.tail()}")
            time.sleep(0.02)

    def check(self, when: str = "") -> None:
        """Raise ``ChildFailed`` if the child has ended by itself."""
        if (code := self.exit_code()) is not None:
            why = "; it was killed, perhaps since memory ran out" if code == -signal.SIGKILL else ""
            raise ChildFailed(f"{self.name} ended with code {code}{when}{why}\n{self.tail()}")

    def exit_code(self) -> int | None:
        """The exit code; None while the child runs."""
        code: int | None = self.process.poll()
        return code

    def output(self) -> str:
        """The output since the last start."""
        return "" if self.log is None else self.log.read_bytes()[self._log_start :].decode(errors="replace")

    def tail(self, lines: int = 30) -> str:
        """The last lines of the log, for an error report."""
        return "\n".join([f"--- end of the log of {self.name} ---", *self.output().splitlines()[-lines:]])

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the whole process group, if there is one."""
        if self.pid:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def ask_to_end(self) -> None:
        """SIGTERM to the whole group, once: a second one ends a node at once."""
        if not self._is_asked:
            self._is_asked = True
            self.send(signal.SIGTERM)

    def end(self, grace_s: float) -> int:
        """SIGTERM, and SIGKILL after ``grace_s``. Returns the exit code. Idempotent."""
        if self.process is None:
            return 0
        self.ask_to_end()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, grace_s))
        return self.kill()

    def kill(self) -> int:
        """SIGKILL to the whole group, which may outlive its leader. Returns the exit code."""
        self.send(signal.SIGKILL)
        code: int = self.process.wait()
        return code


class Children:
    """All children started within a ``with`` block, which ends them on exit."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._all: list[Child] = []

    def __enter__(self) -> Children:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def start(self, name: str, *arguments: str) -> Child:
        """Start ``kvconnect ARGUMENTS`` and return at once."""
        return self.add(Child(name, [*COMMAND, *arguments], self._folder / f"{name}.log", ENVIRONMENT))

    def add(self, child: Child) -> Child:
        """Start a child and return at once."""
        # First of all, so that a child is ended even if an interrupt comes while it is being started.
        self._all.append(child)
        return child.start()

    def check(self) -> None:
        """Raise ``ChildFailed`` if a child has ended by itself."""
        for child in self._all:
            child.check()

    def wait_for_an_end(self) -> None:
        """Wait until a child ends by itself, which raises ``ChildFailed``."""
        while True:
            self.check()
            time.sleep(_POLLED_EACH_S)

    def tails(self) -> str:
        """The last lines of all logs."""
        return "\n".join(child.tail() for child in self._all)

    def end(self, grace_s: float = _TERM_GRACE_S) -> None:
        """End all: SIGTERM to each, then SIGKILL to those that still run."""
        for child in self._all:
            child.ask_to_end()
        deadline = time.monotonic() + grace_s
        for child in self._all:
            child.end(deadline - time.monotonic())
        self._all.clear()


_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def die_with_parent(number: signal.Signals = signal.SIGTERM, parent: int = 0) -> None:
    """Called in a child: let the kernel signal it when its parent is gone and cannot end it.

    With the ``parent``'s process id the child ends at once if the parent ended before this call.
    """
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, number)
        if parent and os.getppid() != parent:
            os._exit(1)


def _begin(parent: int) -> None:
    # Not a session of its own: Linux would schedule each child as one unit, and a child that spins would keep
    # all threads of another child on the same cores from running.
    os.setpgid(0, 0)
    die_with_parent(parent=parent)
    # The parent may have blocked signals while it forks, which a program that is executed would inherit.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
