"""Shared memory: memory of one process that other processes of the same user and machine can map.

With caches in CPU memory, P packs directly into the landing slots of a D on the same machine, without an
engine. The memory is a sealed memfd: it has no name in a file system, cannot shrink under a process that has
mapped it, and is freed with the last process that uses it. A peer opens it through the owner's descriptors
in ``/proc``, and verifies it by a nonce from the owner's introduction.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import mmap
import os
import secrets
import stat
import time
import weakref
from pathlib import Path
from typing import Annotated

import msgspec

from kvconnect.errors import PeerError

_NAME = "kvconnect"
_NONCE_BYTES = 16
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_LEAST_PIECE_BYTES = 4096
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)

Short = Annotated[str, msgspec.Meta(max_length=256)]


class SharedMemoryCard(msgspec.Struct, frozen=True, array_like=True):
    """How a peer on the same machine finds shared memory: as file ``descriptor`` of process ``pid``.

    ``machine`` names the boot and the pid namespace in which ``pid`` is valid. ``address`` is the address in
    the owner's process. ``length_bytes`` excludes the ``nonce``, which lies after these bytes.
    """

    machine: Short
    pid: Annotated[int, msgspec.Meta(gt=0, lt=2**31)]
    descriptor: Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
    nonce: Annotated[bytes, msgspec.Meta(min_length=_NONCE_BYTES, max_length=_NONCE_BYTES)]
    address: Annotated[int, msgspec.Meta(gt=0, lt=2**62)]
    length_bytes: Annotated[int, msgspec.Meta(gt=0, lt=2**62)]


@functools.cache
def this_machine() -> str:
    """The boot id of this machine and the pid namespace of this process; empty if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


class SharedMemory:
    """Zeroed memory of this process that peers on this machine can map by its ``card``.

    Raises ``OSError``: the system has no memfd, or not enough memory.
    """

    def __init__(self, length_bytes: int) -> None:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        self._descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._descriptor, length_bytes + _NONCE_BYTES)
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, _SEALS)
            # Populated now: the first touch of a page during a request would cost more than the copy.
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            self.memory = mmap.mmap(self._descriptor, length_bytes + _NONCE_BYTES, flags)
        except BaseException:
            os.close(self._descriptor)
            raise
        self.memory[length_bytes:] = nonce
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.card = SharedMemoryCard(
            this_machine(), os.getpid(), self._descriptor, nonce, address, length_bytes
        )

    def __del__(self) -> None:
        # Processes that have mapped the memory keep it.
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)


def _map(descriptor: int, length_bytes: int) -> int:
    """Map a whole file, and populate the page table. Returns the address. Raises ``OSError``.

    Not with ``mmap.mmap``, which holds the interpreter's lock meanwhile: 45 ms for 256 MiB.
    """
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | mmap.MAP_POPULATE
    address: int = _LIBC.mmap(None, length_bytes, protection, flags, descriptor, 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return address


class MappedMemory:
    """Memory of a peer, mapped here.

    Raises ``PeerError``: the memory does not match its card, or cannot be opened, as that of another user.
    """

    def __init__(self, card: SharedMemoryCard) -> None:
        self._card = card
        path, length_bytes = f"/proc/{card.pid}/fd/{card.descriptor}", card.length_bytes + _NONCE_BYTES
        try:
            # A peer's card may name any file of any process: only a memfd of this package is opened.
            if not os.readlink(path).startswith(f"/memfd:{_NAME}") or not stat.S_ISREG(os.stat(path).st_mode):
                raise PeerError(f"{path} is no shared memory")
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                # Without the seal the file could shrink under a write, which would kill this process.
                if (
                    fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS
                    or os.fstat(descriptor).st_size != length_bytes
                ):
                    raise PeerError(f"{path} is not sealed memory of {length_bytes} bytes")
                self._base = _map(descriptor, length_bytes)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise PeerError(f"{path} cannot be mapped: {error}") from error
        # Not at exit: a thread may still write there.
        weakref.finalize(self, _LIBC.munmap, self._base, length_bytes).atexit = False
        if not secrets.compare_digest(
            ctypes.string_at(self._base + card.length_bytes, _NONCE_BYTES), card.nonce
        ):
            raise PeerError(f"{path} is memory of another process")

    def at(self, address: int, length_bytes: int) -> int:
        """The address in this process of ``length_bytes`` that the peer has at ``address``.

        Raises:
            PeerError: not all of these bytes are in this memory.
        """
        first = address - self._card.address
        if length_bytes < 0 or first < 0 or first + length_bytes > self._card.length_bytes:
            raise PeerError(
                f"{length_bytes} bytes at {address:#x} are named, the peer's slots are the "
                f"{self._card.length_bytes} bytes at {self._card.address:#x}"
            )
        return self._base + first

    def copy_bytes_per_s(self, source: int, target: int, length_bytes: int) -> float:
        """The best rate of three copies from this process's memory to the peer's; 0 below 4096 bytes.

        Raises:
            PeerError: ``target`` is not in this memory.
        """
        if length_bytes < _LEAST_PIECE_BYTES:
            return 0.0
        place, seconds = self.at(target, length_bytes), []
        for _ in range(3):
            start = time.perf_counter()
            ctypes.memmove(place, source, length_bytes)
            seconds.append(time.perf_counter() - start)
        return length_bytes / max(min(seconds), 1e-9)
