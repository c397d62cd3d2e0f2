"""What SGLang's KV depends on, entry by entry of ``cache.identity.ENTRIES``."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from kvconnect.cache.identity import Identity
from kvconnect.runner_kit.checkpoint_files import files_name, local_files

logger = logging.getLogger(__name__)

_FREE = {
    *("_name_or_path", "name_or_path", "transformers_version", "_commit_hash", "dtype", "torch_dtype"),
    *("use_cache", "_attn_implementation", "output_attentions", "output_hidden_states", "return_dict"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "id2label", "label2id", "architectures"),
    *("initializer_range", "attention_dropout", "_attn_implementation_internal", "chunk_size_feed_forward"),
}
"""Fields of a model's configuration that KV does not depend on, or that have an entry of their own."""


def read_identity(
    model: Any, server_args: Any, kv_args: Any, dtype: torch.dtype, ranks: int, convert_dtype: bool
) -> Identity:
    """The identity of a server's KV: of ``ModelConfig``, its arguments and its pools.

    ``dtype``: of the cache. ``ranks``: their number where a pool travels only between equal ones, else 0.
    """
    architectures = getattr(model.hf_config, "architectures", None) or ["unknown"]
    draft = getattr(server_args, "speculative_draft_model_path", None)
    return Identity.of(
        {
            "model": f"SGLang {'+'.join(architectures)}",
            "configuration": _fields(model.hf_config),
            "settings": {
                "page-size": int(kv_args.page_size),
                "rows beside the KV": [int(size) for size in kv_args.aux_item_lens],
                "states": [str(getattr(kind, "value", kind)) for kind in kv_args.state_types],
                "layout": str(getattr(kv_args, "kv_layout", None)),
            },
            "quantization": str(getattr(model, "quantization", None)),
            "dtype": str(model.dtype),
            "cache dtype": "any of 16 and 8 bits, by convert_dtype" if convert_dtype else str(dtype),
            "ranks": ranks,
            "weights": _weights(model, server_args),
            "draft": {} if not draft else {"": _files(draft, None) or str(draft)},
        }
    )


def _fields(config: Any) -> Mapping[str, Any]:
    """A model's configuration, without what KV does not depend on."""
    fields = config.to_dict() if hasattr(config, "to_dict") else {}
    return {name: _plain(value) for name, value in fields.items() if name not in _FREE and value is not None}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items() if name not in _FREE}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def _weights(model: Any, server_args: Any) -> Mapping[str, str]:
    if str(getattr(server_args, "load_format", "auto")) == "dummy":
        return {"files": f"made up, seed {getattr(server_args, 'random_seed', None)}"}
    name = _files(str(model.model_path), getattr(model, "revision", None))
    # Without files here, the name that both servers were given.
    return {"files": name or f"{model.model_path} {getattr(model, 'revision', None)}"}


def _files(source: str, revision: str | None) -> str | None:
    try:
        path = local_files(source, revision, None)
        return None if path is None else files_name(path)
    except OSError as error:
        logger.info(
            "the weights in %s are compared by name only, as a file cannot be read: %s", source, error
        )
        return None
