"""Which process a peer is, and whether a process of this host has ended."""

from __future__ import annotations

import os

import msgspec


class ProcessIdentity(msgspec.Struct, frozen=True):
    """One process of one boot of one host, never mistaken for a later process of the same pid."""

    host: str
    pid: int
    started: str


def own_identity() -> ProcessIdentity:
    """The identity of this process."""
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
    """This boot of this host and the pid namespace; empty where /proc has neither."""
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
