"""What the ranks of two configurations exchange for one request, by which path, and why not by another.

The same functions that workers use line up the tables and cut the request; nothing here decides by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvconnect.cache.region_table import RegionTable
from kvconnect.cache.shard import Topology, partner_ranks, shard_heads
from kvconnect.explain.cache_file import CacheFile, HeadLayers, StateLayers
from kvconnect.explain.paths import PathEnd, paths_between, reasons_in
from kvconnect.explain.tables import blocks_needed, rank_table, request_blocks
from kvconnect.pack.arena import auto_slot_bytes
from kvconnect.plan.align import TableCard
from kvconnect.plan.chunks import Chunker, RequestCutter
from kvconnect.plan.cost import DEFAULT_PACK_BYTES_PER_S, LinkCost
from kvconnect.plan.transfer import plan_size
from kvconnect.rank_config import place_of

CUDA_SLOT_BYTES = 128 << 20
"""What is taken for the size that suits a GPU: a 512th of the memory of one with 64 GiB."""


@dataclass
class Case:
    """One request between two ranks, its ``blocks`` scattered or adjacent on both sides.

    A closed path has None for what it would take. ``path`` is empty where both are closed.
    """

    blocks: str
    path: str = ""
    copies: int | None = None
    least_copy_bytes: int | None = None
    most_copy_bytes: int | None = None
    direct_bytes: int | None = None
    direct_s: float | None = None
    packed_bytes: int | None = None
    chunks: int | None = None
    packed_s: float | None = None


@dataclass(frozen=True)
class Pair:
    """Two ranks that exchange something.

    ``heads`` are the first and last that both keep, by kind of layers; None where pages are not divided by
    head. ``order`` is that of the packed path, empty where it is closed. ``closed`` has the reasons by path.
    """

    source_rank: int
    target_rank: int
    heads: dict[str, tuple[int, int] | None]
    order: str
    closed: dict[str, list[str]]
    cases: list[Case]


@dataclass(frozen=True)
class Report:
    """Everything about a pair of configurations. ``refusals`` are reasons why they cannot work together.

    ``places`` are where the ranks of both sides are, where settings tell them apart.
    """

    tokens: int
    rates: str
    refusals: list[str]
    pairs: list[Pair]
    places: dict[str, list[str]]

    @property
    def works(self) -> bool:
        """The target can get all that it needs."""
        return (
            not self.refusals and bool(self.pairs) and all(case.path for p in self.pairs for case in p.cases)
        )


def make_report(
    source: CacheFile, target: CacheFile, num_tokens: int, cost: LinkCost | None = None
) -> Report:
    """Work out what the ranks of ``target`` fetch from those of ``source`` for a request of ``num_tokens``.

    Without its ``cost`` the link is taken to be as one that was not measured. Raises ``LayoutError``: one of
    the caches cannot be expressed; ``ConfigError``: this machine has no room even for its addresses.
    """
    cost = cost or LinkCost()
    refusals = list(_refusals(source, target))
    pairs = []
    if source.num_heads == target.num_heads:
        sides = _Sides(source, target, num_tokens, cost)
        for target_rank in range(target.tp_size):
            ranks = Topology(target.tp_size), Topology(source.tp_size)
            for source_rank in partner_ranks(target_rank, *ranks, target.num_heads):
                pairs.append(sides.explain(source_rank, target_rank, not refusals))
    places = {"P": _places(source), "D": _places(target)}
    return Report(num_tokens, cost.describe(), refusals, pairs, places)


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
    """Both configurations with what is made once of them: tables by rank, and the request's blocks."""

    def __init__(self, source: CacheFile, target: CacheFile, num_tokens: int, cost: LinkCost) -> None:
        self._files = (source, target)
        self._tokens = num_tokens
        self._cost = cost
        self._room = [blocks_needed(side, num_tokens) for side in self._files]
        self._tables: dict[tuple[int, int], RegionTable] = {}
        self._blocks = {
            name: [
                request_blocks(side, num_tokens, room, name == "scattered", seed)
                for seed, (side, room) in enumerate(zip(self._files, self._room, strict=True))
            ]
            for name in ("scattered", "adjacent")
        }
        self._convert = source.extra.convert_dtype and target.extra.convert_dtype
        self._slot_bytes = min(_slot_bytes(side) for side in self._files)

    def explain(self, source_rank: int, target_rank: int, may: bool) -> Pair:
        """What one rank fetches from another; no path is taken where they ``may`` not."""
        source, target = (self._card(side, rank) for side, rank in enumerate((source_rank, target_rank)))
        ends = (
            PathEnd(side.path, side.extra.num_slots != 0, card)
            for side, card in zip(self._files, (source, target), strict=True)
        )
        found = paths_between(*ends, convert=self._convert)
        closed, link = found.closed, found.link
        chunker = None if found.wire is None else Chunker(found.wire)
        order = chunker.wire.order if chunker and not closed["packed"] else ""
        cases = []
        for name, (held, wanted) in self._blocks.items():
            case, cost, size, chunk_bytes = Case(name), self._cost, None, []
            with reasons_in(closed["direct"]):
                if link is not None and not closed["direct"]:
                    size = plan_size(link, held, wanted, self._tokens)
                    case.copies, case.direct_bytes = size.copies, size.total_bytes
                    case.least_copy_bytes, case.most_copy_bytes = size.least_bytes, size.most_bytes
                    case.direct_s = cost.predict_direct(size.copies, size.total_bytes)
            with reasons_in(closed["packed"]):
                if chunker is not None and not closed["packed"]:
                    cutter = RequestCutter(
                        chunker, source, target, self._slot_bytes, DEFAULT_PACK_BYTES_PER_S
                    )
                    chunk_bytes = [
                        chunker.place(chunk).total_bytes for chunk in cutter.cut(wanted, self._tokens)
                    ]
            if chunk_bytes:
                case.packed_bytes, case.chunks = sum(chunk_bytes), len(chunk_bytes)
                case.packed_s = cost.predict_packed(case.packed_bytes, case.chunks)
            if may:
                case.path = "direct" if size is not None else "packed" if chunk_bytes else ""
            if may and size is not None and chunk_bytes:
                sizes = size.copies, size.total_bytes, sum(chunk_bytes), len(chunk_bytes)
                case.path = cost.choose(*sizes)
            cases.append(case)
        return Pair(source_rank, target_rank, self._heads(source_rank, target_rank), order, closed, cases)

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
