"""What the weights that a server runs with are called, whatever path they came from. Imports no vLLM.

The name is that of the checkpoint's tensors where its files can be read, and of the tensors in memory where
they cannot, or after these were replaced in place. It is a sample: no file is read whole.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)

_READ_FROM_FILES = {
    *("auto", "hf", "safetensors", "fastsafetensors", "runai_streamer", "instanttensor"),
    *("mistral", "pt", "npcache", "gguf", "bitsandbytes", "sharded_state"),
}
_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_INDEX = "model.safetensors.index.json"
# Training changes nearly every value, so that few samples of a tensor tell two checkpoints apart; their
# number is bounded because folders lie on slow shares too.
_SAMPLE_BYTES = 512
_MOST_SAMPLES = 2048
_LEAST_OF_A_KIND = 4
_MOST_HEADER_BYTES = 256 << 20
_UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, IndexError)
NAME_BYTES = 16


class _Tensor(NamedTuple):
    """A tensor in a safetensors file, or a piece of a file of another kind, whose size is the shape."""

    name: str
    dtype: str
    shape: str
    file: Path
    start: int
    length_bytes: int


def checkpoint_name(model: Any, load_config: Any) -> str | None:
    """The name of the checkpoint that a model is configured with. None: its files are not here, or unused."""
    load_format = getattr(load_config.load_format, "value", load_config.load_format)
    if str(load_format) not in _READ_FROM_FILES:
        return None
    source = str(getattr(model, "model_weights", "") or model.model)
    path = _local_path(source, model.revision, load_config.download_dir)
    try:
        return None if path is None else files_name(path)
    except OSError as error:
        logger.warning("the weights in %s cannot be told by their files: %s", path, error)
        return None


def _local_path(source: str, revision: str | None, cache_dir: str | None) -> Path | None:
    path = Path(source)
    if path.exists():
        return path
    if "://" in source:
        # Streamed from an object store, in which an address says nothing of what it holds today.
        return None
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(source, revision=revision, cache_dir=cache_dir, local_files_only=True))
    except Exception as error:
        # Not a name that it knows, nothing in its cache, or no such package.
        logger.debug("no files of %s are here: %s", source, error)
        return None


def files_name(path: Path) -> str | None:
    """The name of what a checkpoint holds: a folder, or one file. None: there are no weights in it.

    Tensors count by name, type, shape and a sample of their bytes, wherever in which file they are. Files of
    another kind than safetensors count by name, size and samples.

    Raises:
        OSError: a file cannot be read.
    """
    files = [path] if path.is_file() else _weight_files(path)
    if not files:
        return None
    digest = hashlib.blake2b(digest_size=NAME_BYTES)
    tensors = [tensor for file in files for tensor in _tensors(file) or _pieces(file, len(files))]
    for tensor in sorted(tensors):
        digest.update(f"{tensor.name} {tensor.dtype} {tensor.shape}\n".encode())
    # In an order that does not depend on how the tensors are spread over files.
    for _, data in sorted(_samples(tensors).items()):
        digest.update(data)
    return f"files {digest.hexdigest()}"


def _weight_files(folder: Path) -> list[Path]:
    """The files that vLLM reads of a folder: of one kind, and none that says the same once more."""
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
    """What the header of a safetensors file says; nothing if there is none that can be read."""
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
    """Evenly spaced, the first at the file's beginning and the last at its end."""
    count, size = max(2, _MOST_SAMPLES // num_files), path.stat().st_size
    last, length_bytes = max(size - _SAMPLE_BYTES, 0), min(_SAMPLE_BYTES, size)
    return [
        _Tensor(f"{path.name} {number}", "", str(size), path, last * number // (count - 1), length_bytes)
        for number in range(count)
    ]


def _samples(tensors: Iterable[_Tensor]) -> dict[str, bytes]:
    """Bytes of tensors of every kind, by name: those whose names differ in numbers only are one kind."""
    kinds: dict[str, list[_Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault(re.sub(r"\d+", "#", tensor.name), []).append(tensor)
    count = max(_LEAST_OF_A_KIND, _MOST_SAMPLES // max(len(kinds), 1))
    chosen = [tensor for kind in kinds.values() for tensor in sorted(kind, key=_chance)[:count]]
    chosen.sort(key=lambda tensor: (tensor.file, tensor.start))
    read: dict[str, bytes] = {}
    for path, held in itertools.groupby(chosen, key=lambda tensor: tensor.file):
        with path.open("rb", buffering=0) as file:
            for tensor in held:
                room = max(tensor.length_bytes - _SAMPLE_BYTES, 0)
                file.seek(tensor.start + _chance(tensor) % (room + 1))
                read[tensor.name] = file.read(min(_SAMPLE_BYTES, tensor.length_bytes))
    return read


def _chance(tensor: _Tensor) -> int:
    return int.from_bytes(hashlib.blake2b(tensor.name.encode(), digest_size=8).digest(), "little")
