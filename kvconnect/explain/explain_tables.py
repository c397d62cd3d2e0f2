"""The region tables of all ranks of a configuration, made of address space that is never touched."""

from __future__ import annotations

import math
import mmap
import warnings
from collections.abc import Sequence

import torch

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
    div_ceil,
    div_exact,
)
from kvconnect.errors import ConfigError
from kvconnect.explain.cache_file import (
    CacheFile,
    HeadLayers,
    LayerKind,
    SlidingLayers,
    StateLayers,
    TokenLayers,
)
from kvconnect.plan.blocks import GroupBlocks

_AXES = {
    "nhd": "block {} token head content",
    "hnd": "block {} head token content",
    "heads_first": "head block {} token content",
}


def rank_table(cache: CacheFile, rank: int, num_blocks: int) -> RegionTable:
    """The region table of one rank with so many logical blocks, over memory that does not exist.

    Raises ``ConfigError``: there is not as much address space; ``LayoutError``: it cannot be expressed.
    """
    groups, tensors, kernels = [], {}, {}
    heads: dict[str, HeadInterval] = {}
    for index, kind in enumerate(cache.layers):
        # Both sides number theirs alike.
        names = tuple(f"{kind.name}.{number}" for number in range(kind.num_layers))
        num_heads = 0
        if isinstance(kind, HeadLayers):
            heads |= dict.fromkeys(names, shard_heads(kind.num_kv_heads, rank, cache.tp_size))
            num_heads = len(heads[names[0]])
        spec = _spec(kind, num_heads)
        groups.append(KVCacheGroup(names, spec))
        kernels[index] = kind.kernel_block_size if isinstance(kind, TokenLayers) else kind.block_size
        shape, axes, dtype = _tensor_shape(kind, spec, num_blocks)
        layers = _reserve(math.prod(shape) * dtype.itemsize * len(names)).view(dtype)
        for name, tensor in zip(names, layers.view(len(names), *shape), strict=True):
            tensors[name] = CacheTensor(tensor, axes)
    return RegionTable.build(KVCacheConfig(num_blocks, tuple(groups)), kernels, tensors, heads)


def blocks_needed(cache: CacheFile, num_tokens: int) -> int:
    """Logical blocks of a cache that holds a request twice over, so that its blocks can be scattered."""
    return 2 * max(div_ceil(num_tokens, kind.block_size) for kind in cache.layers) + 2


def request_blocks(cache: CacheFile, num_tokens: int) -> list[GroupBlocks]:
    """The blocks that a request has in every group.

    A sliding layer keeps those that hold a part of the window before the next token.
    """
    made = []
    for index, kind in enumerate(cache.layers):
        group = KVCacheGroup((kind.name,), _spec(kind, 1))
        ids = list(range(1, 1 + group.num_positions(num_tokens)))
        kept = group.retention.only_kept(ids, 0, num_tokens, kind.block_size, replay=1)
        made.append(GroupBlocks(index, 0, tuple(kept)))
    return made


def _spec(kind: LayerKind, heads: int) -> LayerSpec:
    if isinstance(kind, StateLayers):
        return StateSpec(kind.block_size, ((kind.state_bytes,),), (torch.uint8,))
    assert isinstance(kind, TokenLayers)
    dtype = getattr(torch, kind.dtype)
    if isinstance(kind, SlidingLayers):
        shape = (kind.block_size, heads, kind.head_size, dtype)
        return SlidingWindowSpec(*shape, sliding_window=kind.sliding_window)
    if isinstance(kind, HeadLayers):
        return FullAttentionSpec(kind.block_size, heads, kind.head_size, dtype)
    return MLASpec(kind.block_size, kind.head_size, dtype)


def _tensor_shape(
    kind: LayerKind, spec: LayerSpec, num_blocks: int
) -> tuple[Sequence[int], str, torch.dtype]:
    """Shape, names of the dimensions and type of one layer's tensor."""
    if isinstance(spec, StateSpec):
        return (num_blocks, spec.content_bytes), "block content", torch.uint8
    assert isinstance(kind, TokenLayers)
    kernel, axes, planes = kind.kernel_block_size, "block token content", 1
    extent = {"block": num_blocks * div_exact(spec.block_size, kernel), "token": kernel, "plane": 2}
    if isinstance(kind, HeadLayers) and isinstance(spec, FullAttentionSpec):
        axes = _AXES[kind.layout].format("plane" if kind.kv == "per_block" else "")
        axes = " ".join(("plane " * (kind.kv == "apart") + axes).split())
        extent["head"] = spec.num_kv_heads
        planes = 1 if "plane" in axes else 2
    extent["content"] = kind.head_size * planes
    return [extent[axis] for axis in axes.split()], axes, spec.dtype


def _reserve(length_bytes: int) -> torch.Tensor:
    """Bytes that have addresses and nothing else: not one page of them is ever backed by memory."""
    try:
        # Without the right to write, no kernel counts it as memory that may be needed.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        reserved = mmap.mmap(-1, length_bytes, flags=flags, prot=mmap.PROT_READ)
    except (OSError, OverflowError, ValueError) as error:
        raise ConfigError(
            f"the caches of a rank take {length_bytes} bytes of address space, which this machine does not "
            f"give; ask for fewer tokens: {error}"
        ) from error
    with warnings.catch_warnings():
        # Torch has no tensors that cannot be written, and warns. This one is never written.
        warnings.filterwarnings("ignore", message=".*not writable")
        return torch.frombuffer(reserved, dtype=torch.uint8)
