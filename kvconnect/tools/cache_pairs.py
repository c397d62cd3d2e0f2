"""What the ranks of two nodes exchange for one request, or why they do not, while neither node runs.

This module matches tables and cuts the request with the functions that workers use; it adds no rules.
Region tables lie in reserved address space that is never accessed.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from kvconnect.cache.region_table import CacheTensor, RegionTable
from kvconnect.cache.shard import HeadInterval, Topology, partner_ranks, shard_heads
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
from kvconnect.config import place_of
from kvconnect.errors import ConfigError, LayoutError
from kvconnect.pack.arena import auto_slot_bytes
from kvconnect.plan.align import TableCard, card_refusal
from kvconnect.plan.blocks import GroupBlocks
from kvconnect.plan.chunks import DEFAULT_PACK_BYTES_PER_S, Chunker, RequestCutter
from kvconnect.plan.wire import CANNOT_MATCH, Wire, align_wire
from kvconnect.tools.cache_file import (
    CacheFile,
    HeadLayers,
    LayerKind,
    SlidingLayers,
    StateLayers,
    TokenLayers,
)
from kvconnect.tools.findings import Finding, failure, failure_if, well

MAX_TOKENS = 1 << 20
CUDA_SLOT_BYTES = 128 << 20
"""Assumed slot size on a GPU: a 512th of the memory of a GPU with 64 GiB."""
_AXES = {
    "nhd": "block {} token head content",
    "hnd": "block {} head token content",
    "heads_first": "head block {} token content",
}
_NEXT_REASON = re.compile(r"; (?=layers? '|cache group \d)")


def check_caches(source: CacheFile, target: CacheFile, num_tokens: int) -> Iterator[Finding]:
    """What D, with cache ``target``, fetches from P's ``source`` for a request, or each reason against.

    Raises ``LayoutError`` if a cache cannot be expressed; ``ConfigError`` if ``num_tokens`` is not accepted,
    or this machine lacks the address space.
    """
    if not 1 <= num_tokens <= MAX_TOKENS:
        raise ConfigError(f"tokens is {num_tokens}; accepted: 1 to {MAX_TOKENS}")
    for refusal in differences(source, target):
        yield failure("nodes", refusal, "start both nodes alike in it")
    pairs = cache_pairs(source, target, num_tokens)
    yield from check_ranks_fit(
        "caches", ((f"{p.source_rank} > {p.target_rank}", (str(p), p.refusals)) for p in pairs)
    )
    for side, of_ranks in (("P", source), ("D", target)):
        for rank in range(of_ranks.tp_size if of_ranks.extra.ranks else 0):
            own = of_ranks.extra.of_rank(rank)
            yield well(f"{side} rank {rank}", f"at {place_of(own.host, own.bind, own.device_name)}")


def check_ranks_fit(about: str, pairs: Iterable[tuple[str, tuple[str, list[str]]]]) -> Iterator[Finding]:
    """Whether the caches of rank pairs, named ``P > D``, fit: the bytes they send, or all reasons against."""
    alike: dict[tuple[str, str], list[str]] = {}
    for ranks, (sent, reasons) in pairs:
        alike.setdefault(("" if reasons else sent, ", ".join(reasons)), []).append(ranks)
    for (sent, why), names in alike.items():
        found = f"rank to rank {', '.join(names)}: {why or f'they fit, and send {sent}'}"
        yield failure_if(
            why, about, found, "set alike on both nodes what differs, or serve with one that fits"
        )


@dataclass(frozen=True)
class CachePair:
    """Two ranks that exchange KV: ``chunks`` chunks of ``total_bytes`` together for one request.

    ``heads`` are the first and last KV head that both keep, by kind of layers; None where pages are not
    divided by head. ``order`` is the order of bytes in a chunk: whole pages, or rows. If the caches do not
    fit, ``order`` is empty and ``refusals`` has the reasons.
    """

    source_rank: int
    target_rank: int
    heads: dict[str, tuple[int, int] | None]
    order: str
    chunks: int
    total_bytes: int
    refusals: list[str]

    def __str__(self) -> str:
        parts = [
            kind if both is None else f"{kind} heads {both[0]}-{both[1]}" for kind, both in self.heads.items()
        ]
        return (
            f"{', '.join(parts)}, as {self.order}: {self.total_bytes / 2**20:.1f} MiB in {self.chunks} chunks"
        )


def cache_pairs(source: CacheFile, target: CacheFile, num_tokens: int) -> list[CachePair]:
    """What each rank of ``target`` fetches from each of ``source``; empty if their numbers of heads differ.

    Raises as ``check_caches``.
    """
    if source.num_heads != target.num_heads:
        return []
    sides = _Sides(source, target, num_tokens)
    sizes = Topology(target.tp_size), Topology(source.tp_size)
    return [
        sides.pair(source_rank, target_rank)
        for target_rank in range(target.tp_size)
        for source_rank in partner_ranks(target_rank, *sizes, target.num_heads)
    ]


def differences(source: CacheFile, target: CacheFile) -> Iterator[str]:
    """Reasons for which two workers refuse each other at the greeting, for any tables."""
    for what, one, other in (
        ("engine", source.extra.engine, target.extra.engine),
        ("convert_dtype", source.extra.convert_dtype, target.extra.convert_dtype),
        ("number of KV heads", source.num_heads, target.num_heads),
    ):
        if one != other and "auto" not in (one, other):
            yield f"{what} is {one} on the prefill node, {other} on the decode node"
    ours, theirs = ({kind.name: kind for kind in side.layers} for side in (source, target))
    for label in dict.fromkeys([*ours, *theirs]):
        if label not in ours or label not in theirs:
            yield f"layers {label!r}: only the {'prefill' if label in ours else 'decode'} node has any"
            continue
        for field in ("kind", "num_layers", "num_kv_heads", "sliding_window"):
            our_value, their_value = (getattr(side[label], field, None) for side in (ours, theirs))
            if our_value != their_value:
                yield (
                    f"layers {label!r}: {field} is {our_value} on the prefill node, {their_value} on the "
                    "decode node"
                )
    has_state = any(isinstance(kind, StateLayers) for kind in (*source.layers, *target.layers))
    # A cache file does not state how a state is divided over ranks.
    if has_state and source.tp_size != target.tp_size:
        yield (
            "recurrent state travels between equal tensor-parallel sizes only: tp_size is "
            f"{source.tp_size} on the prefill node, {target.tp_size} on the decode node"
        )


class _Sides:
    """Both caches, with tables by rank and the request's blocks on D, which are made once."""

    def __init__(self, source: CacheFile, target: CacheFile, num_tokens: int) -> None:
        self._files = (source, target)
        self._tokens = num_tokens
        self._room = [blocks_needed(side, num_tokens) for side in self._files]
        self._tables: dict[tuple[int, int], RegionTable] = {}
        self._wanted = request_blocks(target, num_tokens)
        self._convert = source.extra.convert_dtype and target.extra.convert_dtype
        self._slot_bytes = min(_slot_bytes(side) for side in self._files)

    def pair(self, source_rank: int, target_rank: int) -> CachePair:
        """The exchange from one rank of P to one of D."""
        source, target = (self._card(side, rank) for side, rank in enumerate((source_rank, target_rank)))
        wire, refusals = wire_between(source, target, convert=self._convert)
        order, chunk_bytes = "", []
        with reasons_in(refusals):
            if wire is not None:
                chunker = Chunker(wire)
                cutter = RequestCutter(chunker, source, target, self._slot_bytes, DEFAULT_PACK_BYTES_PER_S)
                chunks = cutter.cut(self._wanted, self._tokens)
                chunk_bytes = [chunker.place(chunk).total_bytes for chunk in chunks]
                order = wire.order
        heads = self._heads(source_rank, target_rank)
        return CachePair(source_rank, target_rank, heads, order, len(chunk_bytes), sum(chunk_bytes), refusals)

    def _card(self, side: int, rank: int) -> TableCard:
        if (side, rank) not in self._tables:
            self._tables[side, rank] = rank_table(self._files[side], rank, self._room[side])
        return TableCard.of(self._tables[side, rank])

    def _heads(self, source_rank: int, target_rank: int) -> dict[str, tuple[int, int] | None]:
        heads: dict[str, tuple[int, int] | None] = dict.fromkeys(kind.name for kind in self._files[1].layers)
        for kind in self._files[1].layers:
            if isinstance(kind, HeadLayers):
                held, wanted = (
                    shard_heads(kind.num_kv_heads, rank, side.tp_size)
                    for rank, side in zip((source_rank, target_rank), self._files, strict=True)
                )
                shared = held.intersect(wanted)
                heads[kind.name] = (shared.start, shared.stop - 1)
        return heads


def _slot_bytes(side: CacheFile) -> int:
    if side.extra.slot_bytes:
        return side.extra.slot_bytes
    return CUDA_SLOT_BYTES if side.device == "cuda" else auto_slot_bytes("cpu")


def wire_between(source: TableCard, target: TableCard, *, convert: bool) -> tuple[Wire | None, list[str]]:
    """The wire between two ranks, or None, and all reasons against. Tables may come from any peer."""
    refusals = [refusal for card in (source, target) if (refusal := card_refusal(card))]
    wire = None
    if not refusals:
        with reasons_in(refusals):
            wire = align_wire(source, target, convert=convert)
    return wire, refusals


@contextlib.contextmanager
def reasons_in(refusals: list[str]) -> Iterator[None]:
    """Add the reasons of a ``LayoutError`` to ``refusals``."""
    try:
        yield
    except LayoutError as error:
        refusals.extend(_NEXT_REASON.split(str(error).removeprefix(CANNOT_MATCH)))


def rank_table(cache: CacheFile, rank: int, num_blocks: int) -> RegionTable:
    """The region table of one rank with ``num_blocks`` logical blocks, in address space without memory.

    Raises ``ConfigError`` if address space is lacking; ``LayoutError`` if the cache cannot be expressed.
    """
    groups, tensors, kernels = [], {}, {}
    heads: dict[str, HeadInterval] = {}
    for index, kind in enumerate(cache.layers):
        # Equal names on both sides, so that layers match.
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
    """Logical blocks for twice the request, so that its blocks can be scattered."""
    return 2 * max(div_ceil(num_tokens, kind.block_size) for kind in cache.layers) + 2


def request_blocks(cache: CacheFile, num_tokens: int) -> list[GroupBlocks]:
    """The request's blocks in every group.

    A sliding layer keeps only the blocks of the window before the next token.
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
    """Shape, axis names and dtype of one layer's tensor."""
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
    """A byte tensor in reserved address space; no page of it is ever backed by memory."""
    try:
        # Read-only, so that no kernel counts it as committed memory.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        reserved = mmap.mmap(-1, length_bytes, flags=flags, prot=mmap.PROT_READ)
    except (OSError, OverflowError, ValueError) as error:
        raise ConfigError(
            f"the caches of a rank take {length_bytes} bytes of address space, which this machine does not "
            f"give; ask for fewer tokens: {error}"
        ) from error
    with warnings.catch_warnings():
        # Torch warns of read-only memory. This tensor is never written.
        warnings.filterwarnings("ignore", message=".*not writable")
        return torch.frombuffer(reserved, dtype=torch.uint8)
