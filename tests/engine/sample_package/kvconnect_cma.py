"""A transfer engine for CPU memory of one machine, over Linux's cross memory attach.

One system call copies into the memory of another process of the same user, which takes no part in it. So a
batch is copied as a whole within ``poll``, and its memory is quiescent at its end. Unlike an RDMA card, the
kernel does not know what is registered: the sender checks a batch against the peer's card, which it has to
believe, and which the peer's ``unregister`` does not revoke.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from kvconnect.engine.adapter import Adapter, Flight, decode_card, range_problem
from kvconnect.engine.base import Batch, Capabilities, Completion, Span, SpanSet
from kvconnect.engine.lanes import Transport
from kvconnect.errors import ConfigError, EngineError

_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)


class CmaCard(msgspec.Struct, tag="kvconnect-cma-1", frozen=True):
    """A process, by values that no later process has, and its registered memory."""

    machine: str
    pid: int
    started: str
    spans: list[Span]


class _Peer(NamedTuple):
    pid: int
    started: str
    spans: SpanSet


class _Piece(ctypes.Structure):
    """The kernel's ``iovec``."""

    _fields_ = (("address", ctypes.c_void_p), ("length_bytes", ctypes.c_size_t))


class CmaEngine(Adapter):
    """See ``kvconnect.engine.base.Engine``.

    Raises:
        ConfigError: a protocol is named, and it has none.
        EngineError: the kernel or its sandbox does not let processes write to each other.
    """

    def __init__(self, host: str = "127.0.0.1", protocol: str = "auto", *, max_bytes: int = 16 << 20) -> None:
        if protocol != "auto":
            raise ConfigError(f"protocol is {protocol!r}: the cma engine has none, leave it at 'auto'")
        super().__init__(
            Capabilities(
                "cma",
                max_bytes,
                max_batches_per_peer=8,
                target_must_poll=False,
                lane="cma",
                carries=Transport("shared_memory"),
            )
        )
        self._libc = self._load()
        # Yama lets only a parent write to its child, unless the child allows more. Without Yama this fails.
        self._libc.prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)
        # Each PID namespace, such as a container's, has numbers of its own.
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        self._machine = f"{boot} {os.readlink('/proc/self/ns/pid')}"

    @staticmethod
    def _load() -> Any:
        libc = ctypes.CDLL(None, use_errno=True)
        if not hasattr(libc, "process_vm_writev"):
            raise EngineError("this system has no process_vm_writev: use another engine")
        libc.process_vm_writev.restype = ctypes.c_ssize_t
        pieces = (ctypes.POINTER(_Piece), ctypes.c_ulong)
        libc.process_vm_writev.argtypes = (ctypes.c_int, *pieces, *pieces, ctypes.c_ulong)
        byte = ctypes.c_char()
        if problem := _write(libc, os.getpid(), ctypes.addressof(byte), ctypes.addressof(byte), 1):
            raise EngineError(f"{problem}: give the container the capability SYS_PTRACE")
        return libc

    def register(self, spans: Sequence[Span]) -> None:
        self._check_open()
        for span in spans:
            if span.device != "cpu":
                raise EngineError(f"the cma engine moves CPU memory, not {span.device}")
        self._spans.add(spans)

    def unregister(self, spans: Sequence[Span]) -> None:
        self._spans.remove(spans)

    def card(self) -> bytes:
        self._check_open()
        pid = os.getpid()
        return msgspec.msgpack.encode(CmaCard(self._machine, pid, _started(pid), [*self._spans]))

    def connect(self, peer: str, card: bytes) -> None:
        self._check_open()
        theirs = decode_card(card, CmaCard, "cma")
        if theirs.machine != self._machine:
            raise EngineError(f"peer {peer!r} is not of this machine and PID namespace: use another engine")
        spans = SpanSet()
        spans.add(theirs.spans)
        if peer in self._peers and self._peers[peer][:2] != (theirs.pid, theirs.started):
            self.disconnect(peer)
        self._peers[peer] = _Peer(theirs.pid, theirs.started, spans)

    def submit(self, batch: Batch) -> None:
        self._admit(batch)
        self._flights[batch.batch_id] = Flight(batch=batch, submitted_at=self._clock())

    def poll(self) -> list[Completion]:
        for flight in list(self._flights.values()):
            is_late = self._clock() >= flight.deadline
            self._answer(flight, flight.overdue if is_late else self._copy(flight.batch))
        return self._take_finished()

    def _copy(self, batch: Batch) -> str:
        """Copy a batch; returns the error, empty on success."""
        pid, started, spans = self._peers[batch.peer]
        if problem := range_problem(batch, self._spans, spans):
            return problem
        if _started(pid) != started:
            return f"the process of peer {batch.peer!r}, {pid}, has ended"
        return _write(self._libc, pid, batch.source, batch.target, batch.total_bytes)

    def _end_early(self, flight: Flight, error: str) -> None:
        self._answer(flight, error)


def _write(libc: Any, pid: int, source: int, target: int, length_bytes: int) -> str:
    """Copy into a process; returns the error, empty on success."""
    here, there = _Piece(source, length_bytes), _Piece(target, length_bytes)
    done = libc.process_vm_writev(pid, here, 1, there, 1, 0)
    if done == length_bytes:
        return ""
    why = os.strerror(ctypes.get_errno()) if done < 0 else f"{done} of {length_bytes} bytes were copied"
    return f"process_vm_writev to process {pid} failed: {why}"


def _started(pid: int) -> str:
    """When a process started, in the kernel's ticks since boot; empty if there is none."""
    try:
        # The name of the program is in brackets, and may have any characters.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""
