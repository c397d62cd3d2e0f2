"""What lies in a path of the disk tier, for operators: what there is, whether it is right, and how it goes.

Nothing here needs the process that uses a folder to stop, but for what removes one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvconnect.errors import ConfigError
from kvconnect.offload.disk.folder import (
    MAX_LABEL,
    DiskFolder,
    RowFile,
    holder_of,
    list_files,
    parse_folder_name,
    read_facts,
)
from kvconnect.offload.record import HEADER_BYTES, RecordFormat, namespace_of, opened
from kvconnect.offload.tier import Content


def cache_folders(path: Path) -> list[Path]:
    """The folders of the disk tier below a path. Raises ``ConfigError``: it is no folder that can be read."""
    try:
        return sorted(one for one in path.iterdir() if parse_folder_name(one.name) and one.is_dir())
    except OSError as error:
        raise ConfigError(f"--path is {str(path)!r}: {error}; accepted: the disk_path of a node") from error


def look(path: Path) -> dict[str, Any]:
    """What is in a folder, by its description and its files. Raises ``ConfigError``: it cannot be read.

    ``holder`` is the process that uses it, empty if none does; ``newest_s`` and ``oldest_s`` are when its
    rows were used last.
    """
    parsed = parse_folder_name(path.name)
    assert parsed is not None
    described, rows = read_facts(path), _rows(path)
    return {
        "name": path.name,
        "namespace": str(described.get("namespace", parsed[0])),
        "rank": parsed[1],
        "label": str(described.get("label", ""))[:MAX_LABEL],
        "model": _model_of(described.get("facts")),
        "records": len(rows),
        "length_bytes": sum(row.length_bytes for row in rows),
        "oldest_s": rows[0].used_s if rows else 0.0,
        "newest_s": rows[-1].used_s if rows else 0.0,
        "holder": holder_of(path),
    }


def verify(path: Path) -> Iterator[tuple[str, int, str]]:
    """Read every row of a folder: the name and length of each file, and what is wrong with it, if anything.

    Raises ``ConfigError``: the folder cannot be read.
    """
    for file in sorted(_rows(path)):
        assert file.content is not None
        try:
            text = _flaw(path.name, file.content, memoryview((path / file.name).read_bytes()))
        except FileNotFoundError:
            # It made room.
            continue
        except OSError as error:
            text = str(error)
        yield file.name, file.length_bytes, text


def remove(paths: list[Path]) -> None:
    """Remove folders and all that is in them. Raises ``ConfigError``: a process uses one, or it cannot go.

    If a process uses one of them, none is removed.
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
    namespace = namespace_of(bytes(header))
    if namespace is None:
        return "no intact header"
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


def _model_of(facts: Any) -> str:
    stack = facts.get("stack", facts) if isinstance(facts, dict) else {}
    model = stack.get("model", "") if isinstance(stack, dict) else ""
    while isinstance(model, dict):
        model = model.get("model") or model.get("name") or next(iter(model.values()), "")
    return str(model)[:MAX_LABEL]
