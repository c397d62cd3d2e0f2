"""The parent's side of the store process: starts it, sends it orders with a timeout, and kills it.

Each lane, a socket pair, belongs to one thread, and carries one order at a time. The shared memory belongs
to the parent: after ``kill``, which waits for the child's end, no other process accesses it. A frame on a
lane is a length and an encoded message. This module must not know the library.
"""

from __future__ import annotations

import contextlib
import enum
import mmap
import os
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from kvconnect.errors import EngineError

_MODULE = "kvconnect.engine.mooncake_store"
_LAST_WORDS_BYTES = 1000
_LENGTH = struct.Struct("<I")
# Bounds the keys or codes of one order; a receiver fails on a longer frame.
_MAX_FRAME_BYTES = 64 << 20

M = TypeVar("M", bound=msgspec.Struct)


class Verb(str, enum.Enum):
    """The operations of a store."""

    PUT = "put"
    GET = "get"
    EXIST = "exist"
    REMOVE = "remove"
    CLEAR = "clear"
    CLOSE = "close"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a store process. ``StoreProcess`` fills in ``parent``, ``memory`` and ``lanes``.

    ``segment_bytes`` of the child's memory become part of the store. ``parent`` is a pid; ``memory`` and
    ``lanes`` are descriptors that the child inherits.
    """

    master: str
    metadata: str
    protocol: str
    host: str
    segment_bytes: int
    parent: int = 0
    memory: int = -1
    lanes: tuple[int, ...] = ()


class Order(msgspec.Struct, frozen=True, array_like=True):
    """One order. ``offsets`` and ``lengths``, in bytes, locate each key's value in the shared memory."""

    verb: Verb
    keys: tuple[str, ...] = ()
    offsets: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()


class StoreAnswer(msgspec.Struct, frozen=True, array_like=True):
    """The result of an order: the library's code for each key, or an error. Also sent once after set-up."""

    codes: tuple[int, ...]
    error: str = ""


class StoreMemory:
    """Memory that can be shared with a child process. ``view`` is writable."""

    def __init__(self, length_bytes: int) -> None:
        self.descriptor = os.memfd_create("kvconnect-store", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.descriptor, length_bytes)
            self.view = memoryview(mmap.mmap(self.descriptor, length_bytes))
        except BaseException:
            os.close(self.descriptor)
            raise

    def close(self) -> None:
        """Close the descriptor, but not the mapping behind ``view``. Idempotent."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class StoreProcess:
    """A child process with a store. Up to ``num_lanes`` threads send it orders; values are in ``memory``.

    The thread that makes it must outlive it: the system kills the child when that thread ends. Raises
    ``EngineError``: the process cannot be started, or its store cannot be set up.
    """

    def __init__(
        self, settings: Settings, memory: StoreMemory, num_lanes: int, *, start_timeout_s: float = 20.0
    ) -> None:
        pairs = [socket.socketpair() for _ in range(num_lanes)]
        self._lanes = [ours for ours, _ in pairs]
        theirs = [other for _, other in pairs]
        inherited = (memory.descriptor, *(lane.fileno() for lane in theirs))
        settings = msgspec.structs.replace(
            settings, parent=os.getpid(), memory=inherited[0], lanes=inherited[1:]
        )
        self._kill_lock = threading.Lock()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _MODULE, msgspec.json.encode(settings).decode()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env=_environment(),
                pass_fds=inherited,
            )
        except OSError as error:
            self._close_files()
            raise EngineError(f"a process for the store could not be started: {error}") from error
        finally:
            for lane in theirs:
                lane.close()
        try:
            for index in range(num_lanes):
                self._answer(index, start_timeout_s)
        except EngineError:
            self.kill()
            raise

    def ask(self, lane: int, order: Order, timeout_s: float) -> Sequence[int]:
        """Send an order and wait for its answer. Raises ``EngineError``; the caller must then ``kill``."""
        try:
            self._lanes[lane].settimeout(timeout_s)
            send(self._lanes[lane], order)
        except OSError as error:
            raise EngineError(f"the store's process does not take orders: {error}") from error
        codes = self._answer(lane, timeout_s)
        if order.keys and len(codes) != len(order.keys):
            raise EngineError(f"the store answered {len(codes)} codes for {len(order.keys)} keys")
        return codes

    def _answer(self, lane: int, timeout_s: float) -> Sequence[int]:
        try:
            self._lanes[lane].settimeout(timeout_s)
            answer = receive(self._lanes[lane], StoreAnswer)
        except TimeoutError as error:
            raise EngineError(f"the store's process did not answer within {timeout_s} s") from error
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            raise EngineError(f"the store's process broke off: {error}") from error
        if answer is None:
            raise EngineError(f"the store's process ended; its output ends: {self._last_words()}")
        if answer.error:
            raise EngineError(answer.error)
        return answer.codes

    def kill(self) -> None:
        """Kill the child, and wait for its end. May be called from any thread; idempotent."""
        with self._kill_lock:
            self._process.kill()
            self._process.wait()
            for lane in self._lanes:
                # The lane may be shut down already.
                with contextlib.suppress(OSError):
                    lane.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Kill the child, and close the lanes and the log. No thread may use a lane any more."""
        self.kill()
        self._close_files()

    def _close_files(self) -> None:
        for lane in self._lanes:
            lane.close()
        self._log.close()

    def _last_words(self) -> str:
        with contextlib.suppress(OSError, ValueError):
            size = os.fstat(self._log.fileno()).st_size
            found = os.pread(self._log.fileno(), _LAST_WORDS_BYTES, max(0, size - _LAST_WORDS_BYTES))
            return found.decode(errors="replace").strip() or "nothing"
        return ""


def _environment() -> dict[str, str]:
    """This process's environment, with a ``PYTHONPATH`` by which the child finds this package."""
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "OMP_NUM_THREADS": "1"}


def send(lane: socket.socket, message: msgspec.Struct) -> None:
    """Send a message as one frame. Raises ``OSError``."""
    data = msgspec.msgpack.encode(message)
    lane.sendall(_LENGTH.pack(len(data)) + data)


def receive(lane: socket.socket, kind: type[M]) -> M | None:
    """The next message, or None if the other end is closed.

    Raises ``OSError``: nothing came within the lane's timeout. Raises ``ValueError``: the frame is too long,
    or not of this ``kind``.
    """
    head = _exactly(lane, _LENGTH.size)
    if head is None:
        return None
    (length,) = _LENGTH.unpack(head)
    if length > _MAX_FRAME_BYTES:
        raise ValueError(f"a message of {length} bytes; accepted: up to {_MAX_FRAME_BYTES}")
    body = _exactly(lane, length)
    return None if body is None else msgspec.msgpack.decode(body, type=kind)


def _exactly(lane: socket.socket, length: int) -> bytes | None:
    found = bytearray()
    while len(found) < length:
        part = lane.recv(length - len(found))
        if not part:
            return None
        found += part
    return bytes(found)
