"""The folder of one rank and namespace: lock, description and row files, and operators' commands on it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kvconnect.cache.specs import div_ceil
from kvconnect.errors import ConfigError
from kvconnect.offload.record import HEADER_BYTES, RecordFormat, namespace_of, opened
from kvconnect.offload.tier import Content

OVERHEAD_BYTES = 64 << 10
"""The most bytes that a folder takes beside its rows."""

UNFINISHED = "new.kv.unfinished"
"""The file of a row that is being written; it is renamed to the row's name once it is whole."""

_LOCK, _FACTS = "lock", "facts.json"
_CLEARED = "cleared"
"""While a file of this name exists, all rows in the folder are void."""

MAX_LABEL = 200
_FILE_SYSTEM_BLOCK_BYTES = 4096
_FOLDER_NAME = re.compile(r"([0-9a-f]{16,64})-rank([0-9]{1,6})")
_ROW_NAME = re.compile(r"([0-9a-f]{1,8})-((?:[0-9a-f]{2}){1,64})\.kv")
# Unfinished rows, and segments of former versions.
_REMAINS = re.compile(r"(new|[0-9a-f]+-[0-9a-f]+)\.kv\.unfinished|[0-9]{12}\.kv")


@dataclass(frozen=True)
class FolderOwner:
    """The owner of a folder's rows: one rank of ``world_size``, in one namespace.

    ``namespace`` is the digest in hexadecimal. ``label``, and ``model``, the class that computes, describe it
    to operators.
    """

    namespace: str
    rank: int = 0
    world_size: int = 1
    label: str = ""
    model: str = ""

    @property
    def folder_name(self) -> str:
        return f"{self.namespace[:32]}-rank{self.rank}"


class RowFile(NamedTuple):
    """A file in a folder, last used at ``used_s`` (Unix time). Without ``content`` it is not a whole row."""

    name: str
    content: Content | None
    length_bytes: int
    used_s: float

    @property
    def disk_bytes(self) -> int:
        return bytes_on_disk(self.length_bytes)


class FolderHeld(ConfigError):
    """Another process uses the folder."""


class DiskFolder:
    """An open and locked folder, closed with its last reference, since threads may still read from it.

    Each system call on its files is a method of its own, so that a test can make it fail. With ``is_made`` a
    missing folder is created.

    Raises:
        FolderHeld: another process, or another tier of this process, uses the folder.
        ConfigError: the path is no folder, or a folder of another user.
        OSError: the folder cannot be created, opened or locked.
    """

    def __init__(self, path: Path, *, is_made: bool = True) -> None:
        self.path = path
        self._folder = self._lock = -1
        try:
            if is_made:
                _make(path)
            self._folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            facts = os.fstat(self._folder)
            if facts.st_uid != os.geteuid():
                raise ConfigError(f"disk_path: {path} belongs to user {facts.st_uid}; accepted: our own")
            with contextlib.suppress(OSError):
                os.fchmod(self._folder, 0o700)
            self._take_lock()
            self.is_cleared = os.path.lexists(path / _CLEARED)
        except NotADirectoryError as error:
            raise ConfigError(f"disk_path: {path} is not a folder; accepted: a path of a folder") from error
        except BaseException:
            self.close()
            raise

    def _take_lock(self) -> None:
        self._lock = self.open(_LOCK, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            raise FolderHeld(
                f"disk_path: {self.path} is used by process {holder_of(self.path) or 'unknown'}; accepted: a "
                "folder that no other process uses"
            ) from error
        # The former owner of the lock may have removed the folder that was locked here.
        if not self.is_there:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.path))
        # A full disk cannot record the process id.
        with contextlib.suppress(OSError):
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    @property
    def is_there(self) -> bool:
        """Whether the path still leads to this folder, and the folder has this lock."""
        try:
            lock = os.stat(_LOCK, dir_fd=self._folder, follow_symlinks=False)
            return os.path.samestat(os.stat(self.path), os.fstat(self._folder)) and os.path.samestat(
                lock, os.fstat(self._lock)
            )
        except OSError:
            return False

    # ---- system calls

    def open(self, name: str, flags: int) -> int:
        return os.open(name, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=self._folder)

    def read(self, file: int, buffers: Sequence[Any], offset: int) -> int:
        return os.preadv(file, buffers, offset)

    def write(self, file: int, buffers: Sequence[Any], offset: int) -> int:
        return os.pwritev(file, buffers, offset)

    def rename(self, name: str, new_name: str) -> None:
        os.rename(name, new_name, src_dir_fd=self._folder, dst_dir_fd=self._folder)

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._folder)

    def listing(self) -> list[RowFile]:
        return list_files(self._folder)

    # ---- operations made of them

    def write_row(self, name: str, buffers: Sequence[Any]) -> None:
        """Write a row's file under another name, then rename it to ``name``, where all files are whole."""
        self._put(UNFINISHED, buffers)
        self.rename(UNFINISHED, name)

    def read_row(self, file: int, buffers: Sequence[Any]) -> int:
        """Fill buffers from the start of an open file; returns the number of bytes read."""
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_WILLNEED)
        return _move_all(self.read, file, buffers)

    def mark_cleared(self, is_cleared: bool) -> None:
        """Mark all rows in the folder as void, also for the next process; or remove that mark."""
        if is_cleared:
            self._put(_CLEARED, ())
        else:
            self.remove(_CLEARED)
        self.is_cleared = is_cleared

    def describe(self, owner: FolderOwner) -> None:
        """Write the owner into the folder for operators."""
        names = {"label": owner.label[:MAX_LABEL], "model": owner.model[:MAX_LABEL]}
        text = json.dumps({"namespace": owner.namespace, **names, "rank": owner.rank})
        self._put(_FACTS, [text.encode()])

    def _put(self, name: str, buffers: Sequence[Any]) -> None:
        file = self.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            if _move_all(self.write, file, buffers) < sum(map(len, buffers)):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(file)

    def delete(self) -> None:
        """Remove the folder and its files. Raises ``OSError``: a file of another kind is in it."""
        for file in self.listing():
            self.remove(file.name)
        for name in (_FACTS, _CLEARED, _LOCK):
            self.remove(name)
        os.rmdir(self.path)

    def close(self) -> None:
        """Close and unlock the folder."""
        for file in (self._lock, self._folder):
            if file >= 0:
                os.close(file)
        self._lock = self._folder = -1

    __del__ = close


OpenFolder = Callable[..., DiskFolder]


def parse_folder_name(name: str) -> tuple[str, int] | None:
    """The namespace's first digits and the rank in a folder's name; None for any other name."""
    match = _FOLDER_NAME.fullmatch(name)
    return (match[1], int(match[2])) if match else None


def row_name(content: Content) -> str:
    return f"{content[0]:x}-{content[1].hex()}.kv"


def bytes_on_disk(length_bytes: int) -> int:
    """The most bytes that a file of this length takes on disk: whole blocks, and one block of metadata."""
    return (div_ceil(length_bytes, _FILE_SYSTEM_BLOCK_BYTES) + 1) * _FILE_SYSTEM_BLOCK_BYTES


def list_files(folder: int | Path) -> list[RowFile]:
    """The row files in a folder, whole or not, least recently used first. Raises ``OSError``."""
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            match = _ROW_NAME.fullmatch(entry.name)
            if match or _REMAINS.fullmatch(entry.name):
                content = (int(match[1], 16), bytes.fromhex(match[2])) if match else None
                with contextlib.suppress(FileNotFoundError):
                    facts = entry.stat(follow_symlinks=False)
                    used_s = max(facts.st_mtime, facts.st_atime)
                    if stat.S_ISREG(facts.st_mode):
                        found.append(RowFile(entry.name, content, facts.st_size, used_s))
    return sorted(found, key=lambda file: file.used_s)


def holder_of(path: Path) -> str:
    """The id of the process that uses a folder; empty if none does, ``unknown`` if it is not recorded."""
    with contextlib.suppress(OSError), open(path / _LOCK, errors="replace") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            text = lock.read(32).strip()
            return text if text.isdecimal() else "unknown"
    return ""


def read_facts(path: Path) -> dict[str, Any]:
    """The owner that ``describe`` wrote into a folder; empty if missing or unreadable."""
    with contextlib.suppress(OSError, ValueError), open(path / _FACTS, "rb") as file:
        found = json.loads(file.read(OVERHEAD_BYTES))
        return found if isinstance(found, dict) else {}
    return {}


def _make(path: Path) -> None:
    if not path.is_dir():
        _make(path.parent)
        with contextlib.suppress(FileExistsError):
            path.mkdir(0o700)


def _move_all(move: Callable[[int, Sequence[Any], int], int], file: int, buffers: Sequence[Any]) -> int:
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


def cache_folders(path: Path) -> list[Path]:
    """The folders of disk tiers in ``path``. Raises ``ConfigError``: the path is no readable folder."""
    try:
        return sorted(one for one in path.iterdir() if parse_folder_name(one.name) and one.is_dir())
    except OSError as error:
        raise ConfigError(f"--path is {str(path)!r}: {error}; accepted: the disk_path of a node") from error


def look(path: Path) -> dict[str, Any]:
    """A summary of a folder for operators. Raises ``ConfigError``: the folder cannot be read.

    ``holder`` is the process that uses the folder, empty for none. ``oldest_s`` and ``newest_s`` are the last
    uses of its least and most recently used rows, in Unix time.
    """
    parsed = parse_folder_name(path.name)
    assert parsed is not None
    described, rows = read_facts(path), _rows(path)
    return {
        "name": path.name,
        "namespace": str(described.get("namespace", parsed[0])),
        "rank": parsed[1],
        "label": str(described.get("label", ""))[:MAX_LABEL],
        "model": str(described.get("model", ""))[:MAX_LABEL],
        "records": len(rows),
        "length_bytes": sum(row.length_bytes for row in rows),
        "oldest_s": rows[0].used_s if rows else 0.0,
        "newest_s": rows[-1].used_s if rows else 0.0,
        "holder": holder_of(path),
    }


def verify(path: Path) -> Iterator[tuple[str, int, str]]:
    """Read every row of a folder: yields each file's name, length in bytes, and flaw (empty for none).

    Raises ``ConfigError``: the folder cannot be read.
    """
    for file in sorted(_rows(path)):
        assert file.content is not None
        try:
            text = _flaw(path.name, file.content, memoryview((path / file.name).read_bytes()))
        except FileNotFoundError:
            # The row was evicted meanwhile.
            continue
        except OSError as error:
            text = str(error)
        yield file.name, file.length_bytes, text


def remove(paths: list[Path]) -> None:
    """Remove folders with their files; none of them if a process uses one.

    Raises ``ConfigError``: a process uses a folder, or a folder cannot be removed.
    """
    with contextlib.ExitStack() as opened:
        path = None
        try:
            folders = []
            for path in paths:
                folders.append(opened.enter_context(contextlib.closing(DiskFolder(path, is_made=False))))
            for folder in folders:
                path = folder.path
                folder.delete()
        except OSError as error:
            raise ConfigError(f"{path} cannot be removed: {error}") from error


def _flaw(folder: str, content: Content, data: memoryview) -> str:
    header = data[:HEADER_BYTES]
    digest = namespace_of(bytes(header))
    if digest is None:
        return "no intact header"
    namespace = digest.hex()
    if not folder.startswith(namespace[:32]):
        return f"a row of another namespace: {namespace}"
    end = HEADER_BYTES + RecordFormat(namespace).row_bytes(bytes(header))
    footer = data[end:]
    is_footer_right = not footer or opened(bytes(header), bytes(footer))
    if RecordFormat(namespace).flaw(header, content, data[HEADER_BYTES:end]) or not is_footer_right:
        return f"group {content[0]}, hash {content[1].hex()}: not the bytes that were written"
    return ""


def _rows(path: Path) -> list[RowFile]:
    try:
        return [file for file in list_files(path) if file.content is not None]
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
