"""The region tables of all ranks of a configuration, made of address space that nobody ever touches."""

from __future__ import annotations

import math
import mmap
import random
import warnings
from collections.abc import Sequence

import torch

from kvconnect.arithmetic import div_ceil, div_exact
from kvconnect.cache.region_table import CacheTensor, RegionTable
from kvconnect.cache.shard import HeadInterval, shard_heads
from kvconnect.cache.specs import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    LayerSpec,
    MLASpec,
    SlidingWindowSpec,
    StateSpec,
)
from kvconnect.errors import ConfigError
from kvconnect.explain.cache_file import CacheFile, LayerKind
from kvconnect.orders import GroupBlocks

_AXES = {
    ("nhd", "together"): "block token head content",
    ("nhd", "per_block"): "block plane token head content",
    ("nhd", "apart"): "plane block token head content",
    ("hnd", "together"): "block head token content",
    ("hnd", "per_block"): "block plane head token content",
    ("hnd", "apart"): "plane block head token content",
    ("heads_first", "together"): "head block token content",
    ("heads_first", "per_block"): "head block plane token content",
    ("heads_first", "apart"): "plane head block token content",
}


def rank_table(cache: CacheFile, rank: int, num_blocks: int) -> RegionTable:
    """The region table of one rank with so many logical blocks. Its addresses are nobody's memory.

    Raises:
        ConfigError: there is not as much address space.
        LayoutError: the cache cannot be expressed.
    """
    groups, tensors, kernels = [], {}, {}
    heads: dict[str, HeadInterval] = {}
    for index, kind in enumerate(cache.layers):
        names = layer_names(kind)
        owned = None
        if kind.num_kv_heads is not None:
            owned = shard_heads(kind.num_kv_heads, rank, cache.tp_size)
            heads |= dict.fromkeys(names, owned)
        spec = _spec(kind, 0 if owned is None else len(owned))
        groups.append(KVCacheGroup(names, spec))
        kernels[index] = kind.kernel_block_size or spec.block_size
        shape, axes, dtype = _tensor_shape(kind, spec, num_blocks)
        layers = _reserve(math.prod(shape) * dtype.itemsize * len(names)).view(dtype)
        for name, tensor in zip(names, layers.view(len(names), *shape), strict=True):
            tensors[name] = CacheTensor(tensor, axes)
    return RegionTable.build(KVCacheConfig(num_blocks, tuple(groups)), kernels, tensors, heads)


def layer_names(kind: LayerKind) -> tuple[str, ...]:
    """The layers of a kind. Both sides number theirs alike."""
    return tuple(f"{kind.label}.{index}" for index in range(kind.num_layers))


def blocks_needed(cache: CacheFile, num_tokens: int) -> int:
    """Logical blocks of a cache that holds a request twice over, so that its blocks can be scattered."""
    return 2 * max(div_ceil(num_tokens, kind.block_size or 1) for kind in cache.layers) + 2


def request_blocks(
    cache: CacheFile, num_tokens: int, num_blocks: int, scattered: bool, seed: int
) -> list[GroupBlocks]:
    """The blocks that a request has in every group: adjacent, or anywhere.

    A sliding layer keeps those that hold a part of the window before the next token.
    """
    rng, made = random.Random(seed), []
    for index, kind in enumerate(cache.layers):
        block_size = kind.block_size or 1
        positions = 1 if kind.kind == "state" else div_ceil(num_tokens, block_size)
        ids = rng.sample(range(1, num_blocks), positions) if scattered else list(range(1, 1 + positions))
        if kind.sliding_window is not None:
            first = max(0, num_tokens - kind.sliding_window) // block_size
            ids[:first] = [0] * first
        made.append(GroupBlocks(index, 0, tuple(ids)))
    return made


def _spec(kind: LayerKind, heads: int) -> LayerSpec:
    block_size, dtype = kind.block_size or 1, getattr(torch, kind.dtype)
    if kind.kind == "state":
        return StateSpec(block_size, ((kind.state_bytes or 1,),), (torch.uint8,))
    size = kind.head_size or 1
    if kind.kind == "mla":
        return MLASpec(block_size, size, dtype)
    if kind.sliding_window is not None:
        return SlidingWindowSpec(block_size, heads, size, dtype, sliding_window=kind.sliding_window)
    return FullAttentionSpec(block_size, heads, size, dtype)


def _tensor_shape(
    kind: LayerKind, spec: LayerSpec, num_blocks: int
) -> tuple[Sequence[int], str, torch.dtype]:
    """Shape, names of the dimensions and type of one layer's tensor."""
    if isinstance(spec, StateSpec):
        return (num_blocks, spec.content_bytes), "block content", torch.uint8
    kernel = kind.kernel_block_size or spec.block_size
    size = {"block": num_blocks * div_exact(spec.block_size, kernel), "token": kernel, "plane": 2}
    if isinstance(spec, MLASpec):
        axes = "block token content"
        size["content"] = spec.head_size
    else:
        axes = _AXES[kind.layout, kind.kv]
        size["head"] = spec.num_kv_heads
        size["content"] = spec.head_size * (1 if "plane" in axes else 2)
    return [size[axis] for axis in axes.split()], axes, spec.dtype


def _reserve(length_bytes: int) -> torch.Tensor:
    """Bytes that have addresses and nothing else: not one page of them is ever backed by memory."""
    try:
        # Without the right to write, no kernel counts it as memory that may be needed.
        reserved = mmap.mmap(
            -1, length_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ
        )
    except (OSError, OverflowError, ValueError) as error:
        raise ConfigError(
            f"the caches of a rank take {length_bytes} bytes of address space, which this machine does not "
            f"give; ask for fewer tokens: {error}"
        ) from error
    with warnings.catch_warnings():
        # Torch has no tensors that cannot be written, and says so. Nobody writes to this one.
        warnings.filterwarnings("ignore", message=".*not writable")
        return torch.frombuffer(reserved, dtype=torch.uint8)
