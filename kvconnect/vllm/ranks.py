"""How vLLM divides a cache over its ranks: by heads, layers and tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from kvconnect.cache.shard import Topology, layer_number
from kvconnect.errors import ConfigError
from kvconnect.vllm.geometry import HeadCounts, VllmCache
from kvconnect.vllm.weights import all_ranks, draft_model

if TYPE_CHECKING:
    from vllm.config import VllmConfig


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
    _, *firsts = of_stages(vllm_config, min(numbers, default=0))[::tensor]
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
    return max(of_stages(vllm_config, cache.finest(head_counts(vllm_config)) or 0)) or None


def of_stages(vllm_config: VllmConfig, value: Any) -> list[Any]:
    """What every rank gave; without pipeline ranks, which all have the same, ours."""
    return all_ranks(value) if vllm_config.parallel_config.pipeline_parallel_size > 1 else [value]


def _num_heads(model_config: Any) -> int | None:
    return None if model_config.use_mla else int(model_config.get_total_num_kv_heads())
