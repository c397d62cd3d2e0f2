"""A peer engine in a process of its own, and the parent's handle on it.

Owns the process, its buffers and the small command pipe. It must not know what a test checks.
The child polls its engine between commands, so an engine whose target must poll is served.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from kvconnect.engine.base import Engine, Span

MakeEngine = Callable[[], Engine]

_POLL_EVERY_S = 0.0002
_ANSWER_S = 30.0


class PeerCommands:
    """What a peer does with its engine and buffers. Raises what the engine raises."""

    def __init__(self, make_engine: MakeEngine) -> None:
        self._make_engine = make_engine
        self.engine = make_engine()
        self._buffers: dict[str, np.ndarray] = {}

    def allocate(self, name: str, length_bytes: int, seed: int | None = None) -> int:
        """Make a buffer, of zeros or of random bytes; returns its address."""
        zeros = np.zeros(length_bytes, dtype=np.uint8)
        self._buffers[name] = zeros if seed is None else random_bytes(length_bytes, seed)
        return span_of(self._buffers[name]).address

    def register(self, name: str) -> None:
        self.engine.register([span_of(self._buffers[name])])

    def card(self) -> bytes:
        return self.engine.card()

    def content(self, name: str) -> np.ndarray:
        """A copy of a whole buffer."""
        return self._buffers[name].copy()

    def restart_engine(self) -> None:
        """Close the engine and make a new one over the same buffers; nothing is registered."""
        self.engine.close()
        self.engine = self._make_engine()


class PeerProcess:
    """``PeerCommands`` in a process that has loaded no engine, each by its name. Calls wait for the answer.

    ``make_engine`` is a function of a module that the child can import.
    """

    def __init__(self, make_engine: MakeEngine) -> None:
        # The process that forks has imported what takes most of a start; the environment is that of now.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.engine.engine_suite", "kvconnect.engine.registry", "torch"])
        self._pipe, child_end = context.Pipe()
        given = child_end, make_engine, dict(os.environ)
        self._process = context.Process(target=_serve, args=given, daemon=True)
        self._process.start()
        child_end.close()
        self.card()

    def __getattr__(self, command: str) -> Callable[..., Any]:
        if command.startswith("_"):
            raise AttributeError(command)
        return functools.partial(self._ask, command)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """End the process without any farewell, and wait until it has ended."""
        os.kill(self.pid, signal.SIGKILL)
        self._process.join()

    def close(self) -> None:
        with suppress(OSError):
            self.resume()
        with suppress(OSError, EOFError):
            self._pipe.send(("quit", (), {}))
        self._process.join(timeout=3.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(timeout=3.0)
        self._pipe.close()

    def _ask(self, command: str, *arguments: Any, **named: Any) -> Any:
        self._pipe.send((command, arguments, named))
        if not self._pipe.poll(_ANSWER_S):
            raise TimeoutError(f"the peer process did not answer {command!r} in {_ANSWER_S:g} s")
        ok, value = self._pipe.recv()
        if not ok:
            raise value
        return value


def _serve(pipe: Connection, make_engine: MakeEngine, environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    child = PeerCommands(make_engine)
    while True:
        child.engine.poll()
        if not pipe.poll(_POLL_EVERY_S):
            continue
        try:
            command, arguments, named = pipe.recv()
        except EOFError:
            break
        if command == "quit":
            break
        try:
            answer = (True, getattr(child, command)(*arguments, **named))
        except Exception as error:
            answer = (False, error)
        pipe.send(answer)
    child.engine.close()


def span_of(buffer: np.ndarray, offset: int = 0, length_bytes: int | None = None) -> Span:
    """A part of a buffer, or memory beside it; left out, all of it."""
    return Span(buffer.ctypes.data + offset, buffer.nbytes if length_bytes is None else length_bytes, "cpu")


def random_bytes(length_bytes: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, length_bytes, dtype=np.uint8)


def wait_until(condition: Callable[[], bool], bound_s: float, every_s: float = 0.001) -> bool:
    """Wait for a condition; whether it came true within ``bound_s``."""
    until = time.monotonic() + bound_s
    while not condition():
        if time.monotonic() >= until:
            return False
        time.sleep(every_s)
    return True
