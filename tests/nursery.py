"""Starts processes of one program quickly, so that hundreds of them can be killed and begun anew.

A process that has imported everything waits and forks: what comes out runs the same command line as the
program does, in a group of its own, with a log file and, if asked for, in a network namespace. Nothing is
shared with a process that was started before.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from kvconnect.errors import KVConnectError
from kvconnect.node.children import COMMAND, ENVIRONMENT, Child, die_with_parent

if TYPE_CHECKING:
    import pytest

_MODULE = "tests.nursery"
_CLONE_NEWNET = 0x40000000
_CLONE_NEWNS = 0x00020000
_MS_REC = 0x4000
_MS_SLAVE = 1 << 19
_END_TIMEOUT_S = 20.0


class Forked:
    """A process of a nursery, as ``Child`` wants one. The kernel reaps it: its exit code is what it wrote in
    the file ``code``, and one that was killed wrote nothing."""

    def __init__(self, pid: int, code: Path) -> None:
        self.pid = pid
        self._code = code

    def poll(self) -> int | None:
        """None while it runs. Stopped ones do."""
        if is_running(self.pid):
            return None
        return int(self._code.read_text()) if self._code.exists() else -signal.SIGKILL

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it is no more, and its ports are free."""
        deadline = time.monotonic() + (_END_TIMEOUT_S if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", _END_TIMEOUT_S)
            time.sleep(0.002)
        return code


class Nursery:
    """The process that forks.

    ``program`` is the module whose ``main`` is run, ``imported`` are others that it needs. ``environment`` is
    what they read when they are imported.
    """

    def __init__(
        self, program: str, *imported: str, environment: Mapping[str, str | None] = ENVIRONMENT
    ) -> None:
        command = [sys.executable, "-m", _MODULE, program, *imported]
        pipe = subprocess.PIPE
        self._child = Child("nursery", command, environment=environment, text=True, stdin=pipe, stdout=pipe)
        self._child.start()
        self._process = cast("subprocess.Popen[str]", self._child.process)

    def start(
        self,
        arguments: Sequence[str],
        log: Path,
        *,
        environment: Mapping[str, str | None],
        namespace: str = "",
        before: str = "",
    ) -> Forked:
        """Run the program with its output appended to ``log``, and return at once.

        ``before`` is Python that the process runs before the program. ``namespace`` names a network
        namespace, if not ours. ``environment`` is what the environment of that process alone differs by; None
        takes a variable away.

        Raises:
            KVConnectError: the nursery ended.
        """
        code = log.with_name(log.name + ".code")
        code.unlink(missing_ok=True)
        order = {
            "arguments": list(arguments),
            "log": str(log),
            "code_file": str(code),
            "namespace": namespace,
            "environment": dict(environment),
            "before": before,
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            print(json.dumps(order), file=self._process.stdin, flush=True)
            answer = self._process.stdout.readline()
        except OSError as error:
            raise KVConnectError(f"the process that forks is gone: {error}") from error
        if not answer:
            raise KVConnectError("the process that forks ended")
        return Forked(int(answer), code)

    def end(self) -> None:
        """End it. What it started is killed by the kernel with it."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_TIMEOUT_S)
        self._child.kill()


NODES = (
    "kvconnect.cli",
    "kvconnect.node.serving",
    "kvconnect.router.app",
    "kvconnect.halves.scheduler_half",
    "kvconnect.halves.worker_half",
)
"""The program of nodes and routers, and what these import: most of the time of a start."""


@functools.cache
def nodes_nursery() -> Nursery:
    """The nursery of nodes and routers of this process, which ends with it."""
    return Nursery(*NODES)


@contextlib.contextmanager
def nodes_forked(before: str = "") -> Iterator[None]:
    """Nodes and routers that are started as ``Children`` are forked meanwhile, and run ``before`` first."""
    spawn = Child._spawn

    def fork(child: Child) -> Any:
        command = tuple(child.command)
        if command[: len(COMMAND)] != COMMAND or child.log is None or child._popen:
            return spawn(child)
        arguments, given = command[len(COMMAND) :], child._environment
        return nodes_nursery().start(arguments, child.log, environment=given, before=before)

    Child._spawn = fork  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        Child._spawn = spawn  # type: ignore[method-assign]


@contextlib.contextmanager
def with_nursery(servers: Any, program: str, environment: Mapping[str, str | None]) -> Iterator[None]:
    """A class of servers has a ``nursery`` meanwhile, which forks those of this interpreter."""
    servers.nursery = Nursery(program, environment=environment)
    try:
        yield
    finally:
        servers.nursery.end()
        servers.nursery = None


def forked_while_asked(request: pytest.FixtureRequest, servers: str) -> Iterator[None]:
    """A session's fixture: if its tests start servers, the module ``servers`` has them ``forked`` meanwhile.

    That module is named, since tests are also collected where the stack that it imports is not installed.
    """
    if not any(item.get_closest_marker("servers") for item in request.session.items):
        yield
        return
    with importlib.import_module(servers).forked():
        yield


def is_running(pid: int) -> bool:
    """Whether a process of a nursery still runs. Stopped ones do."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _serve(program: str, *imported: str) -> None:
    """The nursery itself: one order a line, answered with a process id."""
    # What is imported may print something of its own.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for name in imported:
        importlib.import_module(name)
    main = importlib.import_module(program).main
    # What was imported is garbage of nobody: no collection has to look at it.
    gc.freeze()
    die_with_parent(signal.SIGKILL)
    # Whatever ends is reaped by the kernel.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    parent = os.getpid()
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            answers.close()
            _become(main, parent, [program, *order.pop("arguments")], **order)
        print(pid, file=answers, flush=True)
    os._exit(0)


def _become(
    main: Callable[[], object],
    parent: int,
    argv: list[str],
    log: str,
    code_file: str,
    namespace: str,
    environment: Mapping[str, str | None],
    before: str,
) -> None:
    """In the child: be the program. Never returns."""
    code = 70
    try:
        die_with_parent(signal.SIGKILL, parent)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setpgid(0, 0)
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (out, 1), (out, 2)):
            os.dup2(source, target)
        for name, value in environment.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        if namespace:
            _enter(namespace)
        sys.argv = argv
        exec(before, {})
        main()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            Path(code_file).write_text(str(code))
        # Engines' libraries may stumble over an interpreter's end; a server that has ended needs none.
        os._exit(code)


def _enter(namespace: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as file:
        done = libc.setns(file.fileno(), _CLONE_NEWNET) == 0
    # UCX reads in /sys which interfaces there are, so it must be the namespace's own.
    done = done and libc.unshare(_CLONE_NEWNS) == 0
    done = done and libc.mount(b"none", b"/", None, _MS_REC | _MS_SLAVE, None) == 0
    done = done and libc.mount(b"sysfs", b"/sys", b"sysfs", 0, None) == 0
    if not done:
        raise OSError(ctypes.get_errno(), f"cannot enter network namespace {namespace}")


if __name__ == "__main__":
    _serve(*sys.argv[1:])
