"""A model's configuration as text, for any serving stack: each field that KV may depend on."""

from __future__ import annotations

import enum
import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from kvconnect.cache.identity import default

_DEEPEST = 6


def words(by_reason: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    return {reason: tuple(words.split()) for reason, words in by_reason.items()}


FREE_FIELDS = words(
    {
        "where it comes from": "_name_or_path transformers_version _commit_hash",
        "has an entry of its own": "dtype torch_dtype",
        "length of requests: what is derived of it is compared": "max_model_len",
        "what comes after the last layer": """
            id2label label2id problem_type num_labels finetuning_task task_specific_params bos_token_id
            eos_token_id pad_token_id sep_token_id decoder_start_token_id output_attentions
            output_hidden_states return_dict output_router_logits final_logit_softcapping""",
        "training": """
            attention_dropout hidden_dropout embd_pdrop attn_pdrop resid_pdrop dropout initializer_range
            router_aux_loss_coef aux_loss_alpha seq_aux router_jitter_noise""",
        "other runtimes": "use_cache chunk_size_feed_forward _attn_implementation attn_implementation",
    }
)
"""By reason: fields of a model's configuration, at any depth, that KV does not depend on."""
_FREE_FIELDS = {*itertools.chain(*FREE_FIELDS.values())}


def configuration(config: Any) -> dict[str, str]:
    """A model's configuration, field by field, without the fields that KV does not depend on.

    Releases of transformers differ in their fields, so a default value is marked as a default.
    """
    try:
        defaults = dict(_flat(type(config)().to_dict()))
    except Exception:
        # The classes of some models need arguments. Then each value counts as set.
        defaults = {}
    return {
        name: default(value) if name in defaults and defaults[name] == value else value
        for name, value in _flat(config.to_dict())
    }


def _flat(values: Mapping[Any, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    """Path and JSON text of each field of a configuration that KV depends on."""
    for name, value in values.items():
        if str(name) in _FREE_FIELDS:
            continue
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", json.dumps(plain(value), sort_keys=True)


def plain(value: Any, depth: int = 0) -> Any:
    """A value as JSON types, the same in every process; an object as its class and attributes."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if isinstance(value, torch.Tensor):
        plain_bytes = value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
        return hashlib.sha256(plain_bytes).hexdigest()
    if depth > _DEEPEST:
        return type(value).__qualname__
    if isinstance(value, Mapping):
        return {str(key): plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, depth + 1) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((plain(item, depth + 1) for item in value), key=json.dumps)
    if isinstance(value, type) or callable(value):
        name = getattr(value, "__qualname__", type(value).__qualname__)
        return f"{getattr(value, '__module__', '')}.{name}"
    attributes = {key: plain(item, depth + 1) for key, item in getattr(value, "__dict__", {}).items()}
    return {"class": type(value).__qualname__, **attributes}


def dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
