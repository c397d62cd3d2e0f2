"""The node's KV cache: its configuration, its memory, and each layer's view of it.

Backends per group are chosen first, then kernel block sizes, metadata builders, block tables and cache
tensors; all but the first two count in kernel blocks. The cache is the same with and without a connector.
"""

from __future__ import annotations

import math
from itertools import zip_longest

import torch

from kvconnect.cache.region_table import CacheTensor, RegionTable
from kvconnect.cache.specs import (
    AttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    StateSpec,
    div_exact,
)
from kvconnect.errors import ConfigError
from kvconnect.node.attention import (
    AttentionPages,
    LayerPages,
    PagedAttention,
    PagedRows,
    StatePages,
)
from kvconnect.node.models import CACHE_DTYPE, CachedLayer, CacheLayout
from kvconnect.node.node_options import NodeOptions
from kvconnect.runner_kit.block_table import BlockTables
from kvconnect.runner_kit.kernel_blocks import init_attention

CACHE_DTYPES = {"auto": CACHE_DTYPE, "bf16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn}


def parse_cache_dtype(name: str) -> torch.dtype:
    """The dtype of attention caches by its option name. Raises ``ConfigError`` for an unknown name."""
    if name not in CACHE_DTYPES:
        raise ConfigError(f"kv_cache_dtype is {name!r}; accepted: {', '.join(CACHE_DTYPES)}")
    return CACHE_DTYPES[name]


def build_cache_config(layout: CacheLayout, num_blocks: int) -> KVCacheConfig:
    """The configuration of a model's cache with ``num_blocks`` logical blocks, including the null block."""
    groups = (KVCacheGroup.of({layer.name: layer.spec for layer in layers}) for layers in layout.groups)
    return KVCacheConfig(num_blocks, tuple(groups))


class NodeCache:
    """The cache tensors of one node, and the block tables that point into them.

    ``tables`` have a row for each of ``max_num_seqs``, and slots for ``max_num_batched_tokens``. ``tensors``
    are the layers' tensors to register, ``pages`` the same as attention uses them.
    """

    def __init__(self, layout: CacheLayout, options: NodeOptions) -> None:
        self.device = torch.device(options.device)
        self.config = build_cache_config(layout, options.num_blocks)
        backends = {layer.name: layer.backend for g in layout.groups for layer in g if layer.backend}
        self.attention = init_attention(self.config, backends)
        self.kernel_block_sizes = self.attention.kernel_block_sizes
        self.tables = BlockTables(
            max_requests=options.max_num_seqs,
            max_blocks={
                index: group.num_positions(options.max_model_len)
                for index, group in enumerate(self.config.groups)
            },
            block_sizes={index: group.block_size for index, group in enumerate(self.config.groups)},
            kernel_block_sizes=self.kernel_block_sizes,
            max_tokens=options.max_num_batched_tokens,
            device=self.device,
        )
        self.group_of = {
            name: self.config.group_of(name) for g in self.config.groups for name in g.layer_names
        }
        self.tensors: dict[str, CacheTensor] = {}
        self.pages: dict[str, LayerPages] = {}
        places = self._allocate(layout)
        for index, layers in enumerate(layout.groups):
            for layer in layers:
                tensor = self._layer_tensor(layer, index, places[layer.name])
                self.tensors[layer.name] = CacheTensor(tensor, layer.axes)
                self.pages[layer.name] = _pages(layer, tensor)
        self.layer_attention: dict[str, PagedAttention] = {
            name: group.metadata_builder for group in self.attention.groups for name in group.layer_names
        }

    def _allocate(self, layout: CacheLayout) -> dict[str, torch.Tensor]:
        """Zeroed bytes for each layer; layers at the same place of different groups share them."""
        places = list(zip_longest(*layout.groups))
        sizes = [
            self.config.num_blocks * max(layer.spec.page_size_bytes for layer in place if layer)
            for place in places
        ]
        storages = [
            torch.zeros(size, dtype=torch.int8, device=self.device)
            for size in ([sum(sizes)] if layout.single_storage else sizes)
        ]
        if layout.single_storage:
            storages = list(torch.split(storages[0], sizes))
        return {
            layer.name: storage
            for place, storage in zip(places, storages, strict=True)
            for layer in place
            if layer
        }

    def _layer_tensor(self, layer: CachedLayer, group: int, storage: torch.Tensor) -> torch.Tensor:
        """A view of the storage with one dimension per name in the layer's axes."""
        spec = layer.spec
        if isinstance(spec, StateSpec):
            pages = storage[: self.config.num_blocks * spec.page_size_bytes].view(self.config.num_blocks, -1)
            return pages[:, : spec.content_bytes]
        axes = layer.axes.split()
        # Keys and values of a layer with heads lie in separate planes, or side by side.
        has_heads = isinstance(spec, AttentionSpec)
        extent = {
            "plane": 2,
            "block": self.config.num_blocks * div_exact(spec.block_size, self.kernel_block_sizes[group]),
            "head": spec.num_kv_heads if isinstance(spec, AttentionSpec) else 1,
            "token": self.kernel_block_sizes[group],
            "content": spec.head_size * (2 if has_heads and "plane" not in axes else 1),
        }
        size = [extent[axis] for axis in axes]
        return storage.view(spec.dtype)[: math.prod(size)].view(size)

    def region_table(self) -> RegionTable:
        """All pages of the cache, for transfers and the zeroer."""
        return RegionTable.build(self.config, self.kernel_block_sizes, self.tensors)


def _pages(layer: CachedLayer, tensor: torch.Tensor) -> LayerPages:
    """The layer's tensor as attention or a recurrence uses it."""
    spec, axes = layer.spec, layer.axes.split()
    if isinstance(spec, StateSpec):
        return StatePages(tensor, spec.shapes, spec.dtypes)
    if "head" not in axes:
        tensor, axes = tensor.unsqueeze(-2), [*axes[:-1], "head", axes[-1]]
    order = ["block", "token", "head", "content"]
    if "plane" in axes:
        tensor = tensor.permute([axes.index(axis) for axis in ["plane", *order]])
        return AttentionPages(PagedRows(tensor[0]), PagedRows(tensor[1]))
    tensor = tensor.permute([axes.index(axis) for axis in order])
    if not isinstance(spec, AttentionSpec):
        return AttentionPages(PagedRows(tensor), None)
    return AttentionPages(PagedRows(tensor[..., : spec.head_size]), PagedRows(tensor[..., spec.head_size :]))
