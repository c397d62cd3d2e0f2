"""Whether the caches of two nodes fit, and what their ranks exchange for one request, or why they do not.

The ranks introduce themselves, or files describe them. Tables are matched and requests cut with the functions
that workers use; this module adds no rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from kvconnect.cache.identity import ENTRIES, Entry, Identity, Rule, entry_differs
from kvconnect.cache.region_table import RegionTable
from kvconnect.cache.shard import HeadInterval, partner_ranks
from kvconnect.cache.specs import div_ceil
from kvconnect.errors import LayoutError
from kvconnect.peer.agreement import disagreement, rank_refusal, table_refusal, target_share, wanted_table
from kvconnect.peer.messages import Introduction
from kvconnect.plan.blocks import GroupBlocks
from kvconnect.plan.chunks import PACK_BYTES_PER_S, Chunker, RequestCutter
from kvconnect.plan.wire import CANNOT_MATCH, align_wire
from kvconnect.tools.findings import Finding, failure, failure_if, well

Ranks = Mapping[int, Introduction]


@dataclass(frozen=True)
class CachePair:
    """What a rank of D fetches from one of P for a request: ``total_bytes`` in ``chunks``.

    ``heads`` are the KV heads that both keep; None where no page is divided by head. ``order`` is the order
    of bytes in a chunk: whole pages, or rows.
    """

    order: str
    heads: HeadInterval | None
    chunks: int
    total_bytes: int

    def __str__(self) -> str:
        heads = f"heads {self.heads.start}-{self.heads.stop - 1}, " if self.heads else ""
        return f"{heads}as {self.order}: {self.total_bytes / 2**20:.1f} MiB in {self.chunks} chunks"


def check_nodes(sources: Ranks, targets: Ranks, num_tokens: int, *, convert: bool) -> Iterator[Finding]:
    """Whether D, with ranks ``targets``, fetches from P: what for a request, or each reason against."""
    first = sources[0], targets[0]
    source, target = (one.meaning for one in first)
    yield from _identities(source.identity, target.identity)
    # Identities are compared above, entry by entry.
    unnamed = (replace(one, meaning=replace(one.meaning, identity=Identity())) for one in first)
    if refusal := disagreement(*unnamed):
        yield failure("model", refusal.text, refusal.cause.remedy)
        return
    alike: dict[CachePair | str, list[str]] = {}
    for rank in sorted(targets):
        for partner in partner_ranks(rank, target.topology, source.topology, target.num_heads):
            if partner not in sources:
                unknown = f"rank {partner} of the prefill node is not known"
                yield failure("ranks", unknown, "ask again once it has served a request")
                continue
            found = exchange(sources[partner], targets[rank], num_tokens, convert=convert)
            alike.setdefault(found, []).append(f"{partner} > {rank}")
    for found, names in alike.items():
        why = found if isinstance(found, str) else ""
        text = f"rank to rank {', '.join(names)}: {why or f'they fit, and send {found}'}"
        advice = "set alike on both nodes what differs, or serve with one that fits"
        yield failure_if(why, "caches", text, advice)


def exchange(
    source: Introduction, target: Introduction, num_tokens: int, *, convert: bool
) -> CachePair | str:
    """What a rank of D fetches from one of P, or all reasons why their caches do not fit."""
    refusals = (*map(rank_refusal, (source, target)), *map(table_refusal, (source.table, target.table)))
    if any(refusals):
        return ", ".join(filter(None, refusals))
    slot_bytes = min(source.slot_bytes, target.slot_bytes)
    no_slots = "" if slot_bytes else "one of them has no slots, as a node that only offloads"
    try:
        wanted, share = wanted_table(source, target), target_share(source, target)
        wire = align_wire(source.table, wanted, convert=convert)
        if no_slots:
            return no_slots
        chunker = Chunker(wire)
        cutter = RequestCutter(chunker, source.table, wanted, slot_bytes, PACK_BYTES_PER_S["cuda"])
        blocks = share.of(request_blocks(target.table, num_tokens))
        chunks = cutter.cut(blocks, share.count(num_tokens))
    except LayoutError as error:
        return "; ".join(filter(None, (no_slots, str(error).removeprefix(CANNOT_MATCH))))
    divided = [stream.heads for stream in wire.streams if stream.heads is not None]
    heads = HeadInterval(min(divided).start, max(one.stop for one in divided)) if divided else None
    total_bytes = sum(chunker.place(chunk).total_bytes for chunk in chunks)
    return CachePair(wire.order, heads, len(chunks), total_bytes)


def request_blocks(table: RegionTable, num_tokens: int) -> tuple[GroupBlocks, ...]:
    """The blocks of a request in every group; of a window only those before the next token."""
    made = []
    for group in table.groups:
        tokens = group.block_tokens * group.blocks_per_kv_block
        ids = range(1, 1 + (1 if group.is_state else div_ceil(num_tokens, tokens)))
        kept = group.rule.only_kept(ids, 0, num_tokens, tokens, replay=1)
        made.append(GroupBlocks(group.group, 0, tuple(kept)))
    return tuple(made)


def _identities(prefill: Identity, decode: Identity) -> Iterator[Finding]:
    """Compare the identities of both nodes' KV, entry by entry."""
    known = {entry.name: entry for entry in ENTRIES}
    for name in dict.fromkeys([*known, *prefill.entries, *decode.entries]):
        if name not in {*prefill.entries, *decode.entries}:
            continue
        # An entry that this release does not know must be equal, as in the greeting.
        entry = known.get(name, Entry(name, Rule.EQUAL, ""))
        about, advice = f"identity, {name}", f"{entry.rule.value}: start both nodes alike in it"
        if not (found := entry_differs(name, prefill, decode)):
            yield well(about, f"the same on both: {prefill.text(name)}")
        elif entry.rule is Rule.EQUAL:
            yield failure(about, "; ".join(found), advice)
        else:
            yield well(about, f"{entry.what}; {'; '.join(found)}")
