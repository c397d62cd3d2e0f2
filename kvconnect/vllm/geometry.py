"""vLLM's caches in our terms: specs for sizes and kinds, tensors for bytes.

Bytes are taken from the tensors that a worker registers (shape, stride, storage) and from that
worker's own cache configuration. A spec of vLLM's is asked only what kind of layer it is: its fields
change from release to release, and the scheduler's copy is not the worker's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kvconnect.arithmetic import div_exact
from kvconnect.cache.region_table import CacheTensor
from kvconnect.cache.shard import HeadInterval, shard_heads
from kvconnect.cache.specs import (
    EncoderOnlySpec,
    FullAttentionSpec,
    GroupSpec,
    KVCacheConfig,
    KVCacheGroup,
    LayerSpec,
    MLASpec,
    SlidingWindowSpec,
    UniformTypeSpec,
)
from kvconnect.errors import LayoutError

_AXES = "block head token content"


@dataclass(frozen=True)
class VllmCache:
    """A worker's caches, ready to be registered."""

    config: KVCacheConfig
    kernel_block_sizes: dict[int, int]
    tensors: dict[str, CacheTensor]
    heads: dict[str, HeadInterval]


def transferred_groups(kv_cache_config: Any) -> tuple[int, ...]:
    """The groups of a vLLM cache configuration that a connector moves."""
    ids = getattr(kv_cache_config, "transfer_group_ids", None)
    return tuple(range(len(kv_cache_config.kv_cache_groups))) if ids is None else tuple(ids)


def layer_spec(group_spec: Any, layer: str) -> Any:
    """The vLLM spec of one layer, also where a group holds several."""
    inner = getattr(group_spec, "kv_cache_specs", None)
    return inner[layer] if inner is not None else group_spec


def is_state(spec: Any) -> bool:
    """A recurrent layer (Mamba, GDN): its spec lists the shapes of its states."""
    return hasattr(spec, "shapes")


def scheduler_config(kv_cache_config: Any) -> KVCacheConfig:
    """What the scheduler half reads: block sizes and kinds. Bytes are not known here, and not said.

    Raises:
        LayoutError: a group keeps recurrent state.
    """
    moved = set(transferred_groups(kv_cache_config))
    groups = []
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        names = tuple(group.layer_names) or (f"group{index}",)
        spec = group.kv_cache_spec
        first = layer_spec(spec, names[0]) if group.layer_names else spec
        kind: GroupSpec
        if index not in moved:
            kind = EncoderOnlySpec(spec.block_size)
        elif is_state(first):
            raise _state_refusal(names[0])
        else:
            kind = FullAttentionSpec(spec.block_size, 1, 1, torch.int8)
        groups.append(KVCacheGroup(names, kind))
    return KVCacheConfig(kv_cache_config.num_blocks, tuple(groups))


def worker_cache(
    kv_cache_config: Any,
    kv_caches: Mapping[str, torch.Tensor],
    *,
    rank: int,
    world_size: int,
    num_heads: int | None,
) -> VllmCache:
    """A worker's caches as registered by vLLM: four dimensions each, blocks, heads, tokens, content.

    Raises:
        LayoutError: a tensor is not of that form, or its blocks do not match the configuration.
    """
    moved = set(transferred_groups(kv_cache_config))
    groups: list[KVCacheGroup] = []
    kernel_block_sizes: dict[int, int] = {}
    tensors: dict[str, CacheTensor] = {}
    heads: dict[str, HeadInterval] = {}
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        names = tuple(name for name in group.layer_names if name in kv_caches)
        if index not in moved or not names:
            groups.append(
                KVCacheGroup(tuple(group.layer_names), EncoderOnlySpec(group.kv_cache_spec.block_size))
            )
            continue
        specs: dict[str, LayerSpec] = {}
        ratios = set()
        for name in names:
            tensor = kv_caches[name]
            theirs = layer_spec(group.kv_cache_spec, name)
            ratio = _kernel_blocks(name, tensor, kv_cache_config.num_blocks)
            ratios.add(ratio)
            specs[name] = _spec(name, theirs, tensor, ratio)
            tensors[name] = CacheTensor(tensor, _AXES)
            owned = None if num_heads is None else shard_heads(num_heads, rank, world_size)
            if owned is not None and world_size > 1 and len(owned) == tensor.shape[1]:
                heads[name] = owned
        if len(ratios) != 1:
            raise LayoutError(f"cache group {index} mixes {sorted(ratios)} kernel blocks to a block")
        alike = len(set(specs.values())) == 1
        spec: GroupSpec = next(iter(specs.values())) if alike else UniformTypeSpec(specs)
        groups.append(KVCacheGroup(names, spec))
        kernel_block_sizes[index] = div_exact(group.kv_cache_spec.block_size, ratios.pop())
    config = KVCacheConfig(kv_cache_config.num_blocks, tuple(groups))
    return VllmCache(config, kernel_block_sizes, tensors, heads)


def _state_refusal(name: str) -> LayoutError:
    return LayoutError(
        f"layer {name!r} keeps recurrent state, which this version of kvconnect does not move for vLLM"
    )


def _kernel_blocks(name: str, tensor: torch.Tensor, num_blocks: int) -> int:
    if tensor.dim() != 4:
        raise LayoutError(
            f"layer {name!r} has a cache of shape {tuple(tensor.shape)}; this version of kvconnect knows "
            "vLLM's four dimensions (blocks, heads, tokens, content)"
        )
    ratio, rest = divmod(tensor.shape[0], num_blocks)
    if rest:
        raise LayoutError(f"layer {name!r} has {tensor.shape[0]} kernel blocks for {num_blocks} blocks")
    return ratio


def _spec(name: str, theirs: Any, tensor: torch.Tensor, ratio: int) -> LayerSpec:
    """A spec whose bytes are the tensor's and whose kind is vLLM's."""
    _, heads, tokens, content = tensor.shape
    block_size = int(theirs.block_size)
    if is_state(theirs):
        raise _state_refusal(name)
    # A full-attention spec may name a window too, where vLLM keeps all blocks all the same.
    keeps_window_only = "SlidingWindow" in type(theirs).__name__
    whole = tokens * ratio == block_size
    if not whole or type(theirs).__name__.endswith("MLAAttentionSpec"):
        # Latent rows, and caches that keep fewer rows than tokens: nothing in them divides by head.
        return MLASpec(block_size, heads * content, tensor.dtype, stored_block_size=tokens * ratio)
    if keeps_window_only:
        window = int(theirs.sliding_window)
        return SlidingWindowSpec(
            block_size, heads, content, tensor.dtype, head_size_v=0, sliding_window=window
        )
    return FullAttentionSpec(block_size, heads, content, tensor.dtype, head_size_v=0)
