"""What vLLM's KV depends on, entry by entry of ``cache.identity.ENTRIES``, read from the loaded model.

Flags and files are only the request: overrides, the platform and the model itself change a configuration
after it was read. So the objects in memory are read, and every value not known to be without effect counts.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from kvconnect.cache.identity import Identity, default, noted
from kvconnect.cache.shard import layer_number
from kvconnect.config import OffloadConfig
from kvconnect.offload.namespace import salted
from kvconnect.runner_kit.model_configuration import configuration, dtype_name, plain, words
from kvconnect.vllm.geometry import HeadCounts, VllmCache, group_spec, has_slots, head_counts, is_state
from kvconnect.vllm.offload import hash_block_tokens
from kvconnect.vllm.states import Section, conv_layout
from kvconnect.vllm.values import attention_layers, page_orders
from kvconnect.vllm.weights import LoadedWeights, all_ranks, draft_name, running_models

if TYPE_CHECKING:
    from vllm.config import VllmConfig


FREE_SETTINGS = words(
    {
        "where it comes from": """
            model model_weights revision code_revision hf_config_path config_format hf_token
            trust_remote_code allowed_local_media_path allowed_media_domains served_model_name tokenizer
            tokenizer_mode tokenizer_revision skip_tokenizer_init""",
        "has an entry of its own": """
            dtype quantization hf_config hf_text_config hf_overrides generation_config
            override_generation_config model_impl model_class_overrides disable_sliding_window
            multimodal_config quantization_config allow_deprecated_quantization""",
        "length of requests: what is derived of it is compared": """
            max_model_len spec_target_max_model_len""",
        "sampling and answers": """
            seed max_logprobs logprobs_mode logits_processors return_sampling_mask use_fp64_gumbel
            pooler_config enable_return_routed_experts enable_trace_replay""",
        "how the server runs": """
            runner convert is_submodel_config enforce_eager disable_cascade_attn enable_prompt_embeds
            enable_sleep_mode sleep_preserve_parameter_names sleep_mode_backend enable_cumem_allocator
            sleep_mode_offload_cudagraph enable_nccl_comm_suspend io_processor_plugin renderer_num_workers
            word_embeddings_untied_by_checkpoint""",
        "caches and limits of media": """
            limit_per_prompt skip_mm_profiling mm_processor_cache_gb mm_processor_cache_type
            mm_shm_cache_max_object_size_mb mm_ipc_gpu_memory_gb mm_tensor_ipc mm_encoder_tp_mode
            mm_encoder_attn_backend mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin
            interleave_mm_strings enable_mm_embeds allow_missing_mm_embeddings mm_hasher_algorithm
            language_model_only mm_encoder_only""",
    }
)
"""By reason: settings of vLLM that KV does not depend on, or depends on through another entry."""
_FREE_SETTINGS = {*itertools.chain(*FREE_SETTINGS.values())}
_COUNTED_CONFIGS = ("additional_config", "engram_config", "diffusion_config")

_SAME_DTYPE = {"fp8": "fp8_e4m3"}
_CONVERTED = ("bfloat16", "float16", "fp8_e4m3")
_CONVERTED_MODELS = ("bfloat16", "float16")
_READ_OF_SPECS = ("kv_quant_mode", "tokens_per_state", "state_content_bytes", "model_version")
_ROTARY_TABLES = ("cos_sin_cache", "long_short_cos_sin_cache", "cos_cache", "sin_cache")
_ROTARY_CHOICES = ("is_neox_style", "rotary_dim", "use_long_rope", "mrope_section")
_POSITIONS = (1, 37)
_ANGLES = 16
"""This many numbers, of the rows of a rotary table at ``_POSITIONS``, identify its parameters."""


class Stated:
    """The identity entries of all ranks, gathered: a pipeline rank may have layers of one kind only.

    A collective constructor. It writes to ``kv_caches`` and restores them.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: Any,
        kv_caches: Mapping[str, torch.Tensor],
        weights: LoadedWeights,
    ) -> None:
        self._vllm, self._cache, self._weights = vllm_config, kv_cache_config, weights
        models, layers = running_models(), attention_layers(vllm_config)
        specs = {
            name: group_spec(group, name)
            for group in kv_cache_config.kv_cache_groups
            for name in group.layer_names
            if name in kv_caches
        }
        attended = {name: cache for name, cache in kv_caches.items() if not is_state(specs[name])}
        own = {
            "model": {type(model).__name__ for model in models[:1]},
            "attention": {name: _attention(layers.get(name)) for name in attended},
            "rotary": set(_rotary(models[:1])),
            "cache dtype": {name: _cache_dtype(layers.get(name), specs[name]) for name in attended},
            "page order": page_orders(
                layers, attended, vllm_config.model_config.dtype, lambda name: has_slots(specs[name])
            ),
        }
        of_ranks = all_ranks(own)
        draft = draft_name(vllm_config)
        counts = head_counts(vllm_config)
        entries: dict[str, Any] = {
            "model": noted(
                "+".join(sorted({name for rank in of_ranks for name in rank["model"]})),
                str(vllm_config.model_config.model),
            ),
            "configuration": configuration(vllm_config.model_config.hf_config),
            "settings": _settings(vllm_config),
            "rotary": "; ".join(sorted({text for rank in of_ranks for text in rank["rotary"]})),
            "quantization": _quantization(vllm_config),
        }
        for entry in ("attention", "cache dtype", "page order"):
            values = {name: text for rank in of_ranks for name, text in rank[entry].items()}
            entries[entry] = _by_layer(values, counts)
        if draft:
            config = configuration(vllm_config.speculative_config.draft_model_config.hf_config)
            entries["draft"] = {"weights": draft, "configuration": _short(config)}
        self._entries = {name: value for name, value in entries.items() if value}

    def identity(
        self, cache: VllmCache, offload: OffloadConfig | None, *, convert_dtype: bool = False
    ) -> Identity:
        """The identity of caches as described by ``cache``, over all ranks. All ranks must call it.

        With ``convert_dtype`` all convertible dtypes count as one: a peer must have ``convert_dtype`` too.
        """
        # Not every pipeline rank has layers of each kind.
        own = _states(self._cache, cache.sections), bool(cache.rank_bound)
        of_ranks = all_ranks(own)
        states = sorted({state for states, _ in of_ranks for state in states})
        entries = {
            **self._entries,
            "weights": self._weights.names,
            "names": {
                "hashing": salted(hashing(self._vllm), offload),
                "tokens": hash_block_tokens(self._vllm, self._cache),
            },
            **dtypes(
                dtype_name(self._vllm.model_config.dtype),
                self._entries.get("cache dtype", {}),
                has_states=bool(states),
                convert_dtype=convert_dtype,
            ),
        }
        if states:
            entries["states"] = {str(number): state for number, state in enumerate(states)}
        if any(is_bound for _, is_bound in of_ranks):
            entries["ranks"] = self._vllm.parallel_config.tensor_parallel_size
        return Identity.of(entries)


def dtypes(model: str, kept: Mapping[str, str], *, has_states: bool, convert_dtype: bool) -> dict[str, Any]:
    """The dtype entries of ``Stated.identity``: the model's ``dtype``, and ``cache dtype`` by layer."""
    if not convert_dtype:
        return {"dtype": model, "cache dtype": kept}
    is_converted = model in _CONVERTED_MODELS and set(kept.values()) <= set(_CONVERTED)
    # States are not converted, and may have the model's dtype. Rows of a cache with another dtype hold more
    # than values, in part with the model's dtype.
    any_type = "any of 16 and 8 bits, by convert_dtype"
    return {
        "dtype": any_type if is_converted and not has_states else model,
        "cache dtype": any_type if is_converted else {**kept, "convert_dtype": True},
    }


def hashing(vllm_config: VllmConfig) -> str:
    """The algorithm and seed of vLLM's block hashes."""
    algorithm = getattr(vllm_config.cache_config, "prefix_caching_hash_algo", "")
    return f"vllm {algorithm} from {os.environ.get('PYTHONHASHSEED', '')!r}"


def _settings(vllm_config: VllmConfig) -> dict[str, Any]:
    """vLLM's settings that are not at their defaults, without those that KV does not depend on."""
    model, found = vllm_config.model_config, {}
    for config in (model, getattr(model, "multimodal_config", None)):
        for field in dataclasses.fields(config) if dataclasses.is_dataclass(config) else ():
            value = getattr(config, field.name, None)
            if field.name in _FREE_SETTINGS or field.name.startswith("_") or value == _default_of(field):
                continue
            found[field.name] = json.dumps(plain(value), sort_keys=True)
    for name in _COUNTED_CONFIGS:
        if value := getattr(vllm_config, name, None):
            found[name] = json.dumps(plain(value), sort_keys=True)
    return found


def _default_of(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    value = None if field.default is dataclasses.MISSING else field.default
    # A field of pydantic has the default inside.
    factory = getattr(value, "default_factory", None)
    return factory() if callable(factory) else getattr(value, "default", value)


def _quantization(vllm_config: VllmConfig) -> dict[str, str]:
    """The quantization method and its configuration; an empty or false value counts as a default."""
    config = getattr(vllm_config, "quant_config", None)
    given = {"method": str(vllm_config.model_config.quantization)}
    for source in (getattr(vllm_config.model_config, "quantization_config", None), config):
        for name, value in _attributes(source).items():
            text = json.dumps(plain(value), sort_keys=True)
            given[name] = text if value else default(text)
    if config is not None:
        given["class"] = type(config).__name__
    return given


def _attributes(source: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(source) and not isinstance(source, type):
        return {field.name: getattr(source, field.name) for field in dataclasses.fields(source)}
    if isinstance(source, Mapping):
        return {str(name): value for name, value in source.items()}
    # Callables belong to the implementation.
    return {name: value for name, value in getattr(source, "__dict__", {}).items() if not callable(value)}


def _attention(layer: Any) -> str:
    """Which tokens a layer attends to, and how it weighs them."""
    impl = getattr(layer, "impl", None)
    stated = {
        "kind": getattr(layer, "attn_type", ""),
        "head": [getattr(layer, name, None) for name in ("head_size", "head_size_v")],
        "window": getattr(layer, "sliding_window", None),
        "chunk": getattr(layer, "attention_chunk_size", None),
        "scale": getattr(layer, "scale", None) or getattr(impl, "scale", None),
        "soft cap": getattr(impl, "logits_soft_cap", None) or 0,
        "sinks": bool(getattr(layer, "has_sink", False)),
        "alibi": getattr(impl, "alibi_slopes", None) is not None,
        "shares": getattr(layer, "kv_sharing_target_layer_name", None),
    }
    return ", ".join(f"{name} {plain(value)}" for name, value in stated.items() if value)


def _rotary(models: Iterable[nn.Module]) -> Iterable[str]:
    """Of each rotary module, its choices and a digest of its table."""
    for model in models:
        for module in model.modules():
            found = (getattr(module, name, None) for name in _ROTARY_TABLES)
            tables = [table for table in found if isinstance(table, torch.Tensor) and table.dim() == 2]
            if not tables:
                continue
            # In one table the long factors follow the short ones.
            is_long = bool(getattr(module, "use_long_rope", False))
            first = int(getattr(module, "original_max_position_embeddings", 0)) if is_long else 0
            rows = [
                table[first + at].float().cpu()
                for table in tables
                for at in _POSITIONS
                if not table.is_complex() and first + at < len(table)
            ]
            # Rounded: devices differ in the last bits.
            numbers = [
                round(float(row[i]), 2) + 0.0
                for row in rows
                for i in sorted({index * len(row) // _ANGLES for index in range(_ANGLES)})
            ]
            choices = {name: getattr(module, name, None) for name in _ROTARY_CHOICES}
            stated = (f"{name}={plain(value)}" for name, value in choices.items() if value is not None)
            yield " ".join([*stated, _short(numbers)])


def _cache_dtype(layer: Any, spec: Any) -> str:
    """The resolved dtype of a layer's cache, and the spec's fields that define how its bytes are read."""
    named = str(getattr(layer, "kv_cache_dtype", None) or "auto")
    kept = dtype_name(getattr(spec, "dtype", "")) if named == "auto" else _SAME_DTYPE.get(named, named)
    more = {name: getattr(spec, name, None) for name in _READ_OF_SPECS}
    # Defaults are left out, so that a spec without these fields has the same text.
    options = (
        f"{name}={plain(value)}" for name, value in more.items() if value and plain(value) not in (1, "NONE")
    )
    return " ".join([kept, *options])


def _by_layer(values: Mapping[str, str], counts: HeadCounts) -> dict[str, str]:
    """Values by layers: layers with an equal value share a field. A draft model's layers are left out."""
    kinds: dict[str, dict[str, set[int]]] = {}
    for name, value in values.items():
        number = layer_number(name)
        if number is not None and number >= counts.num_layers > 0:
            continue
        kinds.setdefault(re.sub(r"\d+", "#", name), {}).setdefault(value, set()).add(number or 0)
    fields = {
        f"{kind if len(kinds) > 1 else 'layers'} {_ranges(sorted(numbers))}": value
        for kind, shared in kinds.items()
        for value, numbers in shared.items()
    }
    return {"": next(iter(fields.values()))} if len(fields) == 1 else fields


def _ranges(numbers: Sequence[int]) -> str:
    """Rising numbers as ``0-3,8``; if that is long, its beginning and a digest."""
    runs = itertools.groupby(enumerate(numbers), lambda placed: placed[1] - placed[0])
    parts = [[number for _, number in run] for _, run in runs]
    text = ",".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)
    return text if len(text) <= 80 else f"{text[:60]}... ({_short(text)})"


def _states(kv_cache_config: Any, sections: Mapping[str, Sequence[Section]]) -> list[str]:
    """The recurrent states of a page over the whole model; where sections are unknown, those of a rank."""
    described = set()
    for group in kv_cache_config.kv_cache_groups:
        for layer in group.layer_names:
            spec = group_spec(group, layer)
            if is_state(spec):
                parts = sections.get(layer)
                shapes = ", ".join(part.text for part in parts) if parts else getattr(spec, "shapes", ())
                dtypes = tuple(map(dtype_name, getattr(spec, "dtypes", ())))
                described.add(f"{shapes} {dtypes} {conv_layout()}")
    return sorted(described)


def _short(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=8).hexdigest()
