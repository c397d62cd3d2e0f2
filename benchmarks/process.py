"""One side of a pair in a process of its own, and the parent's handle on it.

A child that fails, dies or hangs becomes a ``StepFailed`` in the parent.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import subprocess
import sys
import time
import traceback
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from typing import Any

from kvconnect.errors import KVConnectError
from kvconnect.node.children import Child

_END_S = 10.0
_GRACE_S = 5.0


class StepFailed(KVConnectError):
    """A child did not do what it was asked. The text names the child, the step and the reason."""


class Side:
    """What runs in a child: its methods are the steps that the parent may ask for.

    ``idle_pause_s`` is how long to wait for the next step before ``idle`` is called, None for ever; ``ends``
    is what ends with it.
    """

    idle_pause_s: float | None = None

    def __init__(self) -> None:
        self.ends = ExitStack()

    def idle(self) -> None:
        """Called while no step is asked for."""


class ChildProcess:
    """A process with one side in it.

    Args:
        name: what errors call it.
        side: ``module:class`` of a ``Side`` that is made without arguments.
        timeout_s: how long a step may take. Children are given the same bound and a little less time
            than the parent, so that their own errors arrive.
    """

    def __init__(self, name: str, side: str, timeout_s: float) -> None:
        self.name = name
        self._timeout_s = timeout_s
        self._step = "start"
        self._pipe, far_end = multiprocessing.Pipe()
        code = f"from {__name__} import serve; serve({far_end.fileno()}, {side!r})"
        # It finds what we find.
        found = {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        command = [sys.executable, "-c", code]
        self._child = Child(name, command, environment=found, pass_fds=[far_end.fileno()]).start()
        # With our copy closed, the end of the child is the end of the pipe.
        far_end.close()

    def begin(self, step: str, *arguments: Any) -> None:
        """Ask for a step, and do not wait. Raises StepFailed: the child is gone."""
        self._step = step
        try:
            self._pipe.send((step, arguments))
        except OSError as error:
            raise StepFailed(self._ended()) from error

    def answer(self) -> Any:
        """Wait for the step that was begun, and return what it returned.

        Raises:
            StepFailed: it failed, the child died, or the time is over.
        """
        try:
            if not self._pipe.poll(self._timeout_s + _GRACE_S):
                raise StepFailed(f"{self.name}: step {self._step!r} took more than {self._timeout_s:g} s")
            done, value = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise StepFailed(self._ended()) from error
        if not done:
            raise StepFailed(f"{self.name}: step {self._step!r} failed: {value}")
        return value

    def ask(self, step: str, *arguments: Any) -> Any:
        self.begin(step, *arguments)
        return self.answer()

    def end(self, grace_s: float) -> None:
        with suppress(OSError):
            self._pipe.send(None)
        with suppress(subprocess.TimeoutExpired):
            self._child.process.wait(grace_s)
        self._child.kill()
        self._pipe.close()

    @property
    def died(self) -> str:
        """How it ended, empty while it runs."""
        code = self._child.exit_code()
        return "" if code is None else f"{self.name}: the process ended with code {code}"

    def _ended(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._child.process.wait(_GRACE_S)
        return f"{self.died or self.name + ': its pipe is closed'} in step {self._step!r}"


class ChildPair:
    """A prefill and a decode child; leaving the ``with`` block ends both in every case."""

    def __init__(self, side: str, timeout_s: float) -> None:
        self.prefill = ChildProcess("prefill", side, timeout_s)
        self.decode = ChildProcess("decode", side, timeout_s)

    def __enter__(self) -> ChildPair:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        died = [child.died for child in (self.prefill, self.decode) if child.died]
        # After a failure no child is waited for: one that hangs would only cost time.
        until = time.monotonic() + (_END_S if error is None else 0.0)
        # One after the other: the one that fetches would report the end of the other as a loss.
        for child in (self.decode, self.prefill):
            child.end(max(0.0, until - time.monotonic()))
        if isinstance(error, StepFailed) and died and died[0] not in str(error):
            # What one child complains of may be the other's end.
            raise type(error)(f"{error}; {died[0]}") from error

    def both(self, step: str, prefill: tuple[Any, ...], decode: tuple[Any, ...]) -> tuple[Any, Any]:
        """Ask both for a step at the same time. Raises StepFailed: one of them did not do it."""
        self.prefill.begin(step, *prefill)
        self.decode.begin(step, *decode)
        return self.prefill.answer(), self.decode.answer()


def serve(descriptor: int, side: str) -> None:
    """In a child: take the steps of a side that come over a pipe, until it ends."""
    pipe = Connection(descriptor)
    made: Side | None = None
    problem = ""
    with ExitStack() as ends, suppress(EOFError, OSError):
        try:
            module, _, attribute = side.partition(":")
            made = getattr(importlib.import_module(module), attribute)()
            ends.enter_context(made.ends)
        except Exception as error:
            problem = _describe(error)
        while True:
            while made is not None and not pipe.poll(made.idle_pause_s):
                made.idle()
            if (asked := pipe.recv()) is None:
                break
            try:
                answer = (False, problem) if made is None else (True, getattr(made, asked[0])(*asked[1]))
            except Exception as error:
                answer = (False, _describe(error))
            pipe.send(answer)


def _describe(error: Exception) -> str:
    """One line for what we raise on purpose, and where it came from for everything else."""
    if isinstance(error, KVConnectError):
        return f"{type(error).__name__}: {error}"
    return "".join(traceback.format_exception(error)).rstrip()
