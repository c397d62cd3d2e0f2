"""What the ranks of two configurations exchange for one request, or why they do not.

The same functions that workers use line up the tables and cut the request; nothing here decides by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvconnect.cache.region_table import RegionTable
from kvconnect.cache.shard import Topology, partner_ranks, shard_heads
from kvconnect.explain.cache_file import CacheFile, HeadLayers, StateLayers
from kvconnect.explain.explain_tables import blocks_needed, rank_table, request_blocks
from kvconnect.explain.refusals import reasons_in, wire_between
from kvconnect.pack.arena import auto_slot_bytes
from kvconnect.plan.align import TableCard
from kvconnect.plan.chunks import DEFAULT_PACK_BYTES_PER_S, Chunker, RequestCutter
from kvconnect.rank_config import place_of

CUDA_SLOT_BYTES = 128 << 20
"""What is taken for the size that suits a GPU: a 512th of the memory of one with 64 GiB."""


@dataclass(frozen=True)
class CachePair:
    """Two ranks that exchange something: so many ``chunks`` of ``total_bytes`` together for one request.

    ``heads`` are the first and last that both keep, by kind of layers; None where pages are not divided by
    head. ``order`` is that of the bytes in a chunk: whole pages, or rows. Of caches that do not fit it is
    empty, and ``refusals`` has the reasons.
    """

    source_rank: int
    target_rank: int
    heads: dict[str, tuple[int, int] | None]
    order: str
    chunks: int
    total_bytes: int
    refusals: list[str]


@dataclass(frozen=True)
class CacheReport:
    """Everything about a pair of configurations. ``refusals`` are reasons why they cannot work together.

    ``places`` are where the ranks of both sides are, where settings tell them apart.
    """

    tokens: int
    refusals: list[str]
    pairs: list[CachePair]
    places: dict[str, list[str]]

    @property
    def works(self) -> bool:
        """The target can get all that it needs."""
        return not self.refusals and bool(self.pairs) and not any(pair.refusals for pair in self.pairs)


def make_report(source: CacheFile, target: CacheFile, num_tokens: int) -> CacheReport:
    """Work out what the ranks of ``target`` fetch from those of ``source`` for a request of ``num_tokens``.

    Raises ``LayoutError``: one of the caches cannot be expressed; ``ConfigError``: this machine has no room
    even for its addresses.
    """
    refusals = list(_refusals(source, target))
    pairs = []
    if source.num_heads == target.num_heads:
        sides = _Sides(source, target, num_tokens)
        for target_rank in range(target.tp_size):
            ranks = Topology(target.tp_size), Topology(source.tp_size)
            for source_rank in partner_ranks(target_rank, *ranks, target.num_heads):
                pairs.append(sides.explain(source_rank, target_rank))
    places = {"P": _places(source), "D": _places(target)}
    return CacheReport(num_tokens, refusals, pairs, places)


def _places(side: CacheFile) -> list[str]:
    """Of each rank; none where no rank has one of its own."""
    own = [side.extra.of_rank(rank) for rank in range(side.tp_size)] if side.extra.ranks else []
    return [place_of(one.host, one.bind, one.device_name) for one in own]


def _refusals(source: CacheFile, target: CacheFile) -> Iterator[str]:
    """Why two workers refuse each other when they meet, for any tables."""
    for what, one, other in (
        ("engine", source.extra.engine, target.extra.engine),
        ("convert_dtype", source.extra.convert_dtype, target.extra.convert_dtype),
        ("number of KV heads", source.num_heads, target.num_heads),
    ):
        if one != other and "auto" not in (one, other):
            yield f"{what} differs: source {one!r}, target {other!r}"
    ours, theirs = ({kind.name: kind for kind in side.layers} for side in (source, target))
    for label in dict.fromkeys([*ours, *theirs]):
        if label not in ours or label not in theirs:
            yield f"layers {label!r}: only the {'source' if label in ours else 'target'} has any"
            continue
        for field in ("kind", "num_layers", "num_kv_heads", "sliding_window"):
            our_value, their_value = (getattr(side[label], field, None) for side in (ours, theirs))
            if our_value != their_value:
                yield f"layers {label!r}: {field} differs, source {our_value!r}, target {their_value!r}"
    has_state = any(isinstance(kind, StateLayers) for kind in (*source.layers, *target.layers))
    # No file states how state is divided over ranks.
    if has_state and source.tp_size != target.tp_size:
        yield (
            "recurrent state travels between equal tensor-parallel sizes only: tp_size is "
            f"{source.tp_size} on the source, {target.tp_size} on the target"
        )


class _Sides:
    """Both configurations with what is made once of them: tables by rank, and the request's blocks on D."""

    def __init__(self, source: CacheFile, target: CacheFile, num_tokens: int) -> None:
        self._files = (source, target)
        self._tokens = num_tokens
        self._room = [blocks_needed(side, num_tokens) for side in self._files]
        self._tables: dict[tuple[int, int], RegionTable] = {}
        self._wanted = request_blocks(target, num_tokens)
        self._convert = source.extra.convert_dtype and target.extra.convert_dtype
        self._slot_bytes = min(_slot_bytes(side) for side in self._files)

    def explain(self, source_rank: int, target_rank: int) -> CachePair:
        """What one rank fetches from another."""
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
