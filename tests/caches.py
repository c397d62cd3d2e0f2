"""Caches of every shape for the tests, and the plainest possible way to read and write them.

``block_bytes`` shares no code with the region table: it picks a block out of a tensor by indexing.
"""

from __future__ import annotations

import itertools

import torch

from kvconnect.cache.region_table import CacheTensor, RegionTable
from kvconnect.cache.retention import Window
from kvconnect.cache.specs import (
    AttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    LayerSpec,
    MLASpec,
    StateSpec,
)


def overlaid_groups(table: RegionTable) -> set[tuple[int, int]]:
    """The pairs of groups whose pages of one logical block share bytes."""
    pairs, geometry = set(), table.geometry()
    for first, second in itertools.combinations(table.regions, 2):
        ends = []
        for region in (first, second):
            address, _, size = region.logical_pages(geometry[region.group].blocks_per_kv_block)
            ends.append(address + size)
        if first.group != second.group and first.address < ends[1] and second.address < ends[0]:
            pairs.add((min(first.group, second.group), max(first.group, second.group)))
    return pairs


def spec_of(kind: str, tokens: int, heads: int, width: int, dtype: torch.dtype, window: int) -> LayerSpec:
    """The spec of ``full`` attention, of attention in a ``window``, of ``latent`` rows or of a ``state``.

    ``width`` are the values of a head's K, of a latent row, or of a state.
    """
    match kind:
        case "latent":
            return MLASpec(tokens, width, dtype)
        case "state":
            return StateSpec(tokens, ((width,),), (dtype,))
        case "window":
            return AttentionSpec(tokens, heads, width, dtype, retention=Window(window))
    return AttentionSpec(tokens, heads, width, dtype)


def attention_layer(
    layout: str,
    num_blocks: int,
    heads: int,
    tokens: int,
    content: int,
    dtype: torch.dtype = torch.float16,
    pad: int = 0,
) -> CacheTensor:
    """One layer's cache in a named physical order.

    ``layout`` lists the axes from outermost to innermost, ``content`` last and left out, such as
    ``"block token head"`` or ``"plane block head token"``. ``pad`` values lie between blocks.
    """
    size = {"block": num_blocks, "head": heads, "token": tokens, "plane": 2}
    order = layout.split()
    shape = [size[axis] for axis in order] + [content]
    inner = 1
    for axis in reversed(order):
        if axis == "block":
            break
        inner *= size[axis]
    inner *= content
    strides = []
    step = content
    for axis in reversed(order):
        strides.append(step)
        step = step * size[axis] if axis != "block" else (inner + pad) * num_blocks
        if axis == "block":
            strides[-1] = inner + pad
    strides = [*reversed(strides), 1]
    storage = torch.zeros(step, dtype=dtype)
    view = storage.as_strided(shape, strides)
    return CacheTensor(view, " ".join([*order, "content"]))


def fill_random(cache: CacheTensor, seed: int) -> None:
    """Give every byte of the storage, padding included, a value."""
    raw = torch.empty(0, dtype=torch.uint8).set_(cache.tensor.untyped_storage())
    raw.copy_(
        torch.randint(0, 256, raw.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    )


def block_values(cache: CacheTensor, block: int) -> torch.Tensor:
    """The values of one kernel block in the order plane, head, token, content; a copy, as raw bits."""
    names = cache.axes.split()
    picked = cache.tensor.select(names.index("block"), block)
    rest = [name for name in names if name != "block"]
    wanted = [name for name in ("plane", "head", "token", "content") if name in rest]
    picked = picked.permute([rest.index(name) for name in wanted])
    return picked.contiguous().view(torch.uint8).clone()


def single_group(spec: LayerSpec, num_blocks: int, **tensors: CacheTensor) -> RegionTable:
    """The table of one group whose layers share a spec, without a kernel split."""
    config = KVCacheConfig(num_blocks, (KVCacheGroup(tuple(tensors), spec),))
    return RegionTable.build(config, {0: spec.block_size}, tensors)
