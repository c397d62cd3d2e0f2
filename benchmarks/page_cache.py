"""What the operating system keeps of files in memory: drop it, and see how much of it is left."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)


def drop_pages(folder: Path) -> None:
    """Ask the system to forget what it keeps of all files below a folder, once that is on the disk."""
    for path in _files(folder):
        with _opened(path) as handle:
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)


def resident_share(folder: Path) -> float | None:
    """Which part of the bytes below a folder is in memory, 0 to 1; None where that cannot be told."""
    total = resident = 0
    for path in _files(folder):
        with _opened(path) as handle:
            length = os.fstat(handle).st_size
            if not length:
                continue
            counted = _resident_pages(handle, length)
            if counted is None:
                return None
            resident += counted * mmap.PAGESIZE
            total += length
    return min(1.0, resident / total) if total else 0.0


def _resident_pages(handle: int, length: int) -> int | None:
    # Private and writable: ctypes takes no address of what cannot be written to.
    with mmap.mmap(handle, length, flags=mmap.MAP_PRIVATE) as mapped:
        view = ctypes.c_char.from_buffer(mapped)
        flags = (ctypes.c_ubyte * -(-length // mmap.PAGESIZE))()
        try:
            failed = _libc.mincore(ctypes.c_void_p(ctypes.addressof(view)), ctypes.c_size_t(length), flags)
        finally:
            # The mapping cannot be closed while something points into it.
            del view
        return None if failed else sum(flag & 1 for flag in flags)


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    handle = os.open(path, os.O_RDWR)
    try:
        yield handle
    finally:
        os.close(handle)
