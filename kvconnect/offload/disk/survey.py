"""What lies in a path of the disk tier, for people: what there is, whether it is right, and how it goes.

Nothing here needs the process that uses a folder to stop, but for what removes one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kvconnect.errors import ConfigError
from kvconnect.offload.disk.files import FileFacts, Files
from kvconnect.offload.disk.folder import (
    LOCK,
    DiskFolder,
    FolderHeld,
    holder_of,
    parse_folder_name,
    parse_row_name,
    read_facts,
)
from kvconnect.offload.record import HEADER_BYTES, RecordFormat, namespace_of


@dataclass(frozen=True)
class CacheFolder:
    """A folder of one rank and namespace. ``holder`` is the process that uses it, empty if none does.

    ``newest_s`` and ``oldest_s`` are when its rows were used last, in seconds of the epoch.
    """

    name: str
    namespace: str
    rank: int
    model: str
    records: int
    length_bytes: int
    oldest_s: float
    newest_s: float
    holder: str


class Finding(NamedTuple):
    """Something wrong: in which file, and what."""

    file: str
    text: str


def cache_folders(path: Path) -> list[Path]:
    """The folders of the disk tier below a path.

    Raises:
        ConfigError: the path is no folder that can be read.
    """
    try:
        return sorted(one for one in path.iterdir() if parse_folder_name(one.name) and one.is_dir())
    except OSError as error:
        raise ConfigError(f"--path is {str(path)!r}: {error}; accepted: the disk_path of a node") from error


def look(path: Path) -> CacheFolder:
    """What is in a folder, by its description and its files.

    Raises:
        ConfigError: it cannot be read.
    """
    parsed = parse_folder_name(path.name)
    assert parsed is not None
    described, rows = read_facts(path), _rows(path)
    times = [facts.used_s for facts in rows]
    return CacheFolder(
        name=path.name,
        namespace=str(described.get("namespace", parsed[0])),
        rank=parsed[1],
        model=_model_of(described.get("facts")),
        records=len(rows),
        length_bytes=sum(facts.length_bytes for facts in rows),
        oldest_s=min(times, default=0.0),
        newest_s=max(times, default=0.0),
        holder=_holder(path),
    )


def verify(path: Path) -> Iterator[Finding | int]:
    """Read every row of a folder: what is wrong, and the length in bytes of every file that is right.

    Raises:
        ConfigError: the folder cannot be read.
    """
    for facts in _rows(path):
        try:
            data = (path / facts.name).read_bytes()
        except FileNotFoundError:
            # It made room.
            continue
        except OSError as error:
            yield Finding(facts.name, str(error))
            continue
        text = _flaw(path.name, facts.name, memoryview(data))
        yield Finding(facts.name, text) if text else len(data)


def remove(paths: list[Path]) -> None:
    """Remove folders and all that is in them; none, if a process uses one of them.

    Raises:
        ConfigError: a process uses one, or one cannot be removed.
    """
    with contextlib.ExitStack() as opened:
        folders: list[DiskFolder] = []
        try:
            for path in paths:
                folders.append(DiskFolder(path, Files(), is_made=False))
                opened.callback(folders[-1].close)
            for folder in folders:
                folder.remove()
        except FolderHeld:
            raise
        except OSError as error:
            raise ConfigError(
                f"{folders[-1].path if folders else path} cannot be removed: {error}"
            ) from error


def _flaw(folder: str, name: str, data: memoryview) -> str:
    header, row = data[:HEADER_BYTES], data[HEADER_BYTES:]
    content, namespace = parse_row_name(name), namespace_of(bytes(header))
    assert content is not None
    if namespace is None:
        return "no intact header"
    if not folder.startswith(namespace[:32]):
        return f"a row of another namespace: {namespace}"
    if RecordFormat(namespace).flaw(header, content, row):
        return f"group {content[0]}, hash {content[1].hex()}: not the bytes that were written"
    return ""


def _rows(path: Path) -> list[FileFacts]:
    files = Files()
    try:
        folder = files.open_folder(str(path))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    try:
        found = [facts for facts in files.listing(folder) if parse_row_name(facts.name)]
        return sorted(found)
    finally:
        files.close(folder)


def _holder(path: Path) -> str:
    try:
        lock = os.open(path / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return holder_of(path)
    finally:
        os.close(lock)
    return ""


def _model_of(facts: Any) -> str:
    stack = facts.get("stack", facts) if isinstance(facts, dict) else {}
    model = stack.get("model", "") if isinstance(stack, dict) else ""
    while isinstance(model, dict):
        model = model.get("model") or model.get("name") or next(iter(model.values()), "")
    return str(model)[:200]
