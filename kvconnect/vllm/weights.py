"""Which weights a model folder holds, told apart without reading them all. Imports no vLLM."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
# Training changes nearly every value, so that few samples of a file tell two checkpoints apart; the number of
# samples is bounded because folders lie on slow shares too.
_SAMPLE_BYTES = 4096
_MOST_SAMPLES = 512
_LEAST_SAMPLES = 2


def folder_facts(folder: Path) -> dict[str, Any]:
    """The names and sizes of a folder's weight files, and a digest of samples of what is in them.

    Samples are evenly spaced, the first at a file's beginning, where the shapes are, and the last at its end.
    Files that cannot be read count by name and size.
    """
    files = sorted(
        path for path in folder.rglob("*") if path.suffix in _SUFFIXES and not _is_hidden(path, folder)
    )
    samples = max(_LEAST_SAMPLES, _MOST_SAMPLES // max(len(files), 1))
    digest = hashlib.sha256()
    sizes: dict[str, int] = {}
    for path in files:
        try:
            sizes[path.relative_to(folder).as_posix()] = path.stat().st_size
            _sample(path, samples, digest)
        except OSError:
            continue
    return {"files": sizes, "samples": digest.hexdigest()}


def _is_hidden(path: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def _sample(path: Path, count: int, digest: hashlib._Hash) -> None:
    with path.open("rb", buffering=0) as file:
        last = max(path.stat().st_size - _SAMPLE_BYTES, 0)
        for number in range(count):
            file.seek(last * number // (count - 1))
            digest.update(file.read(_SAMPLE_BYTES))
