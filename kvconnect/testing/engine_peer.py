"""A peer engine in a process of its own, and the parent's handle on it.

Owns the process, its buffers and the small command pipe. It must not know what a test checks.
The child polls its engine between commands, so an engine whose target must poll is served.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from kvconnect.engine.base import Engine, Span
from kvconnect.testing.engine_buffers import Allocate, Buffer, on_host, part

MakeEngine = Callable[[], Engine]
Range = tuple[str, int, int]  # buffer name, offset, length in bytes

_POLL_EVERY_S = 0.0002
_ANSWER_S = 30.0


class PeerProcess:
    """An engine that runs in a spawned process. Every call waits for the child's answer.

    Args:
        make_engine: a function of a module that the child can import.
        allocate: another one, which says where the child's buffers lie.
    """

    def __init__(self, make_engine: MakeEngine, allocate: Allocate = on_host) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, child_end = context.Pipe()
        self._process = context.Process(target=_serve, args=(child_end, make_engine, allocate), daemon=True)
        self._process.start()
        child_end.close()
        self.card()

    @property
    def pid(self) -> int:
        """The child's process id."""
        assert self._process.pid is not None
        return self._process.pid

    def allocate(self, name: str, length_bytes: int, seed: int | None = None) -> int:
        """Make a buffer, of zeros or of random bytes; returns its address."""
        return int(self._ask("allocate", name, length_bytes, seed))

    def register(self, ranges: Sequence[Range]) -> None:
        """Register parts of buffers. Raises what the child's engine raised."""
        self._ask("register", list(ranges))

    def unregister(self, ranges: Sequence[Range]) -> None:
        """Unregister parts of buffers. Raises what the child's engine raised."""
        self._ask("unregister", list(ranges))

    def card(self) -> bytes:
        """The card of the child's engine."""
        return bytes(self._ask("card"))

    def content(self, name: str) -> np.ndarray:
        """A copy of a whole buffer."""
        return np.frombuffer(self._ask("content", name), dtype=np.uint8)

    def count(self, name: str, value: int) -> int:
        """How many bytes of a buffer have this value."""
        return int(self._ask("count", name, value))

    def digest(self, name: str) -> str:
        """A hash of a whole buffer."""
        return str(self._ask("digest", name))

    def restart_engine(self) -> None:
        """Close the child's engine and make a new one over the same buffers; nothing is registered."""
        self._ask("restart")

    def renew_registration(self) -> bool:
        """Have the child's engine keep out peers that know only the cards that it gave out before."""
        return bool(self._ask("renew"))

    def stop(self) -> None:
        """Freeze the process; undone by ``resume``."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let a frozen process go on."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """End the process without any farewell, and wait until it has ended. It is not reaped yet."""
        os.kill(self.pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)

    def close(self) -> None:
        """End the process, by force if it does not go."""
        with suppress(OSError):
            self.resume()
        with suppress(OSError, EOFError):
            self._pipe.send(("quit", ()))
        self._process.join(timeout=3.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(timeout=3.0)
        self._pipe.close()

    def _ask(self, command: str, *arguments: Any) -> Any:
        self._pipe.send((command, arguments))
        if not self._pipe.poll(_ANSWER_S):
            raise TimeoutError(f"the peer process did not answer {command!r} in {_ANSWER_S:g} s")
        ok, value = self._pipe.recv()
        if not ok:
            raise value
        return value


class PeerCommands:
    """What a peer does with its engine and buffers, by the names of ``PeerProcess``'s commands."""

    def __init__(self, make_engine: MakeEngine, allocate: Allocate) -> None:
        self._make_engine = make_engine
        self._allocate = allocate
        self.engine = make_engine()
        self._buffers: dict[str, Buffer] = {}

    def allocate(self, name: str, length_bytes: int, seed: int | None) -> int:
        zeros = np.zeros(length_bytes, dtype=np.uint8)
        content = zeros if seed is None else random_bytes(length_bytes, seed)
        self._buffers[name] = self._allocate(content)
        return self._buffers[name].address

    def register(self, ranges: Sequence[Range]) -> None:
        self.engine.register(self._spans(ranges))

    def unregister(self, ranges: Sequence[Range]) -> None:
        self.engine.unregister(self._spans(ranges))

    def card(self) -> bytes:
        return self.engine.card()

    def content(self, name: str) -> bytes:
        return self._buffers[name].read().tobytes()

    def count(self, name: str, value: int) -> int:
        return int(np.count_nonzero(self._buffers[name].read() == value))

    def digest(self, name: str) -> str:
        return digest_of(self._buffers[name].read())

    def restart(self) -> None:
        self.engine.close()
        self.engine = self._make_engine()

    def renew(self) -> bool:
        return self.engine.renew_registration()

    def _spans(self, ranges: Sequence[Range]) -> list[Span]:
        return [part(self._buffers[name], offset, length) for name, offset, length in ranges]


def _serve(pipe: Connection, make_engine: MakeEngine, allocate: Allocate) -> None:
    child = PeerCommands(make_engine, allocate)
    while True:
        child.engine.poll()
        if not pipe.poll(_POLL_EVERY_S):
            continue
        try:
            command, arguments = pipe.recv()
        except EOFError:
            break
        if command == "quit":
            break
        try:
            answer = (True, getattr(child, command)(*arguments))
        except Exception as error:
            answer = (False, error)
        pipe.send(answer)
    child.engine.close()


def random_bytes(length_bytes: int, seed: int) -> np.ndarray:
    """Reproducible random bytes."""
    return np.random.default_rng(seed).integers(0, 256, length_bytes, dtype=np.uint8)


def digest_of(buffer: np.ndarray) -> str:
    """The hash that ``PeerProcess.digest`` compares with."""
    return hashlib.blake2b(buffer.tobytes(), digest_size=16).hexdigest()


def wait_until(condition: Callable[[], bool], bound_s: float, every_s: float = 0.001) -> bool:
    """Wait for a condition; whether it came true within ``bound_s``."""
    until = time.monotonic() + bound_s
    while not condition():
        if time.monotonic() >= until:
            return False
        time.sleep(every_s)
    return True
