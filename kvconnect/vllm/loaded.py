"""The weights that this server runs with: their name at the start, and after they were replaced in place."""

from __future__ import annotations

import hashlib
import logging
import sys
import uuid
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from kvconnect.vllm.weights import NAME_BYTES, checkpoint_name

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

_SAMPLES_OF_A_TENSOR = 4096
_DRAFTERS = ("drafter", "speculator")
_UNIDENTIFIED = "unidentified"

Gather = Callable[[Any], list[Any]]
"""What every tensor-parallel rank gave, in order. All of them must call it."""


class LoadedWeights:
    """One name on all tensor-parallel ranks, equal on two servers wherever the weights are.

    Args:
        checkpoint: the name of the files that were loaded; None where they cannot be told.
        models: the models in memory; none where they are out of reach.
        gather: brings together what the ranks say.
    """

    def __init__(self, checkpoint: str | None, models: Sequence[nn.Module], gather: Gather) -> None:
        self._models, self._gather = models, gather
        self._first = tensors_digest(models)
        told = gather((checkpoint, self._first))
        if checkpoint is not None and all(name == checkpoint for name, _ in told):
            self.name = checkpoint
        else:
            self.name = self._of_tensors([digest for _, digest in told])
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
        told = self._gather((now is not None and now == self._first, now))
        is_first = all(is_first for is_first, _ in told)
        self.name = self._first_name if is_first else self._of_tensors([digest for _, digest in told])
        if self.name != before:
            logger.warning("weights were replaced in place: they were %s and are %s", before, self.name)
        return self.name != before

    def _of_tensors(self, digests: Sequence[bytes | None]) -> str:
        """A name of what all ranks have in memory: equal only on a server of as many ranks."""
        if any(digest is None for digest in digests):
            return f"{_UNIDENTIFIED} {self._gather(uuid.uuid4().hex)[0]}"
        joined = hashlib.blake2b(b"".join(map(bytes, digests)), digest_size=NAME_BYTES)  # type: ignore[arg-type]
        return f"tensors {joined.hexdigest()} over {len(digests)} ranks"


def loaded_weights(vllm_config: VllmConfig) -> LoadedWeights:
    """Those of the runner that registers its caches now: it is among the callers."""
    return LoadedWeights(_checkpoint(vllm_config), _running_models(), _all_ranks)


def _checkpoint(vllm_config: VllmConfig) -> str | None:
    """The name of what was loaded, of a draft model too if it has files of its own."""
    main, load_config = vllm_config.model_config, vllm_config.load_config
    draft = getattr(vllm_config.speculative_config, "draft_model_config", None)
    name = checkpoint_name(main, load_config)
    if name is None or draft is None or draft.model == main.model:
        return name
    draft_load_config = getattr(vllm_config.speculative_config, "draft_load_config", None) or load_config
    draft_name = checkpoint_name(draft, draft_load_config)
    return None if draft_name is None else f"{name}, draft {draft_name}"


def tensors_digest(models: Sequence[nn.Module]) -> bytes | None:
    """A digest of samples of every tensor of some models on this rank. None: there are none to look at."""
    digest, count = hashlib.blake2b(digest_size=NAME_BYTES), 0
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


def _all_ranks(value: Any) -> list[Any]:
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return [value]
    told: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(told, value, group=group.cpu_group)
    return told
