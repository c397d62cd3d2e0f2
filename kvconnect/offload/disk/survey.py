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
from kvconnect.offload.disk.files import Files
from kvconnect.offload.disk.folder import (
    LOCK,
    DiskFolder,
    FolderHeld,
    holder_of,
    parse_folder_name,
    read_facts,
    segment_number,
)
from kvconnect.offload.disk.scan import scan, walk
from kvconnect.offload.disk.table import read_table, read_trailer
from kvconnect.offload.record import HEADER_BYTES, Flaw, RecordFormat, namespace_of

_TEXTS = {
    Flaw.CORRUPT: "bytes that are no record",
    Flaw.FOREIGN: "a record of another format",
    Flaw.TORN: "a record that is not whole",
}


@dataclass(frozen=True)
class CacheFolder:
    """A folder of one rank and namespace. ``holder`` is the process that uses it, empty if none does.

    ``newest_s`` and ``oldest_s`` are when its segments were written last, in seconds of the epoch.
    """

    name: str
    namespace: str
    rank: int
    model: str
    segments: int
    records: int
    length_bytes: int
    oldest_s: float
    newest_s: float
    holder: str


class Finding(NamedTuple):
    """Something wrong: in which file, from which byte on, what."""

    file: str
    offset: int
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
    """What is in a folder, as it says itself.

    Raises:
        ConfigError: it cannot be read.
    """
    parsed = parse_folder_name(path.name)
    assert parsed is not None
    said = read_facts(path)
    files, total_bytes, records, times = Files(), 0, 0, []
    for name in _segment_names(path):
        with contextlib.suppress(FileNotFoundError), _opened(path / name) as file:
            facts = os.fstat(file)
            times.append(facts.st_mtime)
            total_bytes += facts.st_size
            found = scan(files, file, RecordFormat(parsed[0]))
            records += len(found.entries) + found.flaws[Flaw.FOREIGN]
    return CacheFolder(
        name=path.name,
        namespace=str(said.get("namespace", parsed[0])),
        rank=parsed[1],
        model=_model_of(said.get("facts")),
        segments=len(times),
        records=records,
        length_bytes=total_bytes,
        oldest_s=min(times, default=0.0),
        newest_s=max(times, default=0.0),
        holder=_holder(path),
    )


def verify(path: Path) -> Iterator[Finding | int]:
    """Read everything in a folder: what is wrong, and the length in bytes of every record that is right.

    The end of the youngest segment may be half written while a process uses the folder.

    Raises:
        ConfigError: the folder cannot be read.
    """
    names = _segment_names(path)
    for name in names:
        is_growing = name == names[-1] and bool(_holder(path))
        try:
            with _opened(path / name) as file:
                for found in _verify_segment(name, file, path.name):
                    if not (is_growing and isinstance(found, Finding) and found.text == _TEXTS[Flaw.TORN]):
                        yield found
        except FileNotFoundError:
            # It made room.
            continue
        except OSError as error:
            yield Finding(name, 0, str(error))


def remove(paths: list[Path]) -> None:
    """Remove folders and all that is in them; none, if a process uses one of them.

    Raises:
        ConfigError: a process uses one, or one cannot be removed.
    """
    folders: list[DiskFolder] = []
    try:
        for path in paths:
            try:
                folders.append(DiskFolder(path, Files(), is_made=False))
            except FolderHeld:
                raise
            except OSError as error:
                raise ConfigError(f"{path} cannot be removed: {error}") from error
        for folder in folders:
            try:
                folder.remove()
            except OSError as error:
                raise ConfigError(f"{folder.path} cannot be removed: {error}") from error
    finally:
        for folder in folders:
            folder.close()


def _verify_segment(name: str, file: int, folder: str) -> Iterator[Finding | int]:
    files = Files()
    trailer = read_trailer(files, file)
    if trailer is not None and read_table(files, file, trailer) is None:
        yield Finding(name, trailer.data_bytes, "the table of the records is damaged")
    record_format: RecordFormat | None = None
    raw = bytearray(HEADER_BYTES)
    for offset, header in walk(files, file, RecordFormat("00")):
        if isinstance(header, Flaw):
            yield Finding(name, offset, _TEXTS[header])
            continue
        row = memoryview(bytearray(header.length_bytes))
        files.read(file, [raw], offset)
        got = files.read(file, [row], offset + HEADER_BYTES)
        namespace = namespace_of(bytes(raw))
        if namespace is None or not folder.startswith(namespace[:32]):
            yield Finding(name, offset, f"a record of another namespace: {namespace}")
            continue
        if record_format is None or record_format.namespace != namespace:
            record_format = RecordFormat(namespace)
        if got < len(row) or record_format.flaw(raw, header.content, row):
            group, digest = header.content
            yield Finding(
                name, offset, f"group {group}, hash {digest.hex()}: not the bytes that were written"
            )
        else:
            yield header.record_bytes


def _segment_names(path: Path) -> list[str]:
    try:
        return sorted(name for name in os.listdir(path) if segment_number(name) is not None)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        yield file
    finally:
        os.close(file)


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
