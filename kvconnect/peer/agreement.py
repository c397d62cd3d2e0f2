"""The compatibility check of two workers at the greeting, and the share of a request that both keep.

Pure: two introductions in, a reason or a share out. The wire checks the regions of the two tables later.
"""

from __future__ import annotations

import math

import msgspec

from kvconnect.cache.identity import differences, models_differ, shown, weights_differ
from kvconnect.cache.region_table import RegionTable, are_scales
from kvconnect.cache.retention import parse
from kvconnect.cache.shard import layer_number, shared_tokens
from kvconnect.errors import LayoutError
from kvconnect.outcome import Cause, Reason
from kvconnect.peer.messages import CacheMeaning, Introduction
from kvconnect.plan.blocks import WHOLE, Share

_MOST_GROUPS = 256
_MOST_REGIONS = 65_536
_MOST_ROWS = 65_536
_MOST_BLOCKS = 2**31
_MOST_BYTES = 2**48


def disagreement(prefill: Introduction, decode: Introduction) -> Reason | None:
    """Why two workers are incompatible, with the value of each side; None if they are compatible.

    The regions of the two tables are not compared here: see ``align_wire``.
    """
    if refusal := other_identity(prefill.meaning, decode.meaning):
        return refusal
    of_p, of_d = prefill.meaning, decode.meaning
    drafts = "serve the same model, with the same drafts (--speculative-config)"
    same_engine = "set the same kv_connector_extra_config.engine on both"
    for what, of_prefill, of_decode, remedy in (
        ("number of KV heads", of_p.num_heads, of_d.num_heads, "serve the same model"),
        ("number of prompt tokens left to the decode node", of_p.held_back, of_d.held_back, drafts),
        ("engine", prefill.engine, decode.engine, same_engine),
    ):
        if of_prefill != of_decode:
            return Cause.OTHER_LAYOUT(
                f"{what} is {of_prefill} on the prefill node, {of_decode} on the decode node: {remedy}"
            )
    unlike = (
        table_refusal(prefill.table)
        or table_refusal(decode.table)
        or rank_refusal(prefill)
        or rank_refusal(decode)
        or _unnumbered(prefill, decode)
        or _unlike_turns(prefill, decode)
    )
    return Cause.OTHER_LAYOUT(unlike) if unlike else None


def other_identity(prefill: CacheMeaning, decode: CacheMeaning) -> Reason | None:
    """Why the identities, weights included, are incompatible; None if they are compatible."""
    found = differences(prefill.identity, decode.identity)
    if len(found) == len(weights_differ(prefill.identity.weights, decode.identity.weights)):
        return other_weights(prefill, decode)
    found = models_differ(prefill.identity, decode.identity) + found
    return Cause.OTHER_IDENTITY(f"KV means something else there: {shown(found)}")


def other_weights(prefill: CacheMeaning, decode: CacheMeaning) -> Reason | None:
    """Why the weights, which a node may replace while it runs, are incompatible; None if they are not."""
    found = weights_differ(prefill.identity.weights, decode.identity.weights)
    if not found:
        return None
    found = models_differ(prefill.identity, decode.identity) + found
    return Cause.OTHER_WEIGHTS(f"peer has other weights: {shown(found)}")


def rank_refusal(rank: Introduction) -> str | None:
    """Why no node can have this topology and this rank; None if one can."""
    return rank.meaning.topology.refusal(rank.rank, rank.meaning.num_heads)


def table_refusal(table: RegionTable) -> str | None:
    """Why no cache can have a peer's table, or None if one can.

    A false address harms only the peer, whose own memory is written there. Sizes and counts are bounded,
    so that a peer cannot make this node compute with numbers that no cache has.
    """
    groups = table.geometry()
    if len(table.regions) > _MOST_REGIONS or len(groups) != len(table.groups):
        return f"a table of {len(table.regions)} regions and {len(table.groups)} groups, some of them alike"
    for geometry in table.groups:
        if not (
            0 <= geometry.group < _MOST_ROWS
            and 0 < geometry.block_tokens < _MOST_BLOCKS
            and 0 < geometry.blocks_per_kv_block <= _MOST_ROWS
        ):
            return f"cache group {geometry.group} of the peer's table has impossible block sizes"
        try:
            parse(geometry.retention)
        except LayoutError as error:
            return f"cache group {geometry.group} of the peer's table: {error}"
    for region in table.regions:
        axes = region.axes
        counts = (axes.planes, axes.heads, axes.tokens)
        strides = (axes.plane_stride, axes.head_stride, axes.token_stride)
        if not (
            region.group in groups
            and 0 < region.address < 2**62
            and 0 < region.num_blocks < _MOST_BLOCKS
            and 0 < region.page_bytes <= region.block_stride < _MOST_BYTES
            and all(0 < count <= _MOST_ROWS for count in counts)
            and axes.planes * axes.heads * axes.tokens <= 2**22
            and 0 < axes.row_bytes <= region.page_bytes
            and all(0 <= stride < _MOST_BYTES for stride in strides)
            and 0 <= region.first_plane < _MOST_ROWS
            and (region.heads is None or 0 <= region.heads.start <= region.heads.stop <= _MOST_ROWS)
            and (region.key_bytes is None or 0 <= region.key_bytes <= axes.row_bytes)
        ):
            return f"layer {region.layer[:200]!r} of the peer's table has impossible sizes"
        if not are_scales(region.scales):
            return f"layer {region.layer[:200]!r} of the peer's table has impossible scales {region.scales}"
    return None


def _unnumbered(prefill: Introduction, decode: Introduction) -> str | None:
    """Why layers cannot be assigned to pipeline ranks (a name has no number); None if they can."""
    stages = [len(side.meaning.topology.stages) for side in (prefill, decode)]
    for region in (*prefill.table.regions, *decode.table.regions) if max(stages) > 1 else ():
        if layer_number(region.layer) is None:
            return (
                f"layer {region.layer[:200]!r} has no number, by which layers are assigned to "
                f"{stages[0]} pipeline ranks on the prefill node and {stages[1]} on the decode node"
            )
    return None


def _unlike_turns(prefill: Introduction, decode: Introduction) -> str | None:
    """Why blocks cannot be matched where the sides differ in context parallelism; None if they can."""
    sides = [side.meaning for side in (prefill, decode)]
    contexts = [[side.context, side.interleave] for side in sides]
    if contexts[0] == contexts[1]:
        return None
    units = {unit for context, unit in contexts if context > 1}
    period = math.lcm(*(context for context, _ in contexts))
    both = [f"{context} context-parallel ranks in turns of {unit} tokens" for context, unit in contexts]
    differ = f"there are {both[0]} on the prefill node, {both[1]} on the decode node"
    if len(units) > 1:
        return f"{differ}; accepted: turns of equal length (--cp-kv-cache-interleave-size)"
    for name, side in (("prefill", prefill), ("decode", decode)):
        for group in side.table.groups if side.meaning.context < period else ():
            tokens = group.block_tokens * group.blocks_per_kv_block
            if tokens not in units or group.is_state or not group.rule.sees_all:
                return (
                    f"{differ}, and cache group {group.group} of the {name} node has blocks of {tokens} "
                    f"tokens ({group.retention}); accepted: blocks of one turn (on the other node "
                    f"--cp-kv-cache-interleave-size {tokens}), of layers that see all tokens"
                )
    return None


def source_share(source: Introduction, target: Introduction) -> Share:
    """The share of a request that a rank of P and a rank of D both keep, seen from the rank of P."""
    own, theirs = (side.meaning.topology.tokens(side.rank) for side in (source, target))
    shared = shared_tokens(own, theirs)
    return WHOLE if shared is None or own.context == theirs.context == 1 else Share(shared, own)


def target_share(source: Introduction, target: Introduction) -> Share:
    """The same share seen from the rank of D; cache groups without layers on P's rank are ``elsewhere``."""
    is_divided = len(target.meaning.topology.stages) > 1
    groups = range(_MOST_GROUPS) if is_divided else target.table.geometry()
    elsewhere = frozenset(groups) - {region.group for region in wanted_table(source, target).regions}
    return source_share(target, source)._replace(elsewhere=elsewhere)


def wanted_table(source: Introduction, target: Introduction) -> RegionTable:
    """The region table of a rank of D, with only the regions of layers that a rank of P owns.

    A draft model's layers are left out where P runs another draft model or none. Draft tokens are verified,
    so that missing KV of a draft model cannot change the output.
    """
    topology, table = source.meaning.topology, target.table
    regions = tuple(region for region in table.regions if topology.owns(source.rank, region.layer))
    drafts = [side.meaning.identity.entries.get("draft") for side in (source, target)]
    if (first := target.meaning.draft_from) and drafts[0] != drafts[1]:
        regions = tuple(region for region in regions if (layer_number(region.layer) or 0) < first)
    return msgspec.structs.replace(table, regions=regions)


def fills_windows(source: Introduction, target: Introduction) -> bool:
    """Whether P can fill D's block in which a window begins completely, also before the window's start."""
    rules = [(group.rule, group.block_tokens * group.blocks_per_kv_block) for group in target.table.groups]
    cut = [tokens for rule, tokens in rules if rule.by_position and not rule.sees_all]
    theirs = [group.block_tokens * group.blocks_per_kv_block for group in source.table.groups]
    return not any(tokens % ours for ours in cut for tokens in theirs)
