"""What two vLLM servers must have in common for the KV of one to mean the same on the other.

Versions and paths need not be equal; block sizes and layouts are bridged where the caches are lined up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvconnect.cache.shard import Topology, layer_number
from kvconnect.errors import ConfigError
from kvconnect.vllm.geometry import HeadCounts, VllmCache, group_spec, is_state
from kvconnect.vllm.states import Section, conv_layout
from kvconnect.vllm.weights import all_ranks, draft_model

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_SAME_DTYPE = {"fp8": "fp8_e4m3"}
_CONVERTED_CACHES = ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3")
_CONVERTED_MODELS = ("bfloat16", "float16")


def fingerprint(
    vllm_config: VllmConfig, kv_cache_config: Any, cache: VllmCache, *, convert_dtype: bool = False
) -> str:
    """Model and cache contents in words: ``name=value`` but for the first, so that what differs can be named.

    Nothing of a model's path counts, since paths differ between hosts, and weights have a name of their own.
    The number of ranks counts where some layer can only travel between equal ones. With
    ``convert_dtype`` the types that are converted count as one, so that a peer must convert them too.
    """
    model = vllm_config.model_config
    text = model.hf_text_config
    # Not every pipeline rank has layers of each kind.
    given = _of_stages(vllm_config, (_states(kv_cache_config, cache.sections), bool(cache.rank_bound)))
    states = sorted({state for states, _ in given for state in states})
    parts = [
        str(text.model_type),
        f"layers={text.num_hidden_layers}",
        f"hidden_size={text.hidden_size}",
        *_dtypes(vllm_config, bool(states), convert_dtype),
        *states,
    ]
    if any(is_bound for _, is_bound in given):
        parts.append(f"tensor_parallel_size={vllm_config.parallel_config.tensor_parallel_size}")
    return ":".join(parts)


def head_counts(vllm_config: VllmConfig) -> HeadCounts:
    """The KV heads of the main model and of a draft model. Latent caches have none."""
    main = vllm_config.model_config
    draft = draft_model(vllm_config)
    return HeadCounts(
        main=_num_heads(main),
        draft=None if draft is None else _num_heads(draft),
        num_layers=0 if draft is None else int(main.hf_text_config.num_hidden_layers),
    )


def topology(vllm_config: VllmConfig, rank: int, layers: Iterable[str]) -> Topology:
    """How caches are divided over vLLM's ranks. All of them must call it, each with the layers that it has.

    Raises ``ConfigError``: ranks do not have layers one after the other.
    """
    tensor = stage_ranks(vllm_config)
    numbers = [number for number in map(layer_number, layers) if number is not None]
    _, *firsts = _of_stages(vllm_config, min(numbers, default=0))[::tensor]
    turn = int(getattr(vllm_config.parallel_config, "cp_kv_cache_interleave_size", 1))
    made = Topology(tensor, (0, *firsts), context_ranks(vllm_config), turn)
    for layer in layers:
        if not made.owns(rank, layer):
            raise ConfigError(
                f"rank {rank} has layer {layer!r}, but its pipeline rank begins with layer "
                f"{made.layers(rank).start}, all of them with {made.stages}; accepted: layers in order"
            )
    return made


def stage_ranks(vllm_config: VllmConfig) -> int:
    """How many ranks have the same layers.

    Prefill context parallel ranks have what their tensor-parallel rank has, of latent caches all the same
    bytes. They are numbered within it, as vLLM lets them take turns to keep tokens (DCP over PCP, then TP).
    """
    parallel = vllm_config.parallel_config
    return int(parallel.tensor_parallel_size * getattr(parallel, "prefill_context_parallel_size", 1))


def context_ranks(vllm_config: VllmConfig) -> int:
    """How many ranks with the same heads keep tokens in turns: a block has so many times its tokens."""
    return int(getattr(vllm_config.parallel_config, "decode_context_parallel_size", 1))


def finest(vllm_config: VllmConfig, cache: VllmCache) -> int | None:
    """The finest division of any layer over tensor-parallel ranks; None where they keep the same bytes."""
    return max(_of_stages(vllm_config, cache.finest(head_counts(vllm_config)) or 0)) or None


def _of_stages(vllm_config: VllmConfig, value: Any) -> list[Any]:
    """What every rank gave; without pipeline ranks, which all have the same, ours."""
    return all_ranks(value) if vllm_config.parallel_config.pipeline_parallel_size > 1 else [value]


def _dtypes(vllm_config: VllmConfig, has_states: bool, convert_dtype: bool) -> list[str]:
    """The types that must be equal on both sides, of the model and of its cache."""
    model_dtype = str(vllm_config.model_config.dtype).removeprefix("torch.")
    cache_dtype = str(vllm_config.cache_config.cache_dtype)
    named = f"dtype={model_dtype}"
    equal = [named, f"kv_cache_dtype={_SAME_DTYPE.get(cache_dtype, cache_dtype)}"]
    if not convert_dtype:
        return equal
    if cache_dtype in _CONVERTED_CACHES and model_dtype in _CONVERTED_MODELS:
        # States are not converted, and they may have the model's type.
        equal = [named] if has_states else []
    # Rows of other caches hold more than values, and some of that has the model's type.
    return [*equal, "convert_dtype=true"]


def _num_heads(model_config: Any) -> int | None:
    return None if model_config.use_mla else int(model_config.get_total_num_kv_heads())


def _states(kv_cache_config: Any, sections: Mapping[str, Sequence[Section]]) -> list[str]:
    """The recurrent states of a page over the whole model; where that is not known, those of a rank."""
    described = set()
    for group in kv_cache_config.kv_cache_groups:
        for layer in group.layer_names:
            spec = group_spec(group, layer)
            if is_state(spec):
                parts = sections.get(layer)
                shapes = ", ".join(part.text for part in parts) if parts else getattr(spec, "shapes", ())
                dtypes = tuple(str(dtype).removeprefix("torch.") for dtype in getattr(spec, "dtypes", ()))
                described.add(f"state={shapes} {dtypes} {conv_layout()}")
    return sorted(described)
