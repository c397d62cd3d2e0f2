"""Who a process is, and whether another one of this host still runs: so cheaply that every batch can ask."""

from __future__ import annotations

import logging
import os
import select

import msgspec

log = logging.getLogger("kvconnect.engine")


class ProcessIdentity(msgspec.Struct, frozen=True):
    """One process of one boot of one host, never mistaken for a later process of the same pid."""

    host: str
    pid: int
    started: str


def own_identity() -> ProcessIdentity:
    """Who this process is."""
    return ProcessIdentity(_host_identity(), os.getpid(), _start_time(os.getpid()) or "")


def is_dead(process: ProcessIdentity) -> bool:
    """Whether the process is proven to be gone, and its memory with it.

    Only a process of this host and pid namespace can be proven dead. A zombie counts: its memory is
    released before its sockets are, long before it is reaped.
    """
    if not process.host or process.host != _host_identity():
        return False
    return _start_time(process.pid) != process.started


def _host_identity() -> str:
    """This boot of this host and the pid namespace; empty where the system does not say."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _start_time(pid: int) -> str | None:
    """When a process started, in the system's ticks; None if it is gone or a zombie."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            # The name is in parentheses and may hold anything, so read from its last one on.
            fields = file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else fields[19]


class ProcessWatch:
    """An eye on one process of this host and pid namespace.

    A file descriptor of the process becomes readable when it ends, which takes a microsecond to ask. Where
    the system has none, its entry in /proc is read each time.
    """

    def __init__(self, process: ProcessIdentity) -> None:
        self._process = process
        self._gone = False
        self._poll: select.poll | None = None
        self._descriptor = -1
        try:
            self._descriptor = os.pidfd_open(process.pid)
        except (OSError, OverflowError) as error:
            log.debug("process %d has no descriptor: %s", process.pid, error)
        else:
            self._poll = select.poll()
            self._poll.register(self._descriptor, select.POLLIN)
        # Asked after it was opened, so that the descriptor is not of a later process with this number.
        self._gone = is_dead(process)

    @property
    def gone(self) -> bool:
        """The process has ended, and it will not come back."""
        if not self._gone:
            self._gone = bool(self._poll.poll(0)) if self._poll is not None else is_dead(self._process)
        return self._gone

    def close(self) -> None:
        """Release the descriptor. Idempotent."""
        self._poll = None
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
