"""The name of a checkpoint by the tensors in its files: for any serving stack, and however files are split.

Every tensor is sampled, so that no file is read whole.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

logger = logging.getLogger(__name__)

_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_INDEX = "model.safetensors.index.json"
# Training changes nearly every value, so that few samples of a tensor distinguish two checkpoints. With more
# tensors than _MOST_SAMPLES one tensor per module is sampled, hence each expert: folders may lie on slow
# shares.
_SAMPLE_BYTES = 512
_MOST_SAMPLES = 4096
_LEAST_OF_A_KIND = 4
_MOST_HEADER_BYTES = 256 << 20
_UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, IndexError)
_NAME_BYTES = 16


class _Tensor(NamedTuple):
    """A tensor in a safetensors file, or a sampled piece of another file, whose size is the shape."""

    name: str
    dtype: str
    shape: str
    file: Path
    start: int
    length_bytes: int


def local_files(source: str, revision: str | None, cache_dir: str | None) -> Path | None:
    """The files of a checkpoint on this machine: a path, or a name on the hub. None: they are not here."""
    path = Path(source)
    if path.exists():
        return path
    if "://" in source:
        # Streamed from an object store, where an address does not identify its content.
        return None
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(source, revision=revision, cache_dir=cache_dir, local_files_only=True))
    except Exception as error:
        # An unknown name, no files in the cache, or the package is missing.
        logger.debug("no files of %s are here: %s", source, error)
        return None


def local_name(source: str, revision: str | None, cache_dir: str | None = None) -> str | None:
    """The name of a checkpoint. None: its files are not on this machine, or one of them cannot be read."""
    path = local_files(source, revision, cache_dir)
    try:
        return None if path is None else files_name(path)
    except OSError as error:
        logger.info("the weights in %s are not named by their files, as one cannot be read: %s", path, error)
        return None


def files_name(path: Path) -> str | None:
    """The name of the tensors of a checkpoint, a folder or one file. None: no weights. Raises ``OSError``.

    Tensors count by name, dtype, shape and a sample of their bytes, in any file. Files that are not
    safetensors count by name, size and samples.
    """
    files = [path] if path.is_file() else _weight_files(path)
    if not files:
        return None
    digest = hashlib.blake2b(digest_size=_NAME_BYTES)
    tensors = [tensor for file in files for tensor in _tensors(file) or _pieces(file, len(files))]
    for tensor in sorted(tensors):
        digest.update(f"{tensor.name} {tensor.dtype} {tensor.shape}\n".encode())
    # Sorted by name: independent of how tensors are spread over files.
    for _, data in sorted(_samples(tensors).items()):
        digest.update(data)
    return digest.hexdigest()


def _weight_files(folder: Path) -> list[Path]:
    """The weight files of a folder that serving stacks read: one kind, without a consolidated copy."""
    for suffix in _SUFFIXES:
        files = sorted(path for path in folder.iterdir() if path.suffix == suffix and path.is_file())
        if suffix == ".safetensors" and (folder / _INDEX).is_file():
            try:
                listed = set(json.loads((folder / _INDEX).read_text())["weight_map"].values())
            except _UNREADABLE:
                listed = set()
            files = [path for path in files if path.name in listed] or files
        if files:
            return [path for path in files if not path.name.startswith("consolidated")] or files
    return []


def _tensors(path: Path) -> list[_Tensor]:
    """The tensors in a safetensors file's header; empty for another file or an unreadable header."""
    if path.suffix != ".safetensors":
        return []
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if not 0 < header_bytes <= min(_MOST_HEADER_BYTES, path.stat().st_size):
            return []
        try:
            header = json.loads(file.read(header_bytes))
            header.pop("__metadata__", None)
            found = []
            for name, entry in header.items():
                start, end = entry["data_offsets"]
                place = (path, 8 + header_bytes + start, end - start)
                found.append(_Tensor(name, str(entry["dtype"]), str(entry["shape"]), *place))
            return found
        except _UNREADABLE:
            return []


def _pieces(path: Path, num_files: int) -> list[_Tensor]:
    """Evenly spaced samples of a file, from its beginning to its end."""
    count, size = max(2, _MOST_SAMPLES // num_files), path.stat().st_size
    last, length_bytes = max(size - _SAMPLE_BYTES, 0), min(_SAMPLE_BYTES, size)
    return [
        _Tensor(f"{path.name} {number}", "", str(size), path, last * number // (count - 1), length_bytes)
        for number in range(count)
    ]


def _samples(tensors: Iterable[_Tensor]) -> dict[str, bytes]:
    """By name, bytes of every tensor; of very many tensors, of one per module and some of each kind."""
    every = list(tensors)
    chosen = every if len(every) <= _MOST_SAMPLES else _of_modules(every)
    chosen.sort(key=lambda tensor: (tensor.file, tensor.start))
    read: dict[str, bytes] = {}
    for path, held in itertools.groupby(chosen, key=lambda tensor: tensor.file):
        with path.open("rb", buffering=0) as file:
            for tensor in held:
                room = max(tensor.length_bytes - _SAMPLE_BYTES, 0)
                file.seek(tensor.start + _chance(tensor) % (room + 1))
                read[tensor.name] = file.read(min(_SAMPLE_BYTES, tensor.length_bytes))
    return read


def _of_modules(tensors: Iterable[_Tensor]) -> list[_Tensor]:
    """One tensor of each module, and some of every kind: names that differ in numbers only are one kind."""
    modules: dict[str, list[_Tensor]] = {}
    kinds: dict[str, list[_Tensor]] = {}
    for tensor in sorted(tensors, key=_chance):
        numbered = re.match(r".*\d", tensor.name)
        modules.setdefault(numbered[0] if numbered else tensor.name, []).append(tensor)
        kinds.setdefault(re.sub(r"\d+", "#", tensor.name), []).append(tensor)
    count = max(_LEAST_OF_A_KIND, _MOST_SAMPLES // len(kinds))
    chosen = [module[0] for module in modules.values()] + [
        one for kind in kinds.values() for one in kind[:count]
    ]
    return list(dict.fromkeys(chosen))


def _chance(tensor: _Tensor) -> int:
    return int.from_bytes(hashlib.blake2b(tensor.name.encode(), digest_size=8).digest(), "little")
