"""The system calls of the disk tier, one by one, so that a test can make each of them fail."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Sequence
from typing import Any, NamedTuple

FILE_MODE = 0o600
FOLDER_MODE = 0o700
_FILE_SYSTEM_BLOCK_BYTES = 4096


class FileFacts(NamedTuple):
    """A file in a folder, as it is now. ``used_s`` is when it was written or read last."""

    name: str
    length_bytes: int
    used_s: float


class Files:
    """Files in folders that are held open: what is done in a folder is never done in another of its name."""

    def open_folder(self, path: str) -> int:
        """A descriptor of an existing folder."""
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def open(self, folder: int, name: str, flags: int) -> int:
        """A descriptor of a file in a folder, which only its owner may open if this makes it."""
        return os.open(name, flags | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE, dir_fd=folder)

    def close(self, file: int) -> None:
        """Let go of a descriptor."""
        os.close(file)

    def read(self, file: int, buffers: Sequence[Any], offset: int) -> int:
        """Read into buffers from an offset; how many bytes there were."""
        return os.preadv(file, buffers, offset)

    def write(self, file: int, buffers: Sequence[Any], offset: int) -> int:
        """Write buffers at an offset; how many bytes were taken."""
        return os.pwritev(file, buffers, offset)

    def expect_whole_read(self, file: int) -> None:
        """All of a file is about to be read."""
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_WILLNEED)

    def rename(self, folder: int, name: str, new_name: str) -> None:
        """Give a file another name, at once, in place of the file that had it."""
        os.rename(name, new_name, src_dir_fd=folder, dst_dir_fd=folder)

    def remove(self, folder: int, name: str) -> None:
        """Take a file from the disk; one that is not there is none less.

        Raises:
            OSError: it is still there.
        """
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)

    def listing(self, folder: int) -> list[FileFacts]:
        """The regular files of a folder."""
        found = []
        for name in os.listdir(folder):
            try:
                facts = os.stat(name, dir_fd=folder, follow_symlinks=False)
            except FileNotFoundError:
                continue
            if stat.S_ISREG(facts.st_mode):
                found.append(FileFacts(name, facts.st_size, max(facts.st_mtime, facts.st_atime)))
        return found


def read_all(files: Files, file: int, buffers: Sequence[Any]) -> int:
    """Fill buffers from the beginning of a file, as far as it goes; how many bytes that were."""
    return _move_all(files.read, file, buffers)


def write_all(files: Files, file: int, buffers: Sequence[Any]) -> int:
    """Write buffers to the beginning of a file, as far as it takes them; how many bytes that were."""
    return _move_all(files.write, file, buffers)


def _move_all(move: Any, file: int, buffers: Sequence[Any]) -> int:
    views, total = [memoryview(buffer) for buffer in buffers], 0
    while views:
        moved = move(file, views, total)
        if moved <= 0:
            break
        total += moved
        while views and moved >= len(views[0]):
            moved -= len(views.pop(0))
        if moved:
            views[0] = views[0][moved:]
    return total


def bytes_on_disk(length_bytes: int) -> int:
    """What a file of this length takes on a disk at most: whole blocks, and some for its name and place."""
    blocks = -(-length_bytes // _FILE_SYSTEM_BLOCK_BYTES)
    return (blocks + 1) * _FILE_SYSTEM_BLOCK_BYTES
