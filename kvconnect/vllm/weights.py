"""The names of the weights that a server runs with, wherever they were loaded from.

They are those of the checkpoint's tensors where its files can be read, of the tensors in memory, which alone
count after these were replaced in place, and of the embeddings. All but the last are samples of every tensor:
no file is read whole. A fine-tune that adds tokens changes few rows of a table, which no sample shows: of
embeddings every byte counts.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import re
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

_READ_FROM_FILES = {
    *("auto", "hf", "safetensors", "fastsafetensors", "runai_streamer", "instanttensor"),
    *("mistral", "pt", "npcache", "gguf", "bitsandbytes", "sharded_state"),
}
_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_INDEX = "model.safetensors.index.json"
# Training changes nearly every value, so that few samples of a tensor distinguish two checkpoints. Where
# there are more tensors than this each module has one looked at, and so each expert: folders lie on slow
# shares too.
_SAMPLE_BYTES = 512
_MOST_SAMPLES = 4096
_LEAST_OF_A_KIND = 4
_WORDS_AT_ONCE = 1 << 22
_MOST_HEADER_BYTES = 256 << 20
_UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, IndexError)
_NAME_BYTES = 16
_SAMPLES_OF_A_TENSOR = 4096
_DRAFTERS = ("drafter", "speculator")
_UNIDENTIFIED = "unidentified"

Gather = Callable[[Any], list[Any]]
"""What every rank of a server gave, in order. All of them must call it."""


class LoadedWeights:
    """Their names, the same on all ranks; see ``cache.identity.weights_differ`` for what each is good for.

    ``checkpoint`` is the name of the files, None where it is unknown; ``models`` may be out of reach. Where
    ``experts_move`` between ranks while the server runs, what is in memory is named without them.
    """

    def __init__(
        self,
        checkpoint: str | None,
        models: Sequence[nn.Module],
        gather: Gather,
        *,
        experts_move: bool = False,
    ) -> None:
        self._models, self._gather, self._experts_move = models, gather, experts_move
        self._first = self._digest()
        of_ranks = gather((checkpoint, self._first, embedding_sums(models)))
        is_known = checkpoint is not None and all(name == checkpoint for name, *_ in of_ranks)
        self.names = {"files": checkpoint} if checkpoint is not None and is_known else {}
        self._name_memory([digest for _, digest, _ in of_ranks], [sums for *_, sums in of_ranks])
        self._first_names = self.names
        if self.names.get("tensors", "").startswith(_UNIDENTIFIED):
            logger.warning(
                "the weights of this server cannot be told from others: %s. No peer exchanges KV with it, "
                "and what it keeps is found by this process only",
                self.names["tensors"],
            )
        else:
            logger.info("weights: %s", self.text)

    @property
    def text(self) -> str:
        """The names in one line."""
        return ", ".join(f"{how} {name}" for how, name in self.names.items())

    def check(self) -> bool:
        """Look at the tensors in memory again. Whether the weights have other names than before."""
        now, before = self._digest(), self.text
        of_ranks = self._gather((now is not None and now == self._first, now, embedding_sums(self._models)))
        if all(is_first for is_first, *_ in of_ranks):
            self.names = self._first_names
        else:
            self.names = {}
            self._name_memory([digest for _, digest, _ in of_ranks], [sums for *_, sums in of_ranks])
        if self.text != before:
            logger.warning("weights were replaced in place: they were %s and are %s", before, self.text)
        return self.text != before

    def _digest(self) -> bytes | None:
        return tensors_digest(self._models, without_experts=self._experts_move)

    def _name_memory(self, digests: Sequence[bytes | None], sums: Sequence[Iterable[EmbeddingSum]]) -> None:
        """Name what all ranks have in memory: equal only on a server of as many ranks, embeddings on any."""
        if None not in digests:
            joined = hashlib.blake2b(b"".join(filter(None, digests)), digest_size=_NAME_BYTES)
            self.names["tensors"] = f"{joined.hexdigest()} over {len(digests)} ranks"
        elif "files" not in self.names:
            self.names["tensors"] = f"{_UNIDENTIFIED} {self._gather(uuid.uuid4().hex)[0]}"
        if embeddings := _embeddings_name(sums):
            self.names["embeddings"] = embeddings


def loaded_weights(vllm_config: VllmConfig) -> LoadedWeights:
    """Those of the runner that registers its caches now: it is among the callers."""
    checkpoint = checkpoint_name(vllm_config.model_config, vllm_config.load_config)
    moves = bool(getattr(getattr(vllm_config, "parallel_config", None), "enable_eplb", False))
    return LoadedWeights(checkpoint, running_models()[:1], all_ranks, experts_move=moves)


def draft_model(vllm_config: VllmConfig) -> Any:
    """The configuration of a draft model; None where nothing is guessed, or not by a model."""
    speculative = vllm_config.speculative_config
    draft = getattr(speculative, "draft_model_config", None)
    return None if draft is getattr(speculative, "target_model_config", None) else draft


def draft_name(vllm_config: VllmConfig) -> str:
    """The name of a draft model's weights; empty without one. All ranks must call it."""
    draft = draft_model(vllm_config)
    if draft is None:
        return ""
    if draft.model == vllm_config.model_config.model:
        return "of the model's files"
    own = getattr(vllm_config.speculative_config, "draft_load_config", None)
    name = checkpoint_name(draft, own or vllm_config.load_config)
    if name is not None:
        return name
    in_memory = all_ranks(tensors_digest(running_models()[1:]))
    return f"tensors {hashlib.blake2b(repr(in_memory).encode(), digest_size=_NAME_BYTES).hexdigest()}"


EmbeddingSum = tuple[str, int, int]
"""Type and shape of a whole table, the first row of a rank's part of it, and the sum of that part's bytes."""


def embedding_sums(models: Sequence[nn.Module]) -> list[EmbeddingSum]:
    """A sum of every byte of the tables of embeddings that a rank has: those of parts add up to the whole's.

    Changing any one word of 8 bytes changes it: each is multiplied with an odd number that its place chooses.
    """
    found = []
    for model in models:
        for module in model.modules():
            weight = module._parameters.get("weight")
            indices = getattr(module, "shard_indices", None)
            is_output = "LMHead" in type(module).__name__
            if weight is None or weight.dim() != 2 or is_output or weight.is_meta:
                continue
            if indices is not None:
                first, count = indices.org_vocab_start_index, indices.num_org_elements
                rows = int(getattr(module, "org_vocab_size", weight.shape[0]))
            elif isinstance(module, nn.Embedding):
                first, count, rows = 0, weight.shape[0], weight.shape[0]
            else:
                continue
            kind = f"{str(weight.dtype).removeprefix('torch.')} {rows}x{weight.shape[1]}"
            found.append((kind, first, _sum_of(weight.data[:count], first)))
    return found


def _sum_of(table: torch.Tensor, first: int) -> int:
    """Modulo 2^64, of the rows of a table, the first of which has the number ``first``."""
    row_bytes = table.shape[1] * table.element_size()
    word = next(
        kind
        for kind in (torch.int64, torch.int32, torch.int16, torch.uint8)
        if row_bytes % kind.itemsize == 0
    )
    width, device = row_bytes // word.itemsize, table.device
    # Integers of 64 bits wrap around, on every device.
    at = torch.arange(width, dtype=torch.int64, device=device)
    factors = (at * 0x5851F42D4C957F2D + 0x14057B7EF767814F) * 2 + 1
    total, step = 0, max(1, _WORDS_AT_ONCE // max(1, width))
    for start in range(0, table.shape[0], step):
        part = table[start : start + step].contiguous().view(word)
        numbers = torch.arange(start, start + part.shape[0], dtype=torch.int64, device=device) + first
        total += int(((part * factors).sum(1) * (2 * numbers + 1)).sum())
    return total % 2**64


def _embeddings_name(of_ranks: Sequence[Iterable[EmbeddingSum]]) -> str:
    """One name of what all ranks have, the same for any number of ranks; empty for nothing."""
    totals: dict[str, int] = {}
    # Ranks that have the same part count once.
    for kind, _, part in sorted({one for sums in of_ranks for one in sums}):
        totals[kind] = (totals.get(kind, 0) + part) % 2**64
    if not totals:
        return ""
    types = "+".join(sorted({kind.partition(" ")[0] for kind in totals}))
    return f"{types} {hashlib.blake2b(repr(totals).encode(), digest_size=_NAME_BYTES).hexdigest()}"


def tensors_digest(models: Sequence[nn.Module], *, without_experts: bool = False) -> bytes | None:
    """A digest of samples of every tensor of some models on this rank. None: there are none to look at."""
    digest, count = hashlib.blake2b(digest_size=_NAME_BYTES), 0
    try:
        with torch.no_grad():
            for model in models:
                moving = set(_of_experts(model)) if without_experts else set()
                for name, parameter in model.named_parameters():
                    if id(parameter) in moving:
                        continue
                    digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}\n".encode())
                    digest.update(_sample(parameter.data))
                    count += 1
    except (RuntimeError, TypeError, NotImplementedError) as error:
        logger.warning("the weights in memory cannot be looked at: %s", error)
        return None
    return digest.digest() if count else None


def _of_experts(model: nn.Module) -> Iterator[int]:
    """The ids of the parameters that a model hands out to be moved between ranks."""
    for module in model.modules():
        if hasattr(module, "get_expert_weights"):
            yield from map(id, module.parameters())


def _sample(tensor: torch.Tensor) -> bytes:
    count = tensor.numel()
    if not count:
        return b""
    fits = tensor.untyped_storage().nbytes() >= (tensor.storage_offset() + count) * tensor.element_size()
    # In the order of memory if it has no gaps, since a tensor that is transposed would be copied whole.
    flat = tensor.as_strided((count,), (1,)) if fits else tensor.reshape(-1)
    step = -(-count // _SAMPLES_OF_A_TENSOR)
    return bytes(flat[::step].contiguous().cpu().view(torch.uint8).numpy())


def running_models() -> list[nn.Module]:
    """The models of the nearest caller that has some, a draft's last: vLLM gives no other way to them."""
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
    return digest.hexdigest()


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
    """Bytes of every tensor by name, or where there are very many of one of each module."""
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
    """A tensor of each module, and some of every kind: names that differ in numbers only are of one."""
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
