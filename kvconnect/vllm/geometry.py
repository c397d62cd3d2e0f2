"""vLLM's caches in our terms: specs for sizes and kinds, tensors for bytes.

Byte sizes come from the tensors that a worker registers and from the worker's own cache configuration. Of a
spec of vLLM's only the kind of layer is read: its fields change, and the scheduler's copy differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from kvconnect.cache.region_table import CacheTensor, Scales
from kvconnect.cache.retention import FULL, Chunked, Retention, Window
from kvconnect.cache.shard import HeadInterval, Topology, layer_number, shard_heads
from kvconnect.cache.specs import (
    AttentionSpec,
    EncoderOnlySpec,
    GroupSpec,
    KVCacheConfig,
    KVCacheGroup,
    LayerSpec,
    MLASpec,
    StateSpec,
    div_exact,
)
from kvconnect.errors import ConfigError, LayoutError, listed
from kvconnect.transfer.stack import RankCache
from kvconnect.vllm.states import Section, state_sections
from kvconnect.vllm.values import BYTES, Quantised, is_by_block, read_quantised
from kvconnect.vllm.weights import all_ranks, draft_model

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_AXES = "block head token content"


@dataclass(frozen=True)
class HeadCounts:
    """KV heads over all ranks, of the main model and of a draft model; None where a model has none.

    ``num_layers`` is the main model's number of layers where there is a draft model, else 0: vLLM numbers
    the draft's layers after them.
    """

    main: int | None
    draft: int | None = None
    num_layers: int = 0

    def of(self, layer: str, spec: Any) -> int | None:
        """KV heads of the model that the layer belongs to."""
        is_draft = getattr(spec, "is_draft", None)
        if is_draft is None:
            is_draft = (layer_number(layer) or 0) >= self.num_layers > 0
        return self.draft if is_draft else self.main

    @property
    def finest(self) -> int | None:
        """The finest division over ranks: a rank that owns its heads also owns those of a coarser one."""
        return max((count for count in (self.main, self.draft) if count is not None), default=None)


@dataclass(frozen=True, kw_only=True)
class VllmCache(RankCache):
    """A worker's caches, with the scales of those layers that keep quantised values.

    ``rank_bound`` are layers whose division over ranks only vLLM knows: one head a rank where the model has
    another number, a backend's own slots, states without ``sections``. They are sent whole, between equal
    ranks of equal worlds. ``sections`` has a state's sections by layer, each of which becomes a layer.
    """

    heads: Mapping[str, HeadInterval]
    rank_bound: tuple[str, ...]
    sections: Mapping[str, tuple[Section, ...]]
    num_ranks: int

    def finest(self, counts: HeadCounts) -> int | None:
        """The finest division of any layer over ranks, in heads or units; None if all keep the same bytes."""
        totals = [part.total for parts in self.sections.values() for part in parts]
        totals += [len(owned) * self.num_ranks for owned in self.heads.values() if len(owned) > 1]
        return max([counts.finest or 0, *totals]) or None


def transferred_groups(kv_cache_config: Any) -> tuple[int, ...]:
    """The groups of a vLLM cache configuration that a connector moves."""
    return tuple(kv_cache_config.transfer_group_ids)


def group_spec(group: Any, layer: str = "") -> Any:
    """The vLLM spec of ``layer``; without a layer, the spec of the group's first layer."""
    inner = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    if not inner:
        return group.kv_cache_spec
    return inner[layer] if layer else next(iter(inner.values()))


def is_state(spec: Any) -> bool:
    """Whether a layer keeps one page per request, of any length.

    Recurrent layers (Mamba, GDN) list the shapes of their states; ring buffers are recognised by class name.
    """
    return hasattr(spec, "shapes") or "CircularBuffer" in type(spec).__name__


def held_back(kv_cache_config: Any, num_lookahead_tokens: int) -> int:
    """How many last tokens of a prompt P must not compute, because D always computes them itself.

    A window, a local chunk or a state keeps only the tokens that the token after the last computed one sees.
    D computes a prompt's last token in any case, so P must not have computed it. A drafter of several modules
    reads ``num_lookahead_tokens`` ahead: near the end of a prompt P would keep guesses of its own.
    """
    groups = kv_cache_config.kv_cache_groups
    specs = [group_spec(groups[index]) for index in transferred_groups(kv_cache_config)]
    forgets = any(is_state(spec) or not _retention(spec).sees_all for spec in specs)
    return max(int(forgets), num_lookahead_tokens - 1, 0)


def running_states(kv_cache_config: Any, block_ids: Sequence[Sequence[int]]) -> tuple[Sequence[int], ...]:
    """Block ids with those of state groups cut to the one block that holds the running state.

    vLLM appends one scratch block per speculated token after that block. Where vLLM keeps states by position,
    the blocks before the running state are null or belong to a shared prefix.
    """
    made = []
    for group, ids in zip(kv_cache_config.kv_cache_groups, block_ids, strict=True):
        spec = group_spec(group)
        if is_state(spec) and ids:
            last = max(0, len(ids) - 1 - getattr(spec, "num_speculative_blocks", 0))
            ids = ids[last : last + 1]
        made.append(ids)
    return tuple(made)


def scheduler_config(kv_cache_config: Any, context_ranks: int = 1) -> KVCacheConfig:
    """The cache configuration of the scheduler half: block sizes and kinds. Byte sizes are placeholders.

    A block holds the tokens of all ``context_ranks``, which keep tokens in turns.
    """
    groups = []
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        block_size, spec = int(group.kv_cache_spec.block_size) * context_ranks, group_spec(group)
        kind: GroupSpec
        if index not in transferred_groups(kv_cache_config):
            kind = EncoderOnlySpec(block_size)
        elif is_state(spec):
            kind = StateSpec(block_size, ((1,),), (torch.int8,))
        else:
            kind = replace(_rows_by_head(spec, 1, 1, torch.int8), block_size=block_size)
        groups.append(KVCacheGroup(tuple(group.layer_names) or (f"group{index}",), kind))
    return KVCacheConfig(kv_cache_config.num_blocks, tuple(groups))


def worker_cache(
    kv_cache_config: Any,
    kv_caches: Mapping[str, torch.Tensor],
    *,
    tensor_rank: int,
    num_ranks: int,
    head_counts: HeadCounts,
    layers: Mapping[str, Any] | None = None,
    convert_dtype: bool = False,
) -> VllmCache:
    """A worker's caches as vLLM registers them, each tensor (blocks, heads, tokens, content).

    With ``convert_dtype``, bytes whose values vLLM's ``layers`` define are described as these values.

    Raises:
        LayoutError: a tensor is not of that form, or its blocks do not match the configuration.
    """
    moved = transferred_groups(kv_cache_config)
    groups: list[KVCacheGroup] = []
    kernel_block_sizes: dict[int, int] = {}
    tensors: dict[str, CacheTensor] = {}
    heads: dict[str, HeadInterval] = {}
    scales: dict[str, Scales] = {}
    sections: dict[str, tuple[Section, ...]] = {}
    bound: list[str] = []
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        names = tuple(name for name in group.layer_names if name in kv_caches)
        if index not in moved or not names:
            kind = EncoderOnlySpec(group.kv_cache_spec.block_size)
            groups.append(KVCacheGroup(tuple(group.layer_names) or (f"group{index}",), kind))
            continue
        specs: dict[str, LayerSpec] = {}
        ratio = _common_ratio(index, {name: kv_caches[name] for name in names}, kv_cache_config.num_blocks)
        for name in names:
            tensor, theirs, layer = kv_caches[name], group_spec(group, name), (layers or {}).get(name)
            if is_state(theirs) and tensor.shape[:3] == (kv_cache_config.num_blocks, 1, 1):
                sections[name] = parts = state_sections(theirs, layer, tensor_rank, num_ranks)
                for part in parts:
                    label = f"{name}/{part.name}"
                    specs[label], heads[label] = part.spec(theirs.block_size), part.owned
                    tensors[label] = part.view(tensor[:, 0, 0])
                if parts:
                    continue
            owned = _owned_heads(head_counts.of(name, theirs), tensor, tensor_rank, num_ranks)
            if has_slots(theirs):
                # Only the backend knows where K and V of several heads, or their scales, lie: whole pages.
                tensor, owned = _whole_pages(name, tensor), None
            is_divisible = owned is not None
            specs[name], tensor, quantised = _described(
                theirs, tensor, layer, ratio, divisible=is_divisible, convert_dtype=convert_dtype
            )
            tensors[name] = CacheTensor(tensor, _AXES)
            if quantised is not None:
                scales[name] = quantised.scales
            if owned is not None and isinstance(specs[name], AttentionSpec):
                heads[name] = owned
            elif num_ranks > 1 and not (_is_latent(theirs) or getattr(theirs, "tp_replicated", False)):
                bound.append(name)
        groups.append(KVCacheGroup.of(specs))
        kernel_block_sizes[index] = div_exact(group.kv_cache_spec.block_size, ratio)
    return VllmCache(
        config=KVCacheConfig(kv_cache_config.num_blocks, tuple(groups)),
        kernel_block_sizes=kernel_block_sizes,
        tensors=tensors,
        heads=heads,
        scales=scales,
        rank_bound=tuple(bound),
        sections=sections,
        num_ranks=num_ranks,
    )


def _described(
    theirs: Any, tensor: torch.Tensor, layer: Any, ratio: int, *, divisible: bool, convert_dtype: bool
) -> tuple[LayerSpec, torch.Tensor, Quantised | None]:
    """A layer's spec, its tensor in the form that this describes, and scales, if its values are known."""
    if is_state(theirs):
        return _spec(theirs, tensor, ratio, None, divisible=divisible), tensor, None
    by_block = is_by_block(layer) and not has_slots(theirs)
    divided = divisible and not by_block and _is_divided(theirs, tensor, ratio)
    quantised = None if layer is None else read_quantised(layer, tensor)
    if quantised is not None and not (divided or quantised.is_even):
        quantised = None
    if convert_dtype and tensor.dtype in BYTES:
        # Bytes without a known meaning are not values.
        convertible = quantised is not None and quantised.convertible
        tensor = tensor.view(torch.float8_e4m3fn if convertible else torch.uint8)
    if by_block:
        # One row for each head of a kernel block: rows that hold several tokens are not cut by token.
        tensor = tensor.view(*tensor.shape[:2], 1, -1)
    return _spec(theirs, tensor, ratio, quantised, divisible=divisible), tensor, quantised


def has_slots(spec: Any) -> bool:
    """Whether the head axis of a layer's cache counts slots of the backend's own instead of KV heads."""
    return getattr(spec, "num_head_slots", None) is not None


def _whole_pages(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A cache with each kernel block as one row, in memory order. Raises ``LayoutError`` for gaps."""
    inner = sorted(zip(tensor.stride()[1:], tensor.shape[1:], strict=True))
    extent = 1
    for stride, size in inner:
        if size > 1 and stride != extent:
            raise LayoutError(
                f"layer {name!r} keeps slots of its backend's own, {tensor.shape[1]} of them, and a page of "
                f"it has gaps (shape {tuple(tensor.shape)}, strides {tensor.stride()}); accepted: "
                "whole pages, as VLLM_KV_CACHE_LAYOUT with blocks before heads (BHLNC, BLHNC) has them"
            )
        extent *= size
    return tensor.as_strided((tensor.shape[0], 1, 1, extent), (tensor.stride(0), extent, extent, 1))


def _owned_heads(count: int | None, tensor: torch.Tensor, rank: int, world_size: int) -> HeadInterval | None:
    """The interval of its model's heads that a layer's cache has; None where it is not known."""
    owned = None if count is None else shard_heads(count, rank, world_size)
    if owned is not None and len(owned) == tensor.shape[1]:
        return owned
    # Layers of one model may differ in heads. Several heads a rank are divided evenly. With one head a rank,
    # the number of ranks that keep the same head is not known.
    heads = tensor.shape[1]
    return HeadInterval(rank * heads, (rank + 1) * heads) if heads > 1 or world_size == 1 else None


def _is_latent(spec: Any) -> bool:
    """Whether a token's row is one vector that every rank keeps."""
    return "MLA" in type(spec).__name__


def _common_ratio(index: int, caches: Mapping[str, torch.Tensor], num_blocks: int) -> int:
    """How many kernel blocks a block of a group has. Raises ``LayoutError``: its layers differ in that."""
    ratios = {_kernel_blocks(name, tensor, num_blocks) for name, tensor in caches.items()}
    if len(ratios) != 1:
        raise LayoutError(f"cache group {index} mixes {listed(ratios)} kernel blocks to a block")
    return ratios.pop()


def _kernel_blocks(name: str, tensor: torch.Tensor, num_blocks: int) -> int:
    if tensor.dim() != 4:
        raise LayoutError(
            f"layer {name!r} has a cache of shape {tuple(tensor.shape)}; this version of kvconnect knows "
            "vLLM's four dimensions (blocks, heads, tokens, content)"
        )
    ratio, rest = divmod(tensor.shape[0], num_blocks)
    if rest or not ratio:
        raise LayoutError(f"layer {name!r} has {tensor.shape[0]} kernel blocks for {num_blocks} blocks")
    return ratio


def _is_divided(theirs: Any, tensor: torch.Tensor, ratio: int) -> bool:
    """Whether a page has one row for each head and token."""
    return tensor.shape[2] * ratio == int(theirs.block_size) and not _is_latent(theirs)


def _retention(theirs: Any) -> Retention:
    """Which tokens a layer sees, including tokens that a draft model recomputes."""
    # A full-attention spec may also name a window or a chunk, but vLLM keeps all its blocks all the same.
    kind = type(theirs).__name__
    if "SlidingWindow" in kind:
        return Window(int(theirs.sliding_window) + int(getattr(theirs, "extra_retained_tokens", 0)))
    return Chunked(int(theirs.attention_chunk_size)) if "ChunkedLocal" in kind else FULL


def _rows_by_head(
    theirs: Any, heads: int, key: int, dtype: torch.dtype, value: int | None = None, rows: int | None = None
) -> AttentionSpec:
    """A spec with rows by head: one row for each token, or ``rows`` in a block."""
    return AttentionSpec(int(theirs.block_size), heads, key, dtype, value, None, rows, _retention(theirs))


def _spec(
    theirs: Any, tensor: torch.Tensor, ratio: int, quantised: Quantised | None, *, divisible: bool
) -> LayerSpec:
    """A spec with the tensor's sizes and the kind of vLLM's spec."""
    _, heads, tokens, content = tensor.shape
    block_size = int(theirs.block_size)
    if is_state(theirs):
        return StateSpec(block_size, ((ratio * heads * tokens * content,),), (tensor.dtype,))
    if divisible and tokens == 1 and not _is_latent(theirs):
        # One row of each head for each of a block's kernel blocks.
        return _rows_by_head(theirs, heads, content, tensor.dtype, value=0, rows=ratio)
    if not divisible or not _is_divided(theirs, tensor, ratio):
        # Latent rows, caches that keep fewer rows than tokens, heads whose numbers are not known: none of
        # these can be divided by head.
        rows = tokens * ratio
        return MLASpec(
            block_size, heads * content, tensor.dtype, stored_block_size=rows, retention=_retention(theirs)
        )
    # Only scaled values need the place where K ends.
    key = content if quantised is None else quantised.key_width
    return _rows_by_head(theirs, heads, key, tensor.dtype, value=content - key)


# How a cache is divided over ranks: by heads, layers and tokens


def head_counts(vllm_config: VllmConfig) -> HeadCounts:
    """KV heads of the main model and of a draft model; None for a latent cache."""
    main = vllm_config.model_config
    draft = draft_model(vllm_config)
    return HeadCounts(
        main=_num_heads(main),
        draft=None if draft is None else _num_heads(draft),
        num_layers=0 if draft is None else int(main.hf_text_config.num_hidden_layers),
    )


def topology(vllm_config: VllmConfig, rank: int, layers: Iterable[str]) -> Topology:
    """How vLLM divides layers, heads and tokens over its ranks. A collective call, each rank with its layers.

    Raises ``ConfigError`` if pipeline ranks do not hold consecutive layers.
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

    A prefill context parallel rank has the same layers as its tensor-parallel rank, and of latent caches the
    same bytes. It is numbered within that rank, in vLLM's order of turns (DCP over PCP, then TP).
    """
    parallel = vllm_config.parallel_config
    return int(parallel.tensor_parallel_size * getattr(parallel, "prefill_context_parallel_size", 1))


def context_ranks(vllm_config: VllmConfig) -> int:
    """How many ranks with the same heads keep tokens in turns; a block holds that many times its tokens."""
    return int(getattr(vllm_config.parallel_config, "decode_context_parallel_size", 1))


def of_stages(vllm_config: VllmConfig, value: Any) -> list[Any]:
    """Each rank's value. Without pipeline ranks all values are equal, and only ours is returned."""
    return all_ranks(value) if vllm_config.parallel_config.pipeline_parallel_size > 1 else [value]


def _num_heads(model_config: Any) -> int | None:
    return None if model_config.use_mla else int(model_config.get_total_num_kv_heads())
