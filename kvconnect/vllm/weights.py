"""Names of the weights that a server runs with, independent of where they were loaded from.

There are up to three: a digest of the checkpoint's tensors where its files can be read, one of the tensors in
memory, and one of the embeddings. The first two sample every tensor, so that no file is read whole; after
weights were replaced in place the files do not count. A fine-tune that adds tokens changes few rows of an
embedding table, which a sample may miss, so every byte of embeddings counts.
"""

from __future__ import annotations

import hashlib
import logging
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from kvconnect.runner_kit.checkpoint_files import local_name

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

_READ_FROM_FILES = {
    *("auto", "hf", "safetensors", "fastsafetensors", "runai_streamer", "instanttensor"),
    *("mistral", "pt", "npcache", "gguf", "bitsandbytes", "sharded_state"),
}
_WORDS_AT_ONCE = 1 << 22
_NAME_BYTES = 16
_SAMPLES_OF_A_TENSOR = 4096
_DRAFTERS = ("drafter", "speculator")
_UNIDENTIFIED = "unidentified"

Gather = Callable[[Any], list[Any]]
"""Returns each rank's value, in the order of ranks. A collective call."""


class LoadedWeights:
    """The names of this server's weights, equal on all ranks; ``cache.identity.weights_differ`` compares.

    ``checkpoint`` is the name of the files, None where unknown; ``models`` may be empty. With
    ``experts_move``, experts move between ranks at run time, and the name of the memory leaves them out.
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
        self._files = {"files": checkpoint} if checkpoint is not None and is_known else {}
        self.names = self._named(self._files, of_ranks)
        if self.names.get("tensors", "").startswith(_UNIDENTIFIED):
            logger.warning(
                "the weights of this server cannot be told from others, so that no peer exchanges KV with it "
                "and what it keeps is found by this process only: load them from files on this machine "
                "(--load-format auto)"
            )
        else:
            logger.info("weights: %s", self.text)

    @property
    def text(self) -> str:
        """The names in one line."""
        return ", ".join(f"{how} {name}" for how, name in self.names.items())

    def check(self) -> bool:
        """Read the tensors in memory again. Returns whether a name changed. All ranks must call it."""
        now, before = self._digest(), self.text
        of_ranks = self._gather((now is not None and now == self._first, now, embedding_sums(self._models)))
        # After weights were replaced in place the files do not count, until these are there again.
        self.names = self._named(self._files if all(first for first, *_ in of_ranks) else {}, of_ranks)
        if self.text != before:
            logger.info("weights were replaced in place: they were %s and are %s", before, self.text)
        return self.text != before

    def _digest(self) -> bytes | None:
        return tensors_digest(self._models, without_experts=self._experts_move)

    def _named(
        self, files: Mapping[str, str], of_ranks: Sequence[tuple[Any, bytes | None, Iterable[EmbeddingSum]]]
    ) -> dict[str, str]:
        """Names with those of tensors, comparable for equal numbers of ranks, and of embeddings, for any."""
        names, digests = dict(files), [digest for _, digest, _ in of_ranks]
        if None not in digests:
            joined = hashlib.blake2b(b"".join(filter(None, digests)), digest_size=_NAME_BYTES)
            names["tensors"] = f"{joined.hexdigest()} over {len(digests)} ranks"
        elif not files:
            names["tensors"] = f"{_UNIDENTIFIED} {self._gather(uuid.uuid4().hex)[0]}"
        if embeddings := _embeddings_name([sums for *_, sums in of_ranks]):
            names["embeddings"] = embeddings
        return names


def loaded_weights(vllm_config: VllmConfig) -> LoadedWeights:
    """The weights of the model runner that registers its caches now, which is one of the callers."""
    checkpoint = checkpoint_name(vllm_config.model_config, vllm_config.load_config)
    moves = bool(getattr(getattr(vllm_config, "parallel_config", None), "enable_eplb", False))
    return LoadedWeights(checkpoint, running_models()[:1], all_ranks, experts_move=moves)


def draft_model(vllm_config: VllmConfig) -> Any:
    """The configuration of a draft model; None where no model drafts."""
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
"""Dtype and shape of a whole table, the first row of a rank's part, and the sum of the part's bytes."""


def embedding_sums(models: Sequence[nn.Module]) -> list[EmbeddingSum]:
    """A 64-bit sum over every byte of this rank's embedding tables; the sums of parts add up to the whole's.

    A change of any one word changes the sum: each word's factor is odd and depends on its place.
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
    """The sum modulo 2^64 of a part of a table, whose first row has the number ``first`` in the table."""
    row_bytes = table.shape[1] * table.element_size()
    word = next(
        kind
        for kind in (torch.int64, torch.int32, torch.int16, torch.uint8)
        if row_bytes % kind.itemsize == 0
    )
    width, device = row_bytes // word.itemsize, table.device
    # 64-bit integers wrap around on every device.
    at = torch.arange(width, dtype=torch.int64, device=device)
    factors = (at * 0x5851F42D4C957F2D + 0x14057B7EF767814F) * 2 + 1
    total, step = 0, max(1, _WORDS_AT_ONCE // max(1, width))
    for start in range(0, table.shape[0], step):
        part = table[start : start + step].contiguous().view(word)
        numbers = torch.arange(start, start + part.shape[0], dtype=torch.int64, device=device) + first
        total += int(((part * factors).sum(1) * (2 * numbers + 1)).sum())
    return total % 2**64


def _embeddings_name(of_ranks: Sequence[Iterable[EmbeddingSum]]) -> str:
    """One name for all ranks' embeddings, independent of the number of ranks; empty without embeddings."""
    totals: dict[str, int] = {}
    # A part that several ranks have counts once.
    for kind, _, part in sorted({one for sums in of_ranks for one in sums}):
        totals[kind] = (totals.get(kind, 0) + part) % 2**64
    if not totals:
        return ""
    types = "+".join(sorted({kind.partition(" ")[0] for kind in totals}))
    return f"{types} {hashlib.blake2b(repr(totals).encode(), digest_size=_NAME_BYTES).hexdigest()}"


def tensors_digest(models: Sequence[nn.Module], *, without_experts: bool = False) -> bytes | None:
    """A digest of samples of every tensor of these models on this rank. None: no tensor can be read."""
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
        logger.info("the weights in memory cannot be read: %s", error)
        return None
    return digest.digest() if count else None


def _of_experts(model: nn.Module) -> Iterator[int]:
    """Ids of the parameters that a model may move between ranks."""
    for module in model.modules():
        if hasattr(module, "get_expert_weights"):
            yield from map(id, module.parameters())


def _sample(tensor: torch.Tensor) -> bytes:
    count = tensor.numel()
    if not count:
        return b""
    fits = tensor.untyped_storage().nbytes() >= (tensor.storage_offset() + count) * tensor.element_size()
    # In memory order if the tensor has no gaps: a reshape would copy a transposed tensor whole.
    flat = tensor.as_strided((count,), (1,)) if fits else tensor.reshape(-1)
    step = -(-count // _SAMPLES_OF_A_TENSOR)
    return bytes(flat[::step].contiguous().cpu().view(torch.uint8).numpy())


def running_models() -> list[nn.Module]:
    """The models of the nearest caller that is a model runner, drafts last: vLLM offers no other access."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        runner: Any = frame.f_locals.get("self")
        if hasattr(runner, "get_model") and hasattr(runner, "initialize_kv_cache"):
            found = [runner.get_model()]
            found += [getattr(getattr(runner, name, None), "model", None) for name in _DRAFTERS]
            # A model that CUDA graphs capture is wrapped.
            found = [model.unwrap() if hasattr(model, "unwrap") else model for model in found]
            return [model for model in found if isinstance(model, nn.Module)]
        frame = frame.f_back
    return []


def _rank_groups() -> tuple[Any, ...]:
    from vllm.distributed.parallel_state import get_pcp_group, get_pp_group, get_tp_group

    return get_pp_group(), get_tp_group(), get_pcp_group()


def own_rank() -> int:
    """This rank's number: pipeline rank by pipeline rank, within each tensor-parallel rank by rank."""
    number = 0
    for group in _rank_groups():
        number = number * group.world_size + group.rank_in_group
    return number


def all_ranks(value: Any) -> list[Any]:
    """Each rank's value, in the order of rank numbers. All ranks must call it."""
    gathered = [value]
    for group in reversed(_rank_groups()):
        if group.world_size > 1:
            parts: list[Any] = [None] * group.world_size
            torch.distributed.all_gather_object(parts, gathered, group=group.cpu_group)
            gathered = [given for part in parts for given in part]
    return gathered


def checkpoint_name(model: Any, load_config: Any) -> str | None:
    """The name of the checkpoint in a model's configuration. None: its files are not here, or not used."""
    load_format = getattr(load_config.load_format, "value", load_config.load_format)
    if str(load_format) not in _READ_FROM_FILES:
        return None
    source = str(getattr(model, "model_weights", "") or model.model)
    return local_name(source, model.revision, load_config.download_dir)
