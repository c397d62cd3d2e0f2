"""The system calls of the disk tier, one by one, so that a test can make each of them fail."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

FILE_MODE = 0o600
FOLDER_MODE = 0o700
_FILE_SYSTEM_BLOCK_BYTES = 4096


@dataclass(frozen=True)
class FileFacts:
    """A file in a folder, as it is now."""

    name: str
    length_bytes: int
    modified_s: float


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

    def sync(self, file: int) -> None:
        """Wait until a file's bytes are on the disk."""
        os.fsync(file)

    def expect_whole_read(self, file: int) -> None:
        """Much of a file will be read from its beginning to its end, a little at a time."""
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_WILLNEED)

    def is_linked(self, file: int) -> bool:
        """Whether an open file still has a name."""
        return os.fstat(file).st_nlink > 0

    def length(self, file: int) -> int:
        """Bytes of a file."""
        return os.fstat(file).st_size

    def cut(self, file: int, length_bytes: int) -> None:
        """Shorten a file."""
        os.ftruncate(file, length_bytes)

    def remove(self, folder: int, name: str) -> None:
        """Take a file's bytes from the disk now, whoever has it open, and then its name.

        Raises:
            FileNotFoundError: there is none.
        """
        file = self.open(folder, name, os.O_WRONLY)
        try:
            self.cut(file, 0)
        finally:
            self.close(file)
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
                found.append(FileFacts(name, facts.st_size, facts.st_mtime))
        return found


def bytes_on_disk(length_bytes: int) -> int:
    """What a file of this length takes on a disk at most: whole blocks, and some to know where they are."""
    blocks = -(-length_bytes // _FILE_SYSTEM_BLOCK_BYTES)
    return (blocks + 2) * _FILE_SYSTEM_BLOCK_BYTES
