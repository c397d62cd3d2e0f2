"""A model's own ``config.json``, as Hugging Face has it, read as the cache that a node of it has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from kvconnect.errors import ConfigError
from kvconnect.explain.cache_file import CacheFile, Dtype, parse_cache
from kvconnect.reading import read_file

USUAL_BLOCK_SIZE = 16

_KINDS = {"full_attention": "gqa", "sliding_attention": "sliding"}
"""Of ``layer_types``. The size of a recurrent state each model states in its own way."""


def read_cache(path: Path, sizes: Mapping[str, int]) -> CacheFile:
    """The cache of a file, or of a model's folder; ``sizes`` replace ``tp_size`` and ``block_size``.

    Raises ``ConfigError``.
    """

    def parse(given: Mapping[str, Any]) -> CacheFile:
        return parse_cache({**(cache_of(given) if is_model_config(given) else given), **sizes})

    return read_file(path / "config.json" if path.is_dir() else path, parse)


def is_model_config(given: Mapping[str, Any]) -> bool:
    """Whether this describes a model and no cache."""
    return "layers" not in given and ("model_type" in given or "architectures" in given)


def cache_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """A cache as ``cache_file`` reads it. Raises ``ConfigError``: the model does not state what it keeps."""
    text = given.get("text_config") or given
    num_layers = _number(text, "num_hidden_layers")
    dtype = str(text.get("dtype") or text.get("torch_dtype") or given.get("torch_dtype") or "bfloat16")
    common: dict[str, Any] = {"dtype": dtype if dtype in get_args(Dtype) else "bfloat16"}
    if text.get("kv_lora_rank"):
        width = _number(text, "kv_lora_rank") + _number(text, "qk_rope_head_dim")
        layers = [{"kind": "mla", "num_layers": num_layers, "head_size": width, **common}]
    else:
        num_heads = _number(text, "num_attention_heads")
        common["num_kv_heads"] = text.get("num_key_value_heads") or num_heads
        common["head_size"] = text.get("head_dim") or _number(text, "hidden_size") // num_heads
        layers = [
            {"kind": kind, "num_layers": count, **common, **_window(kind, text)}
            for kind, count in _counts(text, num_layers).items()
        ]
    return {"layers": layers, "block_size": USUAL_BLOCK_SIZE}


def _counts(text: Mapping[str, Any], num_layers: int) -> Mapping[str, int]:
    """How many layers of each kind there are."""
    types = text.get("layer_types")
    if types is None:
        slides = text.get("sliding_window") and text.get("use_sliding_window", True)
        return {"sliding" if slides else "gqa": num_layers}
    unknown = sorted(set(types) - _KINDS.keys())
    if unknown:
        raise ConfigError(
            f"layer_types has {', '.join(map(repr, unknown))}, accepted: {', '.join(_KINDS)}; write a file "
            "of the cache instead, see deploy/examples"
        )
    return Counter(_KINDS[kind] for kind in types)


def _window(kind: str, text: Mapping[str, Any]) -> dict[str, int]:
    return {"sliding_window": _number(text, "sliding_window")} if kind == "sliding" else {}


def _number(text: Mapping[str, Any], key: str) -> int:
    value = text.get(key)
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"{key} is {value!r}; accepted: a number that the model states, at least 1")
    return value
