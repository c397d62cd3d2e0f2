"""SGLang's pools of one rank in our terms: from ``KVArgs``, which has addresses and sizes, and no tensors.

K and V of a layer are allocations of their own, and count as two layers here. Each state component is a cache
group with a pool of its own, whose blocks SGLang names only with the last part of a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvconnect.cache.borrowed_memory import memory_at
from kvconnect.cache.region_table import CacheTensor
from kvconnect.cache.shard import HeadInterval, shard_heads
from kvconnect.cache.specs import (
    AttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    LayerSpec,
    MLASpec,
    StateSpec,
)
from kvconnect.errors import ConfigError, LayoutError
from kvconnect.plan.blocks import GroupBlocks
from kvconnect.transfer.stack import RankCache

_PAGED = ("swa", "dsa")
"""State components with one page per page of tokens, of the end of a prompt."""
_DTYPES = {
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


@dataclass(frozen=True)
class RankShape:
    """What ``KVArgs`` lacks of a rank. ``num_heads``: KV heads of the model; None for latent caches."""

    num_heads: int | None
    rank: int = 0
    size: int = 1
    num_layers: int = 0
    dtype: torch.dtype = torch.uint8
    device: str = "cpu"


@dataclass(frozen=True)
class RankPools:
    """The pools of a rank. ``states``: by cache group from 1 on, whether it has one block per request.

    ``page_bytes``: bytes of a page in all layers. ``draft_from``: the first layer of a draft model, or 0.
    ``cut_by_rank``: the pools can only be exchanged between equal numbers of ranks.
    """

    cache: RankCache
    page_tokens: int
    page_bytes: int
    states: tuple[bool, ...]
    draft_from: int
    cut_by_rank: bool

    @property
    def streams(self) -> bool:
        """Parts of a prompt can be sent before its end: no group has its blocks named only there."""
        return all(self.states)

    def groups(
        self, first_page: int, pages: Sequence[int], states: Sequence[Any] | None
    ) -> tuple[GroupBlocks, ...]:
        """A request's blocks: ``pages`` from ``first_page`` on, and SGLang's indices by state component.

        Raises ``LayoutError``: they do not match the pools.
        """
        made, end = [GroupBlocks(0, first_page, tuple(pages))], first_page + len(pages)
        given = list(states or ())
        if given and len(given) != len(self.states):
            raise LayoutError(f"{len(given)} state components are given, the rank has {len(self.states)}")
        for group, (is_state, indices) in enumerate(zip(self.states, given, strict=False), 1):
            ids = tuple(int(one) for one in np.asarray(indices if indices is not None else ()).reshape(-1))
            if (is_state and len(ids) != 1) or len(ids) > max(end, 1):
                raise LayoutError(f"state component {group} has {len(ids)} indices for {end} pages")
            made.append(GroupBlocks(group, 0 if is_state else end - len(ids), ids))
        return tuple(made)


def dtype_of(name: str, model_dtype: torch.dtype) -> torch.dtype:
    """The type of a cache's values, by SGLang's name of it."""
    named = {"auto": model_dtype, **_DTYPES}
    return named[name] if name in named else getattr(torch, name, torch.uint8)


def read_pools(args: Any, shape: RankShape) -> RankPools:
    """Describe the pools of a rank. Raises ``LayoutError`` or ``ConfigError``: they are not supported."""
    page, num_draft = int(args.page_size), int(getattr(args, "num_draft_entries", 0) or 0)
    planes = 1 if shape.num_heads is None else 2
    made = _Maker(page, shape)
    count = len(args.kv_data_ptrs) - num_draft
    ids = list(getattr(args, "kv_layer_ids", None) or ())
    first = int(getattr(args, "prefill_start_layer", 0) or 0)
    for begin, stop, base in ((0, count, first), (count, count + num_draft, shape.num_layers)):
        layers = max(1, (stop - begin) // planes)
        for entry in range(begin, stop):
            layer, plane = base + (entry - begin) % layers, (entry - begin) // layers
            name = f"layers.{ids[entry] if ids else layer}.{'kv'[plane] if planes > 1 else 'latent'}"
            pool = args.kv_data_ptrs[entry], args.kv_data_lens[entry], args.kv_item_lens[entry]
            made.paged(0, name, *pool, like=args.kv_item_lens[0])
    states = []
    for group, kind in enumerate(args.state_types, 1):
        number, kind = group - 1, str(getattr(kind, "value", kind))
        layout = getattr(args, "swa_kv_cache_layout", None)
        if kind not in (*_PAGED, "mamba") or (kind == "swa" and layout not in (None, "nhd")):
            raise ConfigError(
                f"the model keeps the state component {kind!r} in the layout {layout}, which the transfer "
                "backend kvconnect does not move; accepted: swa as nhd, dsa, mamba"
            )
        sizes = args.state_data_lens[number], args.state_item_lens[number]
        pools = zip(args.state_data_ptrs[number], *sizes, strict=True)
        half = len(args.state_data_ptrs[number]) // 2
        for entry, pool in enumerate(pools):
            if kind == "swa" and planes > 1:
                name = f"{kind}.{entry % half}.{'kv'[entry // half]}"
                made.paged(group, name, *pool, like=args.kv_item_lens[0])
            elif kind == "mamba":
                made.state(group, f"{kind}.{entry}", *pool)
            else:
                made.opaque(group, f"{kind}.{entry}", *pool)
        states.append(kind == "mamba")
    draft_from, page_bytes = shape.num_layers if num_draft else 0, sum(args.kv_item_lens)
    return RankPools(made.cache(), page, page_bytes, tuple(states), draft_from, made.cut_by_rank)


class _Maker:
    """Collects the layers of each group."""

    def __init__(self, page: int, shape: RankShape) -> None:
        self.cut_by_rank = False
        self._page, self._shape = page, shape
        self._specs: dict[int, dict[str, LayerSpec]] = {}
        self._blocks: dict[int, int] = {}
        self._tensors: dict[str, CacheTensor] = {}
        self._heads: dict[str, HeadInterval] = {}

    def paged(self, group: int, name: str, address: int, length: int, item: int, *, like: int) -> None:
        """Rows of tokens: of K or V by head, or latent ones."""
        shape, size = self._shape, self._shape.dtype.itemsize
        heads = None if shape.num_heads is None else shard_heads(shape.num_heads, shape.rank, shape.size)
        width, rest = divmod(item, self._page * size * len(heads or (0,)))
        if rest or (heads is not None and item != like and shape.size > 1):
            # Of a draft model with other heads, or rows with more than values in them.
            self.opaque(group, name, address, length, item)
            return
        tensor = self._add(group, name, address, length, item).view(shape.dtype)
        if heads is None:
            self._specs[group][name] = MLASpec(self._page, width, shape.dtype)
            self._tensors[name] = CacheTensor(tensor.view(-1, self._page, width), "block token content")
            return
        self._specs[group][name] = AttentionSpec(self._page, len(heads), width, shape.dtype, head_size_v=0)
        view = tensor.view(-1, self._page, len(heads), width)
        self._tensors[name] = CacheTensor(view, "block token head content")
        self._heads[name] = heads

    def opaque(self, group: int, name: str, address: int, length: int, item: int) -> None:
        """Pages whose inner order is not known: they travel whole."""
        tensor = self._add(group, name, address, length, item)
        self._specs[group][name] = MLASpec(self._page, item, torch.uint8, stored_block_size=1)
        self._tensors[name] = CacheTensor(tensor, "block content")
        self.cut_by_rank |= self._shape.num_heads is not None

    def state(self, group: int, name: str, address: int, length: int, item: int) -> None:
        """States, one per request."""
        tensor = self._add(group, name, address, length, item)
        self._specs[group][name] = StateSpec(self._page, ((item,),), (torch.uint8,))
        self._tensors[name] = CacheTensor(tensor, "block content")
        self.cut_by_rank = True

    def cache(self) -> RankCache:
        groups = (KVCacheGroup.of(specs, self._blocks[at]) for at, specs in sorted(self._specs.items()))
        config = KVCacheConfig(self._blocks[0], tuple(groups))
        return RankCache(config, dict.fromkeys(self._specs, self._page), self._tensors, self._heads)

    def _add(self, group: int, name: str, address: int, length: int, item: int) -> torch.Tensor:
        """The pool's bytes by block."""
        blocks = length // item
        if self._blocks.setdefault(group, blocks) != blocks:
            raise LayoutError(f"pool {name} has {blocks} blocks, others of its group {self._blocks[group]}")
        self._specs.setdefault(group, {})
        return memory_at(address, blocks * item, self._shape.device).view(blocks, item)
