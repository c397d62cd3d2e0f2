"""The name of the weights that a server runs with, wherever they were loaded from.

The name is that of the checkpoint's tensors where its files can be read, and of the tensors in memory where
they cannot, or after these were replaced in place. It is a sample: no file is read whole.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import re
import sys
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from kvconnect.peer.messages import DRAFT

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

_READ_FROM_FILES = {
    *("auto", "hf", "safetensors", "fastsafetensors", "runai_streamer", "instanttensor"),
    *("mistral", "pt", "npcache", "gguf", "bitsandbytes", "sharded_state"),
}
_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_INDEX = "model.safetensors.index.json"
# Training changes nearly every value, so that few samples of a tensor distinguish two checkpoints; their
# number is bounded because folders lie on slow shares too.
_SAMPLE_BYTES = 512
_MOST_SAMPLES = 2048
_LEAST_OF_A_KIND = 4
_MOST_HEADER_BYTES = 256 << 20
_UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, IndexError)
_NAME_BYTES = 16
_SAMPLES_OF_A_TENSOR = 4096
_DRAFTERS = ("drafter", "speculator")
_UNIDENTIFIED = "unidentified"

Gather = Callable[[Any], list[Any]]
"""What every rank of a server gave, in order. All of them must call it."""


class LoadedWeights:
    """One name on all ranks, equal on two servers wherever the weights are.

    ``checkpoint`` is that of the files, None where it is unknown; ``models`` may be out of reach.
    """

    def __init__(self, checkpoint: str | None, models: Sequence[nn.Module], gather: Gather) -> None:
        self._models, self._gather = models, gather
        self._first = tensors_digest(models)
        of_ranks = gather((checkpoint, self._first))
        is_known = checkpoint is not None and all(name == checkpoint for name, _ in of_ranks)
        self.name = str(checkpoint) if is_known else self._of_tensors([digest for _, digest in of_ranks])
        self._first_name = self.name
        if self.name.startswith(_UNIDENTIFIED):
            logger.warning(
                "the weights of this server cannot be told from others: %s. No peer exchanges KV with it, "
                "and what it keeps is found by this process only",
                self.name,
            )
        else:
            logger.info("weights: %s", self.name)

    def check(self) -> bool:
        """Look at the tensors in memory again. Whether the weights have another name than before."""
        now, before = tensors_digest(self._models), self.name
        of_ranks = self._gather((now is not None and now == self._first, now))
        is_first = all(is_first for is_first, _ in of_ranks)
        self.name = self._first_name if is_first else self._of_tensors([digest for _, digest in of_ranks])
        if self.name != before:
            logger.warning("weights were replaced in place: they were %s and are %s", before, self.name)
        return self.name != before

    def _of_tensors(self, digests: Sequence[bytes | None]) -> str:
        """A name of what all ranks have in memory: equal only on a server of as many ranks."""
        if any(digest is None for digest in digests):
            return f"{_UNIDENTIFIED} {self._gather(uuid.uuid4().hex)[0]}"
        joined = hashlib.blake2b(b"".join(map(bytes, digests)), digest_size=_NAME_BYTES)  # type: ignore[arg-type]
        return f"tensors {joined.hexdigest()} over {len(digests)} ranks"


def loaded_weights(vllm_config: VllmConfig) -> LoadedWeights:
    """Those of the runner that registers its caches now: it is among the callers."""
    return LoadedWeights(_checkpoint(vllm_config), _running_models(), all_ranks)


def draft_model(vllm_config: VllmConfig) -> Any:
    """The configuration of a draft model; None where nothing is guessed, or not by a model."""
    speculative = vllm_config.speculative_config
    draft = getattr(speculative, "draft_model_config", None)
    return None if draft is getattr(speculative, "target_model_config", None) else draft


def _checkpoint(vllm_config: VllmConfig) -> str | None:
    """The name of what was loaded, of a draft model too."""
    main, load_config = vllm_config.model_config, vllm_config.load_config
    draft = draft_model(vllm_config)
    name = checkpoint_name(main, load_config)
    if name is None or draft is None:
        return name
    if draft.model == main.model:
        return f"{name}{DRAFT}of the same files"
    draft_load_config = getattr(vllm_config.speculative_config, "draft_load_config", None) or load_config
    draft_name = checkpoint_name(draft, draft_load_config)
    return None if draft_name is None else f"{name}{DRAFT}{draft_name}"


def tensors_digest(models: Sequence[nn.Module]) -> bytes | None:
    """A digest of samples of every tensor of some models on this rank. None: there are none to look at."""
    digest, count = hashlib.blake2b(digest_size=_NAME_BYTES), 0
    try:
        with torch.no_grad():
            for model in models:
                for name, parameter in model.named_parameters():
                    digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}\n".encode())
                    digest.update(_sample(parameter.data))
                    count += 1
    except (RuntimeError, TypeError, NotImplementedError) as error:
        logger.warning("the weights in memory cannot be looked at: %s", error)
        return None
    return digest.digest() if count else None


def _sample(tensor: torch.Tensor) -> bytes:
    count = tensor.numel()
    if not count:
        return b""
    fits = tensor.untyped_storage().nbytes() >= (tensor.storage_offset() + count) * tensor.element_size()
    # In the order of memory if it has no gaps, since a tensor that is transposed would be copied whole.
    flat = tensor.as_strided((count,), (1,)) if fits else tensor.reshape(-1)
    step = -(-count // _SAMPLES_OF_A_TENSOR)
    return bytes(flat[::step].contiguous().cpu().view(torch.uint8).numpy())


def _running_models() -> list[nn.Module]:
    """The models of the nearest caller that has some. vLLM gives a connector no other way to them."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        runner: Any = frame.f_locals.get("self")
        if hasattr(runner, "get_model") and hasattr(runner, "initialize_kv_cache"):
            found = [runner.get_model()]
            found += [getattr(getattr(runner, name, None), "model", None) for name in _DRAFTERS]
            # A model that is captured in graphs is wrapped.
            found = [model.unwrap() if hasattr(model, "unwrap") else model for model in found]
            return [model for model in found if isinstance(model, nn.Module)]
        frame = frame.f_back
    return []


def _rank_groups() -> tuple[Any, ...]:
    from vllm.distributed.parallel_state import get_pcp_group, get_pp_group, get_tp_group

    return get_pp_group(), get_tp_group(), get_pcp_group()


def own_rank() -> int:
    """The number of this rank, pipeline rank by pipeline rank, in each by tensor-parallel rank."""
    number = 0
    for group in _rank_groups():
        number = number * group.world_size + group.rank_in_group
    return number


def all_ranks(value: Any) -> list[Any]:
    """What every rank gave, by their numbers."""
    gathered = [value]
    for group in reversed(_rank_groups()):
        if group.world_size > 1:
            parts: list[Any] = [None] * group.world_size
            torch.distributed.all_gather_object(parts, gathered, group=group.cpu_group)
            gathered = [given for part in parts for given in part]
    return gathered


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
        # Streamed from an object store, in which an address does not identify what it holds today.
        return None
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(source, revision=revision, cache_dir=cache_dir, local_files_only=True))
    except Exception as error:
        # Not a name that it knows, nothing in its cache, or no such package.
        logger.debug("no files of %s are here: %s", source, error)
        return None


def files_name(path: Path) -> str | None:
    """The name of what a checkpoint, a folder or one file, holds. None: no weights. Raises ``OSError``.

    Tensors count by name, type, shape and a sample of their bytes, wherever in which file they are. Files of
    another kind than safetensors count by name, size and samples.
    """
    files = [path] if path.is_file() else _weight_files(path)
    if not files:
        return None
    digest = hashlib.blake2b(digest_size=_NAME_BYTES)
    tensors = [tensor for file in files for tensor in _tensors(file) or _pieces(file, len(files))]
    for tensor in sorted(tensors):
        digest.update(f"{tensor.name} {tensor.dtype} {tensor.shape}\n".encode())
    # In an order that does not depend on how the tensors are spread over files.
    for _, data in sorted(_samples(tensors).items()):
        digest.update(data)
    return f"files {digest.hexdigest()}"


def _weight_files(folder: Path) -> list[Path]:
    """The files that vLLM reads of a folder: of one kind, and none that repeats others."""
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
    """The tensors that the header of a safetensors file names; nothing if there is none that can be read."""
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
