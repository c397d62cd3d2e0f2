"""The folder of one rank and namespace: its lock, its description, and the names of its files."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvconnect.errors import ConfigError, LocalError
from kvconnect.offload.disk.files import FOLDER_MODE, FileFacts, Files
from kvconnect.offload.tier import Content

LOCK = "lock"
FACTS = "facts.json"
OVERHEAD_BYTES = 64 << 10
"""What a folder takes beside its rows, at most."""

_MAX_FACTS_BYTES = 40 << 10
_FOLDER_NAME = re.compile(r"([0-9a-f]{16,64})-rank([0-9]{1,6})")
_ROW_NAME = re.compile(r"([0-9a-f]{1,8})-((?:[0-9a-f]{2}){1,64})\.kv")
_UNFINISHED = ".unfinished"
_FORMER_NAME = re.compile(r"[0-9]{12}\.kv")
_NAMESPACE = re.compile(r"[0-9a-f]{16,64}")


def folder_name(namespace: str, rank: int) -> str:
    """The folder of a rank's rows in a namespace.

    Raises:
        LocalError: the namespace is no hexadecimal digest.
    """
    if not _NAMESPACE.fullmatch(namespace):
        raise LocalError(f"namespace is {namespace!r}; accepted: 16 to 64 hexadecimal digits")
    return f"{namespace[:32]}-rank{rank}"


def parse_folder_name(name: str) -> tuple[str, int] | None:
    """The beginning of the namespace, and the rank, of a folder; None if it is none of ours."""
    match = _FOLDER_NAME.fullmatch(name)
    return (match[1], int(match[2])) if match else None


def row_name(content: Content) -> str:
    """The file of a row."""
    group, digest = content
    return f"{group:x}-{digest.hex()}.kv"


def unfinished_name(name: str) -> str:
    """The file of a row that is being written; it gets its own name once it is whole."""
    return name + _UNFINISHED


def parse_row_name(name: str) -> Content | None:
    """Which row a file is; None if it is none."""
    match = _ROW_NAME.fullmatch(name)
    return (int(match[1], 16), bytes.fromhex(match[2])) if match else None


def is_remains(name: str) -> bool:
    """Whether a file is the beginning of a row, or a segment as former versions wrote them."""
    if name.endswith(_UNFINISHED):
        return parse_row_name(name.removesuffix(_UNFINISHED)) is not None
    return is_former(name)


def is_former(name: str) -> bool:
    """Whether a file is a segment as former versions wrote them."""
    return _FORMER_NAME.fullmatch(name) is not None


class FolderHeld(ConfigError):
    """Another process uses the folder."""


class DiskFolder:
    """An open and locked folder.

    Args:
        path: of the folder itself.
        files: how files are reached.
        is_made: whether it may be made; if not, it must be there.

    Raises:
        FolderHeld: another process, or another tier of this one, uses it.
        ConfigError: the path is of no folder, or another user's.
        OSError: it cannot be made, opened or locked.
    """

    def __init__(self, path: Path, files: Files, *, is_made: bool = True) -> None:
        self.path = path
        self.files = files
        self.is_read_only = False
        self.folder = -1
        self._lock = -1
        try:
            if is_made:
                _make(path)
            self._open()
        except NotADirectoryError as error:
            raise ConfigError(f"disk_path: {path} is not a folder; accepted: a path of a folder") from error

    def _open(self) -> None:
        self.folder = self.files.open_folder(str(self.path))
        try:
            owner = os.fstat(self.folder)
            if owner.st_uid != os.geteuid():
                raise ConfigError(f"disk_path: {self.path} belongs to user {owner.st_uid}; accepted: our own")
            if owner.st_mode & 0o077:
                with contextlib.suppress(OSError):
                    os.fchmod(self.folder, FOLDER_MODE)
            self._lock = self._take_lock()
        except BaseException:
            self.files.close(self.folder)
            self.folder = -1
            raise

    def _take_lock(self) -> int:
        while True:
            try:
                lock = self.files.open(self.folder, LOCK, os.O_RDWR | os.O_CREAT)
            except OSError as error:
                if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
                    raise
                # A disk that takes nothing any more can still give back what is on it.
                self.is_read_only = True
                lock = self.files.open(self.folder, LOCK, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                self.files.close(lock)
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise
                holder = holder_of(self.path)
                raise FolderHeld(
                    f"disk_path: {self.path} is used by process {holder}; accepted: a folder that no other "
                    "process uses"
                ) from error
            # Who removes a folder holds its lock: what was locked may be gone.
            if self._is_lock_there(lock):
                break
            self.files.close(lock)
        if not self.is_read_only:
            # On a disk that is full it goes without.
            with contextlib.suppress(OSError):
                os.ftruncate(lock, 0)
                os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        return lock

    def _is_lock_there(self, lock: int) -> bool:
        try:
            there = os.stat(LOCK, dir_fd=self.folder, follow_symlinks=False)
        except FileNotFoundError:
            return False
        held = os.fstat(lock)
        return (there.st_dev, there.st_ino) == (held.st_dev, held.st_ino)

    @property
    def is_there(self) -> bool:
        """Whether it is still in its place, and its lock in it."""
        try:
            there, ours = os.stat(self.path), os.fstat(self.folder)
            return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino) and self._is_lock_there(
                self._lock
            )
        except OSError:
            return False

    def describe(self, namespace: str, rank: int, facts: Mapping[str, Any]) -> None:
        """Leave in the folder what it is of, for people who look: as many facts as there is room for.

        Raises:
            OSError: it cannot be written.
        """
        said: dict[str, Any] = {}
        left_bytes = _MAX_FACTS_BYTES - 1024
        for name in sorted(facts, key=lambda name: len(json.dumps(facts[name], default=str))):
            left_bytes -= len(json.dumps({name: facts[name]}, default=str))
            if left_bytes < 0:
                break
            said[name] = facts[name]
        text = json.dumps({"namespace": namespace, "rank": rank, "facts": said}, default=str).encode()
        file = self.files.open(self.folder, FACTS, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            self.files.write(file, [text], 0)
        finally:
            self.files.close(file)

    def listing(self) -> list[FileFacts]:
        """The files of rows, whole and otherwise, least recently used first.

        Raises:
            OSError: the folder cannot be read.
        """
        found = [
            facts
            for facts in self.files.listing(self.folder)
            if parse_row_name(facts.name) or is_remains(facts.name)
        ]
        return sorted(found, key=lambda facts: facts.used_s)

    def remove(self) -> None:
        """Remove the folder and all that is ours in it, and close it.

        Raises:
            OSError: something cannot be removed, or something else is in the folder.
        """
        for facts in self.listing():
            self.files.remove(self.folder, facts.name)
        for name in (FACTS, LOCK):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self.folder)
        os.rmdir(self.path)
        self.close()

    def close(self) -> None:
        """Let another process have it."""
        for file in (self._lock, self.folder):
            if file >= 0:
                self.files.close(file)
        self._lock = self.folder = -1


def holder_of(path: Path) -> str:
    """The process that says it uses a folder; ``unknown`` if none does."""
    try:
        text = (path / LOCK).read_text()[:32].strip()
    except (OSError, UnicodeDecodeError):
        return "unknown"
    return text if text.isdecimal() else "unknown"


def read_facts(path: Path) -> dict[str, Any]:
    """What a folder says that it is of; empty if it says nothing that can be read."""
    try:
        with open(path / FACTS, "rb") as file:
            found = json.loads(file.read(_MAX_FACTS_BYTES + 1))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _make(path: Path) -> None:
    missing = []
    for folder in (path, *path.parents):
        if folder.is_dir():
            break
        missing.append(folder)
    for folder in reversed(missing):
        try:
            os.mkdir(folder, FOLDER_MODE)
        except FileExistsError:
            if not folder.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder)) from None
